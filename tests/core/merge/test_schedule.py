"""The merge: a function of seed, weights and position, whoever was faster."""

import tracemalloc
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from types import FunctionType
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.core.merge import merge_kernels as kernels_module
from streampack.core.merge import schedule as merge_module
from streampack.core.merge.entries import HANDLE, LENGTH, PART
from streampack.core.merge.merge_kernels import drop_first, merge_take, of_first
from streampack.core.merge.queues import BARRIER
from streampack.core.merge.schedule import STRIDE_ONE, Merge, merge_of, phase, strides
from streampack.core.model.keys.planning_keys import WeightUnit
from streampack.core.model.rules import MAX_WEIGHT_RATIO, Rules, StreamRules

Sample = list[int]
"""Lengths of its pieces; [0] for a tombstone, [-1] for the end of a pass."""
Taken = tuple[int, int, int, int]
"""Stream, partition in it, sample number in that, piece."""


@dataclass(frozen=True)
class Run:
    """Streams of partitions of samples, all of them."""

    weights: list[float]
    streams: list[list[list[Sample]]]
    seed: int
    unit: WeightUnit = "tokens"
    stops: tuple[int, ...] = ()

    def numbered(self, s: int, p: int) -> list[tuple[int, Sample]]:
        """A partition's entries, each with the number of samples before it."""
        numbers = accumulate((sample != [BARRIER] for sample in self.streams[s][p]), initial=0)
        return list(zip(numbers, self.streams[s][p], strict=False))


@st.composite
def runs(draw: st.DrawFn, policies: bool = False) -> Run:
    """With ``policies`` there are barriers between passes, and streams that stop the rest."""
    length = st.one_of(st.integers(1, 20), st.integers(1, 2000))
    sample = st.one_of(length.map(lambda n: [n]), st.lists(length, min_size=2, max_size=4), st.just([0]))
    if policies:
        sample = st.one_of(sample, sample, st.just([BARRIER]))
    stream = st.lists(st.lists(sample, max_size=12), min_size=1, max_size=4)
    streams = draw(st.lists(stream, min_size=1, max_size=4))
    weights = [draw(st.floats(0.01, 4, allow_nan=False)) for _ in streams]
    unit: WeightUnit = draw(st.sampled_from(["tokens", "samples"]))
    stops = draw(st.sets(st.integers(0, len(streams) - 1), max_size=2)) if policies else ()
    return Run(weights, streams, draw(st.integers(0, 2**62 - 1)), unit, tuple(stops))


