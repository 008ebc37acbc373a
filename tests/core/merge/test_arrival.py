"""The merge in order of arrival: a function of script, marks and ends, whenever the samples come."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.core.merge import arrival as arrival_module
from streampack.core.merge.arrival import Arrival
from streampack.core.merge.merge_kernels import arrival_take
from streampack.core.merge.schedule import Merge, merge_of
from streampack.core.model.rules import Rules, StreamRules
from streampack.core.model.snapshot import MergeState

Sample = list[int]
"""Lengths of its pieces; [0] for a tombstone."""
Event = tuple[str, int, list[Sample]]
"""("push" | "mark" | "end", partition, samples)."""
Name = tuple[int, int, int]
"""Partition, sample number in it, piece."""


@st.composite
def stories(draw: st.DrawFn, partitions: int) -> list[Event]:
    """What is admitted, in its order; every partition ends, but where there is an infinite one."""
    length = st.one_of(st.integers(1, 5), st.integers(1, 900))
    sample = st.one_of(length.map(lambda n: [n]), st.lists(length, min_size=2, max_size=4), st.just([0]))
    kinds = st.sampled_from(["push", "push", "push", "mark"])
    events: list[Event] = []
    for _ in range(draw(st.integers(0, 40))):
        kind, p = draw(kinds), draw(st.integers(0, partitions - 1))
        events.append((kind, p, draw(st.lists(sample, min_size=1, max_size=6)) if kind == "push" else []))
    for p in range(partitions):
        after = max((at for at, event in enumerate(events) if event[1] == p), default=-1)
        events.insert(draw(st.integers(after + 1, len(events))), ("end", p, []))
    return events


@dataclass
class Books:
    """All that the oracle knows of a story: every sample's place in the script, and its pass."""

    script: list[tuple[int, int, int, Sample]] = field(default_factory=list)
    """(pass, partition, sample number, pieces)."""

    def order(self) -> list[Name]:
        """The script sorted stably by pass, without those that are rejected."""
        rows = sorted(self.script, key=lambda row: row[0])
        return [(p, seq, piece) for _, p, seq, pieces in rows for piece, length in enumerate(pieces) if length]


def books_of(story: list[Event]) -> Books:
    books, passes, counts = Books(), dict[int, int](), dict[int, int]()
    for kind, p, samples in story:
        if kind == "mark":
            passes[p] = passes.get(p, 0) + 1
        for pieces in samples:
            books.script.append((passes.get(p, 0), p, counts.get(p, 0), pieces))
            counts[p] = counts.get(p, 0) + 1
    return books


class Feed:
    """A merge that is told a story; a handle is an index into ``names``."""

    def __init__(self, partitions: int, block: int = 64) -> None:
        self.merge = Arrival([partitions], block)
        self.sent = [0] * partitions
        self.names: list[Name] = []
        self.lengths: list[int] = []
        self.order: list[Name] = []
        self.blocked: int | None = None

    def tell(self, event: Event, skip: int = 0) -> None:
        """An event, its first ``skip`` samples left out."""
        kind, p, samples = event
        if kind == "mark":
            self.merge.end_pass(p)
        elif kind == "end":
            self.merge.end(p)
        elif samples[skip:]:
            rows = [(seq, pieces) for seq, pieces in enumerate(samples[skip:], self.sent[p])]
            entries = [
                (self._name(p, seq, piece, size), size, piece) for seq, s in rows for piece, size in enumerate(s)
            ]
            self.merge.push(p, *np.array(entries, np.int64).T)
            self.sent[p] += len(rows)

    def _name(self, *name: int) -> int:
        self.names.append((name[0], name[1], name[2]))
        self.lengths.append(name[3])
        return len(self.names) - 1

    def take(self, max_tokens: int, over: bool = True) -> None:
        """Take, and again in every pass that can begin then."""
        while True:
            taken = self.merge.take(max_tokens)
            assert taken.lengths.tolist() == [self.lengths[handle] for handle in taken.handles.tolist()]
            tokens = int(taken.lengths.sum())
            assert tokens < max_tokens + 4 * 900 or (max_tokens, tokens) == (0, 0)
            self.order += [self.names[handle] for handle in taken.handles.tolist()]
            self.blocked = taken.blocked
            if not (over and self.merge.between_passes):
                enough = tokens >= max_tokens
                assert enough or (taken.blocked is not None) != (self.merge.closed or self.merge.between_passes)
                return
            assert not self.merge.take(2**60).handles.size
            self.merge.next_pass()


def told(story: list[Event], partitions: int) -> list[Name]:
    feed = Feed(partitions)
    for event in story:
        feed.tell(event)
    feed.take(2**60)
    assert feed.merge.closed
    assert feed.blocked is None
    return feed.order


