"""Checks of the arguments of ``pack_lengths`` and ``plan_step``: integers, and lengths that fit the budget.

The lengths and rules of a stream are checked where they come in. These checks are for callers that pack or plan
offline.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

import numpy as np

from streampack.core.packers.packer import I64
from streampack.errors import ConfigError, SampleError


def is_integer(value: object) -> TypeGuard[int]:
    """Return True for an int or a numpy integer, and False for a bool."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def check_numbers(least: int = 1, **numbers: object) -> None:
    """Raise ConfigError if one of ``numbers``, given by name, is not an integer or is below ``least``."""
    for name, value in numbers.items():
        if not is_integer(value) or value < least:
            raise ConfigError(f"{name}: got {value!r}, expected an integer of at least {least}")


def integers(lengths: Sequence[int] | I64) -> I64:
    """Return ``lengths``, a sequence, an array or a tensor, as int64 [n].

    Raises SampleError, which names the sample, for a length that is not an integer.
    """
    if hasattr(lengths, "__array__"):
        lengths = np.asarray(lengths)
    if not isinstance(lengths, np.ndarray):
        for i, length in enumerate(lengths):
            if not is_integer(length):
                raise SampleError(f"sample {i}: got a length of {length!r}, expected an integer")
            if abs(length) > np.iinfo(np.int64).max:
                raise SampleError(f"sample {i}: got a length of {length}, expected a length that fits into int64")
        return np.array(lengths, np.int64)
    if lengths.ndim != 1 or lengths.dtype.kind not in "iu":
        raise SampleError(
            f"got lengths of shape {lengths.shape} and dtype {lengths.dtype}, expected integers of shape [n]"
        )
    return lengths.astype(np.int64)


def aligned_units(lengths: Sequence[int] | I64, budget: int, align: int) -> I64:
    """Return ``lengths``, in tokens, as int64 [n] in units of ``align`` tokens, rounded up.

    Raises ConfigError for a budget that is not a multiple of ``align``. Raises SampleError, which names the sample, for
    a length that is not an integer, below 1, or above the budget once rounded up.
    """
    check_numbers(budget=budget, align=align)
    if budget % align:
        raise ConfigError(f"budget: got {budget}, expected a multiple of align, {align}")
    units = -(-integers(lengths) // align)
    wrong = np.flatnonzero((units < 1) | (units > budget // align))
    if len(wrong):
        i = int(wrong[0])
        raise SampleError(
            f"sample {i}: got {lengths[i]} tokens ({int(units[i]) * align} when aligned to {align}), expected"
            f" 1 to {budget}, the budget. Drop, truncate or split the sample before packing"
        )
    return units
