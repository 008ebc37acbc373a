"""What a trainer gets: the canonical pack, built in the client from lengths and raw tokens.

Tokens travel as they are; positions, masks, labels and boundaries are derived here, by the same
``core.layout`` that the broker cut the shard with. Everything a framework wants is a view of this.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streampack.core.layout import Layouts, cut, derive, layouts, positions_of
from streampack.core.messages import Attached, Envelope, Mesh, StepPart
from streampack.core.samples import I32, I64, IGNORE_INDEX
from streampack.errors import WireError
from streampack.slabs import Slabs

FORMATS = ("numpy",)
_TOGETHER = 16
"""Packs derived in one go: enough to share numpy's cost by the call, few enough to stay in cache."""


@dataclass(frozen=True, slots=True, eq=False)
class Pack(Mapping[str, Any]):
    """One micro-batch of one rank: attributes, and the same by key (``pack["input_ids"]``, ``**pack``).

    T is the pack's length, T' = T / cp what this rank holds of it; boundaries are those of the whole pack.
    """

    input_ids: I64
    """[T'] tokens, 0 at padding."""
    labels: I64
    """[T'] the next token of the same sample, -100 at its last real token and at padding."""
    position_ids: I64
    """[T'] from 0 in each sample, and in the tail padding."""
    padding_mask: NDArray[np.bool_]
    """[T'] True at padding."""
    cu_seqlens: I32
    """[num_segments + 1] boundaries of real tokens."""
    cu_seqlens_padded: I32
    """[num_segments + 1] boundaries of storage: what kernels that take one array need."""
    max_seqlen: int
    """The widest slot, in tokens."""
    num_samples: int
    num_segments: int
    """One more than samples where there is tail padding."""
    sample_ids: I64
    """[num_samples, 3] stream number, index, part."""
    num_loss_tokens: int
    """Labels that count, over the whole pack."""
    step: int
    micro_batch: int
    dp_rank: int
    pack: int
    """Its number in the step, the same on every mesh."""
    slices: I64
    """[k, 2] the parts [start, stop) of the whole pack that this rank holds, in its order."""

    __eq__ = object.__eq__  # a Mapping's would compare arrays
    __hash__ = object.__hash__

    def positions(self) -> I64:
        """[T'] where in the whole pack each token lies."""
        return positions_of(self.slices[:, 0], self.slices[:, 1])

    def __getitem__(self, key: str) -> Any:
        if key not in _KEYS:
            raise KeyError(key)
        return getattr(self, key)

    def __iter__(self) -> Iterator[str]:
        return iter(_KEYS)

    def __len__(self) -> int:
        return len(_KEYS)


_KEYS = tuple(field.name for field in fields(Pack))


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer update's micro-batches for one rank, with the denominators of all ranks."""

    index: int
    packs: tuple[Pack, ...]
    num_loss_tokens: int
    """Labels that count, over all ranks and micro-batches: divide the summed loss by it."""
    num_samples: int
    digest: str
    """32 hex digits: equal on all ranks, meshes and restarts for the same samples."""
    chain: str
    """Digest of this step and all before it."""

    def __iter__(self) -> Iterator[Pack]:
        return iter(self.packs)

    def __getitem__(self, micro_batch: int) -> Pack:
        return self.packs[micro_batch]

    def __len__(self) -> int:
        return len(self.packs)


def build_step(parts: Sequence[Envelope], attached: Attached, mesh: Mesh, slabs: Slabs) -> Step:
    """A step from its parts, its arrays in memory of ``slabs``.

    Raises WireError if what the broker sent breaks an invariant.
    """
    packs: list[Pack] = []
    first: StepPart | None = None
    for envelope in parts:
        message = envelope.message
        if not isinstance(message, StepPart):
            raise WireError(f"got {type(message).__name__} among the parts of a step")
        first = first or message
        if (message.step, message.first) != (first.step, len(packs)):
            raise WireError(
                f"got step {message.step} from micro-batch {message.first} on, expected {first.step} from {len(packs)}"
            )
        try:
            packs += _build_packs(message, envelope.payload, attached, mesh, slabs)
        except ValueError as error:
            raise WireError(f"got step {message.step}, which cannot be laid out: {error}") from None
    if first is None or len(packs) != first.micro_batches:
        raise WireError(f"got {len(packs)} micro-batches, expected {first.micro_batches if first else 'some'}")
    return Step(
        first.step, tuple(packs), first.num_loss_tokens, first.num_samples, first.digest.hex(), first.chain.hex()
    )


