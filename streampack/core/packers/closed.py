"""``pack_lengths``, which packs a closed list of lengths, and helpers for the number of packs and their order.

Ranks that run in lock step need a number of packs that divides by the number of ranks. So ``with_count`` adds packs by
splitting those that a packer made. Each new pack takes the last sample of the pack with most samples; among equal
packs, of the later pack. NeMo-RL does the same, but splits one pack until a single sample is left in it. No pack grows,
so none passes its budget, and no pack becomes empty. With fewer samples than packs, ``empty="pad"`` adds empty packs at
the end. An empty pack is an empty list.

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
from streampack.core.packers.packer import I64, NO_EXTRA, Extra, Packer
from streampack.core.packers.registry import make_packer, parameters_of
from streampack.errors import ConfigError, SampleError

Empty = Literal["error", "pad"]
_WINDOW = 1024


def with_count(
    packs: Iterable[Sequence[int]], min_packs: int = 0, multiple: int = 1, empty: Empty = "error"
) -> list[list[int]]:
    """Split ``packs`` until there are ``min_packs`` or more, a multiple of ``multiple``; new packs come last.

    With fewer samples than packs, ``empty="error"`` raises SampleError, and ``"pad"`` adds empty packs at the end.
    O(n log n).
    """
    all_packs = [list(pack) for pack in packs]
    num_packs = -(-max(len(all_packs), min_packs) // multiple) * multiple
    num_samples = sum(map(len, all_packs))
    if num_samples < num_packs and empty == "error":
        raise SampleError(
            f"got {num_samples} samples, expected at least {num_packs}, one for each pack that min_packs={min_packs} "
            f"and pack_count_multiple={multiple} require. Lower these two numbers, or pass empty='pad'"
        )
    most = [(-len(pack), -number) for number, pack in enumerate(all_packs)]
    heapify(most)
    for _ in range(min(num_packs, num_samples) - len(all_packs)):
        negated, number = most[0]
        all_packs.append([all_packs[-number].pop()])
        heapreplace(most, (negated + 1, number))
    return all_packs + [[] for _ in range(num_packs - len(all_packs))]


def way_back(packs: Iterable[Sequence[int]]) -> I64:
    """Return the position of each sample in the concatenated packs: the inverse permutation.

    If an array ``results`` follows the packs' order, ``results[way_back(packs)]`` follows the samples' order.

    Args:
        packs: Lists of sample numbers that hold each of 0 to n - 1 once, as ``pack_lengths`` returns them.

    Returns:
        int64 [n].

    Raises:
        SampleError: A number is missing, or in the packs more than once.

    Example:
        >>> way_back([[2, 0], [1]]).tolist()
        [1, 2, 0]
    """
    order = np.fromiter(chain.from_iterable(packs), np.int64)
    counts = np.bincount(order[(order >= 0) & (order < len(order))], minlength=len(order))
    if (wrong := np.flatnonzero(counts != 1)).size:
        raise SampleError(
            f"sample {wrong[0]}: got {counts[wrong[0]]} occurrences in packs of {len(order)} samples, expected 1"
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
    """Pack samples of given lengths into packs of at most ``budget`` tokens.

    The function needs no broker and moves no tokens. ``way_back`` restores the samples' order for results in the packs'
    order.

    Args:
        lengths: Integers [n], the tokens of each sample. Each is rounded up to a multiple of ``align``.
        budget: Tokens of a pack, a multiple of ``align``.
        packer: Name of the packer, such as ``"exact_fill"``, ``"best_fit_decreasing"`` or ``"concatenative"``.
        window: Number of samples from which the packer chooses. Default: all samples for ``exact_fill`` and the packers
            of whole blocks, 1024 for the packers with a sliding window. By default, ``exact_fill`` never makes more
            packs than first fit decreasing.
        align: Multiple of tokens to which each sample is padded.
        seed: Seed of packers that shuffle; the other packers ignore it.
        sizes: Integers [n], the samples in each item if items are groups. The parameter ``max_samples_per_pack`` counts
            these samples. Default: one sample each.
        min_packs: Least number of packs.
        pack_count_multiple: The number of packs is a multiple of this. Missing packs are split off the packs with most
            samples.
        empty: If there are fewer samples than packs: ``"error"`` raises, ``"pad"`` adds empty packs at the end.
        parameters: Parameters of the packer: ``max_samples_per_pack``, ``leftovers`` or ``micro_batch_size``.

    Returns:
        For each pack, the list of its samples as positions in ``lengths``. Packs are in the order in which the packer
        emits them.

    Raises:
        SampleError: A length is not an integer, below 1, or above the budget; or there are too few samples. Also a
            ValueError.
        ConfigError: The packer or a parameter is unknown, or a number is out of range.

    Example:
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
    closed = window is None and chosen.takes_all
    cap = getattr(chosen, "max_samples_per_pack", None)
    counts = _sizes(sizes, len(units), cap)
    packs = closed_packs(
        chosen, units, budget // align, max(len(units), 1) if closed else window or _WINDOW, sizes=counts
    )  # fmt: skip
    if closed and packer == "exact_fill" and len(packs) > -(-int(units.sum()) // (budget // align)):
        falling = first_fit_decreasing(
            units.tolist(), budget // align, cap, None if counts is None else counts.tolist()
        )
        if len(falling) < len(packs):  # exact_fill used up the short samples before the long ones
            packs = sorted(map(sorted, falling))
    return with_count(packs, min_packs, pack_count_multiple, empty)


def closed_packs(
    packer: Packer, lengths: I64, budget: int, window: int, *, sizes: I64 | None = None, extra: Extra = NO_EXTRA
) -> list[list[int]]:
    """Return all packs of a closed list of items, as positions in it; the arguments are those of ``Packer.choose``."""
    unseen = np.full(len(lengths), -1, np.int64)
    choice = packer.choose(lengths, unseen, budget, len(lengths), True, window=window, sizes=sizes, extra=extra)
    indices = choice.indices.tolist()
    return [indices[start:stop] for start, stop in pairwise(choice.bounds.tolist())]


def _sizes(sizes: Sequence[int] | I64 | None, count: int, cap: int | None) -> I64 | None:
    """Return ``sizes``, the samples in each of ``count`` items, as int64 [n], or None.

    Raises SampleError for a size below 1 or above ``cap``, or unless there is one size for each item.
    """
    if sizes is None:
        return None
    counts = integers(sizes)
    if len(counts) != count:
        raise SampleError(f"got {len(counts)} sizes for {count} lengths, expected one size per length")
    for i in np.flatnonzero((counts < 1) | (counts > (cap or counts.max(initial=1)))):
        raise SampleError(
            f"sample {i}: got a group of {counts[i]} samples, expected "
            + (f"1 to {cap}, the value of max_samples_per_pack" if cap else "at least 1")
        )
    return counts
