"""Rights of keys: a broker that knows who may do what lets nobody do more, and takes nothing from the others."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.core.protocol.effects import FromProducer, FromTrainer, Withdrawn
from streampack.core.protocol.events import Tick
from streampack.core.protocol.message import Bye, Envelope, Message, Reject, Who, forbidden
from streampack.core.protocol.producer_messages import Amend, CommitWrite, Eos, Hello, Mark, Samples, Sent, Start
from streampack.core.protocol.relay_messages import NodeGet, NodePing, relay_of, relayed
from streampack.core.protocol.result_messages import AskResults, Publish, ReportValues
from streampack.core.protocol.rights import KEY_DIGITS, NO_RIGHTS, Rights, Side, key_of
from streampack.core.protocol.trainer_messages import Attach
from streampack.wire import frames as wire
from tests.core.sessions.any_messages import EVENTS
from tests.core.sessions.bench import EPOCH, RUN, Bench, attach, fill, hello

KEYS = (b"a" * KEY_DIGITS, b"b" * KEY_DIGITS, b"c" * KEY_DIGITS)
RIGHTS = st.builds(
    Rights, st.sampled_from(["web", "rank-3"]), st.sampled_from(["producer", "trainer", "relay", "any", "none"]),
    st.sampled_from([(), ("a",), ("b", "a"), ("elsewhere",)]), st.sampled_from([(), ("train",), ("valid",)]),
    st.sampled_from([{}, {"dp": 0}, {"dp": 1, "cp": 0}, {"tp": 0, "pp": 0}]),
    st.sampled_from([(), (), ("a",), ("b", "a")]),
)  # fmt: skip


class Guarded(Bench):
    """A bench whose peers have keys: the first character of a peer says which."""

    def __init__(self, rights: list[Rights], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.rights = dict(zip(KEYS, rights, strict=True))

    def say(self, peer: bytes, envelope: Envelope, is_producer: bool) -> bool:
        """Have it said; was it forbidden?"""
        before = len(self.said)
        kind = FromProducer if is_producer else FromTrainer
        self.handle(kind(peer, envelope, self.rights[key_of(peer)]))
        told = [e.message for to, e in self.said[before:] if to == peer]
        return any(isinstance(message, Reject) and message.code == "forbidden" for message in told)

    def holders(self) -> dict[tuple[str, str], bytes]:
        """By side and name of everybody who is there: its key."""
        there = {("producer", each.name): key_of(each.peer) for each in self.core.leases.producers}
        return there | {("trainer", each.name): key_of(each.peer) for each in self.feed.readers.registry}


def spelled_out(rights: Rights, message: Message, side: Side, for_rank: bool = False) -> bool:
    """May it be said? The same in other words."""
    allowed = rights.role in {"producer": ("producer", "any"), "trainer": ("trainer", "relay", "any")}[side]
    if for_rank or isinstance(message, NodeGet | NodePing):
        allowed &= rights.role in ("relay", "any")
    if isinstance(message, Publish):
        allowed &= not any(rights.ranks.values())
    if isinstance(message, NodeGet | NodePing | Publish | ReportValues | AskResults):
        return allowed & (message.feed in (rights.feeds or [message.feed]))
    if isinstance(message, Hello):
        allowed &= all(offer.stream in (rights.streams or [offer.stream]) for offer in message.offers)
    elif isinstance(message, Samples | Eos | Sent | Mark | CommitWrite | Amend | Start):
        allowed &= message.stream in (rights.streams or [message.stream])
    if isinstance(message, Attach):
        allowed &= message.feed in (rights.feeds or [message.feed])
        allowed &= message.host in (rights.hosts or [message.host])
        allowed &= all(getattr(message.mesh, f"{axis}_rank") == rank for axis, rank in rights.ranks.items())
    return allowed


def peers(event: Any) -> tuple[bytes, bool, Envelope]:
    """A peer with a key, its side, and what it says, out of one of the messages that break no broker."""
    peer, is_producer, fence, epoch, run, (message, payload), _ = event
    frames = (payload,) if isinstance(message, Samples | Amend) else ()
    envelope = Envelope(run=run, epoch=epoch, fence=fence, message=message, payload=frames)
    address = KEYS[int(peer) - 1] + peer
    for_rank = not is_producer and not isinstance(message, NodeGet | NodePing) and fence % 2 == 1
    return relayed(address, "r") if for_rank else address, is_producer, wire.decode(wire.encode(envelope))


@given(st.lists(EVENTS, max_size=30), st.lists(RIGHTS, min_size=3, max_size=3), st.integers(0, 3))
def test_nobody_holds_or_sends_what_its_key_does_not_allow(
    events: list[Any], rights: list[Rights], chunks: int
) -> None:
    bench, now = Guarded([Rights("web", "producer"), *rights[1:]] if chunks else rights), 0.0
    if chunks:
        bench.produce(KEYS[0] + b"1", hello("p", "a", "b", digest="d"))
        fill(bench, KEYS[0] + b"1", chunks)
    for event in events:
        peer, is_producer, envelope = peers(event)
        before, stored = bench.holders(), len(bench.stores)
        side: Side = "producer" if is_producer else "trainer"
        own = bench.rights[key_of(peer)]
        may = spelled_out(own, envelope.message, side, relay_of(peer) is not None)
        readers = {reader.name: (reader, reader.peer) for reader in bench.feed.readers.registry}
        was_forbidden = bench.say(peer, envelope, is_producer)
        assert was_forbidden or may
        if not may:
            assert len(bench.stores) == stored
            assert {who: key for who, key in bench.holders().items() if key != key_of(peer)} == {
                who: key for who, key in before.items() if key != key_of(peer)
            }
        after = bench.holders()
        for _, name in (who for who, key in before.items() if who in after and after[who] != key):
            reader, was_at = readers[name]
            assert relay_of(was_at) or relay_of(peer), "a key took another's name"
            ranks = dict(zip(("dp", "cp", "tp", "pp"), reader.mesh.ranks, strict=True))
            assert own.ranks.items() <= ranks.items(), "a key took the name of a rank that it may not read"
            assert reader.host in (own.hosts or [reader.host])
        now += event[-1]
        bench.handle(Tick(now))
    for key, of in bench.rights.items():
        for producer in bench.core.leases.producers:
            if key_of(producer.peer) == key:
                assert of.role in ("producer", "any")
                assert set(producer.offers) <= set(of.streams or producer.offers)
        for reader in bench.feed.readers.registry:
            if key_of(reader.peer) == key:
                assert of.role in (("relay", "any") if relay_of(reader.peer) else ("trainer", "relay", "any"))
                assert reader.host in (of.hosts or [reader.host])
                ranks = dict(zip(("dp", "cp", "tp", "pp"), reader.mesh.ranks, strict=True))
                assert of.ranks.items() <= ranks.items()


@given(st.lists(EVENTS, max_size=30), st.lists(RIGHTS, min_size=3, max_size=3))
def test_allowed_messages_have_the_same_effects_as_without_keys(events: list[Any], rights: list[Rights]) -> None:
    guarded, plain, now = Guarded(rights), Bench(), 0.0
    for event in events:
        peer, is_producer, envelope = peers(event)
        kind = FromProducer if is_producer else FromTrainer
        message, ranks = envelope.message, guarded.rights[key_of(peer)].ranks
        if isinstance(message, ReportValues) and ranks and not guarded.feed.steps.rank_of(message.part, message.parts):
            continue  # a key for some ranks gets no answer until it is known which rank reports the part
        said = len(guarded.said)
        if guarded.say(peer, envelope, is_producer):  # for the others it has left
            del guarded.said[said:]
            bye = Envelope(run=RUN, epoch=plain.core.epoch, fence=0, message=Bye())
            before = len(plain.said)
            if is_producer or plain.feed.readers.knows(peer):  # the goodbye of a relay concerns its ranks
                plain.handle(kind(peer, bye))
            plain.said = [*plain.said[:before], *[(to, e) for to, e in plain.said[before:] if to != peer]]
        else:
            plain.handle(kind(peer, envelope))
        now += event[-1]
        for bench in (guarded, plain):
            bench.handle(Tick(now))
        assert guarded.said == plain.said
    assert guarded.holders() == {
        **{("producer", each.name): key_of(each.peer) for each in plain.core.leases.producers},
        **{("trainer", each.name): key_of(each.peer) for each in plain.feed.readers.registry},
    }


@given(RIGHTS, st.builds(lambda event: peers(event)[2].message, EVENTS), st.sampled_from(get_args(Side)))
def test_a_key_may_say_what_its_rights_spell_out(rights: Rights, message: Message, side: Side) -> None:
    for for_rank in (False, True):
        may = forbidden(rights, message, side, for_rank) == ""
        assert may == spelled_out(rights, message, side, for_rank)
    assert forbidden(NO_RIGHTS, message, side)


def test_a_key_that_is_withdrawn_holds_nothing_and_may_ask_again() -> None:
    bench = Guarded([Rights("web", "producer"), Rights("ranks", "trainer"), Rights("other", "producer")])
    envelope: dict[str, Any] = {"run": RUN, "epoch": EPOCH, "fence": 0}
    for peer, message in ((KEYS[0], hello("p", "a")), (KEYS[2], hello("q", "b"))):
        assert not bench.say(peer + b"1", Envelope(message=message, **envelope), True)
    assert not bench.say(KEYS[1] + b"2", Envelope(message=attach("r"), **envelope), False)
    assert set(bench.holders().values()) == set(KEYS)
    bench.handle(Withdrawn(KEYS[0]))
    bench.handle(Withdrawn(KEYS[1]))
    assert set(bench.holders().values()) == {KEYS[2]}
    assert bench.heard(KEYS[0] + b"1", Who)
    assert bench.heard(KEYS[1] + b"2", Who)
    assert not bench.heard(KEYS[2] + b"1", Who)
    assert not bench.say(KEYS[0] + b"1", Envelope(message=hello("p", "a"), **envelope), True)
    assert bench.say(KEYS[1] + b"2", Envelope(message=hello("p", "a"), **envelope), True), "of another key's process"


@pytest.mark.parametrize("is_producer", [True, False])
def test_no_key_takes_the_name_of_another_keys_process(is_producer: bool) -> None:
    bench = Guarded([Rights("one", "any"), Rights("two", "any"), Rights("three", "any")])
    envelope: dict[str, Any] = {"run": RUN, "epoch": EPOCH, "fence": 0}
    mine = hello("p", "a") if is_producer else attach("p", dp=2, dp_rank=0)
    theirs = hello("p", "b") if is_producer else attach("p", dp=2, dp_rank=1)
    assert not bench.say(KEYS[0] + b"1", Envelope(message=mine, **envelope), is_producer)
    before = bench.holders()
    assert bench.say(KEYS[1] + b"1", Envelope(message=theirs, **envelope), is_producer)
    assert bench.holders() == before
    assert not bench.say(KEYS[0] + b"2", Envelope(message=mine, **envelope), is_producer), "its own, connected anew"


def test_the_name_of_a_rank_moves_between_its_own_key_and_the_relays() -> None:
    bench = Guarded([Rights("rank", "trainer"), Rights("relay", "relay", hosts=("r-host",)), Rights("other", "relay")])
    own, by_relay, other = KEYS[0] + b"1", relayed(KEYS[1] + b"2", "r"), relayed(KEYS[2] + b"3", "r")

    def says(peer: bytes, path: int, **changed: Any) -> bool:
        message = msgspec.structs.replace(attach("r", dp=2, dp_rank=1), route_changes=path, **changed)
        return not bench.say(peer, Envelope(run=RUN, epoch=EPOCH, fence=0, message=message), False)

    assert says(by_relay, 0)
    for path, peer in enumerate((own, by_relay, other, own), start=1):
        assert says(peer, path)
        assert bench.holders() == {("trainer", "r"): key_of(peer)}
    assert not says(by_relay, 5, host="another"), "of a host that the key may not read for"
    assert bench.holders() == {("trainer", "r"): key_of(own)}


@pytest.mark.parametrize("narrow", [{"hosts": ("s-host",)}, {"ranks": {"dp": 0}}, {"feeds": ("valid",)}])
def test_a_relays_key_takes_no_name_of_a_rank_that_it_may_not_read(narrow: dict[str, Any]) -> None:
    bench = Guarded([Rights("rank", "trainer"), Rights("relay", "relay", **narrow), Rights("other", "relay")])
    mine, theirs = attach("r", dp=2, dp_rank=1), attach("r", dp=2, dp_rank=0)
    theirs = msgspec.structs.replace(theirs, host="s-host", route_changes=1)
    assert not bench.say(KEYS[0] + b"1", Envelope(run=RUN, epoch=EPOCH, fence=0, message=mine), False)
    assert bench.say(relayed(KEYS[1] + b"2", "r"), Envelope(run=RUN, epoch=EPOCH, fence=0, message=theirs), False)
    assert bench.holders() == {("trainer", "r"): KEYS[0]}


def test_a_trainers_key_speaks_for_no_other_rank() -> None:
    bench = Guarded([Rights("rank", "trainer"), Rights("relay", "relay"), Rights("other", "trainer")])
    get = NodeGet(feed="train", lineage=0, start=0, stop=1, request=0)
    for message in (get, NodePing(feed="train", have_upto=0)):
        envelope = Envelope(run=RUN, epoch=EPOCH, fence=0, message=message)
        assert bench.say(KEYS[0] + b"1", envelope, False)
        assert not bench.say(KEYS[1] + b"1", envelope, False)
    claim = Envelope(run=RUN, epoch=EPOCH, fence=0, message=attach("r"))
    assert bench.say(relayed(KEYS[0] + b"1", "r"), claim, False)
    assert bench.holders() == {}
    assert not bench.say(relayed(KEYS[1] + b"1", "r"), claim, False)
    assert bench.say(relayed(KEYS[2] + b"1", "r"), claim, False), "another key's relay, without the role"
    assert bench.holders() == {("trainer", "r"): KEYS[1]}


def report(part: int, parts: int, number: int = 1) -> Envelope:
    """Values of no sample, for step 0."""
    message = ReportValues(
        feed="train", number=number, lineage=0, step=0, attempt=(EPOCH, 1), part=part, parts=parts, names=("score",),
        streams_u32=b"", indices_u64=b"", parts_u32=b"",
    )  # fmt: skip
    return Envelope(run=RUN, epoch=EPOCH, fence=0, message=message, payload=(b"",))


@pytest.mark.parametrize("ranks", [{"dp": 1}, {"dp": 1, "cp": 0, "tp": 0, "pp": 0}])
def test_a_key_for_one_rank_reports_and_publishes_for_no_other(ranks: dict[Any, int]) -> None:
    """A key for any rank could report values of every rank's samples, and publish a policy for all."""
    bench = Guarded(
        [Rights("first", "trainer", ranks={"dp": 0}), Rights("second", "trainer", ranks=ranks), Rights("r", "any")]
    )
    values = report(1, 2)
    assert not bench.say(KEYS[1] + b"1", values, False), "it is not known yet which rank reports part 1"
    assert not bench.said, "so the rank repeats its message"
    for rank in (0, 1):
        mine = Envelope(run=RUN, epoch=EPOCH, fence=0, message=attach(f"r{rank}", dp=2, dp_rank=rank))
        assert not bench.say(KEYS[rank] + b"1", mine, False)
    assert bench.say(KEYS[0] + b"2", report(1, 2), False)
    assert bench.say(KEYS[1] + b"2", report(0, 2), False)
    assert not bench.say(KEYS[1] + b"2", values, False)
    publish = Publish(feed="train", number=1, version=3, step=0, attempt=(EPOCH, 1))
    for key, may in ((0, True), (1, False), (2, True)):
        envelope = Envelope(run=RUN, epoch=EPOCH, fence=0, message=publish)
        assert bench.say(KEYS[key] + b"3", envelope, False) is not may
