"""The paths of forward packs: whole packs whose samples may share tokens, joined without their tails."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streampack.core.model.samples import I64
from streampack.packs.pack import Pack


@dataclass(frozen=True, slots=True)
class ForwardPaths:
    """Packs that are joined: forward pack i consists of packs ``of_packs[i]`` to ``of_packs[i + 1]``.

    ``widths`` int64 [forward packs]: tokens of each forward pack, tail padding included.
    """

    packs: Sequence[Pack]
    of_packs: I64
    widths: I64

    @property
    def depths(self) -> I64:
        """Tokens that each sample shares with the sample before it, int64 [samples]."""
        return np.concatenate([pack.shared for pack in self.packs if pack.shared is not None]).astype(np.int64)

    def values(self, arrays: Sequence[NDArray[Any]], pad: Any) -> list[NDArray[Any]]:
        """Convert the packs' arrays [P, ...] to those of the forward packs; ``pad`` is for the one value more."""
        real = [array[: _num_rows(pack)] for array, pack in zip(arrays, self.packs, strict=True)]
        of_packs = []
        for (begin, end), width in zip(pairwise(self.of_packs.tolist()), self.widths.tolist(), strict=True):
            joined = np.concatenate([*real[begin:end], arrays[0][:0]])
            more = np.full((int(len(joined) == width), *joined.shape[1:]), pad, joined.dtype)
            of_packs.append(np.concatenate([joined, more]))
        return of_packs

    def attributes(self) -> list[dict[str, Any]]:
        """Return ``cu_paths`` and ``path_index`` of each forward pack."""
        index, sums = [], []
        for begin, end in pairwise(self.of_packs.tolist()):
            before = 0
            for pack in self.packs[begin:end]:
                assert pack.path_index is not None
                index.append(pack.path_index + before)
                before += int(pack.cu_seqlens_padded[pack.num_samples])
            lengths = [np.diff(pack.cu_paths) for pack in self.packs[begin:end] if pack.cu_paths is not None]
            sums.append(np.cumsum(np.concatenate([np.zeros(1, np.int32), *lengths])).astype(np.int32))
        paths = zip(sums, self.values(index, 0), strict=True)
        return [{"cu_paths": cu_paths, "path_index": places} for cu_paths, places in paths]


def _num_rows(pack: Pack) -> int:
    """Return the tokens of a pack's samples, shared ones for each."""
    assert pack.cu_paths is not None
    return int(pack.cu_paths[-1])
