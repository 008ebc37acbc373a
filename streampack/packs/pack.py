"""What a trainer gets: the canonical pack, and steps of them. Everything a framework wants is a view of this.

``build`` makes them, from lengths and raw tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from dataclasses import fields as dataclass_fields
from typing import Any, Generic, SupportsIndex, cast

import numpy as np
from numpy.typing import NDArray

from streampack.core.layout.layout import positions_of
from streampack.core.model.samples import I32, I64
from streampack.errors import UserError
from streampack.packs.batch_type import BatchT
from streampack.packs.forward_packs import ForwardPacks
from streampack.packs.regroup import Regrouping


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
    """Declared fields by name: [T', ...] by token ([T, ...] where replicated; shifted where they speak of targets),
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


@dataclass(frozen=True, slots=True)
class Step(Generic[BatchT]):
    """One optimizer update's micro-batches for one rank, with the denominators of all ranks."""

    index: int
    packs: Sequence[BatchT]
    """Packs, or views of them, as ``connect``'s format says; made when they are asked for, and kept.
    Not always a tuple: ``tuple(step)`` is."""
    num_tokens: int
    """Real tokens of them; of a rank that holds a part of each, too, of all."""
    num_loss_tokens: int
    """Labels that count, over all ranks and micro-batches: divide the summed loss by it."""
    num_samples: int
    digest: str
    """32 hex digits: equal on all ranks, meshes and restarts for the same samples."""
    chain: str
    """Digest of this step and all before it."""
    regrouping: Regrouping | None = dataclass_field(default=None, repr=False, compare=False)
    """What ``regroup`` knows of it."""

    def regroup(self, budget: SupportsIndex, *, min_packs: SupportsIndex = 1) -> ForwardPacks[BatchT]:
        """Forward packs of up to ``budget`` tokens, in the step's format: its samples on this rank, in its order, for
        passes without gradients. ``ForwardPacks.tokens_back`` gives what was computed back to the micro-batches.

        With the run's budget or more, M micro-batches become ceil(M / (budget // the run's)) packs: as many on every
        rank. With less their number is each rank's own, and ranks that run collectives together give all the most that
        any of them has as ``min_packs``, which adds empty ones. ``micro_batch`` and ``pack`` are a forward pack's
        number on its rank; ``num_loss_tokens`` is -1 where it has a part of a pack whose labels other ranks hold, too.

        Raises UserError for a budget that does not hold every sample, for padded micro-batches, and for layouts whose
        parts of a joined pack this rank does not hold (``zigzag_pack``, ``contiguous``, with cp > 1).

        >>> forward = step.regroup(budget=32768)  # doctest: +SKIP
        >>> old = forward.tokens_back({pack: logprobs(pack) for pack in forward})  # doctest: +SKIP
        """
        if self.regrouping is None:
            raise UserError("got a step that no loader has made, expected one of loader.steps()")
        from streampack.views.formats import canonical  # which knows packs

        packs = tuple(canonical(cast(Any, batch)) for batch in self.packs)
        return self.regrouping.regroup(packs, budget, min_packs)

    @property
    def sample_ids(self) -> I64:
        """[samples of this rank's packs, 3] stream number, index, part: for the trainer's own log."""
        return np.concatenate(
            [np.zeros((0, 3), np.int64), *(np.asarray(cast(Any, pack).sample_ids) for pack in self.packs)]
        )

    def __repr__(self) -> str:
        """One line. Makes no packs."""
        return (
            f"Step(index={self.index}, packs={len(self)}, samples={self.num_samples}, tokens={self.num_tokens}, "
            f"loss_tokens={self.num_loss_tokens})"
        )

    def __iter__(self) -> Iterator[BatchT]:
        return iter(self.packs)

    def __getitem__(self, micro_batch: int) -> BatchT:
        return self.packs[micro_batch]

    def __len__(self) -> int:
        return len(self.packs)
