"""The tree of a chunk as the broker admits it: its tokens, its whole rows, and the trees that it is cut into.

The payload of such a chunk has shared tokens once. The broker's arena holds whole samples, so admission copies the
shared tokens into each sample that has them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streampack.core.model.samples import I64
from streampack.core.trees.shared_prefixes import SharedPieces, check_shared, cut_trees, fit_trees, path_index


class ChunkTree(NamedTuple):
    """The tree of a chunk of n samples.

    Attributes:
        shared: int64 [n], tokens that each sample shares with the sample before it.
        lengths: int64 [n], tokens of each sample.
    """

    shared: I64
    lengths: I64

    @property
    def own_tokens(self) -> int:
        """Tokens of all samples, each shared one once."""
        return int((self.lengths - self.shared).sum())

    def whole_rows(
        self, frames: Iterable[Any], widths: Sequence[tuple[int, int]], once: Sequence[bool]
    ) -> tuple[Any, ...]:  # fmt: skip
        """Return a chunk's payload with the shared tokens in each sample that has them.

        Args:
            frames: The payload frames.
            widths: Bytes (per token, per sample) of each frame.
            once: True for each frame that has the value of a shared token once.
        """
        own = self.lengths - self.shared
        at = path_index(self.shared, self.lengths, np.cumsum(own) - own)
        return tuple(
            np.frombuffer(frame, np.uint8).reshape(-1, width)[at].reshape(-1).data if is_once else frame
            for frame, (width, _), is_once in zip(frames, widths, once, strict=True)
        )

    def own_lengths(self, lengths: I64) -> I64:
        """Return the tokens that samples add to one pack that holds them all, int64 [n].

        ``lengths``: the tokens of each sample that are kept, int64 [n].
        """
        at = np.arange(len(lengths))
        return lengths - self.in_one_pack(at, lengths, np.zeros_like(at)).shared

    def in_one_pack(self, source: I64, length: I64, part: I64) -> SharedPieces:
        """Return the tokens that pieces of the samples share if one pack holds them all (``fit_trees``)."""
        return fit_trees(source, length, part, self.shared, None, None)

    def cut(self, source: I64, length: I64, part: I64, limit: int, most: int | None) -> SharedPieces:
        """Return the tokens that pieces share in packs of ``limit`` tokens and ``most`` samples (``cut_trees``)."""
        return cut_trees(source, length, part, self.shared, limit, most)


def tree_of(columns: dict[str, NDArray[Any]], lengths: I64) -> ChunkTree | None:
    """Take the tree of a chunk out of its ``columns``, by their names in the table; None if the chunk has no tree.

    Raises ValueError if the samples cannot share these tokens. ``lengths``: tokens of each sample, int64 [n].
    """
    column = columns.pop("shared", None)
    if column is None:
        return None
    shared = column.astype(np.int64)
    check_shared(shared, lengths, np.zeros(1, np.int64))
    return ChunkTree(shared, lengths)
