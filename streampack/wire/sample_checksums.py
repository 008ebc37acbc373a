"""CRC32C of every sample of a chunk, and of the whole chunk, in one pass over the bytes.

A chunk holds hundreds of samples in a few columns. Each sample's checksum covers its bytes in all columns, and the
message's checksum covers the columns one after another. ``plain`` calls ``crc32c`` for each sample; Python takes most
of its time. ``compiled`` uses a numba kernel (``crc_kernels``) where there is one for this processor. It also gives the
checksum of the whole at almost no cost, since the checksum of two parts follows from those of the parts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from awscrt.checksums import crc32c

from streampack.wire.checksums import Column, Crcs, CrcsOf


def plain(columns: Sequence[Column]) -> Crcs:
    """Return the checksums of the samples in ``columns``, by ``crc32c``; the whole chunk's checksum is None."""
    crcs = [0] * (len(columns[0][1]) - 1)
    for column, bounds in columns:
        data, begin = column.data, 0
        for i, end in enumerate(bounds[1:].tolist()):
            crcs[i] = crc32c(data[begin:end], crcs[i])
            begin = end
    return np.array(crcs, np.uint32), None


def compiled() -> CrcsOf | None:
    """Return a function like ``plain``, but five times as fast; None without numba or on another processor.

    The first call takes 0.3 s and 60 MB.
    """
    try:
        from streampack.wire import crc_kernels  # imports numba
    except ImportError:
        return None
    return crc_kernels.crcs_of if crc_kernels.runs_here() else None
