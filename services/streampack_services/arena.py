"""The arena: the tokens of every sample held, in memory of a size set at the start.

Tokens arrive in chunks, each copied once, one after another into the block that is being filled.
Samples leave in another order than they came, so blocks grow holes; when but one empty block is
left, the one with the fewest live tokens is moved behind what was filled last, into that spare
where need be, and becomes the spare (the cleaning of a log-structured store: Rosenblum and
Ousterhout, 1992). Handles, not addresses, are what others hold, so nobody notices. The broker's
credits bound live tokens to ``arena_tokens``; the slack of a fifth makes each cleaning worth its
copy, and covers the end of a block that a sample did not fit into, as long as no sample is longer
than an eighth of a block. One thread uses it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from streampack.core.kernels import gather
from streampack.core.samples import I32, I64
from streampack.errors import InternalError

SLACK = 1.25


def arena_tokens(memory_bytes: int, token_bytes: int, block_tokens: int) -> int:
    """Live tokens that an arena of ``memory_bytes`` can promise to hold, of samples up to an eighth of a block."""
    blocks = memory_bytes // token_bytes // block_tokens
    return int(max(blocks - 3, 0) * block_tokens / SLACK)


class Arena:
    """``memory_bytes`` of tokens of ``dtype``, in blocks of ``block_tokens``; no sample is longer than a block."""

    def __init__(self, memory_bytes: int, dtype: str, block_tokens: int) -> None:
        self._tokens: NDArray[Any] = np.empty(
            memory_bytes // np.dtype(dtype).itemsize // block_tokens * block_tokens, dtype
        )
        self._block_tokens = block_tokens
        num_blocks = len(self._tokens) // block_tokens
        self._empty = list(range(num_blocks - 1, -1, -1))
        self._live = np.zeros(num_blocks, np.int64)
        self._members: list[list[I64]] = [[] for _ in range(num_blocks)]
        self._offset = np.zeros(0, np.int64)
        self._length = np.zeros(0, np.int64)
        self._block = self._empty.pop()
        self._fill = 0
        self.moved_tokens = 0
        """Copied by cleaning, since the start."""

    @property
    def live_tokens(self) -> int:
        return int(self._live.sum())

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of a token."""
        return self._tokens.dtype

    def store(self, handles: I64, offsets: I64, lengths: I64, frame: Any) -> None:
        """Copy samples in: ``lengths`` int64 [n] tokens each, from ``offsets`` int64 [n] of ``frame``'s tokens."""
        if not len(handles):
            return
        if int(lengths.max()) > self._block_tokens:
            raise InternalError(f"got a sample of {int(lengths.max())} tokens, expected at most {self._block_tokens}")
        tokens = np.frombuffer(frame, self._tokens.dtype)
        self._reserve(int(handles.max()))
        ends = np.cumsum(lengths)
        joined = bool((offsets - offsets[0] == ends - lengths).all())
        at = base = 0
        while at < len(handles):
            stop = int(np.searchsorted(ends, base + self._block_tokens - self._fill, "right"))
            if stop == at:
                self._open()
                continue
            to = self._block * self._block_tokens + self._fill
            total = int(ends[stop - 1]) - base
            targets = ends[at:stop] - lengths[at:stop] + (to - base)
            if joined:
                start = int(offsets[at])
                self._tokens[to : to + total] = tokens[start : start + total]
            else:
                for target, start, length in zip(
                    targets.tolist(), offsets[at:stop].tolist(), lengths[at:stop].tolist(), strict=True
                ):
                    self._tokens[target : target + length] = tokens[start : start + length]
            self._enter(handles[at:stop], targets, lengths[at:stop], total)
            at, base = stop, base + total

    def release(self, handles: I64) -> None:
        """Forget samples; a block without any is empty again."""
        blocks = self._offset[handles] // self._block_tokens
        gone = np.bincount(blocks, self._length[handles], len(self._live)).astype(np.int64)
        self._length[handles] = 0
        self._live -= gone
        for block in np.flatnonzero((gone > 0) & (self._live == 0)).tolist():
            if block != self._block:
                self._forget(block)

    def gather(
        self, packs: tuple[I64, ...], align: int, width: int, cp: int, rank: int
    ) -> tuple[NDArray[Any], I32 | None]:
        """A rank's shards of packs: tokens [packs, width], padded with 0, and edges int32 [samples, 2] if cp > 1.

        ``width`` is the pack's length over cp; see ``core.layout`` for what a shard holds.
        """
        handles = np.concatenate(packs) if packs else np.zeros(0, np.int64)
        bounds = np.zeros(len(packs) + 1, np.int64)
        np.cumsum([len(pack) for pack in packs], out=bounds[1:])
        out = np.empty((len(packs), width), self._tokens.dtype)
        edges = np.empty((len(handles) if cp > 1 else 0, 2), np.int32)
        wrong = gather(self._tokens, self._offset, self._length, handles, bounds, align, cp, rank, out, edges)
        if wrong >= 0:
            lengths = self._length[packs[wrong]]
            raise InternalError(
                f"got a pack of {int((-(-lengths // align) * align).sum())} tokens, {int((lengths == 0).sum())} of its "
                f"samples released, expected at most {width * cp} and none"
            )
        return out, edges if cp > 1 else None

    def _enter(self, handles: I64, offsets: I64, lengths: I64, total: int) -> None:
        self._offset[handles] = offsets
        self._length[handles] = lengths
        self._members[self._block].append(handles)
        self._live[self._block] += total
        self._fill += total

    def _open(self) -> None:
        """Make room: in an empty block, or with only the spare left by cleaning one."""
        if not self._live[self._block]:
            self._members[self._block].clear()
            self._fill = 0
            return
        if len(self._empty) > 1:
            self._block, self._fill = self._empty.pop(), 0
            return
        live = self._live.astype(np.float64)
        live[self._empty] = np.inf
        live[self._block] = np.inf
        open_tokens = self._open_tokens
        if self._empty:
            self._move(int(np.argmin(live)))
        if self._open_tokens <= open_tokens:
            raise InternalError("the arena is over its capacity: credits were not kept")

    @property
    def _open_tokens(self) -> int:
        """Room in empty blocks and at the end of the one being filled."""
        return (len(self._empty) + 1) * self._block_tokens - self._fill

    def _move(self, victim: int) -> None:
        """Copy a block's live samples behind what was filled last, and what does not fit there into the spare."""
        members = np.concatenate(self._members[victim])
        base = victim * self._block_tokens
        inside = (self._offset[members] >= base) & (self._offset[members] < base + self._block_tokens)
        members = np.unique(members[inside & (self._length[members] > 0)])
        ends = np.cumsum(self._length[members])
        fit = int(np.searchsorted(ends, self._block_tokens - self._fill, "right"))
        self._append(members[:fit])
        if fit < len(members):
            self._block, self._fill = self._empty.pop(), 0
            self._append(members[fit:])
        self._live[victim] = 0
        self._forget(victim)

    def _append(self, handles: I64) -> None:
        """Copy samples that the arena holds to the end of the block being filled."""
        lengths = self._length[handles]
        start = self._block * self._block_tokens + self._fill
        total = int(lengths.sum())
        room = self._tokens[start : start + total].reshape(1, total)
        bounds, edges = np.array([0, len(handles)]), np.empty((0, 2), np.int32)
        gather(self._tokens, self._offset, self._length, handles, bounds, 1, 1, 0, room, edges)
        self._enter(handles, start + np.cumsum(lengths) - lengths, lengths, total)
        self.moved_tokens += total

    def _forget(self, block: int) -> None:
        self._members[block].clear()
        self._empty.append(block)

    def _reserve(self, handle: int) -> None:
        if handle >= len(self._offset):
            grow = max(handle + 1, 2 * len(self._offset)) - len(self._offset)
            self._offset = np.concatenate([self._offset, np.zeros(grow, np.int64)])
            self._length = np.concatenate([self._length, np.zeros(grow, np.int64)])
