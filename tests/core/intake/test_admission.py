"""The kernels of admission against their plain Python twins, and against what they are to say."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from streampack.core.intake.admission_kernels import enter, measure
from streampack.core.intake.overlong import apply_overlong, drop_chunk
from streampack.core.model.samples import SampleTable

LENGTHS = st.lists(st.integers(0, 30), min_size=1, max_size=20)


def read_only(values: list[int]) -> Any:
    """uint32 as they stand in a message."""
    return np.frombuffer(np.array(values, "<u4").tobytes(), "<u4")


def plain(kernel: Any) -> Any:
    return getattr(kernel, "py_func", kernel)


@given(st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)), min_size=1, max_size=20))
def test_a_chunk_is_measured_as_it_is(samples: list[tuple[int, int]]) -> None:
    lengths, loss_tokens = (read_only(list(column)) for column in zip(*samples, strict=True))
    expected = (
        sum(length for length, _ in samples),
        max(length for length, _ in samples),
        sum(length == 0 for length, _ in samples),
        sum(loss > max(length - 1, 0) for length, loss in samples),
    )
    assert measure(lengths, loss_tokens) == plain(measure)(lengths, loss_tokens) == expected


@given(
    LENGTHS,
    st.sampled_from(["truncate", "split", "drop", "stale"]),
    st.integers(0, 3),
    st.integers(0, 2),
    st.booleans(),
)
def test_each_piece_gets_a_row_and_a_place_in_the_chunk(
    lengths: list[int], policy: str, skip: int, keep: int, share: bool
) -> None:
    every, skip = np.array(lengths, np.int64), min(skip, len(lengths))
    pieces = drop_chunk(every[skip:]) if policy == "stale" else apply_overlong(every[skip:], 12, policy)
    kept = [i for i, length in enumerate(pieces.length.tolist()) if length]
    shared = np.arange(len(pieces.length)) if share else np.zeros(0, np.int64)
    found = []
    kernels: list[Any] = [enter, plain(enter)]
    for kernel in kernels:
        table = SampleTable(4)
        handles = table.take(len(kept))
        entries, stored = np.full(len(pieces.length), -9), np.full((3, len(pieces.length)), -9)
        columns: list[Any] = [
            table.stream,
            table.index,
            table.part,
            table.length,
            table.loss_tokens,
            table.crc,
            table.keep,
        ]
        cut, tokens = kernel(
            pieces.source, pieces.offset, pieces.length, pieces.part, every, read_only([7 * n for n in lengths]),
            read_only([max(n - 1, 0) for n in lengths]), skip, 100, 3, 5, keep, handles, *columns, entries, stored,
        )  # fmt: skip
        table.put(handles, {"shared": shared[kept]} if share else {})
        columns.append(table.shared)
        found.append((cut, tokens, entries.tolist(), stored.tolist(), [column[handles].tolist() for column in columns]))
    assert found[0] == found[1]
    samples = (skip + pieces.source[kept]).tolist()
    assert tokens == pieces.length.sum()
    assert cut == sum(lengths[s] != pieces.length[i] for s, i in zip(samples, kept, strict=True))
    assert [entry for entry in entries.tolist() if entry >= 0] == handles.tolist()
    assert (entries < 0).tolist() == (pieces.length == 0).tolist()
    assert found[0][4] == [
        [5] * len(kept), [100 + 3 * s for s in samples], pieces.part[kept].tolist(), pieces.length[kept].tolist(),
        [max(lengths[s] - 1, 0) for s in samples], [7 * lengths[s] for s in samples],
        [keep] * (len(kept) - 1) + [0] * (len(kept) > 0), shared[kept].tolist() if share else [0] * len(kept),
    ]  # fmt: skip
    begins = (np.cumsum(every) - every)[samples] + pieces.offset[kept] if kept else np.zeros(0, np.int64)
    assert stored[:, : len(kept)].tolist() == [begins.tolist(), pieces.length[kept].tolist(), samples]
