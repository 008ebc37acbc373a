"""Packers: which samples share one token budget.

``packer(name)`` finds one for a stream (see ``window`` for the contract that all of them keep), and
``pack_lengths`` packs a closed list. ``exact_fill`` is the default: it fills packs to the token and
keeps samples near their order; ``joint`` forms packs that take equally long, too. The others are what
other systems do, to compare and to reproduce.

None of them imports numba until it forms a pack, and all work without it.

>>> pack_lengths([4, 1, 3, 2, 1, 3, 4, 5], 5, "concatenative")
[[0, 1], [2, 3], [4, 5], [6], [7]]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType

import numpy as np

from streampack.core.packers.concatenative import Concatenative
from streampack.core.packers.decreasing import FirstFitDecreasing
from streampack.core.packers.exact_fill import ExactFill
from streampack.core.packers.joint import Joint
from streampack.core.packers.sliding_ffd import SlidingFFD
from streampack.core.packers.window import I64, Choice, Packer
from streampack.errors import ConfigError, SampleError

__all__ = ["PACKERS", "Choice", "Packer", "pack_lengths", "packer"]

PACKERS: Mapping[str, Packer] = MappingProxyType(
    {each.name: each for each in (ExactFill(), Joint(), SlidingFFD(), FirstFitDecreasing(), Concatenative())}
)


def packer(name: str) -> Packer:
    """The packer of that name; ConfigError lists those there are."""
    try:
        return PACKERS[name]
    except KeyError:
        raise ConfigError(f"packer: got {name!r}, expected one of {', '.join(PACKERS)}") from None


def pack_lengths(
    lengths: Sequence[int] | I64,
    budget: int,
    packer: str = "exact_fill",
    window: int = 1024,
    align: int = 1,
    seed: int = 0,
) -> list[list[int]]:
    """Pack a closed list of lengths: the positions in each pack, in the order packs are emitted.

    ``lengths``: integers, any sequence or array of shape [n], in tokens, each rounded up to a multiple
    of ``align`` first. ``budget``: tokens of a pack, a multiple of ``align``. ``window``: samples that a
    streaming packer looks at, or a block of ``first_fit_decreasing``; ``concatenative`` needs none.
    ``seed`` is for packers that shuffle; none of today's does, and it changes nothing for them.

    Raises SampleError (a ValueError) naming the sample whose length is no integer, below 1, or above the
    budget once rounded up; ConfigError for an unknown packer or a number that cannot be.

    >>> pack_lengths([3, 6, 5, 2, 4], 8)
    [[0, 2], [1, 3], [4]]
    """
    chosen = _packer(packer)
    _check_rules(budget, window, align)
    units = -(-_integers(lengths) // align)
    wrong = np.flatnonzero((units < 1) | (units > budget // align))
    if len(wrong):
        i = int(wrong[0])
        raise SampleError(
            f"sample {i}: got {lengths[i]} tokens ({int(units[i]) * align} when aligned to {align}), expected"
            f" 1 to {budget}, the budget; drop, truncate or split it before packing"
        )
    choice = chosen.choose(units, np.full(len(units), -1, np.int64), budget // align, len(units), True, window=window)
    indices, bounds = choice.indices.tolist(), choice.bounds.tolist()
    return [indices[start:stop] for start, stop in pairwise(bounds)]


_packer = packer  # the name that pack_lengths' parameter hides


def _check_rules(budget: int, window: int, align: int) -> None:
    for name, value in (("budget", budget), ("window", window), ("align", align)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
            raise ConfigError(f"{name}: got {value!r}, expected an integer of at least 1")
    if budget % align:
        raise ConfigError(f"budget: got {budget}, expected a multiple of align, {align}")


def _integers(lengths: Sequence[int] | I64) -> I64:
    """``lengths`` as int64 [n]; refuses what is no integer, naming the sample."""
    if not isinstance(lengths, np.ndarray):
        for i, length in enumerate(lengths):
            if isinstance(length, bool | np.bool_) or not isinstance(length, int | np.integer):
                raise SampleError(f"sample {i}: got a length of {length!r}, expected an integer")
            if abs(length) > np.iinfo(np.int64).max:
                raise SampleError(f"sample {i}: got a length of {length}, expected one that fits int64")
        return np.array(lengths, np.int64)
    if lengths.ndim != 1 or lengths.dtype.kind not in "iu":
        raise SampleError(
            f"got lengths of shape {lengths.shape} and dtype {lengths.dtype}, expected integers of shape [n]"
        )
    return lengths.astype(np.int64)
