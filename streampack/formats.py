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

from streampack.core.layout import derive, layout, positions_of, shard_slices
from streampack.core.messages import Attached, Envelope, Mesh, StepPart
from streampack.core.samples import I32, I64
from streampack.errors import WireError

FORMATS = ("numpy",)


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
    tokens_index: I64
    """[T'] where in the whole pack each token lies."""

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


def build_step(parts: Sequence[Envelope], attached: Attached, mesh: Mesh) -> Step:
    """A step from its parts. Raises WireError if what the broker sent breaks an invariant."""
    packs: list[Pack] = []
    first: StepPart | None = None
    for envelope in parts:
        message = envelope.message
        if not isinstance(message, StepPart):
            raise WireError(f"got {type(message).__name__} among the parts of a step")
        first = first or message
        packs += _build_packs(message, envelope.payload, attached, mesh)
    if first is None or len(packs) != first.micro_batches:
        raise WireError(f"got {len(packs)} micro-batches, expected {first.micro_batches if first else 'some'}")
    return Step(
        first.step, tuple(packs), first.num_loss_tokens, first.num_samples, first.digest.hex(), first.chain.hex()
    )


def _build_packs(part: StepPart, payload: Sequence[Any], attached: Attached, mesh: Mesh) -> list[Pack]:
    rules = attached.rules
    cp, rank = (mesh.cp, mesh.cp_rank) if attached.layout == "zigzag" else (1, 0)
    counts = np.frombuffer(part.counts_u32, "<u4").astype(np.int64)
    lengths = np.frombuffer(part.lengths_u32, "<u4").astype(np.int64)
    loss = np.frombuffer(part.loss_tokens_u32, "<u4").tolist()
    numbers = np.frombuffer(part.packs_u32, "<u4").tolist()
    ids = np.stack(
        [
            np.frombuffer(part.streams_u32, "<u4").astype(np.int64),
            np.frombuffer(part.indices_u64, "<u8").astype(np.int64),
            np.frombuffer(part.parts_u32, "<u4").astype(np.int64),
        ],
        axis=1,
    )
    width = rules.budget // cp
    tokens = np.frombuffer(payload[0], attached.dtype)
    if len(tokens) != len(counts) * width or int(counts.sum()) != len(lengths) or not len(counts) == len(loss):
        raise WireError(f"got {len(tokens)} tokens for {len(counts)} packs, expected {width} each")
    rows = tokens.reshape(len(counts), width).astype(np.int64)
    edges = np.frombuffer(payload[1], "<i4").reshape(-1, 2) if cp > 1 else None
    packs = []
    stops = np.cumsum(counts).tolist()
    for i, stop in enumerate(stops):
        start = stop - int(counts[i])
        pack = layout(lengths[start:stop], rules.align.sample, rules.budget)
        begins, ends = shard_slices(pack.cu_seqlens_padded, cp, rank, attached.layout)
        derived = derive(pack, rows[i], begins, ends, None if edges is None else edges[start:stop].reshape(-1))
        packs.append(
            Pack(
                input_ids=rows[i],
                labels=derived.labels,
                position_ids=derived.position_ids,
                padding_mask=derived.padding_mask,
                cu_seqlens=pack.cu_seqlens,
                cu_seqlens_padded=pack.cu_seqlens_padded,
                max_seqlen=pack.max_seqlen,
                num_samples=pack.num_samples,
                num_segments=pack.num_segments,
                sample_ids=ids[start:stop],
                num_loss_tokens=loss[i],
                step=part.step,
                micro_batch=part.first + i,
                dp_rank=mesh.dp_rank,
                pack=numbers[i],
                tokens_index=positions_of(begins, ends),
            )
        )
    return packs
