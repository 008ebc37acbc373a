"""CRC32C, the one checksum of everything that is sent or logged, and the types of samples' checksums.

``crc32c(data, before=0)`` goes on from the checksum of what came before, and holds no GIL over more than a few
kilobytes. It is that of the AWS Common Runtime, which takes 64 bytes at a time where the processor can: twice as fast
as the crc32 instruction, which the package crc32c uses (the tests' oracle), for bytes in cache or not (RESULTS.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from awscrt.checksums import crc32c
from numpy.typing import NDArray

from streampack.core.model.samples import I64

__all__ = ["Column", "Crcs", "CrcsOf", "crc32c"]

Column = tuple[NDArray[np.uint8], I64]
"""Bytes, uint8 [m], and where each sample of them begins, int64 [samples + 1], with the end behind the last."""
Crcs = tuple[NDArray[np.uint32], int | None]
"""Of every sample, uint32 [samples]; and of all columns as if they were one, where it is known."""
CrcsOf = Callable[[Sequence[Column]], Crcs]
