"""What is remembered of others is bounded: how many they are, what they say of themselves, what they bring."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import numpy as np
import pytest
from streampack_services.broker import report_limit

from streampack.core.broker import OUTBID_BY, Broker
from streampack.core.intake import producers
from streampack.core.intake.admission import MAX_REASONS
from streampack.core.model.capacity import Capacity, FeedPlan, needed_tokens
from streampack.core.model.mesh import Mesh
from streampack.core.model.rules import Rules, StreamRules
from streampack.core.model.snapshot import Snapshot
from streampack.core.protocol.effects import FromProducer, FromTrainer
from streampack.core.protocol.events import Tick
from streampack.core.protocol.message import Bye, Envelope, Message, Reject
from streampack.core.protocol.producer_messages import Hello, Lease, Offer
from streampack.core.protocol.trainer_messages import AskSnapshot, Attach, Attached, Brought
from streampack.core.serve.snapshot_requests import MOST_BROUGHT
from streampack.errors import WireError
from streampack.wire import frames as wire
from tests.world.live import Live
from tests.world.shell import Shell

RUN, EPOCH, MOST = 9, 1000, 3


class Bench(Shell):
    """A broker that remembers ``MOST`` peers, of a stream that is read, ``a``, and one that is pushed, ``p``."""

    def __init__(self, most: int = MOST) -> None:
        self.rules = Rules(
            budget=16, packs=4, window=4, merge="arrival",
            streams=(StreamRules("a", 1.0, 2), StreamRules("p", 1.0, 1, pushed=True)),
        )  # fmt: skip
        plan = FeedPlan("train", self.rules, needed_tokens(self.rules, 32), max_readers=most)
        super().__init__()
        self.start(Broker(run=RUN, epoch=EPOCH, feeds=[plan], capacity=Capacity(64, 32, 128, most)))

    def say(
        self, side: type[FromProducer | FromTrainer], peer: bytes, message: Message, run: int = 0, epoch: int = 0
    ) -> None:
        """Say something, and forget the answers to what was said before."""
        self.said.clear()
        self.handle(side(peer, Envelope(run=run, epoch=epoch, fence=0, message=message)))


def hello(name: str, offer: Offer | None = None) -> Hello:
    return Hello(producer=name, host="h", pid=1, offers=[offer or Offer(stream="a", source_digest="d")])


def attach(name: str, rank: int = 0, dp: int = 4, **more: Any) -> Attach:
    mesh = Mesh(dp=dp, dp_rank=rank)
    return Attach(**{"feed": "train", "reader": name, "host": "h", "pid": 1, "mesh": mesh, "next_step": 0, **more})


def test_producers_beyond_the_limit_are_refused_until_one_has_left() -> None:
    bench = Bench()
    for n in range(MOST + 100):
        bench.say(FromProducer, b"%d" % n, hello(f"producer{n}"))
    assert bench.core.leases.num_producers == MOST
    (refused,) = bench.heard(b"%d" % n, Reject)
    assert refused.code == "too_many"
    assert f"more than {MOST} producers at a time" in refused.detail
    bench.say(FromProducer, b"0", hello("producer0"))
    assert not bench.heard(b"0", Reject), "one that is there may say again that it is"
    bench.say(FromProducer, b"0", hello("producer of another name"))
    assert not bench.heard(b"0", Reject), "its peer has one place"
    assert bench.core.leases.num_producers == MOST
    bench.say(FromProducer, b"1", Bye(reason="goodbye"))
    bench.say(FromProducer, b"last", hello("last"))
    assert not bench.heard(b"last", Reject)


def test_readers_beyond_the_limit_are_refused_until_one_has_left() -> None:
    bench = Bench()
    for n in range(MOST + 100):
        bench.say(FromTrainer, b"%d" % n, attach(f"reader{n}", n % 4))
    seats = bench.core.feeds["train"].readers.registry
    assert (len(seats.held), len(seats.claims)) == (MOST, MOST), "who claims a rank is to replace its holder"
    (refused,) = bench.heard(b"%d" % n, Reject)
    assert refused.code == "too_many"
    assert "raise `limits.peers` in broker.yaml" in refused.detail
    bench.say(FromTrainer, b"0", attach("reader0", 0))
    assert not bench.heard(b"0", Reject)
    bench.say(FromTrainer, b"1", Bye())
    bench.say(FromTrainer, b"last", attach("last", 3))
    assert bench.heard(b"last", Attached)


@pytest.mark.parametrize("dp", [4, 2])
def test_the_most_ranks_that_may_come_can_restart_at_once(dp: int) -> None:
    """On the same mesh or another: while the old ones are not known to be dead yet."""
    bench = Bench(most=4)
    for n in range(4):
        bench.say(FromTrainer, b"old%d" % n, attach(f"old{n}", n))
    for n in range(dp):
        bench.say(FromTrainer, b"new%d" % n, attach(f"new{n}", n, dp))
        assert not bench.heard(b"new%d" % n, Reject)
    bench.handle(Tick(1.0))
    bench.said.clear()
    bench.handle(Tick(10.0))
    assert all(bench.heard(b"new%d" % n, Attached) for n in range(dp))


def test_names_that_claim_a_partition_are_forgotten_the_oldest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producers, "MOST_CLAIMS", 10)
    bench, mine = Bench(), Offer(stream="p", source_digest="d", partition=0)
    bench.say(FromProducer, b"0", hello("holder", mine))
    assert bench.heard(b"0", Lease)
    for n in range(100):
        bench.say(FromProducer, b"x", hello(f"other{n}", mine))
    assert list(bench.core.leases.producers.claims) == [f"other{n}" for n in range(90, 100)]
    for n in range(100):  # each in turn takes it over from one that is silent
        for _ in range(3):
            now = bench.core._now + producers.CLAIM_S + 1
            bench.core.handle(Tick(now))
            bench.say(FromProducer, b"y%d" % n, hello(f"taker{n}", mine))
        assert bench.core.leases.producers.named(f"taker{n}") is not None
    assert len(bench.core.leases.producers.replaced) == 10


def test_snapshots_that_differ_are_held_for_a_few_readers_at_a_time() -> None:
    rules = Rules(budget=16, packs=4, window=4, streams=(StreamRules("a", 1.0, 2),))
    live = Live(rules, {"a": [[5] * 60, [5] * 60]})
    live.read(3)
    taken = live.state(3).snapshot
    assert taken is not None
    some = [other(taken, n) for n in range(20)]
    plan = FeedPlan("train", rules, live.memory)
    bench = Shell()
    bench.start(Broker(run=RUN, epoch=EPOCH, feeds=[plan], capacity=Capacity(64, 16, 1 << 20)))
    snapshots = [*some, *some[:MOST_BROUGHT]]
    for n, brought in enumerate(snapshots):
        peer = b"%d" % n
        message = attach(f"reader{n}", n % 3, 4, next_step=3, snapshot_digest=brought.digest)  # rank 3 never comes
        bench.handle(FromTrainer(peer, Envelope(run=0, epoch=0, fence=0, message=message)))
        if bench.heard(peer, AskSnapshot):
            sent = Brought(feed="train", digest=brought.digest, snapshot=brought)
            bench.handle(FromTrainer(peer, Envelope(run=0, epoch=0, fence=0, message=sent)))
    refused = [n for n in range(len(snapshots)) if bench.heard(b"%d" % n, Reject)]
    assert refused == list(range(MOST_BROUGHT, 20)), bench.said
    held = {id(reader.snapshot) for reader in bench.core.feeds["train"].readers.registry}
    assert len(held) == MOST_BROUGHT


def other(taken: Snapshot, skip: int) -> Snapshot:
    """One that differs, and is as sound."""
    return msgspec.structs.replace(taken, skips=[(1000 + skip, 1000 + skip)])


def test_the_host_that_a_peer_names_has_at_most_255_characters() -> None:
    for message in (hello("p"), attach("r")):
        fits = msgspec.structs.replace(message, host="h" * 255)
        wire.decode(wire.encode(Envelope(run=0, epoch=0, fence=0, message=fits)))
        long = msgspec.structs.replace(message, host="h" * 256)
        with pytest.raises(WireError, match="<= 255"):
            wire.decode(wire.encode(Envelope(run=0, epoch=0, fence=0, message=long)))


def test_no_peer_can_use_up_the_epochs_that_will_ever_be() -> None:
    bench = Bench()
    bench.say(FromTrainer, b"1", attach("r", feed="none"), run=RUN, epoch=wire.MAX_FENCE - 1)
    assert bench.core.epoch == EPOCH
    assert bench.core.foreign == 1
    for n in range(1, 70):
        bench.say(FromTrainer, b"1", attach("r", feed="none"), run=RUN, epoch=bench.core.epoch + 2**n)
    assert EPOCH < bench.core.epoch <= EPOCH + OUTBID_BY


def test_a_peer_that_invents_reasons_makes_few_labels() -> None:
    """Each is a label of a metric, and is kept."""
    counts = Bench().core.feeds["train"].planner.admission.counts[0]
    for n in range(10_000):
        counts.count_rejected({f"reason{n}": 1})
    assert len(counts.rejected) == MAX_REASONS + 1
    assert sum(counts.rejected.values()) == 10_000


def test_partitions_are_shared_out_evenly_among_as_many_producers_as_there_may_be() -> None:
    bench = Bench(most=500)
    for n in range(500):
        bench.say(FromProducer, b"%d" % n, hello(f"producer{n}"))
    holders = [name for name in bench.core.leases.producers.holder if name is not None]
    assert np.unique(holders).tolist() == ["producer0", "producer1"]


def test_a_plan_says_how_many_may_come() -> None:
    assert {f.name: f.default for f in dataclasses.fields(Capacity)}["max_peers"] == 16_384


def test_lines_that_peers_cause_are_bounded_and_counted() -> None:
    limit = report_limit.ReportLimit()
    assert sum(limit.allows(100.0) for _ in range(100_000)) == report_limit.BURST
    assert limit.take_held_back() == 100_000 - report_limit.BURST
    assert sum(limit.allows(101.0 + n / 1000) for n in range(10_000)) == pytest.approx(
        11 * report_limit.PER_SECOND, abs=2
    )
    assert limit.take_held_back() > 0
    assert limit.take_held_back() == 0


def test_all_that_claim_ranks_of_another_mesh_have_the_same_in_their_way() -> None:
    """Found once, not for each of thousands of claims whenever time goes on; and anew when a rank comes or goes."""
    bench = Bench(most=100)
    seats = bench.core.feeds["train"].readers.registry
    for rank in range(4):
        bench.say(FromTrainer, b"%d" % rank, attach(f"held{rank}", rank))
    for rank in range(2):
        bench.say(FromTrainer, b"c%d" % rank, attach(f"claim{rank}", rank, dp=2))
    one, two = seats.claims.values()
    before = seats.in_the_way(one)
    assert before is seats.in_the_way(two)
    assert {reader.name for reader in before} == {f"held{rank}" for rank in range(4)}
    bench.say(FromTrainer, b"3", Bye())
    assert {reader.name for reader in seats.in_the_way(two)} == {f"held{rank}" for rank in range(3)}
    assert len(before) == 4, "whoever goes through it is not disturbed"
    bench.core.handle(Tick(60.0))
    assert not seats.claims