def oracle(run: Run) -> list[Taken]:
    """Stride scheduling over all that there is, a pass at a time, in exact integers, without rings or rebasing."""
    stride = [round(STRIDE_ONE * max(run.weights) / weight) for weight in run.weights]
    left = [[run.numbered(s, p) for p in range(len(partitions))] for s, partitions in enumerate(run.streams)]
    order: list[Taken] = []
    while True:
        heads = [phase(run.seed, s) * (each if run.unit == "tokens" else each // 1024) for s, each in enumerate(stride)]
        clock = [-1 if s in run.stops else head for s, head in enumerate(heads)]
        turn, live = [0] * len(stride), set(range(len(stride)))
        while live:
            s = min(live, key=lambda s: (clock[s], s))
            ready = [p for p, queue in enumerate(left[s]) if queue and queue[0][1] != [BARRIER]]
            if not ready:
                if s in run.stops and not any(left[s]):
                    return order
                live.remove(s)
                continue
            p = min(ready, key=lambda p: (p < turn[s], p))
            seq, sample = left[s][p].pop(0)
            order += [(s, p, seq, piece) for piece, length in enumerate(sample) if length]
            clock[s] += stride[s] * (sum(sample) if run.unit == "tokens" else any(sample))
            turn[s] = (p + 1) % len(left[s])
        if not any(queue for queues in left for queue in queues):
            return order
        for queue in [queue for queues in left for queue in queues if queue]:
            del queue[0]  # the barrier


class Feed:
    """A merge of a run, fed as a test likes; a handle is an index into ``names``."""

    def __init__(self, run: Run, block: int = 64) -> None:
        self.run = run
        self.merge = Merge(run.weights, [len(parts) for parts in run.streams], run.seed, block, run.unit, run.stops)
        self.places = [(s, p) for s, partitions in enumerate(run.streams) for p in range(len(partitions))]
        self.pushed = [0] * len(self.places)
        self.names: list[Taken] = []
        self.lengths: list[int] = []
        self.order: list[Taken] = []
        self.blocked: int | None = None

    def push(self, number: int, count: int) -> None:
        """The next ``count`` samples of a partition, or what is left; and its end once nothing is."""
        s, p = self.places[number]
        samples = self.run.numbered(s, p)
        for seq, sample in samples[self.pushed[number] : self.pushed[number] + count]:
            if sample == [BARRIER]:
                self.merge.end_pass(number)
                continue
            entries = [(len(self.names) + piece, length, piece) for piece, length in enumerate(sample)]
            self.names += [(s, p, seq, piece) for piece in range(len(sample))]
            self.lengths += sample
            self.merge.push(number, *np.array(entries, np.int64).T)
        self.pushed[number] = min(self.pushed[number] + count, len(samples))
        if self.pushed[number] == len(samples) and count:
            self.merge.end(number)

    def take(self, max_tokens: int) -> None:
        """What ``take`` gives, over the ends of passes."""
        self.take_once(max_tokens)
        while self.merge.between_passes:
            before = len(self.order)
            assert not self.merge.take(2**60).handles.size
            self.merge.next_pass()
            self.take_once(max_tokens)
            assert len(self.order) >= before

    def take_once(self, max_tokens: int) -> None:
        taken = self.merge.take(max_tokens)
        assert taken.lengths.tolist() == [self.lengths[handle] for handle in taken.handles.tolist()]
        longest = max((sum(sample) for _, samples in self.all for sample in samples if sample != [BARRIER]), default=0)
        tokens = int(taken.lengths.sum())
        assert tokens < max_tokens + longest or (max_tokens, tokens) == (0, 0)
        assert tokens >= max_tokens or taken.blocked is not None or self.merge.closed or self.merge.between_passes
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


@given(runs(policies=True))
def test_the_order_is_that_of_stride_scheduling(run: Run) -> None:
    assert fed_at_once(run) == oracle(run)


@given(runs(policies=True), st.data())
def test_the_order_does_not_depend_on_arrivals_or_on_how_much_is_taken(run: Run, data: st.DataObject) -> None:
    feed = Feed(run, block=data.draw(st.sampled_from([1, 2, 8]), "block"))
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
    assert feed.merge.closed
    for number, (place, entries) in enumerate(feed.all):
        samples = [sample for sample in entries if sample != [BARRIER]]
        tokens = sum(samples[seq][piece] for *where, seq, piece in feed.order if tuple(where) == place)
        assert int(feed.merge.merged_tokens[number]) == tokens
        if not feed.merge.stopped:
            assert int(feed.merge.merged_samples[number]) == len(samples)
            assert tokens == sum(map(sum, samples))
            assert feed.merge.waiting(number) == 0
    dropped = {feed.names[handle] for handle in feed.merge.drop().tolist()}
    given_ = {name for name, length in zip(feed.names, feed.lengths, strict=True) if length}
    assert dropped == given_ - set(feed.order), "what was not merged can be released"
    assert len(feed.merge.drop()) == 0


@given(runs(policies=True), st.data())
def test_the_partition_that_is_waited_for_is_the_next_one_s(run: Run, data: st.DataObject) -> None:
    feed = Feed(run)
    for number in range(len(feed.places)):
        feed.push(number, data.draw(st.integers(0, 12)))
    feed.take(2**60)
    if feed.blocked is None:
        assert feed.order == oracle(run)
        return
    assert feed.merge.waiting(feed.blocked) == 0
    missing = feed.merge.missing(99)
    assert not any(map(feed.merge.waiting, missing))
    assert feed.blocked not in missing[1:], "the one that is waited for comes first"
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


@given(runs(policies=True))
def test_the_compiled_kernel_and_its_python_twin_agree(run: Run) -> None:
    compiled = fed_at_once(run)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merge_module, "merge_take", getattr(merge_take, "py_func", merge_take))
        assert fed_at_once(run) == compiled


def scan_take(order: Any, num_ordered: Any, now: Any, clock: Any, *rest: Any) -> tuple[int, int]:
    """``merge_take`` with the next stream found by a scan of all of them instead of by the heap."""
    stride, first, turn, live, paused, stops, queues, ended = rest[:8]
    merged_samples, merged_tokens, by_sample, max_tokens, max_samples, most, out_handle, out_length = rest[8:]
    waiting = queues.tail - queues.head
    taken, tokens, samples = 0, 0, 0
    while tokens < max_tokens and samples < max_samples and taken < most:
        active = [s for s in range(len(clock)) if live[s] and not paused[s]]
        if not active:
            return taken, -1
        s = min(active, key=lambda s: (clock[s], s))
        count = int(first[s + 1] - first[s])
        turns = [int(first[s] + (turn[s] + step) % count) for step in range(count)]
        barred = [p for p in turns if waiting[p] and of_first(queues, p, LENGTH) == BARRIER]
        p = next((p for p in turns if p not in barred and (waiting[p] or not ended[p])), -1)
        if p < 0:
            paused[s] = bool(barred)
            if not barred and stops[s]:
                return taken, -2
            live[s] = bool(barred)
            continue
        if not waiting[p]:
            return taken, p
        now[0], gave, pieces = clock[s], 0, 0
        while pieces == 0 or (waiting[p] and of_first(queues, p, PART) > 0):
            handle, length = int(of_first(queues, p, HANDLE)), int(of_first(queues, p, LENGTH))
            if length:
                out_handle[taken], out_length[taken] = handle, length
                taken, gave = taken + 1, gave + length
            drop_first(queues, p)
            waiting[p] -= 1
            pieces += 1
        tokens, samples = tokens + gave, samples + 1
        merged_tokens[p] += gave
        merged_samples[p] += 1
        clock[s] += stride[s] * (int(gave > 0) if by_sample else gave)
        turn[s] = (p - first[s] + 1) % count
    return taken, -1


Act = tuple[str, int, int]


@st.composite
def acts(draw: st.DrawFn) -> tuple[list[int], list[Act], int]:
    """Partitions of up to 40 streams, what happens to their merge, and a seed for weights and lengths."""
    partitions = draw(st.lists(st.sampled_from([1, 1, 2, 3]), min_size=1, max_size=40))
    kinds = ["push", "push", "push", "take", "take", "barrier", "end", "change", "reload"]
    act = st.tuples(st.sampled_from(kinds), st.integers(0, sum(partitions) - 1), st.integers(1, 400))
    return partitions, draw(st.lists(act, max_size=60)), draw(st.integers(0, 2**20))


def played(partitions: list[int], story: list[Act], seed: int) -> list[Any]:
    """All that a merge says while a story happens to it: what it gives, and the state that decides the rest."""
    draw = np.random.default_rng(seed)
    unit: WeightUnit = "tokens" if seed % 2 else "samples"
    weights, stops, said = draw.uniform(0.1, 4, len(partitions)).tolist(), [0] if seed % 3 == 0 else [], list[Any]()
    merge = Merge(weights, partitions, seed, 4, unit, stops)
    ended, handles = set[int](), 0
    for p in range(sum(partitions)):
        merge.push(p, np.arange(8), draw.integers(0, 30, 8), np.zeros(8, np.int64))
    for kind, p, amount in story:
        if kind == "push" and p not in ended:
            count = amount % 9
            parts = np.where(draw.random(count) < 0.2, 1, 0)
            parts[:1] = 0
            merge.push(p, np.arange(handles, handles + count), draw.integers(1, 2000, count), parts)
            handles += count
        elif kind == "barrier" and p not in ended:
            merge.end_pass(p)
        elif kind == "end":
            merge.end(p)
            ended.add(p)
        elif kind == "change":
            weights = [
                weight and weight * scale for weight, scale in zip(weights, draw.uniform(0.5, 2, 99), strict=False)
            ]
            if amount > 300 and np.count_nonzero(weights) > 1:
                s = int(np.searchsorted(np.cumsum(partitions), p, side="right"))
                weights[s] = 0.0
                ended.update(range(sum(partitions[:s]), sum(partitions[: s + 1])))
            if amount % 3 == 0 and merge.may_grow:
                weights, partitions = [*weights, 1.0], [*partitions, 2]
            said.append(merge.change(weights, partitions, stops).tolist())
        elif kind == "reload":
            state = merge.state()
            merge = Merge(weights, partitions, seed, 4, unit, stops)
            merge.load(state)
            said.append(state)
        else:
            for _ in range(2):
                taken = merge.take(50 * amount, amount if amount % 2 else 2**62)
                said.append((taken.handles.tolist(), taken.lengths.tolist(), taken.blocked, taken.moved.tolist()))
                if merge.between_passes:
                    merge.next_pass()
    return [*said, merge.state(), merge.drop().tolist()]


@given(acts())
def test_the_heap_gives_the_order_that_a_scan_of_all_streams_gives(case: tuple[list[int], list[Act], int]) -> None:
    by_heap = played(*case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merge_module, "merge_take", scan_take)
        assert played(*case) == by_heap


class Counted:
    """An array that counts how often an element is read."""

    def __init__(self, values: Any) -> None:
        self.values, self.reads = values, 0

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, at: Any) -> Any:
        self.reads += 1
        return self.values[at]

    def __setitem__(self, at: Any, value: Any) -> None:
        self.values[at] = value


