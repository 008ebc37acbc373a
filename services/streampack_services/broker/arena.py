"""The arena: the tokens and fields of every sample held, in memory of a size set at the start.

Tokens arrive in chunks, each copied once, one after another into the block that is being filled.
Samples leave in another order than they came, so blocks grow holes; when but one empty block is
left, the one with the fewest live tokens is moved behind what was filled last, into that spare
where need be, and becomes the spare (the cleaning of a log-structured store: Rosenblum and
Ousterhout, 1992). Handles, not addresses, are what others hold, so nobody notices. The broker's
credits bound live tokens to ``arena_tokens``; the slack of a fifth makes each cleaning worth its
copy, and covers the end of a block that a sample did not fit into, as long as no sample is longer
than an eighth of a block. Each field of axis ``token`` is a column beside the tokens, with the same
places; those of axis ``sample`` are kept by handle, beside that memory (``core.model.fields`` bounds
them). One thread uses it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streampack.core.layout.boundaries import Contents, layouts
from streampack.core.layout.shards import cut
from streampack.core.layout.step_frames import EDGES, INPUT_IDS
from streampack.core.model.fields import Field
from streampack.core.model.samples import I32, I64
from streampack.errors import InternalError
from streampack_services.broker.arena_kernels import KINDS, copy_slices, let_go, slices_of

SLACK = 1.25


def arena_tokens(memory_bytes: int, token_bytes: int, block_tokens: int) -> int:
    """Live tokens that an arena of ``memory_bytes`` can promise to hold, of samples up to an eighth of a block."""
    blocks = memory_bytes // token_bytes // block_tokens
    return int(max(blocks - 3, 0) * block_tokens / SLACK)


class _Column:
    """One field's numbers, ``width`` a token (or a sample), as unsigned integers of the same size."""

    def __init__(self, field: Field, count: int) -> None:
        self.width = field.value_bytes // field.storage.itemsize
        self.dtype = np.dtype(f"<u{field.storage.itemsize}")
        self.pad = field.fill(field.pad).view(self.dtype)[()]
        self.shift = int(field.align == "target")
        self.replicate = field.cp == "replicate"
        self.data: NDArray[Any] = np.empty(count * self.width, self.dtype)


Room = Callable[[int], NDArray[np.uint8] | None]
"""Gives memory of so many bytes, uint8 [n], or None."""


