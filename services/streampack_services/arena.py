"""The arena: the tokens of every sample held, in memory of a size set at the start.

Tokens arrive in chunks, each copied once, one after another into the block that is being filled.
Samples leave in another order than they came, so blocks grow holes; when no empty block is left,
the one with the fewest live tokens is moved into the spare and becomes empty (the cleaning of a
log-structured store: Rosenblum and Ousterhout, 1992). Handles, not addresses, are what others
hold, so nobody notices. The broker's credits bound live tokens to ``capacity_tokens``; the slack
of a fifth on top makes each cleaning worth its copy. One thread uses it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from streampack.core.kernels import gather_whole, gather_zigzag
from streampack.core.samples import I32, I64
from streampack.errors import InternalError

SLACK = 1.25


def arena_tokens(memory_bytes: int, token_bytes: int, block_tokens: int) -> int:
    """Live tokens that an arena of ``memory_bytes`` can promise to hold."""
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
        tokens = np.frombuffer(frame, self._tokens.dtype)
        self._reserve(int(handles.max()))
        total = int(lengths.sum())
        if total == len(tokens) and total <= self._block_tokens:
            start = self._room(total)
            self._tokens[start : start + total] = tokens
            self._enter(handles, start + offsets, lengths, total)
            return
        for handle, offset, length in zip(handles, offsets.tolist(), lengths.tolist(), strict=True):
            start = self._room(length)
            self._tokens[start : start + length] = tokens[offset : offset + length]
            one = np.array([handle], np.int64)
            self._enter(one, np.array([start], np.int64), np.array([length], np.int64), length)

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
        out = np.zeros((len(packs), width), self._tokens.dtype)
        count = sum(len(handles) for handles in packs)
        edges = np.empty((count, 2), np.int32) if cp > 1 else None
        at = 0
        for row, handles in zip(out, packs, strict=True):
            lengths = self._length[handles]
            slots = -(-lengths // align) * align
            offsets = self._offset[handles]
            if edges is None:
                gather_whole(self._tokens, offsets, lengths, slots, row)
            else:
                flat = edges[at : at + len(handles)].reshape(-1)
                gather_zigzag(self._tokens, offsets, lengths, slots, cp, rank, row, flat)
                at += len(handles)
        return out, edges

    def _enter(self, handles: I64, offsets: I64, lengths: I64, total: int) -> None:
        self._offset[handles] = offsets
        self._length[handles] = lengths
        self._members[self._block].append(handles)
        self._live[self._block] += total
        self._fill += total

    def _room(self, tokens: int) -> int:
        """Where the next ``tokens`` go, opening another block if need be."""
        if self._fill + tokens > self._block_tokens:
            self._open()
            while self._fill + tokens > self._block_tokens:
                self._open()
        return self._block * self._block_tokens + self._fill

    def _open(self) -> None:
        """Go on in an empty block; with only the spare left, clean until there is another."""
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
        victim = int(np.argmin(live))
        if not self._empty or self._live[victim] >= self._block_tokens:
            raise InternalError("the arena is over its capacity: credits were not kept")
        self._block, self._fill = self._empty.pop(), 0
        self._move(victim)

    def _move(self, victim: int) -> None:
        """Copy a block's live samples into the block being filled, which has room for all of them."""
        members = np.concatenate(self._members[victim])
        base = victim * self._block_tokens
        inside = (self._offset[members] >= base) & (self._offset[members] < base + self._block_tokens)
        members = np.unique(members[inside & (self._length[members] > 0)])
        lengths = self._length[members]
        start = self._block * self._block_tokens + self._fill
        offsets = start + np.cumsum(lengths) - lengths
        gather_whole(self._tokens, self._offset[members], lengths, lengths, self._tokens[start:])
        total = int(lengths.sum())
        self._enter(members, offsets, lengths, total)
        self._live[victim] = 0
        self.moved_tokens += total
        self._forget(victim)

    def _forget(self, block: int) -> None:
        self._members[block].clear()
        self._empty.append(block)

    def _reserve(self, handle: int) -> None:
        if handle >= len(self._offset):
            grow = max(handle + 1, 2 * len(self._offset)) - len(self._offset)
            self._offset = np.concatenate([self._offset, np.zeros(grow, np.int64)])
            self._length = np.concatenate([self._length, np.zeros(grow, np.int64)])
