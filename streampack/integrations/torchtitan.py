"""torchtitan: a dataloader that its configuration can name, ``dataloader=StreampackDataLoader.Config(...)``.

torchtitan trains on batches of ``local_batch_size`` rows of ``seq_len`` tokens and finds the samples of a row where its
positions are 0, so a row is a pack and ``seq_len`` the budget. A step of streampack is an update where
``training.global_batch_size`` is its number of packs: a smaller or larger one trains on the same packs, but a
checkpoint between two of its updates may lie inside a step, which is refused. The loader is told nothing of tensor,
context and pipeline parallelism, since torchtitan cuts batches itself: ranks of one data-parallel rank read the same.

torchtitan calls ``state_dict`` once for each checkpoint that it writes, and begins none before the last one is
durable, also where it writes in the background: so each one says that the one before it may be committed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

try:
    from torchtitan.components.dataloader import BaseDataLoader
except ImportError as error:
    raise ImportError(f"got no torchtitan.components.dataloader ({error}), expected torchtitan 0.3") from None

from streampack.client.connect import connect
from streampack.core.model.rules import Rules
from streampack.errors import UserError

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]


class StreampackDataLoader(BaseDataLoader):
    """Packs of a broker as torchtitan's batches: ``({"input": [B, T], "positions": [B, T]}, labels [B, T])``, int64.

    Raises UserError at once for a feed whose packs torchtitan would take wrongly, and what ``connect`` does. At the end
    of a feed all ranks end on the same batch.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """Settings of the loader in a TorchTitan job file."""

        endpoint: str | None = None
        """As ``streampack.connect`` takes it; by default STREAMPACK_ENDPOINT."""
        feed: str = "train"
        prefetch: int = 2
        infinite: bool = True
        """Set by torchtitan's Validator; how long a feed is, the broker's configuration says."""

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        seq_len: int,
        local_batch_size: int,
        snapshot_every_n_steps: int | None = None,
        **_: Any,
    ) -> None:
        copies, copy = _copies(dp_world_size, dp_rank)
        mesh = {"dp": dp_world_size, "dp_rank": dp_rank, "tp": copies, "tp_rank": copy}
        self._loader = connect(
            config.endpoint, feed=config.feed, mesh=mesh, format="torchtitan", prefetch=config.prefetch
        )
        self._rows, self._commits = local_batch_size, dp_rank == copy == 0
        self._step, self._left, self._saved = -1, 0, -1
        try:
            check_rules(self._loader.rules, dp_world_size, seq_len, local_batch_size, snapshot_every_n_steps)
        except UserError:
            self._loader.close()
            raise

    def __iter__(self) -> Iterator[Batch]:
        for step in self._loader.steps():
            for at in range(0, len(step), self._rows):
                packs = step.packs[at : at + self._rows]
                self._step, self._left = step.index, len(step) - at - len(packs)
                inputs = {key: torch.cat([pack[key] for pack in packs]) for key in packs[0]}
                yield inputs, torch.cat([pack.labels for pack in packs])

    def state_dict(self) -> dict[str, Any]:
        """The loader's state, equal on all ranks, between two steps. Raises UserError inside of one."""
        if self._left:
            raise UserError(
                f"got a checkpoint within step {self._step}, {self._left} packs before its end, expected one between "
                f"two steps: set training.global_batch_size to {self._loader.rules.packs}, the packs of a step"
            )
        state = self._loader.state_dict()
        if self._commits and 0 <= self._saved < self._step:
            self._loader.commit(self._saved)
        self._saved = self._step
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a checkpoint's, on any number of ranks; from an empty one at the start."""
        if state_dict:
            self._loader.load_state_dict(state_dict)
            self._step, self._left, self._saved = -1, 0, -1

    def close(self) -> None:
        """Give the rank up."""
        self._loader.close()


def _copies(dp: int, dp_rank: int) -> tuple[int, int]:
    """(how many ranks read what this one reads, which of them this one is). Collective where there are several."""
    if not dist.is_initialized() or dist.get_world_size() == dp:
        return 1, 0
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, dp_rank)
    return ranks.count(dp_rank), ranks[: dist.get_rank()].count(dp_rank)


def check_rules(rules: Rules, dp: int, seq_len: int, rows: int, snapshot: int | None) -> None:
    """Raises UserError for rules whose packs are no rows of torchtitan's batches, or updates that end within steps:
    ``rows`` packs are a batch, ``snapshot`` batches lie between two checkpoints, on each of ``dp`` ranks.
    """
    if rules.batch is not None:
        raise UserError(
            "got steps that are batches, whose packs differ in number, expected as many for each update of torchtitan: "
            "set rules.step to {packs: N}"
        )
    if rules.warmup is not None or rules.budget != seq_len:
        said = "a budget that grows" if rules.warmup is not None else f"{rules.budget} tokens"
        raise UserError(
            f"got packs of {said}, expected all of seq_len={seq_len}: set training.seq_len to rules.budget, no warmup"
        )
    packs = rules.packs // dp
    if rows < 1 or packs % rows or (snapshot is not None and snapshot * rows % packs):
        every = f" and checkpoints every {snapshot * rows} packs" if snapshot is not None else ""
        raise UserError(
            f"got batches of {rows} packs{every} on each rank, expected them to make whole steps of {packs}: set "
            f"training.global_batch_size to {rules.packs}, and local_batch_size to a divisor of {packs}"
        )
