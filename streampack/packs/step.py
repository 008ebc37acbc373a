"""``Step``: the micro-batches of one optimizer update on one rank, with the denominators over all ranks.

A loader's state counts a step as used once the trainer has taken all of its packs, which ``CountedPacks`` knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import Any, Generic, Literal, SupportsIndex, cast, overload

import numpy as np

from streampack.core.flops.model_flops import ModelFlops
from streampack.core.model.rules import Rules
from streampack.core.model.samples import I64
from streampack.errors import UserError
from streampack.packs.batch_type import BatchT
from streampack.packs.forward_packs import ForwardPacks
from streampack.packs.regroup import Regrouping


@dataclass(frozen=True, slots=True)
class Step(Generic[BatchT]):
    """The micro-batches of one optimizer update on one rank, with the denominators over all ranks.

    A step is a sequence of its packs: it has ``len``, indices and iteration.

    Example:
        >>> for step in loader.steps():  # doctest: +SKIP
        ...     for pack in step:
        ...         (summed_loss(pack) / step.num_loss_tokens).backward()
        ...     optimizer.step()
    """

    index: int
    """Number of the step in the feed, from 0."""
    packs: Sequence[BatchT]
    """The rank's packs, or views in the format of ``connect``; made on first use. For a tuple, call ``tuple(step)``."""
    num_tokens: int
    """Real tokens of this rank's packs alone; ``num_samples`` and ``num_loss_tokens`` are of all ranks. With context
    parallelism, of the whole packs."""
    num_loss_tokens: int
    """Loss tokens over all ranks and micro-batches: the denominator of the summed loss. At least 1: a step without any
    has the loss 0 / 1, and gradients 0."""
    num_samples: int
    """Samples over all ranks and micro-batches. This rank alone has ``len(step.sample_ids)``."""
    digest: str
    """32 hex digits that identify the step's samples, equal on all ranks, meshes and restarts."""
    chain: str
    """32 hex digits that identify this step and all steps before."""
    stage: str = "0"
    """The stage of the run to which the step belongs: its name, or its number if it has none. Each change of the rules
    begins a stage; "0" is the begin of the run."""
    rules: Rules | None = dataclass_field(default=None, repr=False, compare=False)
    """The rules by which the step was planned; None for a step that was not made by a loader."""
    regrouping: Regrouping | None = dataclass_field(default=None, repr=False, compare=False)
    """Settings for ``regroup``; internal."""
    reporting: Callable[[Step[Any], Mapping[str, Any], str], None] | None = dataclass_field(
        default=None, repr=False, compare=False
    )
    """Function for ``report``; internal."""
    naming: Callable[[I64], list[str]] | None = dataclass_field(default=None, repr=False, compare=False)
    """Function for ``sample_streams``; internal."""
    lengths: I64 | None = dataclass_field(default=None, repr=False, compare=False)
    """Real tokens of each sample in this rank's packs, int64 [samples], in the order of ``sample_ids``. Shared tokens
    count for the sample before. None for a step that was not made by a loader."""
    shared: I64 | None = dataclass_field(default=None, repr=False, compare=False)
    """Tokens that each of these samples shares with the one before it; None without ``share``."""
    cp_sizes: I64 | None = dataclass_field(default=None, repr=False, compare=False)
    """Ranks that share the pack of each of these samples, with dynamic context parallelism; else None."""

    def report(self, values: Mapping[str, Any], *, reduce: Literal["sum", "same"] = "sum") -> None:
        """Report values of this rank's samples, such as rewards or losses, and wait until they are durable.

        Once every rank has reported, subscribers get the values of the whole step: see ``streampack.results``. Call it
        on every rank; the ranks with ``tp_rank`` 0 in the last pipeline stage speak. A repeated call with the same
        names has no effect. A value is at most once in the results for each lineage, step and sample.

        Args:
            values: By name, one number for each row of ``sample_ids``: an array, a tensor or a list.
            reduce: Context-parallel ranks hold parts of the same samples. With ``"sum"`` their values are added; with
                ``"same"`` each has the whole value, and it counts once.

        Raises:
            UserError: A value has another shape, or the step was not made by a loader.
            Rejected: The broker has not served this step.
            DataStall: The values were not durable in time.

        Example:
            >>> step.report({"reward": rewards, "entropy": entropies})  # doctest: +SKIP
        """
        if self.reporting is None:
            raise UserError("got a step that was not made by a loader, expected a step from loader.steps()")
        self.reporting(self, values, reduce)

    def regroup(
        self, budget: SupportsIndex, *, min_packs: SupportsIndex = 1, round: SupportsIndex | None = None
    ) -> ForwardPacks[BatchT]:
        """Return this rank's samples of the step in packs of another budget, for passes without gradients.

        Such a forward pass (log-probs, rewards) keeps no activations, so it can take larger packs. The samples keep
        their order. In a forward pack, ``micro_batch`` and ``pack`` are its number on this rank. Its
        ``num_loss_tokens`` is -1 if it holds a part of a pack whose labels other ranks hold, too. For
        ``Client.state_dict``, the call takes no micro-batch.

        Padded micro-batches become padded micro-batches with as many rows as the budget holds. Every rank has the same
        number of the same shapes, with any budget.

        Args:
            budget: Tokens of a forward pack. With the run's budget or more, M micro-batches become ceil(M / (budget //
                run's budget)) packs, the same number on every rank. With less, each rank has its own number of packs.
            min_packs: Least number of forward packs; empty ones are added. Ranks that run collectives together pass
                the largest number that any of them has. Padded ones are split before empty ones are added.
            round: The length of padded rows is a multiple of this, by default of ``align.pack``.

        Returns:
            The forward packs, in the step's format. Their ``tokens_back`` maps results back to the micro-batches.

        Raises:
            UserError: The budget does not hold every sample. Or cp > 1 and the layout is ``zigzag_pack`` or
                ``contiguous``, or ``zigzag`` of padded rows: this rank would lack parts of joined packs. Or ``round``
                is not a multiple of ``align.pack``, or micro-batches are packs.

        Example:
            >>> forward = step.regroup(budget=32768)  # doctest: +SKIP
            >>> old = forward.tokens_back({pack: logprobs(pack) for pack in forward})  # doctest: +SKIP
        """
        if self.regrouping is None:
            raise UserError("got a step that was not made by a loader, expected a step from loader.steps()")
        packs = tuple(self.regrouping.read(batch) for batch in uncounted(self.packs))
        return self.regrouping.regroup(packs, budget, min_packs, round)

    @property
    def budget(self) -> int:
        """Most tokens of a pack in this step, padding included; packs of ``shape: fixed`` have as many.

        Raises:
            UserError: The step was not made by a loader.
        """
        if self.rules is None:
            raise UserError("got a step that was not made by a loader, expected a step from loader.steps()")
        return self.rules.budget

    def flops(self, model: Any) -> int:
        """Return the useful FLOPs of training on this rank's packs, forward and backward.

        With context, tensor or pipeline parallelism, the ranks that share these packs share the FLOPs.

        Args:
            model: ``model.config`` of transformers, a dict with the keys of ``config.json``, or a ``ModelFlops``.

        Raises:
            UserError: The model has layers that cannot be counted, or the step was not made by a loader.

        Example:
            >>> tflops = step.flops(model.config) / seconds / 1e12  # doctest: +SKIP
        """
        return ModelFlops.of(model).samples(self._lengths, 0 if self.shared is None else self.shared)

    @property
    def sum_squares(self) -> int:
        """Sum of the squares of the samples' tokens in this rank's packs: the work of attention.

        A sample of s tokens that shares d tokens with the one before counts (d + s)^2 - d^2.

        Raises:
            UserError: The step was not made by a loader.
        """
        own, depths = self._lengths, 0 if self.shared is None else self.shared
        return int((own * (own + 2 * depths)).sum())

    @property
    def _lengths(self) -> I64:
        if self.lengths is None:
            raise UserError("got a step that was not made by a loader, expected a step from loader.steps()")
        return self.lengths

    @property
    def sample_ids(self) -> I64:
        """Ids of the samples in this rank's packs, int64 [samples, 3]: stream number, index and part of each."""
        return np.concatenate(
            [np.zeros((0, 3), np.int64), *(np.asarray(cast(Any, pack).sample_ids) for pack in uncounted(self.packs))]
        )

    @property
    def sample_streams(self) -> list[str]:
        """Names of the streams of the samples in this rank's packs: one for each row of ``sample_ids``.

        Raises:
            UserError: The step was not made by a loader.
            DataStall: A stream was added during the run, and the broker did not answer what its name is.

        Example:
            >>> step.sample_streams[:3]  # doctest: +SKIP
            ['web', 'web', 'code']
        """
        if self.naming is None:
            raise UserError("got a step that was not made by a loader, expected a step from loader.steps()")
        return self.naming(self.sample_ids[:, 0])

    def __repr__(self) -> str:
        """Describe the step in one line, without making packs."""
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


