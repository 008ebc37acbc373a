"""The arena's compiled kernels against their plain Python twins, and both against what says what they do."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from streampack_services.broker.arena_kernels import KINDS, copy_slices, find_slices, measure_stored, release_samples

from streampack.core.layout.boundaries import layouts
from streampack.core.layout.shards import LAYOUTS, cut
from streampack.core.model.samples import I64

GUARD = 7777
"""What lies around an output and must stay."""


def twins(kernel: Any) -> list[Callable[..., Any]]:
    return [kernel.dispatcher, kernel.plain, kernel.py_func]


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
        return (self.column, np.array(self.address)[segment], np.array(self.real)[segment], offset, size)


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
    for kernel in twins(copy_slices):
        out = np.full(len(expected) + 3, GUARD % 200, cut.column.dtype)
        none = np.empty(0, np.int32)
        assert kernel(*cut.args(), cut.width, shift, cut.column.dtype.type(pad), out[:-3], none) == -1
        assert out[:-3].tolist() == expected
        assert (out[-3:] == GUARD % 200).all()


@given(cuts())
def test_edges_are_what_follows_each_slice(cut: Cut) -> None:
    cut = replace(cut, column=cut.column[:100], width=1)
    total = sum(size for _, _, size in cut.slices)
    for kernel in twins(copy_slices):
        edges = np.full(len(cut.slices) + 1, GUARD, np.int32)
        out = np.empty(total, cut.column.dtype)
        assert kernel(*cut.args(), 1, 0, cut.column.dtype.type(0), out, edges[:-1]) == -1
        assert edges.tolist() == [*(cut.token(s, offset + size, -100)[0] for s, offset, size in cut.slices), GUARD]


def test_a_slice_without_room_or_outside_of_the_column_is_named() -> None:
    column, none = np.arange(100, dtype=np.int32), np.empty(0, np.int32)
    for kernel in twins(copy_slices):
        for address, sizes, room in (
            ([0, 20], [4, 5], 8),
            ([0, 98], [4, 5], 9),
            ([0, -3], [4, 5], 9),
            ([0, 20], [4, -1], 9),
        ):
            table = np.array(address), np.array([4, 5]), np.zeros(2, np.int64), np.array(sizes)
            assert kernel(column, *table, 1, 0, 0, np.empty(room, np.int32), none) == 1


@dataclass(frozen=True)
class Laid:
    """Packs of samples that lie anywhere, some of them not as they must, and a context-parallel rank."""

    lengths: I64
    counts: I64
    widths: I64
    aligns: I64
    cp: int
    rank: int
    kind: str


@st.composite
def laid(draw: st.DrawFn) -> Laid:
    counts, cp = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4)), draw(st.integers(1, 3))
    unit = draw(st.sampled_from([1, cp, 2 * cp]))
    aligns = [unit * draw(st.integers(1, 3)) for _ in counts]
    lengths = draw(st.lists(st.integers(1, 20), min_size=sum(counts), max_size=sum(counts)))
    slots = [-(-length // align) * align for length, align in zip(lengths, np.repeat(aligns, counts), strict=True)]
    ends = np.concatenate([[0], np.cumsum(slots)])[np.concatenate([[0], np.cumsum(counts)])]
    widths = np.maximum(np.diff(ends) + [unit * draw(st.integers(0, 3)) for _ in counts], unit)
    if draw(st.integers(0, 9)) == 0:  # no room, or a sample that was let go
        widths = np.maximum(widths - 1, 1)
        lengths = [length - (draw(st.integers(0, 9)) == 0) for length in lengths]
    rank, kind = draw(st.integers(0, cp - 1)), draw(st.sampled_from(LAYOUTS))
    return Laid(np.array(lengths, np.int64), np.array(counts), widths, np.array(aligns), cp, rank, kind)


@settings(max_examples=100)
@given(laid(), st.randoms(use_true_random=False))
def test_slices_are_those_of_the_layout_of_all_packs_and_its_cut(case: Laid, random: Any) -> None:
    handles = np.array(random.sample(range(50), len(case.lengths)), np.int64)
    places, lengths = np.full(50, -1), np.full(50, -1)
    places[handles], lengths[handles] = 1000 * np.arange(len(handles)), case.lengths
    try:
        whole = layouts(case.lengths, case.counts, case.aligns, case.widths)
        mine = cut(whole, case.cp, case.rank, case.kind)
    except ValueError:
        whole = None
    for kernel in twins(find_slices):
        out = np.full((4, 2 * (len(handles) + len(case.counts)) + 1), GUARD)
        packs = handles, case.counts, case.widths, case.aligns
        group = np.array([case.cp]), np.array([case.rank])
        found, tokens = kernel(*packs, places, lengths, *group, KINDS[case.kind], *out)
        assert (out[:, -1] == GUARD).all()
        if whole is None:
            assert found == -1
            continue
        address, real, offset, size = out[:, :found]
        assert real.tolist() == whole.real[mine.segment].tolist()
        assert offset.tolist() == (mine.start - whole.start[mine.segment]).tolist()
        assert size.tolist() == (mine.stop - mine.start).tolist()
        assert tokens == size.sum()
        sample = np.cumsum(whole.real > 0) - 1
        assert (address == 1000 * sample[mine.segment])[real > 0].all()


@given(st.data(), st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=5))
def test_packs_of_groups_are_cut_as_each_pack_alone(data: st.DataObject, sizes: list[int]) -> None:
    ranks = [data.draw(st.integers(0, size - 1)) for size in sizes]
    counts = np.array([data.draw(st.integers(0, 3)) for _ in sizes])
    lengths = np.array([data.draw(st.integers(1, 20)) for _ in range(counts.sum())], np.int64)
    aligns = np.array([2 * size for size in sizes])
    slots = -(-lengths // np.repeat(aligns, counts)) * np.repeat(aligns, counts)
    bounds = np.concatenate([[0], np.cumsum(counts)])
    widths = np.diff(np.concatenate([[0], np.cumsum(slots)])[bounds]) + aligns
    handles, places = np.arange(len(lengths)), 1000 * np.arange(len(lengths))

    def slices(kernel: Any, own: slice, packs: slice) -> list[list[int]]:
        out = np.full((4, 2 * (len(handles) + len(counts))), GUARD)
        groups = np.array(sizes[packs]), np.array(ranks[packs])
        columns = handles[own], counts[packs], widths[packs], aligns[packs]
        count, _ = kernel(*columns, places, lengths, *groups, KINDS["zigzag"], *out)
        return [list(row) for row in out[:, :count].T.tolist()]

    for kernel in twins(find_slices):
        alone = [
            cut for i in range(len(sizes)) for cut in slices(kernel, slice(bounds[i], bounds[i + 1]), slice(i, i + 1))
        ]
        assert slices(kernel, slice(None), slice(None)) == alone


@given(st.lists(st.integers(0, 5), max_size=30), st.sets(st.integers(0, 29)))
def test_blocks_are_emptied_once_when_the_last_sample_goes(held: list[int], gone: set[int]) -> None:
    """Sample i of ``held`` tokens lies in block i % 3; those of none are not there."""
    handles = np.array(sorted(i for i in gone if i < len(held)), np.int64)
    before = [sum(held[block::3]) for block in range(3)]
    after = [sum(n for i, n in enumerate(held) if i % 3 == block and i not in gone) for block in range(3)]
    for kernel in twins(release_samples):
        places, lengths = 10 * (np.arange(len(held)) % 3), np.array(held, np.int64)
        live, emptied = np.array(before), np.full(len(handles), -1)
        for _ in range(2):  # what is gone already changes nothing
            count = kernel(handles, places, lengths, 10, live, emptied)
            assert live.tolist() == after
            expected = [block for block in range(3) if before[block] and not after[block]] if _ == 0 else []
            assert sorted(emptied[:count].tolist()) == expected
        assert lengths.tolist() == [0 if i in gone else n for i, n in enumerate(held)]


@given(st.lists(st.integers(0, 40), min_size=1, max_size=30), st.data())
def test_samples_to_store_are_joined_if_each_begins_where_the_last_ended(sizes: list[int], data: st.DataObject) -> None:
    lengths, ends = np.array(sizes, np.int64), np.zeros(len(sizes), np.int64)
    gaps = data.draw(st.lists(st.sampled_from([0, 0, 0, 3]), min_size=len(sizes), max_size=len(sizes)))
    offsets = 5 + np.cumsum(lengths) - lengths + np.cumsum(gaps)
    handles = np.array(data.draw(st.lists(st.integers(0, 999), min_size=len(sizes), max_size=len(sizes))), np.int64)
    for form in twins(measure_stored):
        assert form(handles, offsets, lengths, ends) == (max(sizes), max(handles), not any(gaps[1:]))
        assert ends.tolist() == np.cumsum(lengths).tolist()
