"""A planner restored from a snapshot goes on as the one that was never stopped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streampack.core.feed.resume import restore, snapshot
from streampack.core.form import auto_window
from streampack.core.form.former import Former
from streampack.core.merge.schedule import merge_of
from streampack.core.model.keys.planning_keys import Balance
from streampack.core.model.rules import Align, Rules, StreamRules
from streampack.core.model.samples import I64, ROW, SampleTable
from streampack.core.model.snapshot import Snapshot
from streampack.core.model.steps import PlannedStep

PACKERS = (
    "exact_fill",
    "sliding_ffd",
    "first_fit_decreasing",
    "concatenative",
    "buffer_first_fit",
    "first_fit_shuffle",
    "joint",
)


def rules_of(packer: str, **changes: Any) -> Rules:
    """``a`` may stop the feed (``on_exhaust``); other changes are of the rules."""
    streams = (StreamRules("a", 0.7, 2, on_exhaust=changes.pop("on_exhaust", "renormalise")), StreamRules("b", 0.3, 1))
    changes |= {"packer": packer, "streams": streams}
    if packer == "joint":
        changes |= {"packer": "exact_fill", "balance": Balance("joint", group=3, patience=2)}
    return Rules(budget=64, packs=3, align=Align(sample=2, pack=4), **{"window": 8} | changes)


@pytest.fixture(scope="module", autouse=True)
def small_windows() -> Iterator[None]:
    """Automatic windows of 2 to 16 samples, so that short streams have several."""
    with pytest.MonkeyPatch.context() as patch:
        for name, size in (("LEAST", 2), ("FIRST", 4), ("MAX_WINDOW", 16)):
            patch.setattr(auto_window, name, size)
        yield


class Planner:
    """Merge and FORM over partitions that are known beforehand, fed a piece at a time."""

    def __init__(self, rules: Rules, partitions: list[I64], pass_samples: int = 1 << 40) -> None:
        self.pass_samples = pass_samples  # a pass over any partition
        self.rules, self.partitions = rules, partitions
        self.table = SampleTable(16)
        self.merge = merge_of(rules)
        self.former = Former(rules, self.table)
        self.pushed = [0] * len(partitions)
        self.steps: list[PlannedStep] = []

    def feed(self, partition: int, count: int) -> None:
        """Push the partition's next samples, up to the end of a pass, or its end; merge and form what can be."""
        count = min(count, self.pass_samples - self.pushed[partition] % self.pass_samples)
        lengths = self.partitions[partition][self.pushed[partition] : self.pushed[partition] + count]
        rows = np.zeros(len(lengths), ROW)
        rows["stream"], rows["length"], rows["loss_tokens"] = partition // 2, lengths, lengths - 1
        rows["index"] = np.arange(self.pushed[partition], self.pushed[partition] + len(lengths)) * 3 + partition
        rows["crc"] = rows["index"] * 7919
        handles = self.table.enter(rows)
        self.merge.push(partition, handles, lengths, np.zeros(len(lengths), np.int64))
        self.pushed[partition] += len(lengths)
        whole = self.pushed[partition] == len(self.partitions[partition])
        if len(lengths) and (whole or self.pushed[partition] % self.pass_samples == 0) and self.drains:
            self.merge.end_pass(partition)
        if whole:
            self.merge.end(partition)
        self.form()
        while self.merge.between_passes:
            self.merge.next_pass()
            self.form()

    @property
    def drains(self) -> bool:
        return self.rules.between_passes == "drain"

    def form(self) -> None:
        taken = self.merge.take(1 << 40)
        self.former.admit(taken.handles, taken.lengths)
        self.former.closed = self.merge.closed or self.merge.between_passes
        while (request := self.former.request()) is not None:
            self.steps += self.former.apply(request.choose())
        self.steps += self.former.cut()
        assert self.former.finished or not self.former.closed

    def finish(self) -> None:
        for partition, lengths in enumerate(self.partitions):
            while self.pushed[partition] < len(lengths):
                self.feed(partition, 1 << 40)
            self.feed(partition, 0)


lists = st.lists(st.integers(1, 64), min_size=0, max_size=60).map(lambda values: np.array(values, np.int64))


@settings(max_examples=80)
@given(
    st.sampled_from(PACKERS),
    st.tuples(lists, lists, lists),
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 20))),
    st.sampled_from(["tokens", "samples"]),
    st.sampled_from(["continue", "drain"]),
    st.sampled_from(["renormalise", "stop"]),
    st.sampled_from([{"window": 8}, {"window": 8, "in_turn": True}, {"window": "auto", "in_turn": True}]),
)
def test_a_restored_planner_forms_the_steps_that_would_have_come(
    packer: str, partitions: tuple[I64, I64, I64], feeds: list[tuple[int, int]], unit: str, between: str, exhaust: str,
    order: dict[str, Any],
) -> None:  # fmt: skip
    rules = rules_of(packer, weight_unit=unit, between_passes=between, on_exhaust=exhaust, seed=7, **order)
    first = Planner(rules, list(partitions), 13)
    for partition, count in feeds:
        first.feed(partition, count)
    stored = msgspec.msgpack.encode(snapshot(rules, first.merge, first.former))
    second = Planner(rules, list(partitions), 13)
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
    with pytest.raises(ValueError, match="from another run"):
        restore(taken, rules_of("concatenative"), planner.merge, planner.former)


def test_a_snapshot_costs_28_bytes_a_sample() -> None:
    lengths = np.full(400, 5, np.int64)
    planner = Planner(rules_of("exact_fill"), [lengths, lengths, np.zeros(0, np.int64)])
    planner.feed(2, 1)
    planner.feed(0, 20)
    planner.feed(1, 3)
    held = snapshot(planner.rules, planner.merge, planner.former).form
    assert len(held.window) == 28 * planner.former.num_samples > 0
