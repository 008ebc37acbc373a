"""How many steps a pass has of which only a sample is known, and how sure that is.

A pass has as many packs as its tokens divided by what a pack holds. Both are estimated from the sample, and so is the
size of a source whose shards were not all counted. The interval is a block bootstrap (Künsch, "The jackknife and the
bootstrap for general stationary observations", Ann. Statist. 17, 1989): samples, packs and shards are drawn again in
blocks of neighbours, which are not independent, and 95 of 100 draws lie in it. What no sample shows it cannot know.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from streampack.core.intake import apply_overlong
from streampack.core.rules import Rules
from streampack.core.samples import I64
from streampack_services.lengths import StreamLengths, Workload

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


def size_of_pass(workload: Workload, rules: Rules, slots: I64) -> PassSize | None:
    """What a pass comes to, of which a workload is a sample; None where nobody knows how many samples it has.

    ``slots`` int64 [p]: what packs hold in the long run, tokens with alignment.
    """
    if any(stream.total is None for stream in workload.streams) or not len(slots):
        return None
    draws = np.random.default_rng(rules.seed)
    tokens, tokens_drawn = 0.0, np.zeros(DRAWS)
    for stream, terms in zip(workload.streams, rules.streams, strict=True):
        one, drawn = _slots_of_pass(stream, rules.budget, rules.align.sample, terms.overlong, draws)
        tokens, tokens_drawn = tokens + one, tokens_drawn + drawn
    fill = float(slots.mean())
    fill_drawn = _means_drawn(slots.astype(np.float64), draws)
    count, counts = tokens / fill, np.sort(tokens_drawn / fill_drawn)
    low, high = counts[int(0.025 * DRAWS)], counts[int(0.975 * DRAWS) - 1]
    steps, *ends = (max(int(np.ceil(each / rules.packs)), 1) for each in (count, min(low, count), max(high, count)))
    unknown = ends[1] > ends[0]
    empty = (rules.packs - 1) / 2 if unknown else steps * rules.packs - np.ceil(count)
    return PassSize(int(np.ceil(count)), steps, ends[0], ends[1], float(empty / count) if rules.tail == "pad" else 0.0)


def _slots_of_pass(
    stream: StreamLengths, budget: int, align: int, overlong: str, draws: np.random.Generator
) -> tuple[float, F64]:
    """Aligned tokens of one pass over a stream, and as many other guesses as there are draws, float64 [DRAWS]."""
    if stream.every is not None:
        lengths, counts = stream.every
        known = float((_slots(lengths, budget, align, overlong) * counts).sum())
        return known, np.full(DRAWS, known)
    read = _slots(np.concatenate(stream.partitions), budget, align, overlong)
    have, total = float(read.sum()), float(stream.total or len(read))
    totals = np.full(DRAWS, total)
    if stream.shard_samples is not None and len(stream.shard_samples) > 1:
        counts = stream.shard_samples.astype(np.float64)
        totals = total * _means_drawn(counts, draws) / counts.mean()
    rest = np.maximum(totals - len(read), 0.0)
    return have + max(total - len(read), 0.0) * float(read.mean()), have + rest * _means_drawn(read, draws)


def _slots(lengths: I64, budget: int, align: int, overlong: str) -> F64:
    """Aligned tokens that become of each sample, float64 [n]; 0 for those that are rejected or dropped."""
    pieces = apply_overlong(lengths, budget, overlong)
    slots = -(-pieces.length // align) * align
    return np.bincount(pieces.source, slots, len(lengths)).astype(np.float64)


def _means_drawn(values: F64, draws: np.random.Generator) -> F64:
    """Means of ``values`` drawn again in blocks of neighbours, float64 [DRAWS]."""
    bounds = np.linspace(0, len(values), min(BLOCKS, len(values)) + 1).astype(np.int64)
    sums, sizes = np.add.reduceat(values, bounds[:-1]), np.diff(bounds)
    chosen = draws.integers(0, len(sizes), (DRAWS, len(sizes)))
    return np.asarray(sums[chosen].sum(axis=1) / sizes[chosen].sum(axis=1), np.float64)
