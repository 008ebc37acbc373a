"""Measure what packing does to the order of samples: shares of streams, mean lengths, and displacement.

Steps come from the broker's own merge and FORM, of drawn lengths. Each case is formed with the window and the order of
versions before 0.2 (*before*), with today's defaults (*now*), and with packs in the order of the merge (*in order*,
``packer: concatenative``).

- *off*: the largest distance of a stream's share of tokens from its weight, over any 20 steps after step 10.
- *change*: windows of samples until the shares over 20 steps follow new weights, after a change in the middle.
- *tenth*: the largest difference between the mean length in a tenth of the steps and that of the same tokens in merge
  order; *first* and *last* are those of the first and last fifth, as the median over seeds.
- *displaced*: the 99th percentile of the steps that a sample leaves before or after its turn. Its turn is the step
  that holds its first token if packs are filled in merge order.
- *fill*: tokens of the packs as a share of their budgets, on lengths that stay the same (``lengths.py``).
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from streampack_services.forecast.forecast import formed

from benchmarks.lengths import BUDGETS, I64, STATIONARY, file_lengths, lengths_of
from benchmarks.report import arguments, head, say
from streampack.core.form.auto_window import LEAST, auto_window
from streampack.core.form.auto_window import STEPS as WINDOW_STEPS
from streampack.core.merge.schedule import Merge
from streampack.core.model.keys.planning_keys import MAX_WINDOW
from streampack.core.model.rules import Rules
from streampack.core.packers import make_packer

WEIGHTS, CHANGED = (0.5, 0.3, 0.2), (0.1, 0.5, 0.4)
BUDGET, PACKS, STEPS = 1024, 8, 150
SPAN, BEGIN = 20, 10
WAYS: dict[str, dict[str, Any]] = {
    "before": {},
    "now": {"window": "auto", "in_turn": True},
    "in order": {"packer": "concatenative"},
}
LOGNORMAL = {"documents": ((6.3, 1.1), (7.0, 1.1), (5.5, 1.1)), "chats": ((5.0, 0.8), (6.0, 0.8), (5.5, 0.8))}
KINDS = ("documents", "chats", "code")
"""Lengths of three streams: long documents, short chats, and source files beside two streams of texts."""
ROWS = {"short": (5.0, 0.7), "middle": (5.8, 1.0), "long": (6.2, 0.9)}
"""Logarithmic mean and spread of the lengths of SFT rows."""


def main() -> None:
    args = arguments(__doc__, "two seeds, fewer rows").parse_args()
    seeds = range(2 if args.quick else 5)
    report = head("order", budget=BUDGET, packs=PACKS, seeds=len(seeds))
    mixtures = [_mixture(kind, seeds) for kind in KINDS]
    print(f"weights {WEIGHTS}, `overlong: split`, {PACKS} packs of {BUDGET} in a step, {len(seeds)} seeds\n")
    for row in mixtures:
        ways = "; ".join(
            f"{way}: off {row[way]['off']:.3f}, change {row[way]['change']:.2f}, displaced {row[way]['displaced']:.0f}"
            for way in WAYS
        )
        print(f"{row['kind']:>10}  {ways}", flush=True)
    print("\nSFT rows\n")
    sizes = (2_000, 4_000) if args.quick else (2_000, 20_000)
    rows = [_rows(kind, count, seeds) for kind, count in product(ROWS, sizes)]
    for row in rows:
        ways = "; ".join(
            f"{way}: tenth {row[way]['tenth']:.3f}, first {row[way]['first']:+.3f}, last {row[way]['last']:+.3f}, "
            f"displaced {row[way]['displaced']:.0f}"
            for way in WAYS
        )
        print(f"{row['kind']:>6} {row['rows']:>6,}  {ways}", flush=True)
    print("\nfill in percent, and percentage points more or less\n")
    fills = [
        _fill(kind, budget, 6_144 if args.quick else 49_152)
        for kind, budget in product(STATIONARY, BUDGETS[1:2] if args.quick else BUDGETS)
    ]
    for row in fills:
        windows = ", ".join(f"{window}: {more:+.3f}" for window, more in row["in_turn"].items())
        print(f"{row['kind']:>16} {row['budget']:>6}  before {row['before']:.3f}; {windows}; auto: {row['auto']}")
    say(report | {"mixtures": mixtures, "rows": rows, "fill": fills}, args.json)


def drawn(kind: str, stream: int, count: int, seed: int) -> I64:
    """Return the lengths of a stream's pieces after ``overlong: split``, int64 [n]."""
    draw = np.random.default_rng([seed, stream])
    if kind == "code":
        samples = (
            draw.choice(file_lengths(), count) if stream == 0 else draw.lognormal((0, 6.0, 5.0)[stream], 0.8, count)
        )
    else:
        samples = draw.lognormal(*LOGNORMAL[kind][stream], count)
    return split(np.maximum(samples.astype(np.int64), 1))


