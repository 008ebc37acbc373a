"""CRC32C of every sample of a chunk, and of all of them, in one pass over their bytes.

A chunk holds hundreds of samples in a few columns. Each sample's checksum covers its bytes in all of them, and the
message's covers the columns one after another. ``plain`` asks ``crc32c`` for each sample: it needs nothing, and Python
takes most of its time. ``compiled`` gives the same from a numba kernel (``crc_kernels``) where there is one for this
processor, and the checksum of the whole beside it, for next to nothing: that of two parts follows from theirs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from awscrt.checksums import crc32c

from streampack.wire.checksums import Column, Crcs, CrcsOf


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
