"""Slabs: nobody's memory is lent twice, and no more of it is kept than was held at one time."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from streampack.packs.slabs import Slabs

SIZES = st.integers(1, 40 * mmap.PAGESIZE)


def address_of(lent: Any) -> int:
    found: int = np.frombuffer(lent, np.uint8).__array_interface__["data"][0]
    return found


@given(st.lists(st.tuples(SIZES, st.integers(0, 4)), max_size=60))
def test_a_slab_is_lent_once_and_idle_slabs_are_no_more_than_were_held(asked: list[tuple[int, int]]) -> None:
    """Of each (size, kept): a slab is taken, and of those held only the last ``kept`` are kept."""
    slabs, held, most = Slabs(), list[tuple[int, Any]](), 0
    for number, (size, kept) in enumerate(asked):
        lent = np.frombuffer(slabs.take(size), np.uint8)
        assert (lent.size, lent.ctypes.data % mmap.PAGESIZE) == (size, 0)
        lent[:] = number % 256
        held.append((number % 256, lent))
        del lent
        most = max(most, len(held))
        del held[: len(held) - kept]
        assert all((values == each).all() for each, values in held), "nobody else wrote there"
        assert len(held) + slabs.num_idle <= most


def test_a_new_length_every_step_maps_no_more_memory() -> None:
    slabs = Slabs()
    for size in range(1, 400):
        step = [slabs.take(size * mmap.PAGESIZE // each) for each in (1, 3, 50)]
        del step
    assert slabs.num_idle <= 3


def test_a_slab_of_up_to_twice_the_size_is_used_again_and_a_larger_one_is_left() -> None:
    slabs = Slabs()
    lent = slabs.take(4 * mmap.PAGESIZE)
    place = address_of(lent)
    del lent
    small = slabs.take(2 * mmap.PAGESIZE)
    assert address_of(small) == place
    del small
    tiny = slabs.take(mmap.PAGESIZE)
    assert slabs.num_idle == 0, "the one that does not fit has given way"
    del tiny
    assert slabs.num_idle == 1
