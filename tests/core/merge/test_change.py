"""Rules that change while a feed runs: from a position on, the same when the run is played again."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.core.merge.arrival import Arrival
from streampack.core.merge.queues import BARRIER, NOWHERE
from streampack.core.merge.schedule import AnyMerge, Merge, change_merge, merge_of
from streampack.core.model.keys.planning_keys import MergeOrder, WeightUnit
from streampack.core.model.rules import Rules, StreamRules

Name = tuple[int, int]
"""Partition, entry."""


@dataclass(frozen=True)
class Changed:
    """The weights of all streams there are then, from a position on."""

    position: int
    weights: list[float]


@dataclass
class World:
    """Streams of one or two partitions, all that they will ever hold (0 a rejected sample, -1 the end of a pass);
    ``begin`` weights of those that are there at first.
    """

    kind: MergeOrder
    streams: list[list[list[int]]]
    begin: list[float]
    seed: int = 0
    unit: WeightUnit = "tokens"
    stops: tuple[int, ...] = ()

    @property
    def partitions(self) -> list[int]:
        return [len(stream) for stream in self.streams]

    def merge(self) -> AnyMerge:
        first = self.partitions[: len(self.begin)]
        if self.kind == "arrival":
            return Arrival(first, block=2)
        stops = [s for s in self.stops if s < len(self.begin)]
        return Merge(self.begin, first, self.seed, 2, self.unit, stops)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    kind: MergeOrder = draw(st.sampled_from(["schedule", "arrival"]))
    entry = st.one_of(st.integers(1, 40), st.integers(1, 2000), st.integers(1, 2000), st.sampled_from([0, BARRIER]))
    stream = st.lists(st.lists(entry, max_size=15), min_size=1, max_size=2)
    streams = draw(st.lists(stream, min_size=2, max_size=4))
    begin = draw(st.lists(st.floats(0.05, 4), min_size=1, max_size=len(streams)))
    stops = draw(st.sets(st.integers(0, len(streams) - 1), max_size=1)) if kind == "schedule" else ()
    unit: WeightUnit = draw(st.sampled_from(["tokens", "samples"]))
    return World(kind, streams, begin, draw(st.integers(0, 99)), unit, tuple(stops))


class Feed:
    """A merge of a world, told what comes in any order; a handle is an index into ``names``."""

    def __init__(self, world: World) -> None:
        self.world, self.merge = world, world.merge()
        self.entries = [partition for stream in world.streams for partition in stream]
        self.owner = [s for s, stream in enumerate(world.streams) for _ in stream]
        self.weights = list(world.begin)
        self.pushed = [0] * len(self.entries)
        self.names: list[Name] = []
        self.order: list[Name] = []
        self.script: list[tuple[int, int, int]] = []
        """(partition, sample, 1) as they were pushed."""

    @property
    def open(self) -> list[int]:
        """Partitions of streams that are there."""
        there = [s < len(self.weights) and self.weights[s] > 0 for s in range(len(self.world.streams))]
        return [p for p, s in enumerate(self.owner) if there[s]]

    def push(self, p: int, count: int) -> None:
        """The next entries of a partition, and its end with the last."""
        at = self.pushed[p]
        for number, length in enumerate(self.entries[p][at : at + count], at):
            if length == BARRIER:
                self.merge.end_pass(p)
                continue
            self.names.append((p, number))
            self.merge.push(p, np.array([len(self.names) - 1]), np.array([length]), np.array([0]))
            before = sum(each != BARRIER for each in self.entries[p][:number])
            self.script.append((p, before, 1))
        self.pushed[p] = min(at + count, len(self.entries[p]))
        if self.pushed[p] == len(self.entries[p]):
            self.merge.end(p)

    def take(self, max_tokens: int, max_position: int = NOWHERE) -> None:
        taken = self.merge.take(max_tokens, max_position)
        self.order += [self.names[handle] for handle in taken.handles.tolist()]
        assert self.merge.position <= max_position

    def change(self, weights: list[float]) -> None:
        world = self.world
        stops = [s for s in world.stops if s < len(weights)]
        removed = [s for s, (old, new) in enumerate(zip(self.weights, weights, strict=False)) if old and not new]
        waiting = {name for name in self.names if self.owner[name[0]] in removed} - set(self.order)
        dropped = self.merge.change(weights, world.partitions[: len(weights)], stops)
        assert {self.names[handle] for handle in dropped.tolist()} == {
            (p, number) for p, number in waiting if self.entries[p][number] > 0
        }
        self.weights = weights

    def finish(self) -> None:
        """Push all that is left of the streams there are, and take it."""
        for p in self.open:
            self.push(p, 1 << 40)
        self.take(1 << 60)
        while self.merge.between_passes:
            self.merge.next_pass()
            self.take(1 << 60)
        assert self.merge.closed


def live(world: World, data: st.DataObject) -> tuple[Feed, list[Changed]]:
    """A run in which anything happens at any time; what was changed, and where."""
    feed, changes = Feed(world), list[Changed]()
    for _ in range(data.draw(st.integers(1, 40), "events")):
        what = data.draw(st.sampled_from(["push", "push", "take", "take", "pass", "change"]))
        if what == "push" and feed.open:
            feed.push(data.draw(st.sampled_from(feed.open)), data.draw(st.integers(1, 6)))
        elif what == "take":
            feed.take(data.draw(st.integers(0, 3000)))
        elif what == "pass" and feed.merge.between_passes:
            feed.merge.next_pass()
        elif what == "change" and not feed.merge.closed:
            weights = [each and data.draw(st.one_of(st.floats(0.05, 4), st.just(0))) for each in feed.weights]
            between = feed.merge.state().fresh and feed.merge.state().passes
            if not between and data.draw(st.booleans()):
                weights += [data.draw(st.floats(0.05, 4))] * (len(weights) < len(world.streams))
            if not any(weights):
                continue
            feed.change(weights)
            changes.append(Changed(feed.merge.position, weights))
    feed.finish()
    return feed, changes


def go_to(feed: Feed, position: int, data: st.DataObject) -> None:
    """Take up to a position; the next pass begins only where one more sample is wanted."""
    while True:
        feed.take(data.draw(st.sampled_from([1, 500, 1 << 60])), position)
        if feed.merge.position == position:
            return
        if feed.merge.between_passes:
            feed.merge.next_pass()


@given(worlds(), st.data())
def test_a_change_that_is_played_again_at_its_position_gives_the_same_order(world: World, data: st.DataObject) -> None:
    first, changes = live(world, data)
    again = Feed(world)
    for each in changes:
        recite(again, first)
        for p in again.open:
            again.push(p, 1 << 40)
        go_to(again, each.position, data)
        if data.draw(st.booleans(), "resumed"):
            again = resumed(again, first)
        again.change(each.weights)
    recite(again, first)
    again.finish()
    assert again.order == first.order
    np.testing.assert_array_equal(again.merge.merged_samples, first.merge.merged_samples)


def recite(feed: Feed, first: Feed) -> None:
    """What was pushed in which order, to a merge in order of arrival."""
    if isinstance(feed.merge, Arrival):
        for p, seq, count in first.script:
            feed.merge.script(p, seq, count)


def resumed(feed: Feed, first: Feed) -> Feed:
    """Another one that goes on from the state of ``feed``, under the weights then."""
    world = feed.world
    state, after = feed.merge.state(), Feed(world)
    streams = tuple(
        StreamRules(f"s{s}", weight, world.partitions[s], on_exhaust="stop" if s in world.stops else "renormalise")
        for s, weight in enumerate(feed.weights)
    )
    after.merge = merge_of(Rules(merge=world.kind, weight_unit=world.unit, seed=world.seed, streams=streams))
    after.weights, after.order, after.names = feed.weights, feed.order, feed.names
    after.merge.load(state)
    recite(after, first)
    for p in feed.open:
        # All was pushed before: what waits comes again, but for the barrier that the state is at.
        after.pushed[p] = len(feed.entries[p]) - feed.merge.waiting(p) + state.at_barrier[p]
        after.push(p, 1 << 40)
    return after


@given(st.data())
def test_shares_follow_the_new_weights_from_the_change_on(data: st.DataObject) -> None:
    """No stream makes up for what it got before: from the change on every prefix keeps to stride scheduling's
    bound, with the longest sample (or the seed's 1024 tokens) as everyone's lead at the start.
    """
    count = data.draw(st.integers(2, 4))
    lengths = [data.draw(st.integers(1, 2000)) for _ in range(count)]
    draw = np.random.default_rng(data.draw(st.integers(0, 99)))
    streams = [[draw.integers(1, length + 1, 400).tolist()] for length in lengths]
    added = data.draw(st.booleans())
    before = [data.draw(st.floats(0.05, 4)) for _ in range(count - added)]
    after = [data.draw(st.floats(0.05, 4)) for _ in range(count)]
    unit: WeightUnit = data.draw(st.sampled_from(["tokens", "samples"]))
    feed = Feed(World("schedule", streams, before, unit=unit))
    for p in range(count - added):
        feed.push(p, 400)
    feed.take(data.draw(st.integers(0, 20_000)))
    start = len(feed.order)
    feed.change(after)
    if added:
        feed.push(count - 1, 400)
    feed.take(1 << 60)
    sizes = [[length if unit == "tokens" else 1 for length in stream[0]] for stream in streams]
    longest = np.array([max(each) for each in sizes])
    lead = max(int(longest.max()), 1024 if unit == "tokens" else 1)
    weights, given_ = np.array(after) / sum(after), np.zeros(count)
    left = np.array([400] * count) - [sum(p == s for p, _ in feed.order[:start]) for s in range(count)]
    for s, number in feed.order[start:]:
        if not left.all():
            return  # one has ended: the rest share its place
        given_[s] += sizes[s][number]
        left[s] -= 1
        surplus = given_ - weights * given_.sum()
        assert (surplus <= longest + lead * count * weights + 1e-3 * given_.sum()).all()
        assert (surplus >= -lead - weights * longest.sum() - 1e-3 * given_.sum()).all()


def test_a_heavy_past_is_not_held_against_a_stream() -> None:
    """1000 to 1 and then even: they take turns at once, though the light one had been owed nothing for long."""
    feed = Feed(World("schedule", [[[10] * 5000], [[10] * 5000]], [1000.0, 1.0]))
    for p in range(2):
        feed.push(p, 5000)
    feed.take(30_000)
    start = len(feed.order)
    feed.change([1.0, 1.0])
    feed.take(2000)
    since = [p for p, _ in feed.order[start:]]
    assert abs(since.count(0) - since.count(1)) <= 2 + 1024 // 10


def test_a_removed_stream_gives_nothing_more_and_holds_nobody_up() -> None:
    feed = Feed(World("schedule", [[[5] * 10], [[7] * 10]], [1.0, 1.0]))
    feed.push(0, 4)
    feed.push(1, 3)
    feed.take(20)
    feed.change([0, 1.0])
    start = len(feed.order)
    feed.finish()
    assert {p for p, _ in feed.order[start:]} == {1}
    assert feed.order.count((1, 9)) == 1


@pytest.mark.parametrize(
    ("weights", "partitions", "expected"),
    [
        ([1.0, 0.0, 1.0], [1, 1, 1], "removed"),
        ([0.0, 0.0, 0.0], [1, 1, 1], "expected a weight above"),
        ([1.0, 0.0001, 0.0], [1, 1, 1], "expected a weight above"),
        ([1.0, 0.0, 0.0], [2, 1, 1], "known streams keep their partitions"),
    ],
)
def test_a_change_that_cannot_be_is_refused_and_changes_nothing(
    weights: list[float], partitions: list[int], expected: str
) -> None:
    merge = Merge([1.0, 1.0, 1.0], [1, 1, 1], 3)
    merge.change([1.0, 1.0, 0.0], [1, 1, 1])
    state = merge.state()
    with pytest.raises(ValueError, match=expected):
        merge.change(weights, partitions)
    assert merge.state() == state


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("kind", ["schedule", "arrival"])
def test_a_new_stream_between_two_passes_is_refused(kind: MergeOrder, empty: bool) -> None:
    """Whether it is of the pass before or of the next one could not be said of a position."""
    rules = Rules(merge=kind, streams=(StreamRules("a", 1.0, 1),))
    before = merge_of(rules)
    if not empty:
        before.push(0, np.array([4]), np.array([3]), np.array([0]))
    before.end_pass(0)
    before.take(1 << 60)
    before.next_pass()
    merge = merge_of(rules)
    merge.load(before.state())
    with pytest.raises(
        ValueError, match="got a new stream between two passes, expected the new stream after the first"
    ):
        merge.change([1.0, 1.0], [1, 1])
    merge.push(0, np.array([4]), np.array([3]), np.array([0]))
    merge.take(1 << 60)
    assert not merge.change([1.0, 1.0], [1, 1]).size


@pytest.mark.parametrize("kind", ["schedule", "arrival"])
def test_changed_rules_go_into_their_merge(kind: MergeOrder) -> None:
    begin = Rules(merge=kind, streams=(StreamRules("a", 1.0, 1), StreamRules("b", 1.0, 2)))
    merge = merge_of(begin)
    merge.push(0, np.array([4, 5]), np.array([3, 0]), np.array([0, 0]))
    streams = (StreamRules("a", 0.0, 1), StreamRules("b", 1.0, 2), StreamRules("c", 1.0, 3))
    assert change_merge(merge, Rules(merge=kind, streams=streams)).tolist() == [4]
    assert len(merge.merged_samples) == 6
    assert merge.state() == merge_of(Rules(merge=kind, streams=streams)).state()
