"""The segments of a pack whose samples may share tokens."""

from __future__ import annotations

import numpy as np

from streampack.core.model.samples import I32, I64
from streampack.core.trees.shared_prefixes import Segments, segments_of
from streampack.packs.pack import Pack


def has_paths(pack: Pack) -> bool:
    """Return whether the samples of a pack may share tokens, so that labels have P values."""
    return pack.shared is not None


def pack_segments(pack: Pack) -> Segments:
    """Return the segments of a whole pack, and the segment above each."""
    shared, cu_paths, path_index = _of_paths(pack)
    starts = pack.cu_seqlens_padded[: pack.num_samples].astype(np.int64)
    lengths = np.diff(cu_paths).astype(np.int64)
    return segments_of(shared.astype(np.int64), lengths, starts, path_index, int(pack.cu_seqlens_padded[-1]))


def _of_paths(pack: Pack) -> tuple[I32, I32, I64]:
    """Return ``shared``, ``cu_paths`` and ``path_index`` of a pack whose samples may share tokens."""
    assert pack.shared is not None
    assert pack.cu_paths is not None
    assert pack.path_index is not None
    return pack.shared, pack.cu_paths, pack.path_index
