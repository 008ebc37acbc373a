"""Estimate the number of steps in a pass from a sample of it, with a 95% interval.

A pass has as many packs as its tokens divided by the mean tokens of a pack. Its batches are its samples divided by the
samples of a batch. Tokens and samples are estimated from the sample if the shards of a source were not all counted.

The interval is a block bootstrap (Künsch, "The jackknife and the bootstrap for general stationary observations", Ann.
Statist. 17, 1989). Samples, packs and shards are drawn again in blocks of neighbors, because neighbors are not
independent. The interval holds 95% of the draws.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from streampack.core.model.lease_terms import StreamTerms, terms_of
from streampack.core.model.rules import Rules
from streampack.core.model.samples import I64
from streampack_services.forecast.lengths import StreamLengths, Workload
from streampack_services.forecast.media_sizes import pieces_of

DRAWS = 400
"""Draws of the bootstrap."""
BLOCKS = 64
"""Blocks of neighbors that each draw chooses from."""
F64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PassSize:
    """Size of one pass: ``packs`` with samples, and ``steps`` with a 95% interval; None if it is not known.

    ``empty_share``: empty packs per pack with samples.
    """

    packs: int | None = None
    steps: int | None = None
    steps_low: int | None = None
    steps_high: int | None = None
    empty_share: float = 0.0


def size_of_pass(workload: Workload, rules: Rules, slots: I64, batch_packs: float) -> PassSize:
    """Estimate the size of the pass that a workload is a sample of, if the samples of a pass are known.

    ``slots``: tokens with alignment of each pack with samples, int64 [packs]. ``batch_packs``: mean packs per batch.
    """
    if any(stream.total is None for stream in workload.streams) or not len(slots):
        return PassSize()
    draws = np.random.default_rng(rules.seed)
    sums, sums_drawn = 0.0, np.zeros(DRAWS)
    for stream, terms in zip(workload.streams, terms_of(rules), strict=True):
        one, drawn = _sum_over_pass(stream, rules, terms, draws)
        sums, sums_drawn = sums + one, sums_drawn + drawn
    batch = rules.batch
    if batch is not None and batch.samples is not None:
        count, (low, high) = sums / batch.samples, _interval(sums_drawn / batch.samples)
        whole = np.ceil if rules.tail == "pad" else np.floor
        steps, *ends = (max(int(whole(_exact(estimate))), 1) for estimate in (count, low, high))
        return PassSize(round(count * batch_packs), steps, min(steps, ends[0]), max(steps, ends[1]))
    fill = float(slots.mean())
    low, high = _interval(sums_drawn / _means_drawn(slots.astype(np.float64), draws))
    count = sums / fill
    steps, *ends = (_steps(rules, estimate) for estimate in (count, min(low, count), max(high, count)))
    more = (steps - _steps(msgspec.structs.replace(rules, warmup=None), count)) * rules.packs
    unknown = ends[1] > ends[0]
    empty = (rules.packs - 1) / 2 if unknown else steps * rules.packs - more - np.ceil(count)
    share = max(float(empty / count), 0.0) if rules.tail == "pad" else 0.0
    return PassSize(int(np.ceil(count)) + more, steps, ends[0], ends[1], share)


def _interval(drawn: F64) -> tuple[float, float]:
    """Return the interval that holds the middle 95% of the values, float64 [DRAWS]."""
    rising = np.sort(drawn)
    return float(rising[int(0.025 * DRAWS)]), float(rising[int(0.975 * DRAWS) - 1])


def _steps(rules: Rules, packs: float) -> int:
    """Return the number of steps that hold ``packs`` packs of the whole budget, with the smaller steps of a warm-up."""
    need, warmup = packs / rules.packs, rules.warmup
    if warmup is None or warmup.init == rules.budget:
        return max(int(np.ceil(_exact(need))), 1)
    first, steps = warmup.init / rules.budget, warmup.steps
    if need >= (within := (1 + first) / 2 * steps):
        return int(np.ceil(_exact(steps + need - within)))
    growth = (1 - first) / steps  # first * n + growth * n * n / 2 = need
    return max(int(np.ceil((np.sqrt(first * first + 2 * growth * need) - first) / growth)), 1)


def _exact(value: float) -> float:
    """Remove the rounding error of a sum of floats before it is rounded up or down."""
    return round(value, 9)


def _sum_over_pass(
    stream: StreamLengths, rules: Rules, terms: StreamTerms, draws: np.random.Generator
) -> tuple[float, F64]:
    """Estimate the sum of ``_step_units`` over one pass of a stream.

    Return the estimate, and that of each draw of the bootstrap, float64 [DRAWS].
    """
    if stream.every is not None:
        lengths, counts = stream.every
        units = float((_step_units(lengths, None, rules, terms) * counts).sum())
        return units, np.full(DRAWS, units)
    media = np.concatenate(stream.media) if stream.media is not None else None
    read = _step_units(np.concatenate(stream.partitions), media, rules, terms)
    have, total = float(read.sum()), float(stream.total or len(read))
    totals = np.full(DRAWS, total)
    if stream.shard_samples is not None and len(stream.shard_samples) > 1:
        counts = stream.shard_samples.astype(np.float64)
        totals = total * _means_drawn(counts, draws) / counts.mean()
    rest = np.maximum(totals - len(read), 0.0)
    return have + max(total - len(read), 0.0) * float(read.mean()), have + rest * _means_drawn(read, draws)


def _step_units(lengths: I64, media: I64 | None, rules: Rules, terms: StreamTerms) -> F64:
    """Return how much each sample fills steps, float64 [n]: its tokens with alignment, or 1 if steps are batches.

    A rejected or dropped sample has 0. ``media``: sizes of the samples' media, int64 [n, 4], or None.
    """
    pieces = pieces_of(lengths, media, terms)
    slots = -(-pieces.length // rules.align.sample) * rules.align.sample
    sums = np.bincount(pieces.source, slots, len(lengths))
    return (sums if rules.batch is None else sums > 0).astype(np.float64)


def _means_drawn(values: F64, draws: np.random.Generator) -> F64:
    """Draw ``values`` again in blocks of neighbors, DRAWS times; return the mean of each draw, float64 [DRAWS]."""
    bounds = np.linspace(0, len(values), min(BLOCKS, len(values)) + 1).astype(np.int64)
    sums, sizes = np.add.reduceat(values, bounds[:-1]), np.diff(bounds)
    chosen = draws.integers(0, len(sizes), (DRAWS, len(sizes)))
    return np.asarray(sums[chosen].sum(axis=1) / sizes[chosen].sum(axis=1), np.float64)
