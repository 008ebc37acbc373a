"""Megatron-LM: the broker's plan for its schedule of hybrid context parallelism, for a feed with ``cp: dynamic``.

Megatron's ``hybrid_context_parallel_forward_backward`` takes once per iteration samples by id, and the ids of each
group and rank. Megatron's own data loader makes them on the ranks: it gathers all lengths, plans on every rank, and
exchanges tokens. The broker has planned the step before, and each rank has received its shards, so no rank calls it.

An id is a pack. Megatron runs forward and backward once for a pack, and all ranks run equally often. A rank knows the
packs of its own groups. The schedule reads no others: it takes this rank's ids, and counts the ranks that share one.

Every tensor-parallel rank reads the same packs from the broker, because the schedule gives an iterator to the first one
only. Megatron's ``get_batch`` would cut samples that are cut already, so ``HybridSchedule.get_batch`` takes its place.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams

from streampack.core.model.samples import IGNORE_INDEX
from streampack.errors import UserError
from streampack.integrations.megatron.megatron_lm import TRIED
from streampack.packs.step import Step
from streampack.views.megatron import packed_seq_params
from streampack.views.view import View

__all__ = ["HybridSchedule"]

GROUPS = "get_hybrid_data_context_parallel_groups"
"""Function of Megatron's ``parallel_state`` that returns this rank's group of a size."""


class HybridSchedule:
    """The broker's plan of a step, as Megatron's schedule of hybrid context parallelism takes it.

    Megatron must be initialized with ``hybrid_context_parallel=True``, which makes the process groups.

    Args:
        config: Megatron's config of the model.

    Raises:
        UserError: The config or Megatron's ranks do not suit the plan.

    Example:
        >>> schedule = HybridSchedule(config)  # doctest: +SKIP
        >>> loader = streampack.connect(mesh=schedule.mesh, format="thd")  # doctest: +SKIP
        >>> for step in loader.steps():  # doctest: +SKIP
        ...     forward_backward(data_iterator=schedule.data_iterator(step), forward_step_func=forward_step, ...)
    """

    mesh: dict[str, int]
    """The mesh to connect with; all data-parallel and context-parallel ranks are ``dp``."""

    def __init__(self, config: Any) -> None:
        TRIED.check(parallel_state, GROUPS)
        ranks = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
        _check(config, ranks)
        self.mesh = {
            "dp": ranks,
            "dp_rank": parallel_state.get_data_parallel_rank(with_context_parallel=True),
            "tp": parallel_state.get_tensor_model_parallel_world_size(),
            "tp_rank": parallel_state.get_tensor_model_parallel_rank(),
        }
        self._groups = {1: None} | {size: _group_of(size) for size in _powers(ranks)}
        self._batches: Iterator[View] = iter(())

    def data_iterator(self, step: Step[View]) -> Iterator[tuple[dict[int, dict[str, Any]], list[list[list[int]]]]]:
        """Return the ``data_iterator`` of the step's iteration.

        Args:
            step: A step in the format ``thd``, of a loader with ``mesh``.

        Returns:
            An iterator with one item: the packs of this rank by id, and for each micro-batch the ids of each rank.
            Ranks that share no pack with this one have no ids.

        Raises:
            UserError: The feed has no ``cp: dynamic``, or the loader has another mesh or format.
        """
        batches = tuple(step)
        ids = [self._ids_of(batch) for batch in batches]
        self._batches = iter(batches)
        return iter([({batch.pack: {"batch": batch} for batch in batches}, ids)])

    def _ids_of(self, batch: View) -> list[list[int]]:
        """Return the ids of each rank in the micro-batch of this pack."""
        if not isinstance(batch, View) or batch["input_ids"].dim() != 1:
            raise UserError("got packs in another format, expected format='thd'. Pass it to streampack.connect")
        if batch.cp_ranks is None:
            raise UserError(
                f"got packs of the layout {batch.layout!r}, expected a feed with `cp: dynamic`. Set it for the feed in "
                f"broker.yaml, or train without hybrid_context_parallel"
            )
        first, size = batch.cp_ranks
        group, ranks, own = range(first, first + size), range(self.mesh["dp"]), self.mesh["dp_rank"]
        if own not in group or group[-1] not in ranks:
            raise UserError(
                f"got a pack of the ranks {first} to {group[-1]} on rank {own} of {len(ranks)}, expected a pack of "
                f"this rank. Connect with mesh=schedule.mesh"
            )
        return [[batch.pack] if rank in group else [] for rank in ranks]

    def get_batch(self, data_iterator: Iterator[dict[str, Any]] | None) -> dict[str, Any]:
        """Return the next micro-batch in a forward step, in place of Megatron's ``get_batch``.

        Args:
            data_iterator: The iterator that the forward step receives; None on tensor ranks other than the first.

        Returns:
            Arguments of ``GPTModel`` by name:

            - ``input_ids``, ``position_ids``, ``labels``: int64 [1, T'], this rank's shard.
            - ``loss_mask``: float32 [1, T'], 1 where the label counts.
            - ``attention_mask``: None.
            - ``packed_seq_params``: boundaries of the whole pack, and the process group of its ranks.
        """
        batch = next(self._batches) if data_iterator is None else next(data_iterator)["batch"]
        packed = PackedSeqParams(
            **packed_seq_params(batch), local_cp_size=batch.cp_size, cp_group=self._groups[batch.cp_size]
        )
        return {
            "input_ids": batch.input_ids[None],
            "position_ids": batch.position_ids.unsqueeze(-2),
            "labels": batch.labels.clamp(min=0)[None],
            "loss_mask": (batch.labels != IGNORE_INDEX).float()[None],
            "attention_mask": None,
            "packed_seq_params": packed,
        }


def _check(config: Any, ranks: int) -> None:
    """Raise UserError for a config, or a number of dp x cp ranks, that does not suit the plan."""
    wanted = {
        "hybrid_context_parallel": (True, "Without it, Megatron runs another schedule"),
        "calculate_per_token_loss": (True, "Packs have different numbers of labels, so a mean of means is biased"),
        "pipeline_model_parallel_size": (1, "Megatron's schedule has no pipeline"),
    }
    for name, (expected, why) in wanted.items():
        if (got := getattr(config, name)) != expected:
            raise UserError(f"got {name}={got!r}, expected {expected!r}. {why}")
    if ranks & (ranks - 1):
        raise UserError(
            f"got {ranks} data-parallel x context-parallel ranks, expected a power of two, because Megatron makes no "
            f"process groups of {1 << (ranks.bit_length() - 1)} of these ranks. Train without Megatron's schedule"
        )


def _powers(ranks: int) -> list[int]:
    """Return the sizes of groups of two and more ranks."""
    return [1 << level for level in range(1, ranks.bit_length())]


def _group_of(size: int) -> Any:
    """Return Megatron's process group of this size; raise UserError if Megatron made none."""
    try:
        return getattr(parallel_state, GROUPS)(group_size=size)
    except KeyError:
        raise UserError(
            f"got no process group of {size} ranks from Megatron, expected one. Call initialize_model_parallel with "
            f"hybrid_context_parallel=True"
        ) from None
