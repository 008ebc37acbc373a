"""TRL's AsyncGRPO: form micro-batches from a window of rollouts, instead of one rollout at a time.

TRL fills one open row for each rank, and closes the micro-batch when the next rollout fits nowhere. ``install``
replaces this batcher in this process. Ours waits for the rollouts of a few micro-batches, and plans these together.
Rows are full, and the rows of a micro-batch cost the same. TRL's collator and loss stay as they are. A row still
computes the tokens that its rollouts share once, and the rollouts of a prompt stay in one row if they fit.

"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from streampack.core.trees.shared_prefixes import prefix_order
from streampack.errors import UserError
from streampack.integrations.checks.tried_versions import Tried
from streampack.planning import plan_step

__all__ = ["WindowBatcher", "install"]

TRIED = Tried("trl", "1.16.0")
WINDOW = 4
"""Micro-batches that are planned together."""


def install(window: int = WINDOW) -> None:
    """Make AsyncGRPO in this process plan micro-batches with streampack. ``token_budget`` must be above 0.

    Args:
        window: Number of micro-batches that are planned together. More fill rows better, and rollouts wait longer.

    Raises:
        UserError: ``window`` is below 1, or this version of TRL does not have the class that is replaced.

    Example:
        >>> streampack.integrations.trl.install()  # doctest: +SKIP
        >>> AsyncGRPOTrainer(...).train()  # doctest: +SKIP
    """
    from trl.experimental.async_grpo import async_grpo_trainer

    if window < 1:
        raise UserError(f"got window={window}, expected at least 1")
    TRIED.check(async_grpo_trainer, "TokenBudgetBatcher")

    def batcher(dataset: Iterable[dict[str, Any]], num_processes: int, token_budget: int, metrics: Any) -> Any:
        """Return a batcher in place of TRL's."""
        return WindowBatcher(dataset, num_processes, token_budget, metrics, window)

    TRIED.check_parameters(async_grpo_trainer.TokenBudgetBatcher, batcher)
    async_grpo_trainer.TokenBudgetBatcher = batcher


class WindowBatcher(torch.utils.data.IterableDataset[list[Any]]):
    """Yields micro-batches: lists of ``num_processes`` rows, each a ``TreeRow`` of TRL with at least one rollout.

    Args:
        dataset: Yields rollouts, as dicts with ``input_ids`` [T], ``completion_mask`` [T] and ``group_id``.
        num_processes: Number of data-parallel ranks.
        token_budget: Most tokens of a row, shared ones counted once. A longer rollout is dropped and counted.
        metrics: The trainer's metrics, lists by name.
        window: Number of micro-batches that are planned together.

    Example:
        >>> for rows in WindowBatcher(rollouts, num_processes=8, token_budget=16384, metrics={}):  # doctest: +SKIP
        ...     batch = collator([rows])
    """

    def __init__(
        self, dataset: Iterable[dict[str, Any]], num_processes: int, token_budget: int, metrics: Any,
        window: int = WINDOW,
    ) -> None:  # fmt: skip
        self._dataset, self._metrics = dataset, metrics
        self._ranks, self._budget = num_processes, token_budget
        self._wanted = window * num_processes * token_budget
        self._left: list[dict[str, Any]] = []

    def __iter__(self) -> Iterator[list[Any]]:
        """Yield micro-batches for as long as rollouts come; at the end of a finite dataset, those that are left."""
        waiting: list[dict[str, Any]] = []
        tokens = 0
        for sample in self._dataset:
            if len(sample["input_ids"]) > self._budget:
                self._metrics["batch/dropped_oversize_total"].append(1.0)
                continue
            if tokens >= self._wanted and sample["group_id"] != waiting[-1]["group_id"]:  # a group is planned whole
                yield from self._plan(waiting)
                waiting, self._left = self._left, []
                tokens = sum(len(each["input_ids"]) for each in waiting)
            waiting.append(sample)
            tokens += len(sample["input_ids"])
        if len(waiting) >= self._ranks:
            yield from self._plan(waiting)

    def _plan(self, samples: list[dict[str, Any]]) -> Iterator[list[Any]]:
        """Yield the micro-batches of a window."""
        units = self._units(samples)
        plan = plan_step([_size_of(unit) for unit in units], budget=self._budget, dp=self._ranks, a=0)
        rows = [
            [[sample for at in plan.packs[rank][number] for sample in units[at]] for rank in range(self._ranks)]
            for number in range(plan.num_micro_batches)
        ]
        every = [row for micro_batch in rows for row in micro_batch]
        while not all(every):  # no rank may be idle: the row with the most rollouts gives half of them
            fullest, empty = max(every, key=len), next(row for row in every if not row)
            if len(fullest) < 2:  # too few rollouts for the last micro-batches: they wait for the next window
                self._left += [
                    sample for micro_batch in rows if not all(micro_batch) for row in micro_batch for sample in row
                ]
                rows = [micro_batch for micro_batch in rows if all(micro_batch)]
                break
            half = len(fullest) // 2
            empty += fullest[half:]
            del fullest[half:]
        yield from ([_row_of(row) for row in micro_batch] for micro_batch in rows)

    def _units(self, samples: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
        """Return the samples of each group, split until they fit a row."""
        groups: dict[Any, list[dict[str, Any]]] = {}
        for sample in samples:
            groups.setdefault(sample["group_id"], []).append(sample)
        left, units = list(groups.values()), list[list[dict[str, Any]]]()
        while left:
            group = left.pop()
            if len(group) > 1 and _size_of(group) > self._budget:
                left += [group[: len(group) // 2], group[len(group) // 2 :]]
            else:
                units.append(group)
        return units


def _size_of(samples: list[dict[str, Any]]) -> int:
    """Return the most tokens that a row computes, or learns, for some samples.

    A ``TreeRow`` computes shared tokens once, except for the last one before a branch.
    """
    _, depths = prefix_order([sample["input_ids"].numpy() for sample in samples])
    tokens = sum(len(sample["input_ids"]) for sample in samples) - int(np.maximum(depths - 1, 0).sum())
    return max(tokens, sum(int(sample["completion_mask"].sum()) for sample in samples))


def _row_of(samples: list[dict[str, Any]]) -> Any:
    """Return a ``TreeRow`` of TRL with these samples."""
    from trl.experimental.async_grpo.packing import TreeRow

    row = TreeRow()
    for sample in samples:
        row.add(sample)
    return row
