"""What FORM has to know of a step's samples, in one go over the table: compiled by numba where it is installed.

Plain Python over numpy arrays, so that the function itself is the twin that the tests compare with.
"""

from __future__ import annotations

from streampack.core.kernels import njit
from streampack.core.samples import I32, I64, U32


@njit(nogil=True, cache=True)
def describe(
    handles: I64,
    bounds: I64,
    stream: I32,
    index: I64,
    part: I32,
    length: I32,
    loss_tokens: I32,
    crc: U32,
    align: int,
    a: int,
    b: int,
    sums: I64,
    identities: U32,
) -> None:
    """Of packs ``handles[bounds[i]:bounds[i + 1]]`` fill in ``sums`` int64 [4, packs], see ``steps.Packs``, and
    ``identities`` uint32 [samples, 6], in little endian ``steps.IDENTITY``. The others are columns of a table; a
    sample of s padded tokens costs ``a * s + b * s * s``."""
    for pack in range(len(bounds) - 1):
        tokens, slots, loss, cost = 0, 0, 0, 0
        for k in range(bounds[pack], bounds[pack + 1]):
            h = handles[k]
            real = int(length[h])  # in 64 bits where this is not compiled, too
            slot = (real + align - 1) // align * align
            tokens += real
            slots += slot
            loss += int(loss_tokens[h])
            cost += slot * (a + b * slot)
            identities[k, 0] = stream[h]
            identities[k, 1] = part[h]
            identities[k, 2] = index[h] & 0xFFFFFFFF
            identities[k, 3] = index[h] >> 32
            identities[k, 4] = length[h]
            identities[k, 5] = crc[h]
        sums[0, pack] = tokens
        sums[1, pack] = slots
        sums[2, pack] = loss
        sums[3, pack] = cost
