"""Snapshots that trainers bring, over the network: taken, or refused with a line; nothing of them breaks the broker."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import asdict, replace

from streampack.core.broker import Broker
from streampack.core.feed.resume import snapshot
from streampack.core.feed.snapshot_check import problem
from streampack.core.form.former import Former
from streampack.core.merge.schedule import merge_of
from streampack.core.model.capacity import Capacity, FeedPlan
from streampack.core.model.keys.stage_keys import Stage, StageBegin
from streampack.core.model.mesh import Mesh
from streampack.core.model.rule_changes import Restream, Reweigh, Schedule, Scheduled
from streampack.core.model.rules import Align, Rules, RulesChange, StreamRules
from streampack.core.model.samples import MEDIA_ROW, ROW, SampleTable
from streampack.core.model.snapshot import Snapshot
from streampack.core.protocol.effects import Change, FromTrainer, SendTrainer
from streampack.core.protocol.events import Tick
from streampack.core.protocol.message import Envelope, Reject
from streampack.core.protocol.trainer_messages import AskSnapshot, Attach, Attached, Brought
from streampack.wire import frames as wire
from streampack.wire import record_frames

STREAMS = (StreamRules("a", 0.7, 2), StreamRules("b", 0.3, 1, on_exhaust="stop"))
RULES = Rules(budget=64, window=8, packs=3, align=Align(sample=2, pack=4), streams=STREAMS)
OTHER = (StreamRules("c", 1.0, 1),)
TOKENS, PARTITIONS = 4096, 4


def broker() -> Broker:
    plans = [FeedPlan("train", RULES, TOKENS), FeedPlan("valid", replace(RULES, streams=OTHER), TOKENS)]
    return Broker(run=1, epoch=1, feeds=plans, capacity=Capacity(1024, 64, 4096))


def taken(samples: int = 40, seed: int = 0) -> Snapshot:
    """One of a planner in the middle of its work, with samples in the window and in packs."""
    rng, table, merge = np.random.default_rng(seed), SampleTable(), merge_of(RULES)
    former = Former(RULES, table)
    for p, (stream, of) in enumerate([(0, 0), (0, 1), (1, 0)]):
        rows = np.zeros(samples, ROW)
        rows["stream"], rows["length"] = stream, rng.integers(1, 65, samples)
        rows["index"] = np.arange(samples) * STREAMS[stream].partitions + of
        rows["loss_tokens"] = rows["length"] - 1
        zeros = np.zeros(samples, np.int64)
        merge.push(p, table.enter(rows), rows["length"].astype(np.int64), zeros)
    for count in (3, 3, 2):
        found = merge.take(700)
        former.admit(found.handles, found.lengths)
        request = former.request()
        assert request is not None
        former.apply(dataclasses.replace(request, count=count).choose())
    return snapshot(RULES, merge, former, [(0, None)] * 3)


GOOD = taken()
NUM_HELD = len(GOOD.form.ages) + sum(GOOD.form.counts)


GIVEN: dict[bytes, Snapshot] = {}


def attach(given: Snapshot | None, step: int, chain: bytes = b"") -> FromTrainer:
    message = Attach(
        feed="train", reader="reader", host="h", pid=1, mesh=Mesh(), next_step=step, chain=chain,
        snapshot_digest=b"" if given is None else given.digest,
    )  # fmt: skip
    if given is not None:
        GIVEN[given.digest] = given
    return FromTrainer(b"peer", Envelope(run=1, epoch=0, fence=0, message=message))


def said(core: Broker, event: FromTrainer) -> Any:
    """What the trainer is told last, once it has sent its snapshot."""
    while True:
        answers = [e.envelope.message for e in core.handle(event) if isinstance(e, SendTrainer)]
        asked = next((each for each in answers if isinstance(each, AskSnapshot)), None)
        if asked is None:
            return answers[0]
        message = Brought(feed="train", digest=asked.digest, snapshot=GIVEN[asked.digest])
        event = FromTrainer(b"peer", Envelope(run=1, epoch=0, fence=0, message=message))


def test_a_whole_snapshot_is_gone_on_from() -> None:
    assert GOOD.form.window
    assert GOOD.form.pending
    assert problem(GOOD, RULES, TOKENS, PARTITIONS) == ""
    core = broker()
    assert isinstance(said(core, attach(GOOD, GOOD.step)), Attached)
    assert core.feeds["train"].next_step == GOOD.step


def test_an_attach_is_small_however_large_the_snapshot_and_names_it_on_both_sides() -> None:
    large = form_with(ages=[0] * 65_536, window=GOOD.form.window * 500)
    event = attach(large, large.step)
    frames = wire.encode(event.envelope)
    assert sum(len(frame) for frame in frames) < 1024
    decoded = record_frames.decode_snapshot(record_frames.encode_snapshot(large))
    assert (
        decoded.digest == large.digest == record_frames.decode_snapshot(record_frames.encode_snapshot(decoded)).digest
    )
    assert large.digest != GOOD.digest


def rows(**columns: Any) -> bytes:
    changed = np.frombuffer(GOOD.form.window, ROW).copy()
    for name, value in columns.items():
        changed[name][0] = value
    return changed.tobytes()


def merge_with(**columns: Any) -> Snapshot:
    return replace(GOOD, merge=replace(GOOD.merge, **columns))


def form_with(**columns: Any) -> Snapshot:
    return replace(GOOD, form=replace(GOOD.form, **columns))


def changed_to(rules: Rules, applied: int = 1, position: int = 3) -> Snapshot:
    return replace(GOOD, changes=[RulesChange(step=0, position=position, rules=rules)], applied=applied)


MORE = (*STREAMS, StreamRules("d", 1.0, 1))


@pytest.mark.parametrize(
    ("given_", "expected"),
    [
        (replace(GOOD, rules="0" * 32), "got a snapshot with rules digest 0000"),
        (merge_with(clock=[0]), "got columns of lengths"),
        (merge_with(clock=[0, 2**63]), "got clocks, turns or counts"),
        (merge_with(turn=[2, 0]), "got clocks, turns or counts"),
        (merge_with(merged_samples=[-1, 0, 0]), "got clocks, turns or counts"),
        (merge_with(at_barrier=[True, False, False]), "got a partition that waits at the end of a pass"),
        (replace(GOOD, floors=GOOD.floors[1:]), "got columns of lengths"),
        (
            replace(GOOD, floors=[(10**6, (0, 0, 0)), *GOOD.floors[1:]]),
            "partition 0: got sample 1000000 as the first to read",
        ),
        (replace(GOOD, floors=[(1, None), *GOOD.floors[1:]]), "partition 0: got sample 1 as the first to read"),
        (form_with(chain=b"short"), "got step"),
        (form_with(window=GOOD.form.window[:-1]), "expected 28 bytes per sample"),
        (form_with(ages=GOOD.form.ages[1:]), "one age of at least -1 for each sample"),
        (form_with(ages=[2**63, *GOOD.form.ages[1:]]), "one age of at least -1 for each sample"),
        (form_with(counts=[*GOOD.form.counts, 1]), "pending packs with"),
        (form_with(recent=(9,) * 5), "expected at most 4 numbers of at least 0"),
        (form_with(recent=(9, -1)), "expected at most 4 numbers of at least 0"),
        (form_with(recent=(9,) * 4), ""),
        (form_with(keeps=b"\1"), "got 1 bytes of group settings, expected 0, or one valid byte for each of"),
        (form_with(keeps=b"\3" * NUM_HELD), "bytes of group settings, expected 0"),
        (form_with(keeps=b"\1" * NUM_HELD), ""),
        (form_with(window=rows(length=65)), "got samples of 1 to 65 tokens"),
        (form_with(window=rows(length=0)), "got samples of 0 to"),
        (form_with(window=rows(loss_tokens=64)), "fewer loss tokens than tokens in each sample"),
        (
            form_with(window=rows(stream=2)),
            "got a sample with an invalid stream, index or part, expected a sample of the 2 streams",
        ),
        (form_with(window=rows(index=-1)), "got a sample with an invalid stream, index or part"),
        (form_with(window=rows(stream=0, index=10**9)), "got a sample that is not merged"),
        (form_with(window=GOOD.form.pending[:28] + GOOD.form.window[28:]), "got the same sample twice"),
        (form_with(counts=[sum(GOOD.form.counts)]), ""),
        (replace(GOOD, applied=1), "got 1 applied changes of the rules"),
        (replace(GOOD, skips=[(2, 1)]), "got invalid ranges of skipped steps"),
        (changed_to(replace(RULES, seed=1)), "a change of the rules: rules.seed: got 1, expected 0"),
        (changed_to(replace(RULES, streams=STREAMS[:1])), "a change of the rules: rules.streams"),
        (changed_to(replace(RULES, streams=(*STREAMS, StreamRules("a")))), "got an invalid new stream 'a'"),
        (changed_to(replace(RULES, streams=(*STREAMS, StreamRules("d", 1.0, 10**6)))), "got 1000003 partitions"),
        (changed_to(replace(RULES, streams=(*STREAMS, StreamRules("d", float("nan"))))), "weights: "),
        (changed_to(replace(RULES, streams=MORE), applied=1, position=-1), "got changes of the rules at positions"),
        (changed_to(replace(RULES, streams=MORE)), "got columns of lengths"),
        (
            changed_to(replace(RULES, streams=(*STREAMS, *OTHER)), applied=0, position=-1),
            "which belongs to feed 'valid'",
        ),
    ],
)
def test_a_wrong_snapshot_is_refused_naming_the_fault(given_: Snapshot, expected: str) -> None:
    core = broker()
    answer = said(core, attach(given_, GOOD.step))
    if not expected:
        assert isinstance(answer, Attached | Reject)
        return
    assert isinstance(answer, Reject)
    assert answer.code == "snapshot"
    assert expected in answer.detail
    assert core.feeds["train"].next_step == 0
    assert not core.feeds["train"].history.changes


def test_a_change_that_is_asked_for_here_and_another_in_the_snapshot_do_not_go_together() -> None:
    core = broker()
    core.handle(Change(1, "train", Restream((StreamRules("e", 1.0, 1),)), 5))
    answer = said(core, attach(changed_to(replace(RULES, streams=MORE), applied=0, position=-1), GOOD.step))
    assert isinstance(answer, Reject)
    assert "expected this run's change at step 5" in answer.detail


NUMBERS = st.one_of(st.integers(-3, 70), st.integers(-(2**63), 2**64 - 1))
FLOORS = st.tuples(st.integers(0, 2**62 - 1), st.none() | st.just((0, 0, 0)))


@st.composite
def damaged(draw: st.DrawFn) -> Snapshot:
    """A snapshot in which some values are others, of the types that the wire lets through."""
    found = GOOD
    for _ in range(draw(st.integers(1, 3))):
        part = draw(st.sampled_from(["merge", "form", "snapshot"]))
        of: Any = found if part == "snapshot" else getattr(found, part)
        name = draw(st.sampled_from([name for name in of.__struct_fields__ if name not in ("rules", "merge", "form")]))
        changed = replace(of, **{name: draw(another(name, asdict(of)[name]))})
        found = changed if part == "snapshot" else replace(found, **{part: changed})
    return found


def another(name: str, value: Any) -> st.SearchStrategy[Any]:
    if name == "changes":
        stream = st.builds(StreamRules, st.sampled_from("abcd"), st.floats(), st.integers(-1, 2**20))
        lists = st.lists(stream, max_size=4).map(tuple)
        rules = st.builds(lambda streams: replace(RULES, streams=streams), lists)
        return st.lists(st.builds(RulesChange, step=NUMBERS, position=NUMBERS, rules=rules), max_size=2)
    if name == "skips":
        return st.lists(st.tuples(NUMBERS, NUMBERS), max_size=3)
    if name == "floors":
        return st.lists(FLOORS, min_size=2, max_size=4)
    if name in ("followed", "reach"):
        return NUMBERS
    if name == "schedule":
        weights = st.dictionaries(st.sampled_from("abcd"), st.floats(), max_size=2)
        stage = st.builds(Stage, at=st.builds(StageBegin, step=NUMBERS), weights=weights)
        changes = st.builds(
            Scheduled, NUMBERS, st.builds(Reweigh, weights) | stage, st.builds(StageBegin, step=NUMBERS)
        )
        return st.builds(Schedule, st.lists(changes, max_size=2), st.lists(NUMBERS, max_size=2))
    if name == "recent":
        return st.lists(NUMBERS, max_size=5).map(tuple)
    if name == "keeps":
        says = st.sampled_from([0, 0, 1, 1, 2, 3])
        return st.lists(says, min_size=NUM_HELD - 1, max_size=NUM_HELD).map(bytes)
    if name == "media":
        return st.binary(max_size=2 * MEDIA_ROW.itemsize).map(lambda start: start * NUM_HELD)
    if name == "shares":
        shared = st.lists(st.integers(0, 5), min_size=NUM_HELD - 1, max_size=NUM_HELD)
        return shared.map(lambda values: np.array(values, "<u4").tobytes())
    if isinstance(value, bool):
        return st.booleans()
    if isinstance(value, int):
        return NUMBERS
    if isinstance(value, bytes):
        at = st.integers(0, max(len(value) - 1, 0))
        flipped = st.builds(lambda i, b: value[:i] + bytes([b]) + value[i + 1 :], at, st.integers(0, 255))
        return st.one_of(flipped, st.builds(lambda i: value[:i], at), st.binary(max_size=60))
    items = st.booleans() if value and isinstance(value[0], bool) else NUMBERS
    swapped = st.builds(lambda i, v: [*value[:i], v, *value[i + 1 :]], st.integers(0, max(len(value) - 1, 0)), items)
    return st.one_of(swapped, st.lists(items, max_size=len(value) + 1))


@given(damaged(), st.integers(0, 8))
def test_no_damage_of_a_snapshot_breaks_the_broker_or_its_bounds(given_: Snapshot, more: int) -> None:
    core = broker()
    feed = core.feeds["train"]
    answer = said(core, attach(given_, GOOD.step + more))
    assert isinstance(answer, Attached | Reject)
    for now in range(1, 4):
        core.handle(Tick(float(now)))
    assert feed.memory.held_tokens <= TOKENS
    assert len(core.table) <= TOKENS
    assert len(core.leases.partitions.intakes) <= PARTITIONS + 8
    if isinstance(answer, Reject):
        assert feed.memory.held_tokens == 0
        assert answer.code == "snapshot"
