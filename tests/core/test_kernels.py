"""The compiled kernels against their plain Python twins, and both against one token at a time."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from streampack.core.kernels import gather_whole, gather_zigzag
from streampack.core.layout import round_up

GUARD = 7777
"""What lies around an output and must stay."""


def twins(kernel: Any) -> list[Callable[..., Any]]:
    return [kernel, kernel.py_func]


@st.composite
def cuts(draw: st.DrawFn) -> tuple[NDArray[Any], list[int], list[int], int, int]:
    """An arena, offsets and lengths of samples in it that may overlap, cp, alignment."""
    cp = draw(st.sampled_from([1, 2, 4, 8]))
    align = 2 * cp * draw(st.integers(1, 3))
    dtype = draw(st.sampled_from(["uint16", "int32"]))
    arena = np.arange(1, 200).astype(dtype)
    lengths = draw(st.lists(st.integers(1, 80), max_size=6))
    offsets = [draw(st.integers(0, len(arena) - length)) for length in lengths]
    return arena, offsets, lengths, cp, align


@given(cuts())
def test_zigzag_shards_and_their_edges_are_those_of_a_token_by_token_cut(
    cut: tuple[NDArray[Any], list[int], list[int], int, int],
) -> None:
    arena, offsets, lengths, cp, align = cut
    slots = [round_up(length, align) for length in lengths]
    for rank in range(cp):
        expected, edges = [], []
        for offset, length, slot in zip(offsets, lengths, slots, strict=True):
            chunk = slot // (2 * cp)
            for number in (rank, 2 * cp - 1 - rank):
                places = range(number * chunk, (number + 1) * chunk)
                expected += [int(arena[offset + k]) if k < length else 0 for k in places]
                edges.append(int(arena[offset + places.stop]) if places.stop < length else -100)
        for kernel in twins(gather_zigzag):
            out = np.zeros(len(expected) + 4, arena.dtype)
            out[-4:] = GUARD
            found = np.full(len(edges) + 2, GUARD, np.int32)
            tail = kernel(arena, np.array(offsets, np.int64), np.array(lengths, np.int64), np.array(slots, np.int64),
                          cp, rank, out[:-4], found[:-2])  # fmt: skip
            assert tail == len(expected) == sum(slots) // cp
            assert out.tolist() == expected + [GUARD] * 4
            assert found.tolist() == edges + [GUARD] * 2


@given(cuts())
def test_whole_packs_are_those_of_a_token_by_token_copy(
    cut: tuple[NDArray[Any], list[int], list[int], int, int],
) -> None:
    arena, offsets, lengths, _, align = cut
    slots = [round_up(length, align) for length in lengths]
    expected = []
    for offset, length, slot in zip(offsets, lengths, slots, strict=True):
        expected += arena[offset : offset + length].tolist() + [0] * (slot - length)
    for kernel in twins(gather_whole):
        out = np.zeros(len(expected) + 4, arena.dtype)
        out[-4:] = GUARD
        columns = (np.array(column, np.int64) for column in (offsets, lengths, slots))
        assert kernel(arena, *columns, out) == len(expected)
        assert out.tolist() == expected + [GUARD] * 4


def test_the_golden_cut_of_two_samples_over_two_ranks() -> None:
    """cu [0, 8, 16], lengths 8 and 5; the tokens are the positions, plus 100."""
    arena = np.arange(100, 116, dtype=np.int32)
    args = (np.array([0, 8]), np.array([8, 5]), np.array([8, 8]))
    for kernel in twins(gather_zigzag):
        shards = []
        for rank in range(2):
            out, edges = np.zeros(8, np.int32), np.zeros(4, np.int32)
            assert kernel(arena, *args, 2, rank, out, edges) == 8
            shards.append((out.tolist(), edges.tolist()))
        assert shards == [
            ([100, 101, 106, 107, 108, 109, 0, 0], [102, -100, 110, -100]),
            ([102, 103, 104, 105, 110, 111, 112, 0], [104, 106, 112, -100]),
        ]


WITHOUT_NUMBA = """
import sys
sys.modules["numba"] = None
import numpy as np
from streampack.core.kernels import gather_whole
from streampack.core.merge import Merge
merge = Merge([1.0], [2], 0)
for p in range(2):
    merge.push(p, np.array([p, 2 + p]), np.array([3, 4]), np.zeros(2, np.int64))
    merge.end(p)
print(merge.take(100).handles.tolist(), merge.closed, hasattr(gather_whole, "py_func"))
"""


@pytest.mark.timeout(60)
def test_everything_works_without_numba() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_NUMBA], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[0, 1, 2, 3] True False"
