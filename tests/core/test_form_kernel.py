"""What a kernel says of a step's packs, compiled and as plain Python, against their rows."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.core.form_kernel import describe
from streampack.core.samples import ROW, SampleTable
from streampack.core.steps import digests_of, pack_digests

GUARD = 7777
"""What outputs hold before."""


@pytest.mark.parametrize("kernel", [describe, describe.py_func])
@given(counts=st.lists(st.integers(0, 4), max_size=6), seed=st.integers(0, 2**32 - 1), align=st.integers(1, 9))
def test_what_is_said_of_packs_is_the_sums_and_the_digests_of_their_rows(
    kernel: Callable[..., Any], counts: list[int], seed: int, align: int
) -> None:
    rng, bounds = np.random.default_rng(seed), np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    rows = np.zeros(int(bounds[-1]), ROW)
    for name in ROW.names or ():
        rows[name] = rng.integers(0, np.iinfo(ROW[name]).max, len(rows), endpoint=True)
    rows["length"] %= 2**20
    table = SampleTable(len(rows) + 3)
    table.take(3)
    handles = table.enter(rows)
    sums, identities = np.full((4, len(counts)), GUARD), np.full((len(rows), 6), GUARD, np.uint32)
    kernel(
        handles, bounds, table.stream, table.index, table.part, table.length, table.loss_tokens, table.crc, align,
        3, 2, sums, identities,
    )  # fmt: skip
    slots = [-(-int(length) // align) * align for length in rows["length"]]
    columns = [rows["length"].tolist(), slots, rows["loss_tokens"].tolist(), [3 * s + 2 * s * s for s in slots]]
    spans = list(zip(bounds.tolist(), bounds[1:].tolist(), strict=False))
    assert sums.tolist() == [[sum(column[begin:end]) for begin, end in spans] for column in columns]
    assert digests_of(memoryview(identities.tobytes()), bounds) == pack_digests(rows, bounds)
