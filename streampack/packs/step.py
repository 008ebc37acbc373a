"""A step: the micro-batches of one optimizer update for one rank, with the denominators of all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import Any, Generic, SupportsIndex, cast

import numpy as np

from streampack.core.model.samples import I64
from streampack.errors import UserError
from streampack.packs.batch_type import BatchT
from streampack.packs.forward_packs import ForwardPacks
from streampack.packs.regroup import Regrouping


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
        packs = tuple(self.regrouping.read(batch) for batch in self.packs)
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
