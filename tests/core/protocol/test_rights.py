"""Rights of keys: a broker that knows who may do what lets nobody do more, and takes nothing from the others."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streampack.core.protocol.effects import FromProducer, FromTrainer, Withdrawn
from streampack.core.protocol.events import Tick
from streampack.core.protocol.message import Bye, Envelope, Message, Reject, Who
from streampack.core.protocol.producer_messages import Eos, Hello, Mark, Samples, Sent
from streampack.core.protocol.rights import KEY_DIGITS, NO_RIGHTS, Rights, Side, forbidden, key_of
from streampack.core.protocol.trainer_messages import Attach
from streampack.wire import frames as wire
from tests.core.sessions.test_sessions import _EVENTS, EPOCH, RUN, Bench, attach, fill, hello

KEYS = (b"a" * KEY_DIGITS, b"b" * KEY_DIGITS, b"c" * KEY_DIGITS)
RIGHTS = st.builds(
    Rights, st.sampled_from(["web", "rank-3"]), st.sampled_from(["producer", "trainer", "any", "none"]),
    st.sampled_from([(), ("a",), ("b", "a"), ("elsewhere",)]), st.sampled_from([(), ("train",), ("valid",)]),
    st.sampled_from([{}, {"dp": 0}, {"dp": 1, "cp": 0}, {"tp": 0, "pp": 0}]),
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


def spelled_out(rights: Rights, message: Message, side: Side) -> bool:
    """May it be said? The same in other words."""
    allowed = rights.role in {"producer": ("producer", "any"), "trainer": ("trainer", "any")}[side]
    if isinstance(message, Hello):
        allowed &= all(offer.stream in (rights.streams or [offer.stream]) for offer in message.offers)
    elif isinstance(message, Samples | Eos | Sent | Mark):
        allowed &= message.stream in (rights.streams or [message.stream])
    if isinstance(message, Attach):
        allowed &= message.feed in (rights.feeds or [message.feed])
        allowed &= all(getattr(message.mesh, f"{axis}_rank") == rank for axis, rank in rights.ranks.items())
    return allowed


def peers(event: Any) -> tuple[bytes, bool, Envelope]:
    """A peer with a key, its side, and what it says, out of one of the messages that break no broker."""
    peer, is_producer, fence, epoch, run, (message, payload), _ = event
    frames = (payload,) if isinstance(message, Samples) else ()
    envelope = Envelope(run=run, epoch=epoch, fence=fence, message=message, payload=frames)
    return KEYS[int(peer) - 1] + peer, is_producer, wire.decode(wire.encode(envelope))


@settings(max_examples=80, deadline=None)
@given(st.lists(_EVENTS, max_size=30), st.lists(RIGHTS, min_size=3, max_size=3), st.integers(0, 3))
def test_nobody_holds_or_sends_what_its_key_does_not_allow(
    events: list[Any], rights: list[Rights], chunks: int
) -> None:
    bench, now = Guarded([Rights("web", "producer"), *rights[1:]] if chunks else rights), 0.0
    if chunks:
        bench.produce(KEYS[0] + b"1", hello("p", "a", "b", digest="d"))
        fill(bench, KEYS[0] + b"1", chunks)
    for event in events:
        peer, is_producer, envelope = peers(event)
        before, stored = bench.holders(), len(bench.stored)
        side: Side = "producer" if is_producer else "trainer"
        may = spelled_out(bench.rights[key_of(peer)], envelope.message, side)
        was_forbidden = bench.say(peer, envelope, is_producer)
        assert was_forbidden or may
        if not may:
            assert len(bench.stored) == stored
            assert {who: key for who, key in bench.holders().items() if key != key_of(peer)} == {
                who: key for who, key in before.items() if key != key_of(peer)
            }
        after = bench.holders()
        assert all(after[who] == key for who, key in before.items() if who in after), "a key took another's name"
        now += event[-1]
        bench.handle(Tick(now))
    for key, of in bench.rights.items():
        for producer in bench.core.leases.producers:
            if key_of(producer.peer) == key:
                assert of.role in ("producer", "any")
                assert set(producer.offers) <= set(of.streams or producer.offers)
        for reader in bench.feed.readers.registry:
            if key_of(reader.peer) == key:
                assert of.role in ("trainer", "any")
                ranks = dict(zip(("dp", "cp", "tp", "pp"), reader.mesh.ranks, strict=True))
                assert of.ranks.items() <= ranks.items()


@settings(max_examples=80, deadline=None)
@given(st.lists(_EVENTS, max_size=30), st.lists(RIGHTS, min_size=3, max_size=3))
def test_what_is_allowed_has_the_same_effects_as_without_keys(events: list[Any], rights: list[Rights]) -> None:
    guarded, plain, now = Guarded(rights), Bench(), 0.0
    for event in events:
        peer, is_producer, envelope = peers(event)
        kind = FromProducer if is_producer else FromTrainer
        said = len(guarded.said)
        if guarded.say(peer, envelope, is_producer):  # for the others it has left
            del guarded.said[said:]
            bye = Envelope(run=RUN, epoch=plain.core.epoch, fence=0, message=Bye())
            before = len(plain.said)
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


@given(RIGHTS, st.builds(lambda event: peers(event)[2].message, _EVENTS), st.sampled_from(get_args(Side)))
def test_a_key_may_say_what_its_rights_spell_out(rights: Rights, message: Message, side: Side) -> None:
    assert (forbidden(rights, message, side) == "") == spelled_out(rights, message, side)
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