def clock_reads(num_streams: int, monkeypatch: pytest.MonkeyPatch) -> float:
    """How many clocks are looked at for each sample that is merged."""
    merge: Any = Merge([1.0 + s % 7 for s in range(num_streams)], [1] * num_streams, 3)
    for p in range(num_streams):
        merge.push(p, np.arange(8), np.full(8, 100), np.zeros(8, np.int64))
    for name in ("merge_take", "sift_down"):
        kernel = getattr(kernels_module, name)
        twin = cast("FunctionType", getattr(kernel, "py_func", kernel))
        monkeypatch.setattr(kernels_module, name, twin)
    monkeypatch.setattr(merge_module, "merge_take", kernels_module.merge_take)
    clock = merge._clock = Counted(merge._clock)
    samples = len(merge.take(num_streams * 200).handles)
    return clock.reads / samples


def test_a_sample_costs_the_logarithm_of_the_number_of_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    assert clock_reads(1024, monkeypatch) < 8 * 10


def test_memory_follows_what_waits_and_not_the_number_of_partitions() -> None:
    """Each partition may have as many samples waiting as one does, at another time: the same memory holds them."""
    count, burst = 512, 16_384
    none = np.zeros(burst, np.int64)
    merge = Merge([1.0], [count], 0)
    tracemalloc.start()
    for p in range(4):
        merge.push(p, none, none + 1, none)
        assert len(merge.drop()) == burst
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 8 * 12 * burst


