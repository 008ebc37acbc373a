"""The columns that not every sample has: rows of the table are used again, and records have them only if needed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.core.model.samples import EXTRA_ROW, EXTRAS, ROW, SampleTable, extra_rows

NAMES = [name for name in EXTRA_ROW.names or () if name != "keep"]


@given(st.lists(st.tuples(st.sets(st.sampled_from(NAMES)), st.integers(1, 5)), min_size=1, max_size=8))
def test_a_row_has_no_column_of_the_sample_that_had_it_before(chunks: list[tuple[set[str], int]]) -> None:
    table = SampleTable(4)
    for names, count in chunks:
        handles = table.take(count)
        table.put(handles, {name: np.arange(1, count + 1) for name in names})
        for name in NAMES:
            expected = list(range(1, count + 1)) if name in names else [0] * count
            assert table.column(name, handles).tolist() == expected
        assert all(table.has(name) for name in names)
        table.free(handles)


@given(st.lists(st.tuples(*[st.integers(0, 2)] * len(EXTRA_ROW.names or ())), max_size=4))
def test_columns_come_back_from_a_record(values: list[tuple[int, ...]]) -> None:
    extras = np.array(values, EXTRA_ROW)
    for dtype in EXTRAS.values():
        first, *others = dtype.names or ()
        for name in others:
            extras[name][extras[first] == 0] = 0
    recorded: dict[str, Any] = {
        name: extras[list(dtype.names or ())].astype(dtype).tobytes() for name, dtype in EXTRAS.items()
    }
    table = SampleTable(2)
    handles = table.enter(np.zeros(len(values), ROW), **recorded)
    assert extra_rows(table.extras(handles), len(values)).tolist() == extras.tolist()
    assert all(bool(column) == bool(extras[(EXTRAS[name].names or ("",))[0]].any()) for name, column in table.extras(
        handles
    ).items())  # fmt: skip


def test_a_column_of_another_size_is_an_error() -> None:
    with pytest.raises(ValueError, match="got 3 bytes in the field keeps, expected 2 bytes or an empty field"):
        extra_rows({"keeps": bytes(3)}, 2)