class Arena:
    """``memory_bytes`` of tokens of dtype ``tokens`` with their fields, in blocks of ``block_tokens``.

    No sample is longer than a block.
    """

    def __init__(self, memory_bytes: int, tokens: str, block_tokens: int, fields: tuple[Field, ...] = ()) -> None:
        by_token = [field for field in fields if field.axis == "token"]
        token_bytes = np.dtype(tokens).itemsize + sum(field.value_bytes for field in by_token)
        num_blocks = memory_bytes // token_bytes // block_tokens
        self._tokens: NDArray[Any] = np.empty(num_blocks * block_tokens, tokens)
        self._columns = {field.name: _Column(field, num_blocks * block_tokens) for field in by_token}
        self._by_sample = {field.name: _Column(field, 0) for field in fields if field.axis == "sample"}
        self._names = [field.name for field in fields]
        self._block_tokens = block_tokens
        self._empty = list(range(num_blocks - 1, -1, -1))
        self._live = np.zeros(num_blocks, np.int64)
        self._members: list[list[I64]] = [[] for _ in range(num_blocks)]
        self._offset = np.zeros(0, np.int64)
        self._length = np.zeros(0, np.int64)
        self._token_bytes = token_bytes
        self._block = self._empty.pop()
        self._touched = 1
        """Blocks: the lowest numbers are taken first."""
        self._fill = 0
        self.moved_tokens = 0
        """Copied by cleaning, since the start."""

    @property
    def touched_bytes(self) -> int:
        """Bytes of the blocks that were ever written to: the operating system gives memory when it is first used."""
        return self._touched * self._block_tokens * self._token_bytes

    @property
    def live_tokens(self) -> int:
        return int(self._live.sum())

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of a token."""
        return self._tokens.dtype

    def store(self, handles: I64, offsets: I64, lengths: I64, rows: I64, frames: tuple[Any, ...]) -> None:
        """Copy samples in: ``lengths`` int64 [n] tokens each, from ``offsets`` int64 [n] of a chunk's frames.

        ``frames`` are the tokens and then every field, as declared; ``rows`` int64 [n] each one's number in the chunk.
        """
        if not len(handles):
            return
        if int(lengths.max()) > self._block_tokens:
            raise InternalError(f"got a sample of {int(lengths.max())} tokens, expected at most {self._block_tokens}")
        self._reserve(int(handles.max()))
        columns = [(self._tokens, 1, np.frombuffer(frames[0], self._tokens.dtype))]
        for name, frame in zip(self._names, frames[1:], strict=True):
            if name in self._columns:
                column = self._columns[name]
                columns.append((column.data, column.width, np.frombuffer(frame, column.dtype)))
            else:
                column = self._by_sample[name]
                values = np.frombuffer(frame, column.dtype).reshape(-1, column.width)
                column.data.reshape(-1, column.width)[handles] = values[rows]
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
                places = [(to, int(offsets[at]), total)]
            else:
                places = list(zip(targets.tolist(), offsets[at:stop].tolist(), lengths[at:stop].tolist(), strict=True))
            for data, width, source in columns:
                for target, start, length in places:
                    data[target * width : (target + length) * width] = source[start * width : (start + length) * width]
            self._enter(handles[at:stop], targets, lengths[at:stop], total)
            at, base = stop, base + total

    def _take_empty(self) -> int:
        block = self._empty.pop()
        self._touched = max(self._touched, len(self._live) - len(self._empty))
        return block

    def release(self, handles: I64) -> None:
        """Forget samples, those that were never stored too; a block without any is empty again."""
        if not len(handles):
            return
        self._reserve(int(handles.max()))
        emptied = np.empty(len(handles), np.int64)
        count = let_go(handles, self._offset, self._length, self._block_tokens, self._live, emptied)
        for block in emptied[:count].tolist():
            if block != self._block:
                self._forget(block)

    def gather(
        self, packs: Contents, names: list[str], cp: int, rank: int, layout: str, room: Room | None = None
    ) -> tuple[NDArray[Any], ...]:
        """A rank's shards of packs, each a field of ``names`` in that order (``core.frames``).

        ``input_ids`` [sum of T / cp] padded with 0, ``edges`` int32 [slices], fields of axis ``token``
        [sum of T / cp * width] (or all of each pack, where they are replicated) and ``sample`` [samples * width].
        See ``core.layout`` for what a shard holds. ``room`` is asked for the memory of the first.
        """
        mine, total = self._slices(packs, cp, rank, layout)
        edges = np.empty(mine.shape[1] if EDGES in names else 0, np.int32)
        found: dict[str, NDArray[Any]] = {EDGES: edges}
        for name in names:
            if name in self._by_sample:
                column = self._by_sample[name]
                found[name] = column.data.reshape(-1, column.width)[packs.handles].reshape(-1)
            elif name in self._columns:
                column = self._columns[name]
                slices, count = self._slices(packs, 1, 0, layout) if column.replicate else (mine, total)
                found[name] = np.empty(count * column.width, column.dtype)
                _copy(column.data, slices, column.width, column.shift, column.pad, found[name], _NO_EDGES)
            elif name == INPUT_IDS:
                memory = room(total * self._tokens.itemsize) if room is not None else None
                found[name] = np.empty(total, self.dtype) if memory is None else memory.view(self.dtype)
                _copy(self._tokens, mine, 1, 0, 0, found[name], edges)
        return tuple(found[name] for name in names)

    def _slices(self, packs: Contents, cp: int, rank: int, layout: str) -> tuple[I64, int]:
        """Address, real tokens, offset and size of each slice of a shard, int64 [4, slices], and their tokens."""
        slices = np.empty((4, 2 * (len(packs.handles) + len(packs.counts))), np.int64)
        found, total = slices_of(*packs, self._offset, self._length, cp, rank, KINDS[layout], *slices)
        if found < 0:
            why = self._wrong(packs, cp, rank, layout)
            raise InternalError(f"got a pack that cannot be laid out, or a released sample: {why}")
        return slices[:, :found], total

    def _wrong(self, packs: Contents, cp: int, rank: int, layout: str) -> str:
        """Why no shard can be cut of packs."""
        self._reserve(int(packs.handles.max(initial=0)))
        try:
            cut(layouts(self._length[packs.handles], packs.counts, packs.aligns, packs.widths), cp, rank, layout)
        except ValueError as error:
            return str(error)
        return "nothing is wrong with it"

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
            self._block, self._fill = self._take_empty(), 0
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
            self._block, self._fill = self._take_empty(), 0
            self._append(members[fit:])
        self._live[victim] = 0
        self._forget(victim)

    def _append(self, handles: I64) -> None:
        """Copy samples that the arena holds to the end of the block being filled."""
        lengths, address = self._length[handles], self._offset[handles]
        start = self._block * self._block_tokens + self._fill
        total = int(lengths.sum())
        slices = np.stack([address, lengths, np.zeros(len(handles), np.int64), lengths])
        for data, width in [(self._tokens, 1), *((column.data, column.width) for column in self._columns.values())]:
            _copy(data, slices, width, 0, 0, data[start * width : (start + total) * width], _NO_EDGES)
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
            for column in self._by_sample.values():
                column.data = np.concatenate([column.data, np.zeros(grow * column.width, column.dtype)])


_NO_EDGES: I32 = np.empty(0, np.int32)


def _copy(
    data: NDArray[Any], slices: I64, width: int, shift: int, pad: Any, out: NDArray[Any], edges: I32
) -> None:  # fmt: skip
    """Slices as of ``Arena._slices``, of a column."""
    address, real, offset, size = slices
    filler = data.dtype.type(pad)  # of one type, whoever asks: the kernel is compiled once for a column
    wrong = copy_slices(data, address, real, offset, size, width, shift, filler, out, edges)
    if wrong >= 0:
        raise InternalError(f"got slice {wrong} of a pack outside of the arena")
