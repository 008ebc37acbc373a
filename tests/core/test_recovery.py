"""What a broker does when it goes elsewhere: each test a sequence of events that once lost, repeated or stopped."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from streampack.core.broker import Broker
from streampack.core.feed.resume import snapshot
from streampack.core.form.former import Former
from streampack.core.intake.producers import refusal
from streampack.core.journal.history import ChunkPlace, History
from streampack.core.journal.journal import Journal
from streampack.core.journal.log_effects import Safe
from streampack.core.journal.log_records import Base, ChunkAdmitted
from streampack.core.merge.schedule import merge_of
from streampack.core.model.capacity import Capacity, FeedPlan
from streampack.core.model.mesh import Mesh
from streampack.core.model.rule_changes import Restream
from streampack.core.model.rules import Rules, RulesChange, StreamRules
from streampack.core.model.samples import ROW, SampleTable
from streampack.core.model.snapshot import Cursor, Snapshot
from streampack.core.protocol.effects import (
    Change,
    FromProducer,
    FromTrainer,
    SendProducer,
)
from streampack.core.protocol.events import Tick
from streampack.core.protocol.message import Bye, Envelope, Message, Reject
from streampack.core.protocol.producer_messages import Eos, Flow, Hello, Lease, Offer
from streampack.core.protocol.step_part import StepPart
from streampack.core.protocol.trainer_messages import AskSnapshot, Attach, Brought, Commit, Committed, End, Get, Wait
from tests.world.chunks import message_of
from tests.world.disk import Disk
from tests.world.shell import M, Sending, Shell

LENGTH, CHAIN = 8, b"x" * 16
CAPACITY = Capacity(1024, 64, 4096)


class Desk(Shell):
    """A broker, one producer of everything, one trainer. Its log, if there is one, is safe when ``safe`` says so."""

    def __init__(self, *feeds: tuple[str, Rules], disk: Disk | None = None) -> None:
        super().__init__(disk)
        self.fence = 0
        self.start(broker_of(*feeds, keeps=disk is not None))

    @property
    def leases(self) -> dict[tuple[str, int], tuple[Lease, int]]:
        """The newest lease of each partition, and its session."""
        leases = [(e.message, e.fence) for _, e in self.said if isinstance(e.message, Lease)]
        return {(lease.stream, lease.partition): (lease, session) for lease, session in leases}

    def carry(self, effect: Sending, envelope: Envelope) -> bool:
        if effect.peer == b"trainer":
            self.fence = envelope.fence or self.fence
        return super().carry(effect, envelope)

    def sync(self) -> None:
        pass

    def safe(self, full: str = "") -> None:
        self.disk.safe_upto = len(self.disk.records)
        self.handle(Safe(self.disk.safe_upto, full=full))

    def producer(self, message: Message, fence: int = 0, payload: tuple[Any, ...] = ()) -> None:
        of = Envelope(run=1, epoch=self.core.epoch, fence=fence, message=message, payload=payload)
        self.handle(FromProducer(b"producer", of))

    def trainer(self, message: Message) -> None:
        self.handle(FromTrainer(b"trainer", Envelope(run=1, epoch=self.core.epoch, fence=self.fence, message=message)))

    def offer(self, *streams: str, begin: Cursor | UnsetType = UNSET) -> None:
        offers = [Offer(stream=stream, source_digest="data", begin=begin) for stream in streams]
        self.producer(Hello(producer="p", host="h", pid=1, offers=offers))

    def send(self, stream: str, partition: int, base: int, count: int) -> None:
        session = self.leases[stream, partition][1]
        zeros = bytes(4 * count)
        message = message_of((stream, partition), base, [LENGTH] * count, crcs_u32=zeros, loss_tokens_u32=zeros)
        self.producer(message, session, (bytes(4 * LENGTH * count),))

    def end(self, stream: str, partition: int, total: int) -> None:
        self.producer(Eos(stream=stream, partition=partition, total=total), self.leases[stream, partition][1])

    def attach(self, feed: str, step: int, given: Snapshot | None = None, reader: str = "r") -> None:
        mesh = Mesh()
        digest, known = b"" if given is None else given.digest, len(self.told(AskSnapshot))
        attach = Attach(feed=feed, reader=reader, host="h", pid=1, mesh=mesh, next_step=step, snapshot_digest=digest)
        self.trainer(attach)
        if given is not None and len(self.told(AskSnapshot)) > known:
            self.trainer(Brought(feed=feed, digest=digest, snapshot=given))

    def get(self, feed: str, start: int, stop: int, done: int) -> None:
        self.trainer(Get(feed=feed, lineage=0, start=start, stop=stop, done_upto=done, request=0))

    def told(self, kind: type[M]) -> list[M]:
        """Messages to the trainer."""
        return self.heard(b"trainer", kind)


def broker_of(*feeds: tuple[str, Rules], keeps: bool) -> Broker:
    plans = [FeedPlan(name, rules, 8192) for name, rules in feeds]
    return Broker(run=1, epoch=2, feeds=plans, capacity=CAPACITY, journal=Journal(keeps), run_name="run")


def held_by(rules: Rules, changes: list[RulesChange] | None = None, merged: int = 2, step: int = 5) -> Snapshot:
    """At ``step``, ``merged`` samples of each partition in the window, under the first rules or the last change."""
    now = changes[-1].rules if changes else rules
    building = replace(rules, streams=tuple(replace(each, on_exhaust="renormalise") for each in rules.streams))
    table, merge, at = SampleTable(), merge_of(building), 0
    former = Former(rules, table)
    for number, stream in enumerate(rules.streams):
        for p in range(stream.partitions):
            rows = np.zeros(merged, ROW)
            rows["stream"], rows["length"], rows["index"] = number, LENGTH, np.arange(merged) * stream.partitions + p
            lengths = rows["length"].astype(np.int64)
            merge.push(at, table.enter(rows), lengths, np.zeros(merged, np.int64))
            merge.end(at)  # so that all are taken, whoever's turn it is
            at += 1
    found = merge.take(1 << 30)
    former.admit(found.handles, found.lengths)
    state, load = merge.state(), merge_of(now)
    live = [bool(stream.weight) for stream in now.streams]
    ended = [not stream.weight for stream in now.streams for _ in range(stream.partitions)]
    load.load(replace(state, live=live, ended=ended, clock=[0] * len(live)))
    taken = snapshot(rules, load, former, [(0, None)] * at)
    form = replace(taken.form, next_step=step, chain=CHAIN)
    return replace(taken, form=form, changes=changes or [], applied=len(changes or []))


def rules_of(*streams: StreamRules, **more: Any) -> Rules:
    return Rules(budget=16, window=4, packs=1, streams=streams, **more)


STOPPED = rules_of(StreamRules("a", 1.0, 1, on_exhaust="stop"), StreamRules("b", 1.0, 1))
REMOVED = rules_of(StreamRules("a", 1.0, 1), StreamRules("b", 1.0, 1))


def test_samples_that_are_held_are_read_again_when_another_stream_has_stopped_the_feed() -> None:
    """The merge was stopped before their partition had sent them: they were taken no more, and their step waited."""
    desk = Desk(("train", STOPPED))
    desk.attach("train", 5, held_by(STOPPED))
    desk.offer("a", "b")
    desk.send("a", 0, 0, 2)
    desk.end("a", 0, 2)
    desk.send("b", 0, 0, 6)
    desk.get("train", 5, 60, 5)
    assert [part.step for part in desk.told(StepPart)] == [5, 6]
    assert [end.num_steps for end in desk.told(End)] == [7]
    assert desk.core.leases.partitions.ended


def test_samples_of_a_removed_stream_that_are_held_are_read_again() -> None:
    gone = replace(REMOVED, streams=(REMOVED.streams[0], replace(REMOVED.streams[1], weight=0.0)))
    desk = Desk(("train", REMOVED))
    desk.attach("train", 5, held_by(REMOVED, [RulesChange(step=5, position=4, rules=gone)]))
    desk.offer("a", "b")
    desk.send("a", 0, 0, 2)
    desk.end("a", 0, 2)
    desk.send("b", 0, 0, 9)
    desk.get("train", 5, 60, 5)
    assert [part.step for part in desk.told(StepPart)] == [5, 6]
    assert [end.num_steps for end in desk.told(End)] == [7]
    assert desk.core.leases.partitions.ended


def test_a_step_whose_samples_are_awaited_names_the_partition_and_who_should_send_it() -> None:
    desk = Desk(("train", REMOVED))
    desk.attach("train", 5, held_by(REMOVED, merged=4))
    desk.offer("a")
    desk.send("a", 0, 0, 4)
    desk.get("train", 5, 60, 5)
    desk.handle(Tick(1.0))
    desk.handle(Tick(2.0))
    details = [wait.detail for wait in desk.told(Wait)]
    assert (
        "samples of step 7 are being read again from stream 'b' partition 0 of 1 (no producer offers it" in details[-1]
    )


# The order in which a source is read

MIXED: Cursor = (1 << 40, 0, 0)
ARRIVAL = rules_of(StreamRules("a", 1.0, 1), merge="arrival")


def cursor_of(desk: Desk) -> Cursor | None:
    return desk.leases["a", 0][0].cursor


def test_a_new_run_reads_its_source_from_the_cursor_that_the_first_producer_offers() -> None:
    desk = Desk(("train", ARRIVAL), disk=Disk())
    desk.offer("a", begin=MIXED)
    assert cursor_of(desk) == MIXED
    again = Desk(("train", ARRIVAL), disk=desk.disk)
    again.offer("a")  # a producer of an earlier version, which would take the cursor for another pass
    assert not again.leases
    refused = refusal(Offer(stream="a", source_digest="data"), again.core.leases.partitions, {"a": "data"})
    assert refused is not None
    assert "got a producer of an earlier version" in refused[1]
    again.offer("a", begin=MIXED)
    assert cursor_of(again) == MIXED
    again.disk.append(again.core.base())
    cut = broker_of(("train", ARRIVAL), keeps=True)
    cut.recover(0, again.records()[-1])
    assert cut.leases.partitions.begins == {"a": MIXED}


def test_a_run_that_began_before_sources_were_mixed_keeps_its_order() -> None:
    desk = Desk(("train", ARRIVAL), disk=Disk())
    desk.offer("a")
    again = Desk(("train", ARRIVAL), disk=desk.disk)
    again.offer("a", begin=MIXED)
    assert cursor_of(again) is None


def test_a_checkpoint_tells_a_broker_without_a_log_the_order_of_its_run() -> None:
    one = rules_of(StreamRules("a", 1.0, 1))
    old = Desk(("train", one))
    old.attach("train", 5, held_by(one))  # its partition is read again from sample 0, without a cursor
    old.offer("a", begin=MIXED)
    assert cursor_of(old) is None
    new = Desk(("train", one))
    new.attach("train", 5, replace(held_by(one), floors=[(0, MIXED)]))
    new.offer("a", begin=MIXED)
    assert cursor_of(new) == MIXED


@pytest.mark.parametrize("first", ["offer", "attach"])
def test_a_partition_of_which_an_old_checkpoint_has_nothing_keeps_the_order_of_the_others(first: str) -> None:
    two = rules_of(StreamRules("a", 1.0, 2))
    empty = held_by(two, merged=0)
    merge = replace(empty.merge, merged_samples=[4, 0], ended=[False, False], live=[True])
    old = replace(empty, floors=[(4, (0, 0, 4)), (0, None)], merge=merge)
    desk = Desk(("train", two), disk=Disk())
    if first == "offer":
        desk.offer("a", begin=MIXED)
    desk.attach("train", 5, old)
    desk.offer("a", begin=MIXED)
    assert [desk.leases["a", p][0].cursor for p in (0, 1)] == [(0, 0, 4), None]
    again = Desk(("train", two), disk=desk.disk)
    assert again.core.leases.partitions.begins == {}


def test_the_snapshots_of_a_run_have_the_cursor_of_its_first_sample() -> None:
    desk = Desk(("train", ARRIVAL), disk=Disk())
    desk.offer("a", begin=MIXED)
    desk.attach("train", 0)
    floors = desk.core.leases.accounts.floors("train", np.zeros(0, np.int64))
    assert floors == [(0, MIXED)]


# What is kept for whom


def begun(*feeds: tuple[str, Rules], offers: tuple[str, ...] = ("a",)) -> Desk:
    """A broker with a log, to which both have come."""
    desk = Desk(*feeds, disk=Disk())
    desk.offer(*offers)
    desk.attach("train", 0)
    return desk


def reading(desk: Desk, feed: str, stream: str, upto: int) -> None:
    """A trainer gets and returns steps below ``upto``, of two samples of 8 tokens each."""
    for step in range(upto):
        desk.send(stream, 0, 2 * step, 2)
        desk.safe()
        desk.get(feed, step, step + 1, step)
    desk.get(feed, upto, upto, upto)


def test_a_checkpoint_committed_after_trainers_went_back_is_kept_though_later_steps_were_committed_before() -> None:
    desk = begun(("train", ARRIVAL))
    reading(desk, "train", "a", 40)
    for step in (36, 37, 38):
        desk.trainer(Commit(feed="train", step=step))
        desk.safe()
    desk.trainer(Bye())
    desk.attach("train", 4, reader="again")
    desk.trainer(Commit(feed="train", step=4))
    desk.safe()
    assert desk.core.feeds["train"].history.commits == [37, 38, 4]
    assert [said.step for said in desk.told(Committed)] == [36, 37, 38, 4]
    assert desk.core.feeds["train"].wanted_lsn <= desk.core.feeds["train"].history.lsn_of(4)


def test_a_commit_of_a_step_that_was_never_formed_changes_nothing() -> None:
    desk = begun(("train", ARRIVAL))
    reading(desk, "train", "a", 4)
    for step in (3, 2**60, 2**60 + 1, 2**60 + 2):
        desk.trainer(Commit(feed="train", step=step))
    assert desk.core.feeds["train"].history.commits == [3]


def test_a_feed_that_has_no_snapshot_does_not_keep_the_whole_log_for_ever() -> None:
    """One that nobody reads, or that ends before its first snapshot is due: all of it can be formed again."""
    train, valid = rules_of(StreamRules("a", 1.0, 1)), rules_of(StreamRules("v", 1.0, 1))
    desk = begun(("train", train), ("valid", valid), offers=("a", "v"))
    reading(desk, "train", "a", 60)
    desk.safe(full="the log has reached its retain.bytes")
    for now in range(1, 5):
        desk.handle(Tick(float(now)))
        desk.safe(full="the log has reached its retain.bytes")
    assert desk.disk.first_lsn > 60
    bases = sum(isinstance(record, Base) for record in desk.records())
    assert bases <= 3, "it is said again once for what may go"


def test_a_stream_that_joined_later_keeps_the_records_that_it_needs() -> None:
    """A snapshot from before it joined has no floor for it: looking for one ended the broker."""
    history = History(ARRIVAL, 1)
    taken = held_by(rules_of(StreamRules("a", 1.0, 1)))
    history.add_snapshot(taken, 3)
    history.order += [ChunkPlace(1, 0, 2, 2), ChunkPlace(0, 0, 2, 3)]
    assert history.wanted_lsn(taken.step) == 2


def test_a_log_that_was_cut_may_begin_with_chunks_of_a_stream_that_joined_before() -> None:
    """What says that it joined is said again behind them, in the next Base."""
    desk = begun(("train", ARRIVAL))
    reading(desk, "train", "a", 3)
    desk.handle(Change(1, "train", Restream((StreamRules("late", 1.0, 1),)), 0))
    desk.offer("a", "late")
    desk.send("a", 0, 6, 2)
    for at in range(0, 6, 2):
        desk.send("late", 0, at, 2)
        desk.send("a", 0, 8 + at, 2)
    desk.disk.append(desk.core.base())
    records = desk.records()
    first = [at for at, r in enumerate(records) if isinstance(r, ChunkAdmitted) and r.stream == "late"][1]
    again = broker_of(("train", ARRIVAL), keeps=True)
    for lsn, record in enumerate(records[first:], first):
        again.recover(lsn, record)
    history, late = again.feeds["train"].history, again.leases.partitions.find("late", 0)
    assert late is not None
    assert again.leases.partitions.intakes[late].recorded.next_seq == 6
    assert [place.lsn for place in history.order] == sorted(place.lsn for place in history.order)
    assert len(history.order) == sum(isinstance(record, ChunkAdmitted) for record in records[first:])
    assert history.is_cut


def test_a_log_of_other_feeds_that_was_cut_is_refused_with_their_names() -> None:
    desk = begun(("train", ARRIVAL))
    reading(desk, "train", "a", 3)
    desk.disk.append(desk.core.base())
    desk.disk.first_lsn = 3
    with pytest.raises(ValueError, match="got feeds other, expected train, the feeds in the log"):
        Desk(("other", rules_of(StreamRules("b", 1.0, 1))), disk=desk.disk)


def test_a_log_that_is_whole_is_not_taken_for_one_that_was_cut() -> None:
    desk = begun(("train", ARRIVAL))
    reading(desk, "train", "a", 40)
    again = Desk(("train", ARRIVAL), disk=desk.disk)
    history = again.core.feeds["train"].history
    assert history.last_snapshot > 0
    assert history.oldest_step == 0


def test_trainers_that_go_back_before_all_that_a_cut_log_knows_are_refused_naming_the_oldest_step() -> None:
    desk = begun(("train", ARRIVAL))
    reading(desk, "train", "a", 60)
    for step in (55, 56, 57):
        desk.trainer(Commit(feed="train", step=step))
    for now in range(1, 5):
        desk.safe()
        desk.handle(Tick(float(now)))
    assert desk.disk.first_lsn > 0
    oldest = desk.core.feeds["train"].history.oldest_step
    assert 0 < oldest <= 55
    desk.trainer(Bye())
    desk.attach("train", 3, reader="again")
    [refusal] = desk.told(Reject)
    assert refusal.code == "step_gone"
    assert f"expected step {oldest} or later" in refusal.detail
    again = Desk(("train", ARRIVAL), disk=desk.disk)
    again.attach("train", 3)
    [refusal] = again.told(Reject)
    assert f"expected step {oldest} or later" in refusal.detail


def test_a_base_says_what_was_returned_before_the_broker_was_started() -> None:
    desk = begun(("train", ARRIVAL))
    reading(desk, "train", "a", 8)
    again = Desk(("train", ARRIVAL), disk=desk.disk)
    last = [record for record in desk.records() if isinstance(record, Base)][-1]
    assert last.released["train"] == again.core.feeds["train"].readers.steps.released_upto > 0


def test_without_a_log_the_order_of_chunks_is_kept_no_longer_than_a_snapshot_needs_it() -> None:
    desk = Desk(("train", ARRIVAL))
    desk.offer("a")
    desk.attach("train", 0)
    for step in range(400):
        desk.send("a", 0, 2 * step, 2)
        desk.get("train", step, step + 1, step)
    history = desk.core.feeds["train"].history
    assert len(history.order) < 200
    assert history.oldest_step > 200
    desk.trainer(Bye())
    desk.attach("train", 3, reader="again")
    assert [refusal.code for refusal in desk.told(Reject)] == ["step_gone"]


def test_a_full_log_gives_credit_for_what_it_holds_already() -> None:
    """Else trainers that went back would wait for samples that nobody may send, and could commit no checkpoint."""
    desk = begun(("train", ARRIVAL))
    reading(desk, "train", "a", 30)
    desk.safe(full="the log has reached its retain.bytes")
    desk.trainer(Bye())
    desk.attach("train", 4, reader="again")
    lease, session = desk.leases["a", 0]
    [flow] = [
        e.envelope.message for e in desk.core.leases.credits.flow(0, repeat=True) if isinstance(e, SendProducer)
    ]  # fmt: skip
    assert isinstance(flow, Flow)
    assert lease.first_seq < flow.grant_seq == 60
    assert flow.grant_bytes >= 4 * LENGTH * (60 - lease.first_seq)
    assert session
