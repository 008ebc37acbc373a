"""Groups of samples that begin alike."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st


@st.composite
def groups(draw: st.DrawFn, max_rows: int = 16) -> list[np.ndarray]:
    """Rows that branch off each other up to six times, with equal rows, empty rows and rows that begin another."""
    rows: list[list[int]] = [[]]
    for _ in range(draw(st.integers(1, max_rows))):
        from_row = rows[draw(st.integers(0, len(rows) - 1))]
        kept = from_row[: draw(st.integers(0, len(from_row)))]
        rows.append(kept + draw(st.lists(st.integers(0, 3), max_size=6)))
    return [np.array(row, np.int32) for row in draw(st.permutations(rows))]


def common(one: np.ndarray, other: np.ndarray) -> int:
    """Tokens that two rows have in common from their beginning."""
    size = min(len(one), len(other))
    return next((i for i in range(size) if one[i] != other[i]), size)