class CountedPacks(Sequence[Any]):
    """A step's packs, as a sequence that counts the packs it hands out.

    The trainer may iterate the packs, index them, and iterate them again. A loop that has packs left therefore counts,
    even if another loop took them before. Reads by the library itself, such as ``Step.regroup`` and
    ``streampack.verify``, go through ``uncounted``.
    """

    def __init__(self, packs: Sequence[Any]) -> None:
        self.packs = packs
        """The same packs, without counting."""
        self._untaken = set(range(len(packs)))
        self._loops = 0

    @property
    def all_taken(self) -> bool:
        """True if every pack was taken, and no loop over the packs has packs left."""
        return not self._untaken and not self._loops

    @property
    def none_taken(self) -> bool:
        """True if no pack was taken yet."""
        return len(self._untaken) == len(self)

    def note_taken(self, number: int) -> None:
        """Count pack ``number`` as taken."""
        self._untaken.discard(number)

    def __len__(self) -> int:
        return len(self.packs)

    @overload
    def __getitem__(self, at: int) -> Any: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[Any, ...]: ...
    def __getitem__(self, at: int | slice) -> Any:
        packs = self.packs[at]
        numbers = range(len(self))[at]
        for number in numbers if isinstance(numbers, range) else (numbers,):
            self.note_taken(number)
        return packs

    def __iter__(self) -> Iterator[Any]:
        last, is_open = len(self) - 1, False
        try:
            for number, pack in enumerate(self.packs):
                if (number < last) != is_open:
                    is_open = not is_open
                    self._loops += 1 if is_open else -1
                self.note_taken(number)
                yield pack
        finally:
            self._loops -= is_open

    def __eq__(self, other: object) -> bool:
        return bool(self.packs == uncounted(other))

    def __hash__(self) -> int:
        return hash(self.packs)

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return tuple, (tuple(self),)

    def __repr__(self) -> str:
        return f"<{len(self)} packs>"


def uncounted(packs: Any) -> Any:
    """Return ``packs`` for a read that does not count as taking them."""
    return packs.packs if isinstance(packs, CountedPacks) else packs