def split(samples: I64) -> I64:
    """Return the lengths of the pieces into which ``overlong: split`` cuts samples of these lengths, int64 [n]."""
    pieces = -(-samples // BUDGET)
    lengths = np.full(int(pieces.sum()), BUDGET)
    lengths[np.cumsum(pieces) - 1] = (samples - 1) % BUDGET + 1
    return lengths


def merged(kind: str, seed: int, changed_after: int | None = None) -> tuple[I64, I64, int]:
    """Merge three drawn streams: see ``merged_parts``."""
    count = STEPS * PACKS * BUDGET // 60
    return merged_parts([drawn(kind, stream, count, seed) for stream in range(len(WEIGHTS))], seed, changed_after)


def merged_parts(parts: Sequence[I64], seed: int, changed_after: int | None = None) -> tuple[I64, I64, int]:
    """Merge streams of samples with these lengths by ``WEIGHTS``, and by ``CHANGED`` after so many tokens.

    Returns:
        Lengths and streams of the samples in merge order, int64 [n] each, and the samples before the change.
    """
    tokens = STEPS * PACKS * BUDGET
    merge = Merge(list(WEIGHTS), [1] * len(WEIGHTS), seed)
    for stream, begin in enumerate(np.cumsum([0, *map(len, parts)])[:-1].tolist()):
        handles = np.arange(begin, begin + len(parts[stream]))
        merge.push(stream, handles, parts[stream], np.zeros(len(handles), np.int64))
    taken = [merge.take(tokens if changed_after is None else changed_after).handles]
    if changed_after is not None:
        merge.change(list(CHANGED), [1] * len(WEIGHTS))
        taken.append(merge.take(tokens - changed_after).handles)
    order = np.concatenate(taken)
    streams = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    return np.concatenate(parts)[order], streams[order], len(taken[0])


def steps_of(lengths: I64, way: str) -> list[I64]:
    """Return the samples of each step, as positions in ``lengths``."""
    return [step.packs.handles for step in formed(lengths, Rules(budget=BUDGET, packs=PACKS, **WAYS[way]))[0]]


def _mixture(kind: str, seeds: Sequence[int]) -> dict[str, Any]:
    """Measure the shares of three streams: the worst of all seeds, and medians."""
    row: dict[str, Any] = {"kind": kind}
    for way in WAYS:
        worst, displaced, changes = [], [], []
        for seed in seeds:
            lengths, streams, _ = merged(kind, seed)
            steps = steps_of(lengths, way)
            worst.append(off(shares(steps, lengths, streams), BEGIN, STEPS - 2 * BEGIN))
            displaced.append(float(np.percentile(displacement(steps, lengths), 99)))
            changes.append(_change(kind, seed, way))
        row[way] = {"off": max(worst), "displaced": statistics.median(displaced), "change": max(changes)}
    return row


def shares(steps: list[I64], lengths: I64, streams: I64) -> I64:
    """Return the tokens of each stream in each step, int64 [steps, streams]."""
    of_each = [np.bincount(streams[step], weights=lengths[step], minlength=len(WEIGHTS)) for step in steps]
    tokens: I64 = np.array(of_each).astype(np.int64)
    return tokens


def off(tokens: I64, begin: int, end: int, weights: Sequence[float] = WEIGHTS) -> float:
    """Return the largest distance of a share from its weight over any ``SPAN`` steps between two steps."""
    sums = np.cumsum(np.vstack([np.zeros(tokens.shape[1], np.int64), tokens[begin:end]]), axis=0)
    spans = sums[SPAN:] - sums[:-SPAN]
    return float(np.abs(spans / spans.sum(axis=1, keepdims=True) - np.array(weights)).max())


def _change(kind: str, seed: int, way: str) -> float:
    """Return the windows of samples until the shares over the next ``SPAN`` steps follow the new weights.

    They do once they are as near to the new weights as in packs in merge order, and 0.05 more.
    """
    lengths, streams, before = merged(kind, seed, STEPS // 2 * PACKS * BUDGET)
    steps = steps_of(lengths, way)
    tokens, ends = shares(steps, lengths, streams), np.cumsum([len(step) for step in steps])
    first = int(np.searchsorted(ends, before, side="right"))
    recent = [len(step) for step in steps[first - WINDOW_STEPS : first]]
    window = {"before": MAX_WINDOW, "now": auto_window(recent), "in order": 1}[way]
    for at in range(first, len(steps) - SPAN):
        if off(tokens, at, at + SPAN, CHANGED) <= 0.05 + 0.01:
            return max(0.0, float(ends[at - 1] - before)) / window
    return float("inf")


def displacement(steps: list[I64], lengths: I64) -> I64:
    """Return the steps that each sample leaves before or after its turn, int64 [n]."""
    ends = np.cumsum([int(lengths[step].sum()) for step in steps])
    turns = np.searchsorted(ends, np.cumsum(lengths) - lengths, side="right")
    left = np.empty(len(lengths), np.int64)
    for number, step in enumerate(steps):
        left[step] = number
    distance: I64 = np.abs(left - turns)
    return distance


def mean_lengths(steps: list[I64], lengths: I64, parts: int) -> list[float]:
    """Return how much longer the samples of each part of the steps are than those of the same tokens in merge order."""
    tokens, merged_tokens = np.cumsum([int(lengths[step].sum()) for step in steps]), np.cumsum(lengths)
    more, begin = [], 0
    for part in range(parts):
        first, last = part * len(steps) // parts, (part + 1) * len(steps) // parts
        end = int(np.searchsorted(merged_tokens, tokens[last - 1])) + 1
        more.append(float(lengths[np.concatenate(steps[first:last])].mean() / lengths[begin:end].mean() - 1))
        begin = end
    return more


def rows_of(kind: str, count: int, seed: int) -> I64:
    """Return the lengths of SFT rows, int64 [count]."""
    drawn_lengths = np.random.default_rng([seed, count]).lognormal(*ROWS[kind], count)
    lengths: I64 = np.clip(drawn_lengths, 1, BUDGET).astype(np.int64)
    return lengths


def _rows(kind: str, count: int, seeds: Sequence[int]) -> dict[str, Any]:
    """Measure the mean lengths and the displacement of ``count`` SFT rows of one stream."""
    row: dict[str, Any] = {"kind": kind, "rows": count}
    for way in WAYS:
        tenths, fifths, displaced = [], [], []
        for seed in seeds:
            lengths = rows_of(kind, count, seed)
            steps = steps_of(lengths, way)
            tenths.append(max(map(abs, mean_lengths(steps, lengths, 10))))
            fifths.append(mean_lengths(steps, lengths, 5))
            displaced.append(float(np.percentile(displacement(steps, lengths), 99)))
        row[way] = {
            "tenth": statistics.median(tenths),
            "first": statistics.median(each[0] for each in fifths),
            "last": statistics.median(each[-1] for each in fifths),
            "displaced": statistics.median(displaced),
        }
    return row


def _fill(kind: str, budget: int, count: int) -> dict[str, Any]:
    """Measure the fill with fixed windows, and name the automatic window of steps of 8 packs."""
    lengths = lengths_of(kind, budget, count, 0)

    def fill(window: int, in_turn: bool) -> float:
        packer = make_packer("exact_fill", in_turn=in_turn)
        choice = packer.choose(lengths, np.full(count, -1), budget, count, True, window=window)
        return 100 * int(lengths.sum()) / ((len(choice.bounds) - 1) * budget)

    before, windows = fill(MAX_WINDOW, False), [LEAST << k for k in range(4)][::-1]
    step = [round(PACKS * budget / float(lengths.mean()))]
    in_turn = {window: fill(window, True) - before for window in windows}
    return {"kind": kind, "budget": budget, "before": before, "in_turn": in_turn, "auto": auto_window(step)}


if __name__ == "__main__":
    main()
