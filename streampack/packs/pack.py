"""The canonical pack: what a trainer gets. Everything that a framework wants is a view of it.

``build`` makes them, from lengths and raw tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streampack.core.layout.labels import positions_of
from streampack.core.model.samples import I32, I64


@dataclass(slots=True, eq=False)  # not frozen: that makes one six times dearer
class Pack(Mapping[str, Any]):
    """One micro-batch of one rank: attributes, and the same by key (``pack["input_ids"]``, ``**pack``).

    T is the pack's length, T' what this rank holds of it (T / cp, but for the layout ``whole``); boundaries are
    those of the whole pack. Declared fields are keys of their own. A middle stage of a pipeline gets boundaries and
    positions alone: there ``input_ids`` and ``labels`` are None, and no keys. A padded one has its rows one after
    another, slots of ``max_seqlen`` tokens: ``streampack.rows`` gives them.
    """

    input_ids: I64
    """[T'] tokens, 0 at padding."""
    labels: I64
    """[T'] the next token of the same sample, or the label sent with it; -100 at its last real token, at padding
    and where the loss mask is 0."""
    position_ids: NDArray[Any]
    """[T'] from 0 in each sample, and in the tail padding; or as supplied, [T'] or [3, T']."""
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
    step_num_loss_tokens: int
    """The step's, over all ranks and micro-batches: what a pack's summed loss is divided by."""
    micro_batch: int
    num_micro_batches: int
    """Of the step, on this rank: the last one is where an optimizer steps."""
    dp_rank: int
    pack: int
    """Its number in the step, the same on every mesh; but of padded ones micro_batch * dp + dp_rank."""
    slices: I64
    """[k, 2] the parts [start, stop) of the whole pack that this rank holds, in its order."""
    layout: str
    """``zigzag``, ``zigzag_pack``, ``contiguous`` or ``whole``."""
    cp: int
    cp_rank: int
    fields: Mapping[str, NDArray[Any]]
    """Declared fields by name: [T', ...] by token ([T, ...] where replicated; shifted where aligned with labels),
    [num_samples, ...] by sample. bfloat16 as float32."""

    __eq__ = object.__eq__  # a Mapping's would compare arrays
    __hash__ = object.__hash__

    def positions(self) -> I64:
        """[T'] where in the whole pack each token lies."""
        return positions_of(self.slices[:, 0], self.slices[:, 1])

    def __getitem__(self, key: str) -> Any:
        if key in self.fields:
            return self.fields[key]
        value = getattr(self, key) if key in _KEYS else None
        if value is None:
            raise KeyError(key)
        return value

    def __iter__(self) -> Iterator[str]:
        yield from (key for key in _KEYS if getattr(self, key) is not None)
        yield from self.fields

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"Pack({summary(self)}, {shapes_of(self)})"


def summary(pack: Pack) -> str:
    """Return where the pack is and what it holds, for a repr: step, micro-batch, samples, real tokens."""
    return (
        f"step={pack.step}, micro_batch={pack.micro_batch}/{pack.num_micro_batches}, pack={pack.pack}, "
        f"samples={pack.num_samples}, tokens={int(pack.cu_seqlens[-1])}"
    )


def shapes_of(batch: Mapping[str, Any]) -> str:
    """Return the shape of the tokens, or of the positions where a rank has no tokens, as ``input_ids=[4096]``."""
    key = next(
        (key for key in ("input_ids", "tokens", "input", "position_ids") if hasattr(batch.get(key), "shape")), None
    )
    return f"keys={len(batch)}" if key is None else f"{key}={list(batch[key].shape)}"


_KEYS = tuple(field.name for field in dataclass_fields(Pack) if field.name != "fields")
