"""How many steps a pass has of which only a sample is known, and how sure that is.

A pass has as many packs as its tokens divided by what a pack holds; or as many batches as its samples make. All are
estimated from the sample, and so is the size of a source whose shards were not all counted. The interval is a block
bootstrap (Künsch, "The jackknife and the bootstrap for general stationary observations", Ann. Statist. 17, 1989):
samples, packs and shards are drawn again in blocks of neighbors, which are not independent, and 95 of 100 draws lie in
it. What no sample shows it cannot know.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from streampack.core.intake.overlong import apply_overlong
from streampack.core.model.rules import Rules
from streampack.core.model.samples import I64
from streampack_services.forecast.lengths import StreamLengths, Workload

DRAWS = 400
BLOCKS = 64
F64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PassSize:
    """Packs with samples, and steps, of one pass; ``empty_share`` empty packs for each that is not."""

    packs: int
    steps: int
    low: int
    high: int
    empty_share: float


def size_of_pass(workload: Workload, rules: Rules, slots: I64, batch_packs: float) -> PassSize | None:
    """What a pass comes to, of which a workload is a sample; None where nobody knows how many samples it has.

    ``slots`` int64 [p]: what packs hold in the long run, tokens with alignment; ``batch_packs``: how many a batch is.
    """
    if any(stream.total is None for stream in workload.streams) or not len(slots):
        return None
    draws = np.random.default_rng(rules.seed)
    sums, sums_drawn = 0.0, np.zeros(DRAWS)
    for stream, terms in zip(workload.streams, rules.streams, strict=True):
        one, drawn = _sum_over_pass(stream, rules, terms.overlong, draws)
        sums, sums_drawn = sums + one, sums_drawn + drawn
    batch = rules.batch
    if batch is not None and batch.samples is not None:
        count, (low, high) = sums / batch.samples, _interval(sums_drawn / batch.samples)
        whole = np.ceil if rules.tail == "pad" else np.floor
        steps, *ends = (max(int(whole(_exact(each))), 1) for each in (count, low, high))
        return PassSize(round(count * batch_packs), steps, min(steps, ends[0]), max(steps, ends[1]), 0.0)
    fill = float(slots.mean())
    low, high = _interval(sums_drawn / _means_drawn(slots.astype(np.float64), draws))
    count = sums / fill
    steps, *ends = (_steps(rules, each) for each in (count, min(low, count), max(high, count)))
    more = (steps - _steps(msgspec.structs.replace(rules, warmup=None), count)) * rules.packs
    unknown = ends[1] > ends[0]
    empty = (rules.packs - 1) / 2 if unknown else steps * rules.packs - more - np.ceil(count)
    share = max(float(empty / count), 0.0) if rules.tail == "pad" else 0.0
    return PassSize(int(np.ceil(count)) + more, steps, ends[0], ends[1], share)


def _interval(drawn: F64) -> tuple[float, float]:
    """Where 95 of 100 are."""
    found = np.sort(drawn)
    return float(found[int(0.025 * DRAWS)]), float(found[int(0.975 * DRAWS) - 1])


def _steps(rules: Rules, packs: float) -> int:
    """Steps of so many packs of the whole budget; while it warms up a step is less."""
    need, warmup = packs / rules.packs, rules.warmup
    if warmup is None or warmup.init == rules.budget:
        return max(int(np.ceil(_exact(need))), 1)
    first, steps = warmup.init / rules.budget, warmup.steps
    if need >= (within := (1 + first) / 2 * steps):
        return int(np.ceil(_exact(steps + need - within)))
    growth = (1 - first) / steps  # first * n + growth * n * n / 2 = need
    return max(int(np.ceil((np.sqrt(first * first + 2 * growth * need) - first) / growth)), 1)


def _exact(value: float) -> float:
    """Without what sums of floats are off a whole number by."""
    return round(value, 9)


def _sum_over_pass(stream: StreamLengths, rules: Rules, overlong: str, draws: np.random.Generator) -> tuple[float, F64]:
    """Of what steps are cut by, over one pass of a stream; and as many other guesses as there are draws, float64
    [DRAWS].
    """
    if stream.every is not None:
        lengths, counts = stream.every
        known = float((_counted(lengths, rules, overlong) * counts).sum())
        return known, np.full(DRAWS, known)
    read = _counted(np.concatenate(stream.partitions), rules, overlong)
    have, total = float(read.sum()), float(stream.total or len(read))
    totals = np.full(DRAWS, total)
    if stream.shard_samples is not None and len(stream.shard_samples) > 1:
        counts = stream.shard_samples.astype(np.float64)
        totals = total * _means_drawn(counts, draws) / counts.mean()
    rest = np.maximum(totals - len(read), 0.0)
    return have + max(total - len(read), 0.0) * float(read.mean()), have + rest * _means_drawn(read, draws)


def _counted(lengths: I64, rules: Rules, overlong: str) -> F64:
    """What each sample adds to steps, float64 [n]: its aligned tokens; or one, where a batch counts samples. Nothing,
    if it is rejected or dropped.
    """
    pieces = apply_overlong(lengths, rules.budget, overlong)
    slots = -(-pieces.length // rules.align.sample) * rules.align.sample
    sums = np.bincount(pieces.source, slots, len(lengths))
    return (sums if rules.batch is None else sums > 0).astype(np.float64)


def _means_drawn(values: F64, draws: np.random.Generator) -> F64:
    """Means of ``values`` drawn again in blocks of neighbors, float64 [DRAWS]."""
    bounds = np.linspace(0, len(values), min(BLOCKS, len(values)) + 1).astype(np.int64)
    sums, sizes = np.add.reduceat(values, bounds[:-1]), np.diff(bounds)
    chosen = draws.integers(0, len(sizes), (DRAWS, len(sizes)))
    return np.asarray(sums[chosen].sum(axis=1) / sizes[chosen].sum(axis=1), np.float64)
