"""Encode columns of integers: differences to the least value, in as few bytes as the greatest difference needs.

u8 bytes per value, i64 least value, the differences; without differences if all values are equal
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streampack.core.model.samples import I64

_COLUMN = struct.Struct("<Bq")
_WIDTHS = ((1 << 8, 1), (1 << 16, 2), (1 << 32, 4))


def pack_column(values: NDArray[Any]) -> bytes:
    """Return the bytes of a column of integers."""
    if not len(values):
        return _COLUMN.pack(0, 0)
    least, greatest = int(values.min()), int(values.max())
    if least == greatest:
        return _COLUMN.pack(0, least)
    width = next((width for bound, width in _WIDTHS if greatest - least < bound), 8)
    return _COLUMN.pack(width, least) + (values.astype(np.int64) - least).astype(f"<u{width}").tobytes()


def unpack_column(body: bytes, at: int, count: int) -> tuple[I64, int]:
    """Decode a column of ``count`` values at byte ``at``; return the values and the byte where the next one begins."""
    width, least = _COLUMN.unpack_from(body, at)
    at += _COLUMN.size
    if not width:
        return np.full(count, least, np.int64), at
    values = np.frombuffer(body, f"<u{width}", count, at).astype(np.int64)
    return values + least, at + width * count
