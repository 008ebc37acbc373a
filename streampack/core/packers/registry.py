"""Every packer by its name, and ``pack_lengths``, which packs a closed list of lengths."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any, cast

import numpy as np

from streampack.core.packers.arguments import aligned_units, check_numbers, integers, is_integer
from streampack.core.packers.blocks.best_fit import BestFitDecreasing
from streampack.core.packers.blocks.decreasing import FirstFitDecreasing, first_fit_decreasing
from streampack.core.packers.blocks.first_fit import FirstFitShuffle
from streampack.core.packers.blocks.karmarkar_karp import KarmarkarKarp
from streampack.core.packers.blocks.knapsack import GreedyKnapsack
from streampack.core.packers.blocks.modified_first_fit import ModifiedFirstFitDecreasing
from streampack.core.packers.blocks.tumbling import Tumbling
from streampack.core.packers.blocks.unpacked import Unpacked
from streampack.core.packers.closed import Empty, with_count
from streampack.core.packers.exact_fill.exact_fill import ExactFill
from streampack.core.packers.joint.joint import Joint
from streampack.core.packers.sliding.buffer_first_fit import BufferFirstFit
from streampack.core.packers.sliding.concatenative import Concatenative
from streampack.core.packers.sliding.sliding_ffd import SlidingFFD
from streampack.core.packers.window import I64, Packer
from streampack.errors import ConfigError, SampleError

_EVERY: tuple[Packer, ...] = (
    ExactFill(), Joint(), SlidingFFD(), FirstFitDecreasing(), Concatenative(), ModifiedFirstFitDecreasing(),
    FirstFitShuffle(), BestFitDecreasing(), GreedyKnapsack(), BufferFirstFit(), KarmarkarKarp(), Unpacked(),
)  # fmt: skip
PACKERS: Mapping[str, Packer] = MappingProxyType({each.name: each for each in _EVERY})
"""Each with its defaults."""
_WINDOW = 1024


def packer(name: str, **parameters: Any) -> Packer:
    """The packer of that name, with these ``parameters``; ConfigError lists those there are of either."""
    known = parameters_of(name)
    for unknown in sorted(parameters.keys() - known):
        raise ConfigError(
            f"packer {name}: got the parameter {unknown!r}, expected {' or '.join(known) or 'none: it has none'}"
        )
    for key, value in parameters.items():
        usual = getattr(PACKERS[name], key)
        if isinstance(usual, bool):
            if not isinstance(value, bool):
                raise ConfigError(f"packer {name}: got {key}={value!r}, expected true or false")
        elif not (isinstance(usual, str) or is_integer(value) or (value is None and usual is None)):
            raise ConfigError(f"packer {name}: got {key}={value!r}, expected an integer")
    try:
        return cast(Packer, dataclasses.replace(cast(Any, PACKERS[name]), **parameters))
    except ValueError as error:
        raise ConfigError(f"packer {name}: {error}") from None


def parameters_of(name: str) -> tuple[str, ...]:
    """What the packer of that name can be given: the names of its fields. ConfigError lists those there are."""
    if not isinstance(name, str) or name not in PACKERS:
        raise ConfigError(f"packer: got {name!r}, expected one of {', '.join(PACKERS)}")
    return tuple(field.name for field in dataclasses.fields(cast(Any, PACKERS[name])) if field.name != "name")


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
    chosen = _packer(packer, **parameters)
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


_packer = packer  # the name that pack_lengths' parameter hides


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
