"""Shuffles that are the same on every machine and version of Python and numpy: sorts by 64-bit keys.

Key ``i`` is output ``i`` of a splitmix64 generator (Steele, Lea, Flood, "Fast Splittable Pseudorandom Number
Generators", OOPSLA 2014, section 5, with the constants of Vigna's splitmix64.c). Its state is a hash of integers: a
number for the purpose of the shuffle, and the seed. Equal keys, which are very unlikely with 64 bits, keep their order.

The module does not use ``numpy.random``, because NEP 19 does not keep ``Generator.permutation`` the same from version
to version. Multiplication, shift and exclusive-or modulo 2**64 and a sort are the same everywhere. PYTHONHASHSEED has
no influence, since ``hash()`` is not used.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MASK = 2**64 - 1
GAMMA = 0x9E3779B97F4A7C15
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
SHARDS, SAMPLES, BLOCKS, PACKED = 1, 2, 3, 4
"""The kinds of things that are ordered: the first word of a state, so that two kinds never share keys."""


def shuffled(count: int, seed: int) -> list[int]:
    """Return the numbers 0 to ``count`` - 1, shuffled by ``seed``: any int, used modulo 2**64.

    >>> shuffled(5, seed=0)
    [0, 1, 3, 4, 2]
    """
    order: list[int] = np.argsort(keys(count, state(PACKED, seed)), kind="stable").tolist()
    return order


def keys(count: int, state: int) -> NDArray[np.uint64]:
    """Return random keys to sort by: the first ``count`` outputs of splitmix64 from ``state`` on, uint64 [count]."""
    keys = np.arange(1, count + 1, dtype=np.uint64)
    keys *= np.uint64(GAMMA)  # array arithmetic wraps modulo 2**64 without a warning, as needed
    keys += np.uint64(state)
    keys ^= keys >> np.uint64(30)
    keys *= np.uint64(_MIX_1)
    keys ^= keys >> np.uint64(27)
    keys *= np.uint64(_MIX_2)
    keys ^= keys >> np.uint64(31)
    return keys


def state(*words: int) -> int:
    """Return a 64-bit hash of the integers ``words``; their order matters."""
    state = 0
    for word in words:
        state = mix((state + GAMMA ^ word) & MASK)
    return state


def mix(x: int) -> int:
    """Return the finalizer of splitmix64 at ``x``: a one-to-one map of the integers below 2**64."""
    x = (x ^ x >> 30) * _MIX_1 & MASK
    x = (x ^ x >> 27) * _MIX_2 & MASK
    return x ^ x >> 31