def stream_of(lengths: list[int], partitions: int) -> list[list[Sample]]:
    return [[[length] for length in lengths[p::partitions]] for p in range(partitions)]


@pytest.mark.parametrize("weights", [[1.0, 1.0], [3.0, 1.0], [0.7, 0.2, 0.1], [1.0, 0.05]])
@pytest.mark.parametrize("means", [[1000, 10, 100], [10, 1000, 30]])
def test_token_shares_are_the_weights_whatever_the_lengths(weights: list[float], means: list[int]) -> None:
    draw = np.random.default_rng(3)
    goal = 800_000
    shares = np.array(weights) / sum(weights)
    streams = [
        stream_of(draw.integers(1, 2 * mean, int(1.4 * goal * share / mean)).tolist(), 3)
        for mean, share in zip(means, shares, strict=False)
    ]
    feed = Feed(Run(weights, streams, 11))
    for number in range(len(feed.places)):
        feed.push(number, 10**9)
    feed.take(goal)
    tokens = np.zeros(len(weights))
    np.add.at(tokens, [s for s, _ in feed.places], feed.merge.merged_tokens)
    assert feed.blocked is None
    assert abs(tokens.sum() - goal) < 2000
    np.testing.assert_allclose(tokens / tokens.sum(), shares, atol=0.01)


@given(runs())
def test_every_prefix_holds_the_shares_within_a_sample_of_each_stream(run: Run) -> None:
    """Stride scheduling's bound: none is above its share by more than its longest sample, none below by more than
    its part of all the others'; the seed's head starts, below 1024 tokens or a sample each, come on top.
    """
    weights = np.array(run.weights) / sum(run.weights)
    samples = [list(chain(*stream)) for stream in run.streams]
    sizes = [[sum(sample) if run.unit == "tokens" else int(any(sample)) for sample in each] for each in samples]
    longest = np.array([max(each, default=0) for each in sizes])
    left = np.array([sum(map(any, each)) for each in samples])
    given_, head = np.zeros(len(weights)), 1024 if run.unit == "tokens" else 1
    for s, p, seq, piece in fed_at_once(run):
        if not left.all():
            break  # one has ended: the rest share its place
        sample = next(sample for number, sample in run.numbered(s, p) if number == seq)
        if piece == 0:
            given_[s] += sum(sample) if run.unit == "tokens" else 1
            left[s] -= 1
            surplus = given_ - weights * given_.sum()
            assert (surplus <= longest + head * len(weights) * weights + 1e-3 * given_.sum()).all()
            assert (surplus >= -head - weights * longest.sum() - 1e-3 * given_.sum()).all()


