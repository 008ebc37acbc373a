"""The merge: a function of seed, weights and position, whoever was faster."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.core import merge as merge_module
from streampack.core.kernels import merge_take
from streampack.core.merge import STRIDE_ONE, Merge, phase, strides
from streampack.core.rules import MAX_WEIGHT_RATIO

Sample = list[int]
"""Lengths of its pieces; [0] for a tombstone."""
Taken = tuple[int, int, int, int]
"""Stream, partition in it, sample number in that, piece."""


@dataclass(frozen=True)
class Run:
    """Streams of partitions of samples, all of them."""

    weights: list[float]
    streams: list[list[list[Sample]]]
    seed: int


@st.composite
def runs(draw: st.DrawFn) -> Run:
    length = st.one_of(st.integers(1, 20), st.integers(1, 2000))
    sample = st.one_of(length.map(lambda n: [n]), st.lists(length, min_size=2, max_size=4), st.just([0]))
    stream = st.lists(st.lists(sample, max_size=12), min_size=1, max_size=4)
    streams = draw(st.lists(stream, min_size=1, max_size=4))
    weights = [draw(st.floats(0.01, 4, allow_nan=False)) for _ in streams]
    return Run(weights, streams, draw(st.integers(0, 2**62 - 1)))


def oracle(run: Run) -> list[Taken]:
    """Stride scheduling over all that there is, in exact integers, without rings or rebasing."""
    stride = [round(STRIDE_ONE * max(run.weights) / weight) for weight in run.weights]
    clock = [phase(run.seed, s) * stride[s] for s in range(len(stride))]
    at = [[0] * len(partitions) for partitions in run.streams]
    turn = [0] * len(stride)
    order: list[Taken] = []
    while True:
        live = [s for s, heads in enumerate(at) if any(h < len(run.streams[s][p]) for p, h in enumerate(heads))]
        if not live:
            return order
        s = min(live, key=lambda s: (clock[s], s))
        while at[s][turn[s]] == len(run.streams[s][turn[s]]):
            turn[s] = (turn[s] + 1) % len(at[s])
        p = turn[s]
        sample = run.streams[s][p][at[s][p]]
        order += [(s, p, at[s][p], piece) for piece, length in enumerate(sample) if length]
        clock[s] += stride[s] * sum(sample)
        at[s][p] += 1
        turn[s] = (p + 1) % len(at[s])


class Feed:
    """A merge of a run, fed as a test likes; a handle is an index into ``names``."""

    def __init__(self, run: Run, width: int = 1024) -> None:
        self.run = run
        self.merge = Merge(run.weights, [len(partitions) for partitions in run.streams], run.seed, width)
        self.places = [(s, p) for s, partitions in enumerate(run.streams) for p in range(len(partitions))]
        self.pushed = [0] * len(self.places)
        self.names: list[Taken] = []
        self.lengths: list[int] = []
        self.order: list[Taken] = []
        self.blocked: int | None = None

    def push(self, number: int, count: int) -> None:
        """The next ``count`` samples of a partition, or what is left; and its end once nothing is."""
        s, p = self.places[number]
        samples = self.run.streams[s][p]
        entries = []
        for seq in range(self.pushed[number], min(self.pushed[number] + count, len(samples))):
            for piece, length in enumerate(samples[seq]):
                entries.append((len(self.names), length, piece))
                self.names.append((s, p, seq, piece))
                self.lengths.append(length)
        self.pushed[number] = min(self.pushed[number] + count, len(samples))
        columns = np.array(entries, np.int64).reshape(-1, 3).T
        self.merge.push(number, *columns)
        if self.pushed[number] == len(samples) and count:
            self.merge.end(number)

    def take(self, max_tokens: int) -> None:
        taken = self.merge.take(max_tokens)
        assert taken.lengths.tolist() == [self.lengths[handle] for handle in taken.handles.tolist()]
        longest = max((sum(sample) for _, samples in self.all for sample in samples), default=0)
        tokens = int(taken.lengths.sum())
        assert tokens < max_tokens + longest or (max_tokens, tokens) == (0, 0)
        assert tokens >= max_tokens or taken.blocked is not None or self.merge.closed
        if max_tokens == 0:
            assert tokens == 0
        self.order += [self.names[handle] for handle in taken.handles.tolist()]
        self.blocked = taken.blocked

    @property
    def all(self) -> list[tuple[tuple[int, int], list[Sample]]]:
        return [((s, p), self.run.streams[s][p]) for s, p in self.places]


def fed_at_once(run: Run) -> list[Taken]:
    feed = Feed(run)
    for number in range(len(feed.places)):
        feed.push(number, 10**9)
    feed.take(2**60)
    assert feed.merge.closed
    assert feed.blocked is None
    return feed.order


@given(runs())
def test_the_order_is_that_of_stride_scheduling(run: Run) -> None:
    assert fed_at_once(run) == oracle(run)


@given(runs(), st.data())
def test_the_order_does_not_depend_on_arrivals_or_on_how_much_is_taken(run: Run, data: st.DataObject) -> None:
    feed = Feed(run, width=data.draw(st.sampled_from([1, 2, 8]), "ring"))
    numbers = st.integers(0, len(feed.places) - 1)
    for _ in range(data.draw(st.integers(0, 40), "events")):
        if data.draw(st.booleans()):
            feed.push(data.draw(numbers), data.draw(st.integers(0, 5)))
        else:
            feed.take(data.draw(st.integers(0, 3000)))
    assert feed.order == oracle(run)[: len(feed.order)], "what was taken early is a prefix"
    for number in range(len(feed.places)):
        feed.push(number, 10**9)
    feed.take(2**60)
    assert feed.order == oracle(run)
    for number, (_, samples) in enumerate(feed.all):
        assert int(feed.merge.merged_samples[number]) == len(samples)
        assert int(feed.merge.merged_tokens[number]) == sum(map(sum, samples))
        assert feed.merge.waiting(number) == 0


@given(runs(), st.data())
def test_the_partition_that_is_waited_for_is_the_next_one_s(run: Run, data: st.DataObject) -> None:
    feed = Feed(run)
    for number in range(len(feed.places)):
        feed.push(number, data.draw(st.integers(0, 12)))
    feed.take(2**60)
    if feed.blocked is None:
        assert feed.order == oracle(run)
        return
    assert feed.merge.waiting(feed.blocked) == 0
    before = len(feed.order)
    for number in range(len(feed.places)):
        if number != feed.blocked:
            feed.push(number, 10**9)
    feed.take(2**60)
    assert len(feed.order) == before, "others cannot help"


@given(runs())
def test_within_a_stream_indices_rise_and_pieces_stay_together(run: Run) -> None:
    order = fed_at_once(run)
    for s, partitions in enumerate(run.streams):
        ids = [(seq * len(partitions) + p, piece) for stream, p, seq, piece in order if stream == s]
        assert all(after > before for before, after in pairwise(ids))
    assert len(order) == sum(length > 0 for stream in run.streams for part in stream for s_ in part for length in s_)


@given(runs())
def test_the_compiled_kernel_and_its_python_twin_agree(run: Run) -> None:
    compiled = fed_at_once(run)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merge_module, "merge_take", getattr(merge_take, "py_func", merge_take))
        assert fed_at_once(run) == compiled


def stream_of(lengths: list[int], partitions: int) -> list[list[Sample]]:
    return [[[length] for length in lengths[p::partitions]] for p in range(partitions)]


@pytest.mark.parametrize("weights", [[1.0, 1.0], [3.0, 1.0], [0.7, 0.2, 0.1], [1.0, 0.05]])
@pytest.mark.parametrize("means", [[1000, 10, 100], [10, 1000, 30]])
def test_token_shares_are_the_weights_whatever_the_lengths(weights: list[float], means: list[int]) -> None:
    draw = np.random.default_rng(3)
    goal = 800_000
    streams = [
        stream_of(draw.integers(1, 2 * mean, int(1.4 * goal / mean)).tolist(), 3) for mean in means[: len(weights)]
    ]
    feed = Feed(Run(weights, streams, 11))
    for number in range(len(feed.places)):
        feed.push(number, 10**9)
    feed.take(goal)
    tokens = np.zeros(len(weights))
    np.add.at(tokens, [s for s, _ in feed.places], feed.merge.merged_tokens)
    shares = np.array(weights) / sum(weights)
    assert feed.blocked is None
    assert abs(tokens.sum() - goal) < 2000
    np.testing.assert_allclose(tokens / tokens.sum(), shares, atol=0.01)


def test_an_exhausted_stream_leaves_its_share_to_the_others() -> None:
    run = Run([1.0] * 3, [stream_of([100] * 10, 1), stream_of([100] * 500, 2), stream_of([100] * 500, 3)], 0)
    tail = [s for s, *_ in fed_at_once(run)][-900:]
    assert 0 not in tail
    assert abs(tail.count(1) - tail.count(2)) <= 22, "the head start of the seed is below 1024 tokens"


def test_tombstones_take_their_turn_and_give_nothing() -> None:
    run = Run([1.0], [[[[5], [0], [7]], [[0], [0], [6]]]], 0)
    assert fed_at_once(run) == [(0, 0, 0, 0), (0, 0, 2, 0), (0, 1, 2, 0)]


def test_clocks_stay_within_64_bits() -> None:
    """Light streams whose heavy peer has ended: 2**33 tokens at a stride of 2**32."""
    merge, length = Merge([MAX_WEIGHT_RATIO, 1.0, 1.0], [1, 1, 1], 0), 1 << 20
    merge.end(0)
    order: list[int] = []
    for _ in range(8):
        for stream in (1, 2):
            merge.push(stream, np.full(512, stream), np.full(512, length), np.zeros(512, np.int64))
        order += merge.take(2**60).handles.tolist()
    assert len(order) > 8000
    assert all(after != before for before, after in pairwise(order)), "they take turns to the end"


def test_a_golden_order_is_held_still() -> None:
    """Recorded runs depend on it: a change here is a change of every run's steps."""
    run = Run([3.0, 1.0], [stream_of([400, 300, 500] * 4, 2), stream_of([600, 200] * 3, 1)], 17)
    assert [phase(17, 0), phase(17, 1), phase(2**62 - 1, 5)] == GOLDEN_PHASES
    assert "".join("ab"[s] for s, *_ in fed_at_once(run)) == GOLDEN_ORDER


