"""The segments of a pack whose samples share tokens, and the same samples without sharing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from streampack.core.layout.boundaries import layout
from streampack.core.layout.labels import derive_positions
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


def unfolded(pack: Pack, of_tokens: frozenset[str] = frozenset(), of_targets: frozenset[str] = frozenset()) -> Pack:
    """Return a pack of the same samples that share nothing, without padding.

    Args:
        pack: A whole pack whose samples may share tokens.
        of_tokens: Names of the fields with a value for each token of the pack, T.
        of_targets: Names of the fields with a value for each token of each sample, P.
    """
    _, cu_paths, path_index = _of_paths(pack)
    size = int(cu_paths[-1])
    index, lengths = path_index[:size], np.diff(cu_paths).astype(np.int64)
    laid = layout(lengths, 1, size)
    positions, padding = np.empty(size, np.int64), np.empty(size, np.bool_)
    derive_positions(np.zeros_like(lengths), lengths, lengths, positions, padding)
    fields: dict[str, Any] = dict(pack.fields)
    fields |= {name: pack.fields[name][index] for name in of_tokens if name in fields}
    fields |= {name: pack.fields[name][:size] for name in of_targets if name in fields}
    return replace(
        pack,
        input_ids=None if pack.input_ids is None else pack.input_ids[index],
        labels=None if pack.labels is None else pack.labels[:size],
        position_ids=pack.position_ids[..., index],
        padding_mask=padding,
        cu_seqlens=laid.cu_seqlens,
        cu_seqlens_padded=laid.cu_seqlens_padded,
        max_seqlen=int(lengths.max(initial=0)),
        num_segments=len(lengths),
        slices=np.stack([laid.cu_seqlens_padded[:-1], laid.cu_seqlens_padded[1:]], axis=1).astype(np.int64),
        fields=fields,
        path_index=None,
        cu_paths=None,
        shared=None,
    )
