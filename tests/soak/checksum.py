"""The checksum by which a rank's arrays are compared with the golden run's."""

from __future__ import annotations

from typing import Any

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray


def crc_of(array: NDArray[Any]) -> int:
    """Of an array's kind, shape and bytes."""
    return int(crc32c(np.ascontiguousarray(array).tobytes(), crc32c(f"{array.dtype}{array.shape}".encode())))
