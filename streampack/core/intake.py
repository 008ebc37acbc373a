"""Intake: one partition's samples, in order, once each, and never more than was granted.

The broker owns the position: it tells a producer where to begin (a *session*), and takes samples
from there on, by sequence number. What came before is a repeat and is dropped; what comes later
means that messages were lost, and is answered with a new session that begins at the gap
(go-back-N). Credits are absolute within a session: a producer may send samples below
``grant_seq`` and bytes below ``grant_bytes``, so a lost or repeated credit message harms nothing
(RFC 9000, section 4.1, has the same rule for the same reason).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from streampack.core.samples import I64

MAX_UNMERGED = 16_384
"""Samples of one partition that may wait for the merge: bounds what short samples cost beside their tokens."""


@dataclass(slots=True)
class Intake:
    """The books of one partition.

    ``expected_seq`` is the next sample number, ``cursor`` where the source goes on there,
    ``total`` the number of samples once the end is known. ``closed``: the feed has ended and wants no more
    of it. ``session_bytes`` were taken in this
    session; tokens that are kept but not merged yet, times ``token_bytes``, stay below
    ``quota_bytes``.
    """

    quota_bytes: int
    token_bytes: int
    expected_seq: int = 0
    cursor: tuple[int, int, int] | None = None
    total: int | None = None
    closed: bool = False
    session: int = 0
    session_bytes: int = 0
    kept_tokens: int = 0
    merged_tokens: int = 0
    merged_seq: int = 0

    def begin(self, session: int) -> None:
        """A new session: byte credits start again from nothing."""
        self.session = session
        self.session_bytes = 0

    @property
    def grant_seq(self) -> int:
        """The sample number that must not be reached."""
        return self.merged_seq + MAX_UNMERGED

    @property
    def grant_bytes(self) -> int:
        """The bytes of this session that must not be passed."""
        waiting = (self.kept_tokens - self.merged_tokens) * self.token_bytes
        return self.session_bytes + self.quota_bytes - waiting

    def fits(self, stop_seq: int, num_bytes: int) -> bool:
        """Is a chunk that ends before ``stop_seq`` within the credits?"""
        return stop_seq <= self.grant_seq and self.session_bytes + num_bytes <= self.grant_bytes

    def accept(self, stop_seq: int, num_bytes: int, kept_tokens: int, cursor: tuple[int, int, int]) -> None:
        """Count a chunk that begins at ``expected_seq``."""
        self.expected_seq = stop_seq
        self.cursor = cursor
        self.session_bytes += num_bytes
        self.kept_tokens += kept_tokens

    @property
    def ended(self) -> bool:
        """All of it has been taken, or all that will be."""
        return self.closed or (self.total is not None and self.expected_seq >= self.total)


@dataclass(frozen=True, slots=True)
class Admitted:
    """What the over-long policy makes of a chunk: one entry a piece, or a tombstone of length 0.

    ``source`` int64 [m]: which sample of the chunk; ``offset`` tokens into it; ``length``;
    ``part``. Counts of samples and tokens that the policy touched.
    """

    source: I64
    offset: I64
    length: I64
    part: I64
    num_touched: int
    lost_tokens: int


def apply_overlong(lengths: I64, limit: int, policy: str) -> Admitted:
    """Cut, split or drop samples longer than ``limit`` tokens; ``policy`` is ``drop | truncate | split``.

    ``error`` never comes here: the caller refuses such a chunk. A function of the lengths alone.
    """
    count = len(lengths)
    source = np.arange(count, dtype=np.int64)
    zeros = np.zeros(count, np.int64)
    over = lengths > limit
    touched = int(over.sum())
    if not touched:
        return Admitted(source, zeros, lengths, zeros, 0, 0)
    if policy == "split":
        pieces = np.maximum(-(-lengths // limit), 1)
        source = np.repeat(source, pieces)
        part = np.arange(len(source)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        offset = part * limit
        return Admitted(source, offset, np.minimum(lengths[source] - offset, limit), part, touched, 0)
    kept = np.where(over, limit if policy == "truncate" else 0, lengths)
    return Admitted(source, zeros, kept, zeros, touched, int((lengths - kept).sum()))
