"""A planner restored from a snapshot goes on as the one that was never stopped."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streampack.core.form import Former, Step
from streampack.core.merge import Merge
from streampack.core.rules import Align, Rules, StreamRules
from streampack.core.samples import I64, ROW, SampleTable
from streampack.core.snapshot import Snapshot, restore, snapshot

PACKERS = ("exact_fill", "sliding_ffd", "first_fit_decreasing", "concatenative")


def rules_of(packer: str) -> Rules:
    streams = (StreamRules("a", 0.7, 2), StreamRules("b", 0.3, 1))
    return Rules(packer=packer, budget=64, window=8, packs=3, align=Align(sample=2, pack=4), streams=streams)  # type: ignore[arg-type]


class Planner:
    """Merge and FORM over partitions that are known beforehand, fed a piece at a time."""

    def __init__(self, rules: Rules, partitions: list[I64]) -> None:
        self.rules, self.partitions = rules, partitions
        self.table = SampleTable(16)
        self.merge = Merge([s.weight for s in rules.streams], [s.partitions for s in rules.streams], 7)
        self.former = Former(rules, self.table)
        self.pushed = [0] * len(partitions)
        self.steps: list[Step] = []

    def feed(self, partition: int, count: int) -> None:
        """Push the partition's next samples, or its end; merge and form what can be."""
        lengths = self.partitions[partition][self.pushed[partition] : self.pushed[partition] + count]
        rows = np.zeros(len(lengths), ROW)
        rows["stream"], rows["length"], rows["loss_tokens"] = partition // 2, lengths, lengths - 1
        rows["index"] = np.arange(self.pushed[partition], self.pushed[partition] + len(lengths)) * 3 + partition
        rows["crc"] = rows["index"] * 7919
        handles = self.table.enter(rows)
        self.merge.push(partition, handles, lengths, np.zeros(len(lengths), np.int64))
        self.pushed[partition] += len(lengths)
        if self.pushed[partition] == len(self.partitions[partition]):
            self.merge.end(partition)
        taken = self.merge.take(1 << 40)
        self.former.admit(taken.handles, taken.lengths)
        self.former.closed = self.merge.closed
        while (request := self.former.request()) is not None:
            self.steps += self.former.apply(request.choose())
        self.steps += self.former.cut()

    def finish(self) -> None:
        for partition in range(len(self.partitions)):
            self.feed(partition, 1 << 40)


lists = st.lists(st.integers(1, 64), min_size=0, max_size=60).map(lambda values: np.array(values, np.int64))


@settings(max_examples=80)
@given(
    st.sampled_from(PACKERS), st.tuples(lists, lists, lists), st.lists(st.tuples(st.integers(0, 2), st.integers(1, 20)))
)
def test_a_restored_planner_forms_the_steps_that_would_have_come(
    packer: str, partitions: tuple[I64, I64, I64], feeds: list[tuple[int, int]]
) -> None:
    rules = rules_of(packer)
    first = Planner(rules, list(partitions))
    for partition, count in feeds:
        first.feed(partition, count)
    stored = msgspec.msgpack.encode(snapshot(rules, first.merge, first.former))
    second = Planner(rules, list(partitions))
    restore(msgspec.msgpack.decode(stored, type=Snapshot), rules, second.merge, second.former)
    second.pushed = second.merge.merged_samples.tolist()
    done = len(first.steps)
    first.finish()
    second.finish()
    assert [step.digest for step in second.steps] == [step.digest for step in first.steps[done:]]
    assert second.former.chain == first.former.chain
    assert second.former.finished
    assert first.former.finished


def test_a_snapshot_of_other_rules_is_refused() -> None:
    planner = Planner(rules_of("exact_fill"), [np.array([3]), np.array([4]), np.array([5])])
    taken = snapshot(planner.rules, planner.merge, planner.former)
    with pytest.raises(ValueError, match="of another run"):
        restore(taken, rules_of("concatenative"), planner.merge, planner.former)


def test_a_snapshot_costs_28_bytes_a_sample() -> None:
    lengths = np.full(400, 5, np.int64)
    planner = Planner(rules_of("exact_fill"), [lengths, lengths, np.zeros(0, np.int64)])
    planner.feed(2, 1)
    planner.feed(0, 20)
    planner.feed(1, 3)
    held = snapshot(planner.rules, planner.merge, planner.former).form
    assert len(held.window) == 28 * planner.former.num_samples > 0
