"""The compiled kernels against their plain Python twins, and both against one token at a time."""

import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from streampack.core.kernels import gather
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


def token_by_token(
    arena: NDArray[Any], offsets: list[int], lengths: list[int], align: int, cp: int, rank: int
) -> tuple[list[int], list[list[int]]]:
    """The shard of one pack, without its tail, and its edges."""
    tokens, edges = [], []
    for offset, length in zip(offsets, lengths, strict=True):
        slot = round_up(length, align)
        chunks = 1 if cp == 1 else 2 * cp
        size = slot // chunks
        after = []
        for number in [0] if cp == 1 else [rank, chunks - 1 - rank]:
            places = range(number * size, (number + 1) * size)
            tokens += [int(arena[offset + k]) if k < length else 0 for k in places]
            after.append(int(arena[offset + places.stop]) if places.stop < length else -100)
        edges.append(after)
    return tokens, edges


@given(cuts(), st.integers(0, 6), st.integers(0, 9))
def test_shards_and_their_edges_are_those_of_a_token_by_token_cut(
    cut: tuple[NDArray[Any], list[int], list[int], int, int], split: int, tail: int
) -> None:
    """Two packs, cut where ``split`` says, with a tail of padding."""
    arena, offsets, lengths, cp, align = cut
    split = min(split, len(lengths))
    bounds = [0, split, len(lengths)]
    for rank in range(cp):
        cuts = [token_by_token(arena, offsets[a:b], lengths[a:b], align, cp, rank) for a, b in pairwise(bounds)]
        width = max(len(tokens) for tokens, _ in cuts) + tail
        for kernel in twins(gather):
            out = np.full((3, width), GUARD, arena.dtype)
            found = np.full((len(lengths) + 1, 2), GUARD, np.int32)
            handles = np.arange(len(lengths))[::-1].copy()  # rows of the table in another order
            columns = (np.array(column[::-1], np.int64) for column in (offsets, lengths))
            args = (handles, np.array(bounds), align, cp, rank, out[:2], found[: len(lengths)] if cp > 1 else found[:0])
            assert kernel(arena, *columns, *args) == -1
            assert out[:2].tolist() == [tokens + [0] * (width - len(tokens)) for tokens, _ in cuts]
            assert (out[2] == GUARD).all()
            if cp > 1:
                assert found[:-1].tolist() == cuts[0][1] + cuts[1][1]
            assert (found[-1] == GUARD).all()


def test_a_pack_that_does_not_fit_or_holds_a_released_sample_is_named() -> None:
    arena, edges = np.arange(100, dtype=np.int32), np.empty((0, 2), np.int32)
    for kernel in twins(gather):
        for lengths in ([4, 4, 5], [4, 4, 0]):
            table = np.array([0, 20, 40]), np.array(lengths), np.arange(3), np.array([0, 2, 3])
            assert kernel(arena, *table, 1, 1, 0, np.empty((2, 8 if lengths[2] == 0 else 4), np.int32), edges) == (
                1 if lengths[2] == 0 else 0
            )


def test_the_golden_cut_of_two_samples_over_two_ranks() -> None:
    """cu [0, 8, 16], lengths 8 and 5; the tokens are the positions, plus 100."""
    arena = np.arange(100, 116, dtype=np.int32)
    args = (np.array([0, 8]), np.array([8, 5]), np.arange(2), np.array([0, 2]), 8)
    for kernel in twins(gather):
        shards = []
        for rank in range(2):
            out, edges = np.full((1, 8), GUARD, np.int32), np.zeros((2, 2), np.int32)
            assert kernel(arena, *args, 2, rank, out, edges) == -1
            shards.append((out[0].tolist(), edges.ravel().tolist()))
        assert shards == [
            ([100, 101, 106, 107, 108, 109, 0, 0], [102, -100, 110, -100]),
            ([102, 103, 104, 105, 110, 111, 112, 0], [104, 106, 112, -100]),
        ]


WITHOUT_NUMBA = """
import sys
sys.modules["numba"] = None
import numpy as np
from streampack.core.kernels import gather
from streampack.core.merge import Merge
merge = Merge([1.0], [2], 0)
for p in range(2):
    merge.push(p, np.array([p, 2 + p]), np.array([3, 4]), np.zeros(2, np.int64))
    merge.end(p)
print(merge.take(100).handles.tolist(), merge.closed, hasattr(gather, "py_func"))
"""


@pytest.mark.timeout(60)
def test_everything_works_without_numba() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_NUMBA], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[0, 1, 2, 3] True False"
