"""``pack_lengths``, which packs a closed list of lengths; how many packs there must be, and the way back to samples.

Ranks that run in lock step need a number of packs that divides by theirs. More packs than a packer
made are split off those there are: each new one takes the last sample of the pack with most samples (ties: the
later pack), as in NeMo-RL, which goes on with the same pack until one is left in it, where this
looks for the one with most each time. No pack grows, so none passes its budget. A pack never becomes
empty: with fewer samples than packs the rest are empty ones, where the policy allows that. An empty pack is an empty
list, at the end.

>>> with_count([[0, 1, 2], [3]], multiple=4)
[[0], [3], [2], [1]]
>>> way_back([[2, 0], [1]]).tolist()
[1, 2, 0]
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heapify, heapreplace
from itertools import chain, pairwise
from typing import Any, Literal

import numpy as np

from streampack.core.packers.arguments import aligned_units, check_numbers, integers, is_integer
from streampack.core.packers.blocks.decreasing import first_fit_decreasing
from streampack.core.packers.blocks.tumbling import Tumbling
from streampack.core.packers.exact_fill.exact_fill import ExactFill
from streampack.core.packers.packer import I64
from streampack.core.packers.registry import make_packer, parameters_of
from streampack.errors import ConfigError, SampleError

Empty = Literal["error", "pad"]
_WINDOW = 1024


def with_count(
    packs: Iterable[Sequence[int]], min_packs: int = 0, multiple: int = 1, empty: Empty = "error"
) -> list[list[int]]:
    """These packs in a number of at least ``min_packs``, rounded up to ``multiple``; the new ones behind the others.

    ``empty`` says what happens where there are fewer samples than packs: ``error``, or ``pad``, empty packs at the
    end. O(n log n). Raises SampleError.
    """
    found = [list(pack) for pack in packs]
    num_packs = -(-max(len(found), min_packs) // multiple) * multiple
    num_samples = sum(map(len, found))
    if num_samples < num_packs and empty == "error":
        raise SampleError(
            f"got {num_samples} samples, expected at least {num_packs}, one for each pack of min_packs={min_packs} and "
            f"pack_count_multiple={multiple}: lower them, or ask for empty='pad'"
        )
    most = [(-len(pack), -number) for number, pack in enumerate(found)]
    heapify(most)
    for _ in range(min(num_packs, num_samples) - len(found)):
        negated, number = most[0]
        found.append([found[-number].pop()])
        heapreplace(most, (negated + 1, number))
    return found + [[] for _ in range(num_packs - len(found))]


def way_back(packs: Iterable[Sequence[int]]) -> I64:
    """Where in the packs, laid end to end, each sample is: int64 [n].

    ``packs`` hold 0..n-1, each once. With results r in the packs' order, ``r[way_back(packs)]`` is in that of the
    samples. Raises SampleError naming what is missing, or more than once there.
    """
    order = np.fromiter(chain.from_iterable(packs), np.int64)
    counts = np.bincount(order[(order >= 0) & (order < len(order))], minlength=len(order))
    if (wrong := np.flatnonzero(counts != 1)).size:
        raise SampleError(
            f"sample {wrong[0]}: got it {counts[wrong[0]]} times in packs of {len(order)} samples, expected it once"
        )
    back = np.empty(len(order), np.int64)
    back[order] = np.arange(len(order))
    return back


def pack_lengths(
    lengths: Sequence[int] | I64,
    budget: int,
    packer: str = "exact_fill",
    window: int | None = None,
    align: int = 1,
    seed: int = 0,
    *,
    sizes: Sequence[int] | I64 | None = None,
    min_packs: int = 0,
    pack_count_multiple: int = 1,
    empty: Empty = "error",
    **parameters: Any,
) -> list[list[int]]:
    """Pack a closed list of lengths: the positions in each pack, in the order packs are emitted.

    ``lengths``: integers, any sequence or array of shape [n], in tokens, each rounded up to a multiple
    of ``align`` first. ``budget``: tokens of a pack, a multiple of ``align``. ``window``: samples that a
    packer looks at together. By default ``exact_fill`` looks at all, and never makes more packs than first fit
    decreasing; so do the packers of closed sets, and the others that stream look at 1024. ``seed`` is for packers that
    shuffle, and changes nothing for the others. ``parameters`` are those of the packer:
    ``max_samples_per_pack``, ``leftovers``, ``micro_batch_size``. ``sizes``: where items are groups, the samples in
    each, int [n], which ``max_samples_per_pack`` counts.

    There are at least ``min_packs``, in a multiple of ``pack_count_multiple``: more than were formed are split off
    those with most samples. With fewer samples than packs ``empty`` says ``error``, or ``pad``: empty packs at the end.
    ``way_back`` of the packs puts results in their order back into that of the samples.

    Raises SampleError (a ValueError) naming the sample whose length is no integer, below 1, or above the
    budget once rounded up, or where there are too few; ConfigError for an unknown packer or parameter, or a number
    that cannot be.

    >>> pack_lengths([3, 6, 5, 2, 4], 8)
    [[0, 2], [1, 3], [4]]
    >>> pack_lengths([3, 6, 5, 2, 4], 8, "best_fit_decreasing", pack_count_multiple=2)
    [[1, 3], [2], [4], [0]]
    """
    if not is_integer(seed):
        raise ConfigError(f"seed: got {seed!r}, expected an integer")
    if "seed" in parameters_of(packer):
        parameters["seed"] = seed
    chosen = make_packer(packer, **parameters)
    check_numbers(budget=budget, align=align, pack_count_multiple=pack_count_multiple)
    check_numbers(0, min_packs=min_packs)
    if empty not in ("error", "pad"):
        raise ConfigError(f"empty: got {empty!r}, expected 'error' or 'pad'")
    if window is not None:
        check_numbers(window=window)
    units = aligned_units(lengths, budget, align)
    closed = window is None and isinstance(chosen, ExactFill | Tumbling)
    cap = getattr(chosen, "max_samples_per_pack", None)
    counts = _sizes(sizes, len(units), cap)
    choice = chosen.choose(
        units, np.full(len(units), -1, np.int64), budget // align, len(units), True,
        window=max(len(units), 1) if closed else window or _WINDOW, sizes=counts,
    )  # fmt: skip
    indices, bounds = choice.indices.tolist(), choice.bounds.tolist()
    packs = [indices[start:stop] for start, stop in pairwise(bounds)]
    if closed and isinstance(chosen, ExactFill) and len(packs) > -(-int(units.sum()) // (budget // align)):
        falling = first_fit_decreasing(
            units.tolist(), budget // align, cap, None if counts is None else counts.tolist()
        )
        if len(falling) < len(packs):  # exact_fill has used up the short samples before the long ones
            packs = sorted(map(sorted, falling))
    return with_count(packs, min_packs, pack_count_multiple, empty)


def _sizes(sizes: Sequence[int] | I64 | None, num_items: int, cap: int | None) -> I64 | None:
    """``sizes`` as int64 [n], all within the cap. Raises SampleError."""
    if sizes is None:
        return None
    found = integers(sizes)
    if len(found) != num_items:
        raise SampleError(f"got {len(found)} sizes for {num_items} lengths, expected one for each")
    for i in np.flatnonzero((found < 1) | (found > (cap or found.max(initial=1)))):
        raise SampleError(
            f"sample {i}: got a group of {found[i]} samples, expected 1 to {cap or 'any number'}, max_samples_per_pack"
        )
    return found
