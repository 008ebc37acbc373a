"""CRC32C, the one checksum of everything that is sent or logged; and that of every sample of a chunk, and of all of
them, in one pass over their bytes.

``crc32c(data, before=0)`` goes on from the checksum of what came before, and holds no GIL over more than a few
kilobytes. It is that of the AWS Common Runtime, which takes 64 bytes at a time where the processor can: twice as fast
as the crc32 instruction, which the package crc32c uses (the tests' oracle), for bytes in cache or not (RESULTS.md).

A chunk holds hundreds of samples in a few columns; each sample's checksum covers its bytes in all of them, the
message's covers the columns one after another. ``plain`` asks ``crc32c`` for each sample: it needs nothing, and
Python takes most of its time. ``compiled`` gives the same from a numba kernel (``crc_kernels``) where there is one for
this processor, and the checksum of the whole beside it, for next to nothing: that of two parts follows from theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from awscrt.checksums import crc32c
from numpy.typing import NDArray

from streampack.core.model.samples import I64

__all__ = ["Column", "Crcs", "CrcsOf", "compiled", "crc32c", "plain"]

Column = tuple[NDArray[np.uint8], I64]
"""Bytes, uint8 [m], and where each sample of them begins, int64 [samples + 1], with the end behind the last."""
Crcs = tuple[NDArray[np.uint32], int | None]
"""Of every sample, uint32 [samples]; and of all columns as if they were one, where it is known."""
CrcsOf = Callable[[Sequence[Column]], Crcs]


def plain(columns: Sequence[Column]) -> Crcs:
    """Checksums of the samples in ``columns``, by ``crc32c``."""
    crcs = [0] * (len(columns[0][1]) - 1)
    for column, bounds in columns:
        data, begin = column.data, 0
        for i, end in enumerate(bounds[1:].tolist()):
            crcs[i] = crc32c(data[begin:end], crcs[i])
            begin = end
    return np.array(crcs, np.uint32), None


def compiled() -> CrcsOf | None:
    """As ``plain`` and five times as fast; None where numba is not installed, or has no kernel for this processor.

    Takes 0.3 s the first time, and 60 MB.
    """
    try:
        from streampack.wire import crc_kernels  # numba, only where it is wanted
    except ImportError:
        return None
    return crc_kernels.crcs_of if crc_kernels.runs_here() else None
