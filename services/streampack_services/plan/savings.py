"""``streampack report``: what a run saved against other ways of batching, on its own lengths.

Compared is what GPUs compute, in slots (tokens and padding), for the very same samples in the order in which they came:

- ``padding``: so many samples at a time as a pack of the run held on the average, each padded to the longest of its
  micro-batch, as a loader without packing does;
- ``greedy``: concatenated one after another until the next does not fit (``concatenative``);
- ``first_fit_decreasing``: over blocks of the run's window, as offline packers are run on a stream.

All of them with the run's budget, alignment and shape, and what the run closed on the way (``Served.bounds``: batches)
is closed for them: nobody packs or pads across it. GPU hours are slots by a rate, the slots that one GPU computes a
second, which is given, or estimated from what the broker packs now: the same rate for all, so what attention saves or
costs, where samples are padded or long, is not in them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from streampack.core.model.rules import Rules
from streampack.core.model.samples import I64
from streampack.errors import UserError
from streampack_services.forecast.forecast import with_packer
from streampack_services.forecast.lengths import samples_said
from streampack_services.forecast.run_lengths import Served

Tree = dict[str, Any]
OTHERS = ("padding", "greedy", "first_fit_decreasing")
_PACKERS = {"greedy": "concatenative", "first_fit_decreasing": "first_fit_decreasing"}


@dataclass(frozen=True, slots=True)
class Rate:
    """``tokens_per_s``: slots that one GPU computes a second; ``said`` where that is from."""

    gpus: int
    tokens_per_s: float
    said: str


def padded_slots(lengths: I64, micro_batch: int, align: int, bounds: I64 | None = None) -> int:
    """Slots of samples that are padded to the longest of their micro-batch, the last one (before each of ``bounds``)
    smaller.

    >>> padded_slots(np.array([4, 1, 3, 2, 5]), 2, 1)
    19
    """
    slots = -(-lengths // align) * align
    spans = pairwise([0, len(slots)] if bounds is None else bounds.tolist())
    starts = np.concatenate([np.arange(begin, end, micro_batch) for begin, end in spans])
    counts = np.diff(np.append(starts, len(slots)))
    return int((np.maximum.reduceat(slots, starts) * counts).sum())


def packed_slots(lengths: I64, rules: Rules, packer: str, bounds: I64 | None = None) -> int:
    """Slots of the packs that ``packer`` makes of ``lengths``, each as long as the rules' shape has it; empty ones are
    not counted. What lies between ``bounds``, int64 [b + 1], is packed by itself: whole, where steps are batches.
    """
    window = rules.window if rules.batch is None else max(len(lengths), 1)
    rules = with_packer(rules, packer, batch=None, warmup=None, window=window)
    chosen, align, found = rules.new_packer(), rules.align.sample, 0
    units = -(-lengths // align)
    for begin, end in pairwise([0, len(lengths)] if bounds is None else bounds.tolist()):
        mine, ages = units[begin:end], np.full(end - begin, -1, np.int64)
        choice = chosen.choose(mine, ages, rules.budget // align, end - begin, True, window=window)
        upto = np.concatenate([[0], np.cumsum(mine[choice.indices])])[choice.bounds]
        found += int(rules.own_widths(np.diff(upto) * align).sum())
    return found


def savings(run: Served, micro_batch: int | None, rate: Rate | None) -> Tree:
    """What a run saved: a tree for JSON.

    ``run``: its slots; ``others``: by name the slots that they would need, what the run ``saved`` of them in slots,
    share, and with ``rate`` GPU hours.
    """
    rules = run.rules
    size = micro_batch or max(round(run.samples / run.filled_packs), 1)
    grow = run.tokens / max(int(run.lengths.sum()), 1)
    found: Tree = {
        "what": run.what,
        "note": run.note,
        "samples": run.samples,
        "share": run.share,
        "tokens": run.tokens,
        "budget": rules.budget,
        "window": rules.window,
        "packer": "padded" if rules.padded else rules.new_packer().name,
        "align": rules.align.sample,
        "batches": len(run.bounds) - 1,
        "micro_batch": size,
        "assumptions": assumptions(run, size, rate),
        "gpus": rate.gpus if rate is not None else None,
        "run": _of(run.pack_slots, run.tokens, rate),
    }
    slots = {"padding": padded_slots(run.lengths, size, rules.align.sample, run.bounds)}
    slots |= {name: packed_slots(run.lengths, rules, packer, run.bounds) for name, packer in _PACKERS.items()}
    found["others"] = {name: _of(round(slots[name] * grow), run.tokens, rate, run.pack_slots) for name in OTHERS}
    return found


def rate_of(run: Served, gpus: int | None, tokens_per_s: float | None) -> Rate | None:
    """What one GPU computes: as given, or what the broker packs now by the GPUs; None where neither is known."""
    count = gpus or run.ranks or 1
    if tokens_per_s is not None:
        if not math.isfinite(tokens_per_s):
            raise UserError(f"--tokens-per-second: got {tokens_per_s}, expected what one GPU computes, such as 9000")
        return Rate(count, tokens_per_s, "as given")
    if not run.tokens_per_s or not (gpus or run.ranks):
        return None
    empty = 0 if run.rules.padded else run.empty_packs * int(run.rules.own_widths(np.zeros(1, np.int64))[0])
    slots = run.tokens_per_s * (run.pack_slots + empty) / run.tokens
    whose = f"{count} as given" if gpus else f"the {count} attached ranks"
    return Rate(count, slots / count, f"what the broker packs now, {run.tokens_per_s:,.0f} tokens a second, by {whose}")


def _of(slots: int, tokens: int, rate: Rate | None, own: int | None = None) -> Tree:
    """What a way of batching needs; with the run's ``own`` slots also what it saved."""
    tree: Tree = {"slots": slots, "utilization": tokens / max(slots, 1)}
    if own is not None:
        tree |= {"saved_slots": slots - own, "saved_share": (slots - own) / max(slots, 1)}
    if rate is not None:
        per_hour = rate.tokens_per_s * 3600
        tree["gpu_hours"] = slots / per_hour
        if own is not None:
            tree["saved_gpu_hours"] = (slots - own) / per_hour
            tree["saved_hours"] = (slots - own) / per_hour / rate.gpus
    return tree


def assumptions(run: Served, micro_batch: int, rate: Rate | None) -> list[str]:
    """What the comparison takes for granted, in sentences."""
    part = "all" if run.share == 1 else f"{len(run.lengths):,} (the others in proportion)"
    sentences = [f"Packed in each way: of {samples_said(run.samples)} {part}, {run.note}."]
    if len(run.bounds) > 2:
        sentences.append(f"Nothing crosses the ends of {len(run.bounds) - 1:,} batches, in none of the ways.")
    padding = f"Padding: {samples_said(micro_batch)} a micro-batch; a pack holds {run.samples / run.filled_packs:.1f}."
    split = " Packs are counted as formed, before a mesh splits them." if run.rules.batch is not None else ""
    sentences.append(f"{padding} Empty packs of last steps are counted for none.{split}")
    if rate is None:
        return [*sentences, "GPU hours: --tokens-per-second says what one GPU computes; --gpus how many there are."]
    return [
        *sentences,
        f"GPU hours: {rate.tokens_per_s:,.0f} slots a second and GPU ({rate.said}), whatever they hold.",
    ]
