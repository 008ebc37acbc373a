"""The compiled kernels against their plain Python twins, and both against one token at a time."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from streampack.core.kernels import gather

GUARD = 7777
"""What lies around an output and must stay."""


def twins(kernel: Any) -> list[Callable[..., Any]]:
    return [kernel, kernel.py_func]


@dataclass(frozen=True)
class Cut:
    """Slices of segments that lie anywhere in a column, ``width`` numbers a token."""

    column: NDArray[Any]
    width: int
    address: list[int]
    real: list[int]
    slices: list[tuple[int, int, int]]
    """(segment, offset, size); a size may reach beyond what is real."""

    def token(self, segment: int, place: int, pad: int) -> list[int]:
        if place >= self.real[segment]:
            return [pad] * self.width
        at = (self.address[segment] + place) * self.width
        return [int(each) for each in self.column[at : at + self.width]]

    def args(self) -> tuple[Any, ...]:
        segment, offset, size = (np.array([each[i] for each in self.slices], np.int64) for i in range(3))
        return (self.column, np.array(self.address, np.int64), np.array(self.real, np.int64), offset, size, segment)


@st.composite
def cuts(draw: st.DrawFn) -> Cut:
    width, dtype = draw(st.integers(1, 3)), draw(st.sampled_from(["uint8", "uint16", "int32", "uint64"]))
    column = (np.arange(1, 100 * width + 1) % 251).astype(dtype)
    real = draw(st.lists(st.integers(0, 30), min_size=1, max_size=5))
    address = [draw(st.integers(0, 100 - length)) for length in real]
    pieces = st.tuples(st.integers(0, len(real) - 1), st.integers(0, 34), st.integers(0, 20))
    return Cut(column, width, address, real, draw(st.lists(pieces, max_size=6)))


@given(cuts(), st.sampled_from([0, 1]), st.integers(0, 9))
def test_slices_are_those_of_a_token_by_token_cut(cut: Cut, shift: int, pad: int) -> None:
    expected = [
        number
        for segment, offset, size in cut.slices
        for place in range(offset, offset + size)
        for number in cut.token(segment, place + shift, pad)
    ]
    for kernel in twins(gather):
        out = np.full(len(expected) + 3, GUARD % 200, cut.column.dtype)
        none = np.empty(0, np.int32)
        assert kernel(*cut.args(), cut.width, shift, cut.column.dtype.type(pad), out[:-3], none) == -1
        assert out[:-3].tolist() == expected
        assert (out[-3:] == GUARD % 200).all()


@given(cuts())
def test_edges_are_what_follows_each_slice(cut: Cut) -> None:
    cut = replace(cut, column=cut.column[:100], width=1)
    total = sum(size for _, _, size in cut.slices)
    for kernel in twins(gather):
        edges = np.full(len(cut.slices) + 1, GUARD, np.int32)
        out = np.empty(total, cut.column.dtype)
        assert kernel(*cut.args(), 1, 0, cut.column.dtype.type(0), out, edges[:-1]) == -1
        assert edges.tolist() == [*(cut.token(s, offset + size, -100)[0] for s, offset, size in cut.slices), GUARD]


def test_a_slice_without_room_or_outside_of_the_column_is_named() -> None:
    column, none = np.arange(100, dtype=np.int32), np.empty(0, np.int32)
    two = np.array([0, 1])
    for kernel in twins(gather):
        for address, sizes, room in (
            ([0, 20], [4, 5], 8),
            ([0, 98], [4, 5], 9),
            ([0, -3], [4, 5], 9),
            ([0, 20], [4, -1], 9),
        ):
            table = np.array(address), np.array([4, 5]), np.zeros(2, np.int64), np.array(sizes), two
            assert kernel(column, *table, 1, 0, 0, np.empty(room, np.int32), none) == 1


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
