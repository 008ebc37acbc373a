"""The arrays in .npy files (numpy.lib.format, versions 1 and 2): never unpickled, never trusted about their size."""

import functools
import io
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MAX_HEADER = 10_000


def load_npy(raw: bytes) -> NDArray[Any] | str:
    """The array of numbers or bools in the bytes of a .npy file, read-only; or why there is none: ``npy``, ``dtype``.

    Never allocates what a header claims: the data must have exactly the size that it says.

    >>> buffer = io.BytesIO(); np.save(buffer, np.array([5, 6], np.uint16)); load_npy(buffer.getvalue())
    array([5, 6], dtype=uint16)
    """
    size = 10 + int.from_bytes(raw[8:10], "little") if raw[6:7] == b"\1" else 12 + int.from_bytes(raw[8:12], "little")
    if not raw.startswith(b"\x93NUMPY") or size > min(len(raw), _MAX_HEADER):
        return "npy"
    header = parse_header(raw[:size])
    if isinstance(header, str):
        return header
    dtype, shape, fortran = header
    if dtype.kind not in "biuf":
        return "dtype"
    count = 1
    for length in shape:
        count *= length
    if count * dtype.itemsize != len(raw) - size:
        return "npy"
    return np.frombuffer(raw, dtype, offset=size).reshape(shape, order="F" if fortran else "C")


@functools.lru_cache(maxsize=1024)  # headers differ by length only, and parsing one costs ten times the rest
def parse_header(header: bytes) -> tuple[np.dtype[Any], tuple[int, ...], bool] | str:
    """(dtype, shape, whether in Fortran's order) of a whole header, or the reason why there are none."""
    stream = io.BytesIO(header)
    try:
        version = np.lib.format.read_magic(stream)
        if version == (1, 0):
            shape, fortran, dtype = np.lib.format.read_array_header_1_0(stream)
        elif version == (2, 0):
            shape, fortran, dtype = np.lib.format.read_array_header_2_0(stream)
        else:  # (3, 0) is for field names beyond latin-1: a structured array, no numbers
            return "dtype"
    except Exception:  # the literal parser raises anything for hostile text
        return "npy"
    return "npy" if min(shape, default=0) < 0 else (dtype, shape, fortran)