@pytest.mark.parametrize("weights", [[1.0, 1.0], [0.7, 0.2, 0.1]])
def test_weights_may_be_shares_of_samples(weights: list[float]) -> None:
    """A split sample counts once, one that is rejected does not."""
    draw = np.random.default_rng(5)

    def sample(mean: int) -> Sample:
        return [[0], [mean], [mean] * 4][int(draw.integers(0, 3))]

    streams = [[[sample(mean) for _ in range(3000)] for _ in range(2)] for mean in (1000, 10, 100)[: len(weights)]]
    order = fed_at_once(Run(weights, streams, 3, "samples"))
    starts = [s for s, *_, piece in order if piece == 0][:3000]
    for s, share in enumerate(np.array(weights) / sum(weights)):
        for upto in (10, 100, 1000, 3000):
            assert abs(starts[:upto].count(s) - upto * share) <= 2, "within a sample of each"


def test_a_stream_that_stops_the_rest_ends_the_merge_at_its_turn() -> None:
    web, code = stream_of([100] * 40, 2), stream_of([100] * 90, 1)
    order = fed_at_once(Run([1.0, 1.0], [web, code], 0, stops=(0,)))
    assert [s for s, *_ in order].count(0) == 40, "all of it"
    assert [s for s, *_ in order].count(1) in range(29, 41), "its share, within the seed's head start"
    feed = Feed(Run([1.0, 1.0], [web, code], 0, stops=(0,)))
    feed.push(0, 99)
    feed.push(1, 99)
    feed.push(2, 50)
    feed.take(2**60)
    assert feed.order == order
    assert feed.merge.closed, "without waiting for the others"
    assert feed.merge.stopped
    assert feed.merge.take(2**60).handles.size == 0


def test_nothing_of_a_pass_comes_before_every_stream_has_given_the_one_before() -> None:
    """Streams of 3, 1 and 2 passes: those that ended are absent in later ones; an empty partition is no matter."""
    end = [BARRIER]
    thrice, once = [[[5], end, [5], end, [5], end], []], [[[7], [7], end]]
    twice = [[[9], end, [9], end], [[9], [9], end, [9], [9], end]]
    run = Run([1.0, 1.0, 1.0], [thrice, once, twice], 1)
    passes = [{0: 1, 1: 2, 2: 3}, {0: 1, 2: 3}, {0: 1}]
    feed = Feed(run)
    for number in range(len(feed.places)):
        feed.push(number, 99)
    for expected in passes:
        before = len(feed.order)
        feed.take_once(2**60)
        assert feed.merge.between_passes
        assert not feed.merge.closed
        found = [s for s, *_ in feed.order[before:]]
        assert {s: found.count(s) for s in set(found)} == expected
        feed.merge.next_pass()
    assert feed.merge.closed
    assert not feed.merge.between_passes


def test_a_pass_that_a_stopping_stream_is_missing_in_is_not_begun() -> None:
    end = [BARRIER]
    run = Run([1.0, 5.0], [[[[900], end, [900], end]], [[[5], [5], end]]], 7, stops=(1,))
    assert [s for s, *_ in fed_at_once(run)] in ([1, 1, 0], [1, 0, 1])


def test_the_merge_of_rules_follows_their_policies() -> None:
    streams = (StreamRules("a", 1.0, 1), StreamRules("b", 3.0, 2, on_exhaust="stop"))
    run = Run([1.0, 3.0], [stream_of([10, 2000] * 9, 1), stream_of([5] * 30, 2)], 3, "samples", (1,))
    merge = merge_of(Rules(weight_unit="samples", seed=3, streams=streams))
    assert isinstance(merge, Merge)
    feed = Feed(run)
    feed.merge = merge
    for number in range(3):
        feed.push(number, 99)
    feed.take(2**60)
    assert feed.order == oracle(run)
    assert merge.stopped


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


@given(st.lists(st.integers(0, 9), max_size=60), st.sampled_from([1, 2, 4]))
def test_queues_that_grow_keep_their_order(pushes: list[int], block: int) -> None:
    """Entries come in bursts, into few and small blocks, and leave in the order in which they came."""
    merge, sent, seen = Merge([1.0], [2], 0, block), 0, []
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
    with pytest.raises(ValueError, match=r"got weight .*, expected a weight above"):
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
