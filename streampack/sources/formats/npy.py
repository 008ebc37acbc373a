"""Reads arrays from .npy files (numpy.lib.format, versions 1 and 2), without unpickling or trusting their size."""

import functools
import io
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MAX_HEADER = 10_000


def load_npy(raw: bytes) -> NDArray[Any] | str:
    """Decode the bytes of a .npy file to a read-only array of numbers or bools, or return a reason.

    The reasons are ``npy`` (not a valid .npy file) and ``dtype`` (not numbers). The header's claim
    allocates no memory: the data must have exactly the size that the header gives.

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


@functools.lru_cache(maxsize=1024)  # few headers differ, and parsing one takes ten times as long as the rest
def parse_header(header: bytes) -> tuple[np.dtype[Any], tuple[int, ...], bool] | str:
    """Return (dtype, shape, whether in Fortran order) from a complete .npy header, or the reason it is rejected."""
    stream = io.BytesIO(header)
    try:
        version = np.lib.format.read_magic(stream)
        if version == (1, 0):
            shape, fortran, dtype = np.lib.format.read_array_header_1_0(stream)
        elif version == (2, 0):
            shape, fortran, dtype = np.lib.format.read_array_header_2_0(stream)
        else:  # (3, 0) is for field names beyond latin-1: a structured array, not numbers
            return "dtype"
    except Exception:  # the literal parser raises any exception for hostile text
        return "npy"
    return "npy" if min(shape, default=0) < 0 else (dtype, shape, fortran)
