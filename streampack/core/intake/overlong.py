"""The policy for overlong samples: which pieces of a chunk's samples are kept.

A stream's ``overlong`` policy decides about samples longer than the budget of a pack: ``drop``, ``truncate`` or
``split``. With ``error``, ``chunk_check`` has already rejected the chunk. ``admission`` applies the policy to each
chunk that it admits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec
import numpy as np
from msgspec import UnsetType
from numpy.typing import NDArray

from streampack.core.media.media_counts import MediaOfChunk, over_limits
from streampack.core.model.lease_terms import StreamTerms
from streampack.core.model.samples import I64, Keep
from streampack.core.trees.chunk_trees import ChunkTree
from streampack.core.trees.shared_prefixes import SharedPieces


@dataclass(frozen=True, slots=True)
class Pieces:
    """The kept pieces of a chunk's samples, in order; a dropped sample has one piece of length 0.

    Attributes:
        source: int64 [n], the sample's position in the chunk.
        offset: int64 [n], tokens of the sample before the piece.
        length: int64 [n], tokens of the piece.
        part: int64 [n], number of the piece in its sample.
        num_touched: Samples that were cut, split or dropped.
        lost_tokens: Tokens of the samples that are in no piece.
        tree: Tokens that the pieces share; None if the chunk has no tree.
    """

    source: I64
    offset: I64
    length: I64
    part: I64
    num_touched: int
    lost_tokens: int
    tree: SharedPieces | None = None


def drop_chunk(lengths: I64) -> Pieces:
    """Return the pieces of a chunk that is dropped as a whole: for each sample, one piece of length 0.

    ``lengths``: tokens of each sample, int64 [n].
    """
    source, none = np.arange(len(lengths), dtype=np.int64), np.zeros(len(lengths), np.int64)
    return Pieces(source, none, none, none, int((lengths > 0).sum()), int(lengths.sum()))


def drop_some(pieces: Pieces, dropped: NDArray[np.bool_]) -> Pieces:
    """Return the pieces of a chunk without some of its samples: each of these gets one piece of length 0.

    Args:
        pieces: The pieces of n samples.
        dropped: bool [n], the samples to drop.
    """
    is_dropped = dropped[pieces.source]
    kept = ~is_dropped | (pieces.part == 0)
    length = np.where(is_dropped, 0, pieces.length)
    return Pieces(
        pieces.source[kept], pieces.offset[kept], length[kept], pieces.part[kept], pieces.num_touched,
        pieces.lost_tokens,
    )  # fmt: skip


def drop_unfit_media(pieces: Pieces, lengths: I64, media: MediaOfChunk, terms: StreamTerms) -> Pieces:
    """Return the pieces of a chunk without the samples whose media fit no pack, and without cut samples with media.

    A cut would part the tokens of a media item from its values.

    Args:
        pieces: The pieces of n samples.
        lengths: int64 [n], tokens of each sample.
        media: The media of these samples.
        terms: Terms of the stream.
    """
    kept = np.bincount(pieces.source, pieces.length > 0, len(lengths)) > 0
    cut = np.bincount(pieces.source[pieces.length != lengths[pieces.source]], minlength=len(lengths)) > 0
    unfit = (media.items > 0) & kept & (cut | over_limits(media, terms.limits))
    if not unfit.any():
        return pieces
    lost = int(np.bincount(pieces.source, pieces.length, len(lengths))[unfit].sum())
    rest = drop_some(pieces, unfit)
    return replace(rest, num_touched=rest.num_touched + int((unfit & ~cut).sum()), lost_tokens=rest.lost_tokens + lost)


def apply_overlong(lengths: I64, limit: int, policy: str) -> Pieces:
    """Cut, split or drop samples longer than ``limit`` tokens; their ``lengths`` alone decide.

    Args:
        lengths: int64 [n], tokens of each sample.
        limit: Tokens that a piece may have.
        policy: ``drop``, ``truncate`` or ``split``; with ``error``, samples stay whole.
    """
    count = len(lengths)
    source = np.arange(count, dtype=np.int64)
    zeros = np.zeros(count, np.int64)
    if not count or int(lengths.max()) <= limit:
        return Pieces(source, zeros, lengths, zeros, 0, 0)
    over = lengths > limit
    touched = int(over.sum())
    if policy == "split":
        pieces = np.maximum(-(-lengths // limit), 1)
        source = np.repeat(source, pieces)
        part = np.arange(len(source)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        offset = part * limit
        return Pieces(source, offset, np.minimum(lengths[source] - offset, limit), part, touched, 0)
    if policy == "error":  # its turn comes in a stage with a larger budget, or the feed fails
        return Pieces(source, zeros, lengths, zeros, 0, 0)
    kept = np.where(over, limit if policy == "truncate" else 0, lengths)
    return Pieces(source, zeros, kept, zeros, touched, int((lengths - kept).sum()))


def apply_terms(
    terms: StreamTerms, lengths: I64, keep: Keep | UnsetType = msgspec.UNSET, skip: int = 0,
    tree: ChunkTree | None = None,
) -> Pieces:  # fmt: skip
    """Apply a stream's policy to the samples of a chunk from the ``skip``-th on.

    A chunk that is kept in one pack (``keep``) cannot be cut. The whole chunk is dropped if it does not fit a pack. A
    tree that is not kept in one pack is cut into trees that fill packs well: see ``cut_trees``.

    Args:
        terms: The stream's terms.
        lengths: int64 [n], tokens of all samples of the chunk.
        keep: How the chunk's samples stay together.
        skip: Samples at the chunk's beginning for which no pieces are returned.
        tree: The tree of all samples, if any.
    """
    if tree is None:
        if keep == "pack" and not terms.fits(apply_overlong(lengths, terms.limit, terms.overlong).length):
            return drop_chunk(lengths[skip:])
        return apply_overlong(lengths[skip:], terms.limit, terms.overlong)
    whole = apply_overlong(lengths, terms.limit, terms.overlong)
    pieces = whole.source, whole.length, whole.part
    sharing = tree.in_one_pack(*pieces) if keep == "pack" else tree.cut(*pieces, terms.limit, terms.most)
    if keep == "pack" and not terms.fits(sharing.own(whole.length)):
        return drop_chunk(lengths[skip:])
    rest = apply_overlong(lengths[skip:], terms.limit, terms.overlong)
    return replace(rest, tree=sharing.after(len(whole.length) - len(rest.length)))