GOLDEN_PHASES = [557, 988, 273]
GOLDEN_ORDER = "aaaaaaabaaaababbbb"


def test_seeds_move_where_streams_begin() -> None:
    assert len({(phase(seed, 0), phase(seed, 1)) for seed in range(50)}) == 50
    assert all(0 <= phase(seed, stream) < 1024 for seed in (0, 1, 2**62 - 1) for stream in range(9))


@given(st.lists(st.integers(0, 9), max_size=60), st.integers(1, 3))
def test_a_ring_that_grows_keeps_its_order(pushes: list[int], width: int) -> None:
    """Entries come in bursts over a small ring, wrap around, and leave in the order in which they came."""
    merge, sent, seen = Merge([1.0], [2], 0, width), 0, []
    for count in pushes:
        for partition in range(2):
            handles = np.arange(sent, sent + 2 * count, 2) + partition
            merge.push(partition, handles, np.ones(count, np.int64), np.zeros(count, np.int64))
        sent += 2 * count
        seen += merge.take(count + 1).handles.tolist()
    seen += merge.take(2**60).handles.tolist()
    assert seen == list(range(sent))


@given(st.lists(st.floats(1, MAX_WEIGHT_RATIO), min_size=1, max_size=6))
def test_strides_are_inverse_to_weights(weights: list[float]) -> None:
    found = strides(weights)
    assert found.dtype == np.int64
    assert found.min() == STRIDE_ONE
    np.testing.assert_allclose(found * np.array(weights), STRIDE_ONE * max(weights), rtol=1e-5)


@pytest.mark.parametrize("weights", [[1.0, 0.0], [-1.0], [1.0, 1 / 5000], [float("nan"), 1.0], [1.0, float("nan")]])
def test_weights_that_cannot_be_are_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match=r"got weight .*, expected one above"):
        strides(weights)


def test_a_take_of_nothing_changes_nothing() -> None:
    run = Run([1.0, 2.0], [stream_of([3, 4], 1), stream_of([5], 1)], 1)
    feed: Any = Feed(run)
    for _ in range(3):
        feed.take(0)
        assert feed.order == []
    for number in range(2):
        feed.push(number, 9)
    feed.take(2**60)
    assert feed.order == oracle(run)