def _build_packs(part: StepPart, payload: Sequence[Any], attached: Attached, mesh: Mesh, slabs: Slabs) -> list[Pack]:
    cp, rank = (mesh.cp, mesh.cp_rank) if attached.layout == "zigzag" else (1, 0)
    width = attached.rules.budget // cp
    if len(payload) != (2 if cp > 1 else 1):
        raise WireError(f"got {len(payload)} payload frames, expected tokens, and edges if cp > 1")
    num_packs = len(part.counts_u32) // 4
    counts = _array(part.counts_u32, "<u4", num_packs).astype(np.int64)
    num_samples = int(counts.sum())
    lengths = _array(part.lengths_u32, "<u4", num_samples).astype(np.int64)
    loss = _array(part.loss_tokens_u32, "<u4", num_packs).tolist()
    numbers = _array(part.packs_u32, "<u4", num_packs).tolist()
    columns = ((part.streams_u32, "<u4"), (part.indices_u64, "<u8"), (part.parts_u32, "<u4"))
    ids = np.stack([_array(data, dtype, num_samples).astype(np.int64) for data, dtype in columns], axis=1)
    tokens = _array(payload[0], attached.dtype, num_packs * width)
    edges = _array(payload[1], "<i4", 2 * num_samples).reshape(-1, 2) if cp > 1 else None
    packs: list[Pack] = []
    last = 0
    for at in range(0, num_packs, _TOGETHER):
        stop = min(at + _TOGETHER, num_packs)
        first, last = last, last + int(counts[at:stop].sum())
        laid = layouts(lengths[first:last], counts[at:stop], attached.rules.align.sample, attached.rules.budget)
        starts, ends = cut(laid.start, laid.stop, cp, rank, attached.layout)
        input_ids, labels, position_ids, padding_mask = _derived(
            tokens[at * width : stop * width], laid, starts, ends, None if edges is None else edges[first:last], slabs
        )
        slices = np.stack([starts, ends], axis=1)
        bounds = (laid.first_segment * (len(starts) // len(laid.start))).tolist()
        widest = np.maximum.reduceat(laid.stop - laid.start, laid.first_segment[:-1]).tolist()
        samples = (laid.first_sample + first).tolist()
        for i, pack in enumerate(laid.packs()):
            row = slice(i * width, (i + 1) * width)
            packs.append(
                Pack(
                    input_ids=input_ids[row],
                    labels=labels[row],
                    position_ids=position_ids[row],
                    padding_mask=padding_mask[row],
                    cu_seqlens=pack.cu_seqlens,
                    cu_seqlens_padded=pack.cu_seqlens_padded,
                    max_seqlen=widest[i],
                    num_samples=pack.num_samples,
                    num_segments=pack.num_segments,
                    sample_ids=ids[samples[i] : samples[i + 1]],
                    num_loss_tokens=loss[at + i],
                    step=part.step,
                    micro_batch=part.first + at + i,
                    dp_rank=mesh.dp_rank,
                    pack=numbers[at + i],
                    slices=slices[bounds[i] : bounds[i + 1]],
                )
            )
    return packs


def _derived(
    tokens: NDArray[Any], laid: Layouts, starts: I64, ends: I64, edges: I32 | None, slabs: Slabs
) -> tuple[I64, I64, I64, NDArray[np.bool_]]:
    """input_ids, labels, position_ids and padding_mask of some packs' shards, one after another, in one slab."""
    size = len(tokens)
    slab = slabs.take(25 * size)
    input_ids, labels, position_ids = np.frombuffer(slab, np.int64, 3 * size).reshape(3, size)
    padding_mask = np.frombuffer(slab, np.bool_, size, 24 * size)
    input_ids[:] = tokens
    each = len(starts) // len(laid.start)
    offset, real = starts - np.repeat(laid.start, each), np.repeat(laid.real, each)
    after = None if edges is None else _edges(edges, laid)
    derive(input_ids, offset, ends - starts, real, after, labels, position_ids, padding_mask)
    return input_ids, labels, position_ids, padding_mask


def _array(data: Any, dtype: str, count: int) -> NDArray[Any]:
    """``data`` as [count] of ``dtype``, not copied. Raises ValueError for another size."""
    got, expected = memoryview(data).nbytes, count * np.dtype(dtype).itemsize
    if got != expected:
        raise ValueError(f"got {got} bytes, expected {count} numbers of {dtype}, {expected} bytes")
    return np.frombuffer(data, dtype)


def _edges(edges: I32, laid: Layouts) -> I32:
    """Edges by slice, int32 [2 * segments]: the tail padding has none."""
    found = np.full((len(laid.start), 2), IGNORE_INDEX, np.int32)
    found[laid.real > 0] = edges
    return found.reshape(-1)
