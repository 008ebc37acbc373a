"""The arena: the tokens and fields of all samples that the broker holds, in memory of a fixed size.

The memory is divided into blocks, and one block is filled at a time. A new sample is copied once, to the end of that
block. Samples are released in another order, so blocks get holes. When one empty block is left, the arena cleans. It
copies the live samples of the block with the fewest live tokens to the end of the filled memory. That block is then
empty. (A log-structured store cleans likewise: Rosenblum and Ousterhout, 1992.) Callers hold handles, not addresses,
so a move does not concern them.

The broker's credits bound live tokens to ``arena_tokens``. The rest of the memory, a fifth, keeps cleaning cheap. It
also covers the unused ends of blocks, if no sample is longer than an eighth of a block.

A field of axis ``token`` is a column with the same addresses as the tokens. A field of axis ``sample`` is a column by
handle, outside the fixed memory (``core.model.fields`` bounds its size). So are the media of samples; credit counts
their bytes, so that all together need at most the memory of the arena. The arena is for one thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streampack.core.layout.boundaries import Contents, layouts
from streampack.core.layout.shards import cut
from streampack.core.layout.step_frames import EDGES, INPUT_IDS
from streampack.core.model.fields import MEDIA, Field
from streampack.core.model.samples import I32, I64
from streampack.errors import InternalError
from streampack_services.broker.arena_kernels import KINDS, copy_slices, find_slices, measure_stored, release_samples

SLACK = 1.25
"""Memory for tokens / live tokens that the arena promises to hold."""


def arena_tokens(memory_bytes: int, token_bytes: int, block_tokens: int) -> int:
    """Return how many live tokens always fit in ``memory_bytes``, if samples take at most an eighth of a block."""
    blocks = memory_bytes // token_bytes // block_tokens
    return int(max(blocks - 3, 0) * block_tokens / SLACK)


class _Column:
    """The values of one field for ``count`` tokens (or samples): ``width`` numbers for each.

    Numbers are unsigned integers of the field's item size, so any dtype is copied bit by bit. ``once``: in a pack with
    trees, a shared token has one value of the field, and not one for each sample.
    """

    def __init__(self, field: Field, count: int) -> None:
        self.width = field.value_bytes // field.storage.itemsize
        self.dtype = np.dtype(f"<u{field.storage.itemsize}")
        self.pad = field.fill(field.pad).view(self.dtype)[()]
        self.shift = int(field.align == "target")
        self.replicate = field.cp == "replicate"
        self.once = field.align == "token"
        self.data: NDArray[Any] = np.empty(count * self.width, self.dtype)


Allocate = Callable[[int], NDArray[np.uint8] | None]
"""Takes a number of bytes; returns memory of that size, uint8 [bytes], or None if it has none."""


class Arena:
    """The tokens (dtype ``tokens``) and fields of samples, by handle, in ``memory_bytes`` of memory.

    The memory is divided into blocks of ``block_tokens``; no sample is longer than a block.
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
        """Blocks that were ever used. Empty blocks with lower numbers are used first."""
        self._fill = 0
        self._media: dict[int, bytes] = {}
        self.media_bytes = 0
        """Bytes of the media of the samples held, which are outside the blocks."""
        self.moved_tokens = 0
        """Tokens that cleaning has copied since the start."""

    @property
    def touched_bytes(self) -> int:
        """Bytes of the blocks that were ever used: the system gives a page of memory only when it is first written."""
        return self._touched * self._block_tokens * self._token_bytes

    @property
    def live_tokens(self) -> int:
        """Tokens of the samples held, without fields."""
        return int(self._live.sum())

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of a token."""
        return self._tokens.dtype

    def store_media(self, handles: I64, bounds: I64, frame: Any) -> None:
        """Copy the media of samples, ``handles`` int64 [n], out of a chunk's frame.

        Args:
            handles: Handles of the samples, int64 [n].
            bounds: int64 [2, n], where the media of each sample begin and end in the frame.
            frame: Bytes of the media of a chunk.
        """
        view = memoryview(frame).cast("B")
        for handle, begin, end in zip(handles.tolist(), *bounds.tolist(), strict=True):
            if end > begin:
                self._media[handle] = bytes(view[begin:end])
                self.media_bytes += end - begin

    def store(self, handles: I64, offsets: I64, lengths: I64, rows: I64, frames: tuple[Any, ...]) -> None:
        """Copy samples of a chunk into the arena, under new ``handles`` int64 [n].

        Args:
            handles: Handles of the samples, int64 [n].
            offsets: First token of each sample in the chunk's tokens, int64 [n].
            lengths: Tokens of each sample, int64 [n].
            rows: Index of each sample in the chunk, int64 [n].
            frames: The chunk's tokens, then one buffer for each field in the order of the rules.
        """
        if not len(handles):
            return
        ends = np.empty(len(handles), np.int64)
        longest, last, joined = measure_stored(handles, offsets, lengths, ends)
        if longest > self._block_tokens:
            raise InternalError(f"got a sample of {longest} tokens, expected at most {self._block_tokens}")
        self._reserve(last)
        columns = [(self._tokens, 1, np.frombuffer(frames[0], self._tokens.dtype))]
        for name, frame in zip(self._names, frames[1:], strict=True):
            if name in self._columns:
                column = self._columns[name]
                columns.append((column.data, column.width, np.frombuffer(frame, column.dtype)))
            else:
                column = self._by_sample[name]
                values = np.frombuffer(frame, column.dtype).reshape(-1, column.width)
                column.data.reshape(-1, column.width)[handles] = values[rows]
        at = base = 0
        while at < len(handles):
            stop = int(ends.searchsorted(base + self._block_tokens - self._fill, "right"))
            if stop == at:
                self._make_room()
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
            self._record(handles[at:stop], targets, lengths[at:stop], total)
            at, base = stop, base + total

    def _take_empty(self) -> int:
        """Remove a block from the empty ones and return its number."""
        block = self._empty.pop()
        self._touched = max(self._touched, len(self._live) - len(self._empty))
        return block

    def release(self, handles: I64) -> None:
        """Free the memory of samples, ``handles`` int64 [n]. Handles that were never stored are allowed."""
        if not len(handles):
            return
        if self._media:
            for handle in handles.tolist():
                self.media_bytes -= len(self._media.pop(handle, b""))
        self._reserve(int(handles.max()))
        emptied = np.empty(len(handles), np.int64)
        count = release_samples(handles, self._offset, self._length, self._block_tokens, self._live, emptied)
        for block in emptied[:count].tolist():
            if block != self._block:
                self._mark_empty(block)

    def gather(
        self,
        packs: Contents,
        names: list[str],
        cp: int,
        ranks: tuple[int, ...],
        layout: str,
        allocate: Allocate | None = None,
    ) -> tuple[NDArray[Any], ...]:
        """Return the shards of packs that context-parallel ``ranks`` of ``cp`` hold: one array for each name.

        Packs that groups of ranks share (``packs.sizes``) are cut by ``zigzag`` for each group, and have one rank each.
        An array that the layout cuts has the shards of all packs for the first rank, then for the next. Other arrays
        occur once. If samples share tokens, each shared token occurs once, and ranks get whole packs. Fields aligned
        with the target have the values of every sample then, without padding.

        Args:
            packs: The packs' samples and widths.
            names: Names of fields, ``input_ids`` and ``edges``, as in ``core.layout.step_frames``.
            cp: Context-parallel ranks.
            ranks: Context-parallel ranks, from 0.
            layout: Layout of the shards: a key of ``KINDS``. ``core.layout.shards`` defines them.
            allocate: Gives the memory for ``input_ids``; without it, or if it returns None, the memory is new.

        Returns:
            One-dimensional arrays. ``input_ids``: sum of T / cp tokens for each rank, 0 as padding. ``edges``: for each
            slice the token that follows it in its segment, or -100, int32. A field of axis ``token``: its numbers for
            the same tokens, or for all tokens of the packs if it is replicated. A field of axis ``sample``: its numbers
            for each sample. ``media``: the media bytes of each sample, uint8.
        """
        shards, total = self._slices_of_shards(packs, cp, ranks, layout)
        edges = np.empty(shards.shape[1] if EDGES in names else 0, np.int32)
        arrays: dict[str, NDArray[Any]] = {EDGES: edges}
        for name in names:
            if name == MEDIA:
                media = (self._media.get(handle, b"") for handle in packs.handles.tolist())
                arrays[name] = np.frombuffer(b"".join(media), np.uint8)
            elif name in self._by_sample:
                column = self._by_sample[name]
                arrays[name] = column.data.reshape(-1, column.width)[packs.handles].reshape(-1)
            elif name in self._columns:
                column = self._columns[name]
                slices, count = shards, total
                if packs.depths is not None and not column.once:
                    slices, count = self._slices_of_rows(packs.handles)
                elif column.replicate:
                    slices, count = self._slices_of_shards(packs, 1, (0,), "whole")
                arrays[name] = np.empty(count * column.width, column.dtype)
                _copy_slices(column.data, slices, column.width, column.shift, column.pad, arrays[name], _NO_EDGES)
            elif name == INPUT_IDS:
                memory = allocate(total * self._tokens.itemsize) if allocate is not None else None
                arrays[name] = np.empty(total, self.dtype) if memory is None else memory.view(self.dtype)
                _copy_slices(self._tokens, shards, 1, 0, 0, arrays[name], edges)
        return tuple(arrays[name] for name in names)

    def _slices_of_shards(self, packs: Contents, cp: int, ranks: tuple[int, ...], layout: str) -> tuple[I64, int]:
        """Return the slices of the ranks' shards, rank by rank, and the tokens of all of them.

        The slices are int64 [4, slices]: address, real tokens, offset and size. With the layout ``whole`` all ranks
        have the same shard, which occurs once. Packs that groups of ranks share have one rank each, see ``gather``.
        """
        handles, counts, widths, aligns, depths, sizes, own = packs
        if layout != "whole" and sizes is not None:
            layout = "zigzag"
        if layout == "whole" or sizes is not None:
            ranks = ranks[:1]
        places, lengths = self._offset, self._length
        if depths is not None:
            self._reserve(int(handles.max(initial=0)))
            places, lengths = places[handles] + depths, lengths[handles] - depths
            handles = np.arange(len(handles))
        slices = np.empty((4, 2 * (len(packs.handles) + len(packs.counts)) * len(ranks)), np.int64)
        num_slices = total = 0
        for rank in ranks:
            room = slices[:, num_slices:] if num_slices else slices
            cps, of_packs = (np.array([cp]), np.array([rank])) if sizes is None or own is None else (sizes, own)
            count, tokens = find_slices(
                handles, counts, widths, aligns, places, lengths, cps, of_packs, KINDS[layout], *room
            )
            if count < 0:
                at = tokens % len(cps)
                why = self._layout_error(packs, tokens, int(cps[at]), int(of_packs[at]), layout)
                raise InternalError(f"cannot lay out a pack, or one of its samples was released: {why}")
            num_slices, total = num_slices + count, total + tokens
        return slices[:, :num_slices], total

    def _slices_of_rows(self, handles: I64) -> tuple[I64, int]:
        """Return the slices of whole samples, as ``_slices_of_shards`` does, and the tokens of all of them."""
        lengths = self._length[handles]
        return np.stack([self._offset[handles], lengths, np.zeros_like(lengths), lengths]), int(lengths.sum())

    def _layout_error(self, packs: Contents, pack: int, cp: int, rank: int, layout: str) -> str:
        """Return the reason why a pack cannot be cut into shards, as a sentence for an error."""
        self._reserve(int(packs.handles.max(initial=0)))
        begin, one = int(packs.counts[:pack].sum()), slice(pack, pack + 1)
        own = slice(begin, begin + int(packs.counts[pack]))
        try:
            lengths = self._length[packs.handles[own]] - (0 if packs.depths is None else packs.depths[own])
            cut(layouts(lengths, packs.counts[one], packs.aligns[one], packs.widths[one]), cp, rank, layout)
        except ValueError as error:
            return str(error)
        return "the layout is valid"

    def _record(self, handles: I64, offsets: I64, lengths: I64, total: int) -> None:
        """Record that samples of ``total`` tokens lie at the end of the block being filled, at token ``offsets``."""
        self._offset[handles] = offsets
        self._length[handles] = lengths
        self._members[self._block].append(handles)
        self._live[self._block] += total
        self._fill += total

    def _make_room(self) -> None:
        """Make room for a sample: open an empty block, or clean a block if one empty block is left."""
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
            self._clean(int(np.argmin(live)))
        if self._open_tokens <= open_tokens:
            raise InternalError("the arena is full: producers sent more tokens than their credits allow")

    @property
    def _open_tokens(self) -> int:
        """Free tokens in empty blocks and at the end of the block being filled."""
        return (len(self._empty) + 1) * self._block_tokens - self._fill

    def _clean(self, victim: int) -> None:
        """Copy the live samples of block ``victim`` to the end of the filled memory, and make the block empty."""
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
        self._mark_empty(victim)

    def _append(self, handles: I64) -> None:
        """Copy samples that the arena holds to the end of the block being filled; they must fit."""
        lengths, address = self._length[handles], self._offset[handles]
        start = self._block * self._block_tokens + self._fill
        total = int(lengths.sum())
        slices = np.stack([address, lengths, np.zeros(len(handles), np.int64), lengths])
        for data, width in [(self._tokens, 1), *((column.data, column.width) for column in self._columns.values())]:
            _copy_slices(data, slices, width, 0, 0, data[start * width : (start + total) * width], _NO_EDGES)
        self._record(handles, start + np.cumsum(lengths) - lengths, lengths, total)
        self.moved_tokens += total

    def _mark_empty(self, block: int) -> None:
        """Add a block without live samples to the empty blocks."""
        self._members[block].clear()
        self._empty.append(block)

    def _reserve(self, handle: int) -> None:
        """Grow the columns that are indexed by handle until they have a row for ``handle``."""
        if handle >= len(self._offset):
            grow = max(handle + 1, 2 * len(self._offset)) - len(self._offset)
            self._offset = np.concatenate([self._offset, np.zeros(grow, np.int64)])
            self._length = np.concatenate([self._length, np.zeros(grow, np.int64)])
            for column in self._by_sample.values():
                column.data = np.concatenate([column.data, np.zeros(grow * column.width, column.dtype)])


_NO_EDGES: I32 = np.empty(0, np.int32)


def _copy_slices(
    data: NDArray[Any], slices: I64, width: int, shift: int, pad: Any, out: NDArray[Any], edges: I32
) -> None:  # fmt: skip
    """Copy ``slices`` (see ``Arena._slices_of_shards``) of a column to ``out``; InternalError if one is outside."""
    address, real, offset, size = slices
    filler = data.dtype.type(pad)  # one type in all calls, so that the kernel is compiled once for a column
    wrong = copy_slices(data, address, real, offset, size, width, shift, filler, out, edges)
    if wrong >= 0:
        raise InternalError(f"slice {wrong} of a pack lies outside the arena")
