"""CRC32C, the checksum of all data that is sent or logged, and the types of samples' checksums.

``crc32c(data, before=0)`` continues from the checksum ``before`` of the preceding bytes, and releases the GIL above a
few kilobytes. It is that of the AWS Common Runtime, which takes 64 bytes at a time where the processor can. That is
twice as fast as the crc32 instruction, which the package crc32c uses (the tests' oracle); see RESULTS.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from awscrt.checksums import crc32c
from numpy.typing import NDArray

from streampack.core.model.samples import I64

__all__ = ["Column", "Crcs", "CrcsOf", "crc32c"]

Column = tuple[NDArray[np.uint8], I64]
"""The bytes of a column, uint8 [m], and where each sample begins in it, int64 [samples + 1]."""
Crcs = tuple[NDArray[np.uint32], int | None]
"""The checksum of every sample, uint32 [samples]; and that of all columns, one after another, or None."""
CrcsOf = Callable[[Sequence[Column]], Crcs]