def by_partition(story: list[Event], data: st.DataObject) -> list[Event]:
    """The story as producers send it again: each partition's events in their order, anyhow in between."""
    queues: dict[int, list[Event]] = {}
    for event in story:
        queues.setdefault(event[1], []).append(event)
    again: list[Event] = []
    while queues:
        p = data.draw(st.sampled_from(sorted(queues)))
        again.append(queues[p].pop(0))
        if not queues[p]:
            del queues[p]
    return again


def recite(merge: Arrival, story: list[Event]) -> None:
    """Tell the script of a story, as the log does."""
    counts: dict[int, int] = {}
    for kind, p, samples in story:
        if kind == "push":
            merge.script(p, counts.get(p, 0), len(samples))
            counts[p] = counts.get(p, 0) + len(samples)


@given(st.data())
def test_the_order_is_the_script_s_pass_by_pass(data: st.DataObject) -> None:
    story = data.draw(stories(3))
    assert told(story, 3) == books_of(story).order()


@given(st.data())
def test_the_order_does_not_depend_on_when_or_how_much_is_taken(data: st.DataObject) -> None:
    story = data.draw(stories(3))
    feed, order = Feed(3, block=data.draw(st.sampled_from([1, 2, 8]), "block")), books_of(story).order()
    for event in story:
        feed.tell(event)
        if data.draw(st.booleans()):
            feed.take(data.draw(st.integers(0, 2000)), over=data.draw(st.booleans()))
            assert feed.order == order[: len(feed.order)], "what was taken early is a prefix"
    feed.take(2**60)
    while feed.merge.between_passes:
        feed.merge.next_pass()
        feed.take(2**60)
    assert feed.order == order
    assert feed.merge.closed
    rows = books_of(story).script
    for p in range(3):
        assert feed.merge.merged_samples[p] == sum(row[1] == p for row in rows)
        assert feed.merge.merged_tokens[p] == sum(sum(row[3]) for row in rows if row[1] == p)
        assert feed.merge.waiting(p) == 0


@given(st.data())
def test_a_merge_with_the_script_takes_the_same_in_whatever_order_samples_come_again(data: st.DataObject) -> None:
    """Chunks are cut anew, and come by partition; half of the story is new, and joins the script's end."""
    story = data.draw(stories(3))
    known = data.draw(st.integers(0, len(story)))
    feed = Feed(3)
    for _ in range(data.draw(st.integers(1, 2), "times told")):
        recite(feed.merge, story[:known])
    again = by_partition([event for event in story[:known] if event[0] != "end"], data)
    for event in [*again, *(event for event in story[:known] if event[0] == "end"), *story[known:]]:
        chunks = [("push", event[1], [sample]) for sample in event[2]] if data.draw(st.booleans()) else [event]
        for chunk in chunks or [event]:
            feed.tell(chunk)
            if data.draw(st.booleans()):
                feed.take(data.draw(st.integers(0, 2000)))
    feed.take(2**60)
    assert feed.order == books_of(story).order()
    assert feed.merge.closed


@given(st.data())
def test_a_state_taken_anywhere_goes_on_with_the_same_rest(data: st.DataObject) -> None:
    """The script is told from its beginning, before or after the state is loaded; samples come again in any order."""
    story = data.draw(stories(3))
    order = books_of(story).order()
    feed, at = Feed(3), data.draw(st.integers(0, len(story)))
    for event in story[:at]:
        feed.tell(event)
        if data.draw(st.booleans()):
            feed.take(data.draw(st.integers(0, 2000)), over=data.draw(st.booleans()))
    state = feed.merge.state()
    assert isinstance(state, MergeState)
    assert state == feed.merge.state(), "a pure read"
    resumed = Feed(3, block=data.draw(st.sampled_from([1, 64])))
    first = data.draw(st.booleans())
    if first:
        recite(resumed.merge, story[:at])
    resumed.merge.load(state)
    assert resumed.merge.state() == state
    if not first:
        recite(resumed.merge, story[:at])
    resumed.sent = list(state.merged_samples)
    seen, marked = [0] * 3, [0] * 3
    marks = resumed.merge.num_barriers_pushed
    for kind, p, samples in by_partition(story[:at], data) + story[at:]:
        if kind == "mark":
            marked[p] += 1
            if marked[p] <= marks[p]:
                continue
        skip = max(min(state.merged_samples[p] - seen[p], len(samples)), 0)
        seen[p] += len(samples)
        resumed.tell((kind, p, samples), skip)
        if data.draw(st.booleans()):
            resumed.take(data.draw(st.integers(0, 2000)))
    resumed.take(2**60)
    assert feed.order + resumed.order == order
    assert resumed.merge.closed


