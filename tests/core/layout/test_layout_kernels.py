"""What a client derives for each token: compiled, as plain Python and in numpy; and how the kernel is loaded."""

import os
import subprocess
import sys
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from streampack.core.layout import boundaries, labels
from streampack.core.layout.boundaries import round_up
from streampack.core.layout.layout_kernels import derive, lay_out
from streampack.packs.kernel_loader import Kernels


@dataclass(frozen=True)
class Held:
    """Slices of segments, as a rank may hold them: (place in its segment, tokens, the segment's real ones)."""

    slices: list[tuple[int, int, int]]
    tokens: NDArray[Any]
    cut: bool
    """Slices may end inside a sample: edges say what follows."""
    masked: bool
    sent: bool
    """Labels came with the samples."""

    def run(self, kernel: Any) -> list[list[int]]:
        offset, size, real = np.array(self.slices, np.int64).reshape(-1, 3).T.copy()
        total, draw = len(self.tokens), np.random.default_rng(len(self.tokens))
        edges = draw.integers(0, 99, len(size) if self.cut else 0, np.int32)
        counted = draw.integers(0, 2, total if self.masked else 0, np.uint8)
        ids, labels, positions = np.full((3, total), -7, np.int64)
        padding = np.ones(total, np.bool_)
        if self.sent:
            labels[:] = draw.integers(-100, 99, total)
        for array in (self.tokens, edges, counted):
            array.flags.writeable = False  # as what lies in a message is
        kernel(self.tokens, edges, counted, offset, size, real, self.sent, ids, labels, positions, padding)
        return [array.tolist() for array in (ids, labels, positions, padding)]


@st.composite
def held(draw: st.DrawFn) -> Held:
    cut = draw(st.booleans())
    pieces = st.tuples(st.integers(0, 30 if cut else 0), st.integers(1, 30), st.integers(0, 60))
    slices = draw(st.lists(pieces, max_size=8))
    if not cut:
        slices = [(0, size, min(real, size)) for _, size, real in slices]
    dtype = draw(st.sampled_from(["int32", "uint16"]))
    total = sum(size for _, size, _ in slices)
    tokens = np.random.default_rng(total).integers(0, np.iinfo(dtype).max, total).astype(dtype)
    return Held(slices, tokens, cut, draw(st.booleans()), draw(st.booleans()))


@given(held())
def test_the_compiled_kernel_its_plain_twin_and_numpy_derive_the_same(held: Held) -> None:
    expected = held.run(labels.derive)
    assert held.run(derive.dispatcher) == expected
    assert held.run(derive.py_func) == expected


@given(data=st.data())
def test_packs_are_laid_out_as_by_numpy_or_refused(data: st.DataObject) -> None:
    packs = data.draw(st.lists(st.lists(st.integers(0 if data.draw(st.booleans()) else 1, 9), max_size=5), max_size=5))
    aligns = [data.draw(st.integers(1, 4)) for _ in packs]
    fits = [max(sum(round_up(n, align) for n in pack), 1) for pack, align in zip(packs, aligns, strict=True)]
    widths = [max(fit + data.draw(st.integers(-2, 5)), 1) for fit in fits]
    lengths, counts = np.array([*chain(*packs)], np.int64), np.array([*map(len, packs)], np.int64)
    own, totals = np.array(aligns, np.int64), np.array(widths, np.int64)
    try:
        laid = boundaries.layouts(lengths, counts, own, totals)
    except ValueError:
        laid = None
    for kernel in (lay_out.dispatcher, lay_out.py_func):
        samples, count = len(lengths), len(packs)
        real, start, stop = np.full((3, samples + count), -7)
        first_sample, first_segment = np.full((2, count + 1), -7)
        widest, bounds = np.full(count, -7), np.full((2, samples + 2 * count), -7, np.int32)
        found = kernel(lengths, counts, own, totals, real, start, stop, first_sample, first_segment, widest, *bounds)
        assert (found < 0) == (laid is None)
        if laid is not None and packs:
            expected = laid.boundaries()
            for ours, theirs in (
                (real[:found], laid.real), (start[:found], laid.start), (stop[:found], laid.stop),
                (first_sample, laid.first_sample), (first_segment, laid.first_segment), (widest, laid.widest()),
                (bounds[0, : found + count], expected.real), (bounds[1, : found + count], expected.padded),
            ):  # fmt: skip
                assert ours.tolist() == theirs.tolist()


def test_the_kernel_comes_in_a_thread_of_its_own() -> None:
    kernel = Kernels()
    assert kernel.derive is None
    kernel.load()
    kernel.wait()
    assert kernel.derive is derive


def ran(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300,
        env={**os.environ, **environment},
    )  # fmt: skip
    assert not done.stderr
    return done.stdout.strip()


LOADED = "from streampack.packs.kernel_loader import kernels\nkernels.load()\nkernels.wait()\nprint(kernels.derive)"


def test_without_a_numba_that_works_numpy_builds_the_tensors() -> None:
    assert ran(f"import sys\nsys.modules['numba'] = None\n{LOADED}") == "None"
    assert ran(f"import sys, types\nsys.modules['numba'] = types.ModuleType('numba')\n{LOADED}") == "None"  # a stub
    assert ran(f"import sys\nsys.modules['llvmlite'] = None\n{LOADED}") == "None"
    assert ran(LOADED, NUMBA_DISABLE_JIT="1") == "None"


def test_kernels_are_loaded_once_a_process_has_built_some_tokens() -> None:
    code = (
        "from streampack.packs.kernel_loader import LOADED_AFTER, kernels\n"
        "kernels.count_tokens(LOADED_AFTER - 1)\nkernels.wait()\nprint(kernels.derive)\n"
        "kernels.count_tokens(1)\nkernels.wait()\nprint(kernels.derive is not None)"
    )
    assert ran(code).split() == ["None", "True"]


def test_a_fork_and_the_end_of_the_process_wait_while_a_kernel_is_loaded() -> None:
    """A child that inherits numba half imported would hang where it imports it."""
    code = (
        "import os\nfrom streampack.packs.kernel_loader import kernels\nkernels.load()\n"
        "if not (child := os.fork()):\n"
        "    import numba\n    kernels.load()\n    kernels.wait()\n    os._exit(7 if kernels.derive else 1)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"
    )
    assert ran(code) == "7"
    assert ran("from streampack.packs.kernel_loader import kernels\nkernels.load()") == ""
