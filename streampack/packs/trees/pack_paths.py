"""The segments of a pack whose samples may share tokens."""

from __future__ import annotations

import numpy as np

from streampack.core.trees.shared_prefixes import Segments, segments_of
from streampack.packs.pack import Pack


def has_paths(pack: Pack) -> bool:
    """Return whether the samples of a pack may share tokens, so that labels have P values."""
    return pack.shared is not None


def pack_segments(pack: Pack) -> Segments:
    """Return the segments of a whole pack whose samples may share tokens, and the segment above each."""
    assert pack.shared is not None
    assert pack.cu_paths is not None
    assert pack.path_index is not None
    starts = pack.cu_seqlens_padded[: pack.num_samples].astype(np.int64)
    lengths = np.diff(pack.cu_paths).astype(np.int64)
    num_tokens = int(pack.cu_seqlens_padded[-1])
    return segments_of(pack.shared.astype(np.int64), lengths, starts, pack.path_index, num_tokens)