@given(st.data())
def test_the_partition_that_is_waited_for_has_the_script_s_next_sample(data: st.DataObject) -> None:
    story = data.draw(stories(3))
    feed = Feed(3)
    recite(feed.merge, story)
    late = data.draw(st.integers(0, 2))
    for event in story:
        if event[1] != late:
            feed.tell(event)
    feed.take(2**60)
    rows = books_of(story).script
    before = next((at for at, row in enumerate(rows) if row[1] == late), len(rows))
    first_pass = [row for row in rows[:before] if row[0] == 0]
    assert feed.order == [(p, seq, i) for _, p, seq, s in first_pass for i, size in enumerate(s) if size]
    assert feed.blocked == late


def test_without_a_script_the_silent_partition_is_named() -> None:
    """Of those that the pass waits for the one that gave the fewest; one at its mark is not waited for."""
    feed = Feed(3)
    named: list[int | None] = []
    for event in [("push", 2, [[5], [6]]), ("push", 0, [[5]]), ("mark", 1, []), ("end", 0, []), ("mark", 2, [])]:
        feed.tell(event)
        feed.take(2**60, over=False)
        named.append(feed.blocked)
    assert named == [0, 1, 0, 2, None]
    assert feed.merge.between_passes


def test_samples_sent_ahead_keep_their_place_in_the_next_pass() -> None:
    """Partition 0 is two marks ahead; the batches come in order, each as it arrived."""
    story: list[Event] = [
        ("push", 0, [[1]]), ("mark", 0, []), ("push", 0, [[1]]), ("push", 1, [[2]]), ("mark", 0, []),
        ("push", 0, [[1]]), ("mark", 1, []), ("push", 1, [[2]]), ("mark", 1, []), ("push", 1, [[2]]),
        ("end", 0, []), ("end", 1, []),
    ]  # fmt: skip
    assert [p for p, *_ in told(story, 2)] == [0, 1, 0, 1, 0, 1]


def test_an_empty_pass_is_one_too() -> None:
    """Marks with nothing between them; the count of passes goes into the state."""
    feed = Feed(2)
    for event in [("mark", 0, []), ("mark", 0, []), ("mark", 1, []), ("push", 1, [[7]])]:
        feed.tell(event)
    assert not feed.merge.take(2**60).handles.size
    feed.merge.next_pass()
    assert feed.merge.state().turn == [1, 1]
    resumed = Arrival([2])
    resumed.load(feed.merge.state())
    assert resumed.num_barriers_pushed == [2, 1]
    assert not feed.merge.between_passes
    feed.take(2**60)
    assert feed.order == [(1, 0, 0)]


def test_a_script_with_a_gap_is_refused() -> None:
    merge = Arrival([1, 1])
    merge.script(1, 0, 5)
    merge.script(1, 3, 4)
    with pytest.raises(ValueError, match="got sample 9 of partition 1 in the script, expected sample 7 next"):
        merge.script(1, 9, 1)


@given(st.data())
def test_waiting_samples_can_be_dropped(data: st.DataObject) -> None:
    story = data.draw(stories(2))
    feed = Feed(2)
    for event in story:
        feed.tell(event)
    feed.take(data.draw(st.integers(0, 3000)), over=False)
    dropped = [feed.names[handle] for handle in feed.merge.drop().tolist()]
    assert sorted(dropped + feed.order) == sorted(books_of(story).order())
    assert feed.merge.closed
    assert not feed.merge.take(2**60).handles.size


@given(st.data())
def test_the_compiled_kernel_and_its_python_twin_agree(data: st.DataObject) -> None:
    story = data.draw(stories(3))
    compiled = told(story, 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrival_module, "arrival_take", getattr(arrival_take, "py_func", arrival_take))
        assert told(story, 3) == compiled


def test_many_runs_of_one_sample_keep_their_order_and_little_memory() -> None:
    """Rollouts: 20000 chunks of one sample, a partition that is silent, one that is a batch ahead."""
    merge, order = Arrival([4]), np.random.default_rng(3).integers(0, 3, 20_000).tolist()
    seen: list[int] = []
    merge.push(3, np.array([3]), np.array([1]), np.array([0]))
    merge.end_pass(3)
    for at, p in enumerate(order):
        merge.push(p, np.array([p]), np.array([1]), np.array([0]))
        if at % 50 == 0:
            seen += merge.take(2**60).handles.tolist()
    seen += merge.take(2**60).handles.tolist()
    assert seen == [3, *order]
    script: Any = merge._script
    assert len(script.stop) <= 2048


def test_rules_say_which_merge() -> None:
    streams = (StreamRules("a", partitions=2), StreamRules("b", partitions=3, on_exhaust="stop"))
    merge = merge_of(Rules(merge="arrival", streams=streams))
    assert isinstance(merge, Arrival)
    assert len(merge.merged_samples) == 5
    assert not merge.stopped
    assert isinstance(merge_of(Rules(streams=streams)), Merge)
