"""torchtitan: a dataloader for its configuration, ``dataloader=StreampackDataLoader.Config(...)``.

torchtitan trains on batches of ``local_batch_size`` rows of ``seq_len`` tokens. A sample of a row begins at position 0.
A row is therefore a pack, and ``seq_len`` is the budget.

A step of streampack is an update if ``training.global_batch_size`` is the number of packs of a step. With another
number, torchtitan trains on the same packs, but a checkpoint may fall within a step, which raises an error. All ranks
of one data-parallel rank read the same packs, since torchtitan shards batches for the other axes itself.

torchtitan calls ``state_dict`` once for each checkpoint, and begins no checkpoint before the last one is durable. Each
call therefore commits the checkpoint before.

torchtitan cannot change ``seq_len`` or ``global_batch_size`` while it trains. A stage with other packs ends training
with StageEnds, which names the settings to go on with.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

try:
    from torchtitan.components.dataloader import BaseDataLoader
except ImportError as error:
    raise ImportError(
        f"got no module torchtitan.components.dataloader ({error}), expected torchtitan 0.3. Install that version"
    ) from None

from streampack.client.connect import connect
from streampack.core.model.rules import Rules
from streampack.errors import UserError
from streampack.integrations.checks.checkpointed import CheckpointedLoader
from streampack.integrations.checks.fixed_steps import FixedSteps, check_stages
from streampack.integrations.checks.rank_copies import copies_of
from streampack.integrations.checks.tried_versions import Tried

__all__ = ["StreampackDataLoader"]

TRIED = Tried("torchtitan", "0.3.0")

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]


class StreampackDataLoader(CheckpointedLoader, BaseDataLoader):
    """Dataloader of torchtitan that reads packs from a broker.

    A batch is ``({"input": [B, T], "positions": [B, T]}, labels [B, T])``, all int64, where B is ``local_batch_size``
    and T is ``seq_len``. At the end of a feed, all ranks end after the same batch. torchtitan passes the arguments.

    Args:
        config: Settings from the job's configuration.
        dp_world_size: Number of data-parallel ranks.
        dp_rank: This process's data-parallel rank.
        seq_len: Tokens of a row; must be the feed's budget.
        local_batch_size: Rows of a batch on each rank.
        snapshot_every_n_steps: Batches between two checkpoints, if any.

    Raises:
        UserError: The feed's packs do not match torchtitan's batches; the message says what to set.
        StageEnds: While iterating, a stage begins whose packs do not match torchtitan's batches.
        MeshError: As for ``connect``; likewise Unreachable and Rejected.

    Example:
        >>> dataloader = StreampackDataLoader.Config(endpoint="tcp://node0:7402")  # doctest: +SKIP
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """Settings of the dataloader in torchtitan's configuration."""

        endpoint: str | None = None
        """Address of the broker, as for ``connect``. Default: the environment variable STREAMPACK_ENDPOINT."""
        feed: str = "train"
        """Name of the feed in broker.yaml."""
        prefetch: int = 2
        """Number of steps to keep ready beyond the step in use."""
        infinite: bool = True
        """Set by torchtitan's Validator and ignored: the broker's configuration sets the length of a feed."""

    _step_key = "training.global_batch_size"

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
        TRIED.check(BaseDataLoader, "Config")
        copies, copy = copies_of(dp_world_size, dp_rank)
        mesh = {"dp": dp_world_size, "dp_rank": dp_rank, "tp": copies, "tp_rank": copy}
        self._loader = connect(
            config.endpoint, feed=config.feed, mesh=mesh, format="torchtitan", prefetch=config.prefetch
        )
        self._rows, self._commits = local_batch_size, dp_rank == copy == 0
        self._sizes = dp_world_size, seq_len, local_batch_size, snapshot_every_n_steps
        self._packs = 0  # of the steps so far
        try:
            check_stages(self._loader, self._check, "Set training.steps to that step, so that torchtitan saves there")
        except UserError:
            self._loader.close()
            raise
        self._packs = 0

    def _check(self, rules: Rules, step: int) -> None:
        """Raise UserError if rules do not fit torchtitan's batches, or steps have more or fewer packs than before."""
        check_rules(rules, *self._sizes)
        if self._packs not in (0, rules.packs):
            raise UserError(
                f"got steps of {rules.packs} packs, expected {self._packs} as before. Set training.global_batch_size "
                f"to {rules.packs}"
            )
        self._packs = rules.packs

    def __iter__(self) -> Iterator[Batch]:
        for step in FixedSteps(self._loader, self._check):
            for at in range(0, len(step), self._rows):
                packs = step.packs[at : at + self._rows]
                self._step, self._left = step.index, len(step) - at - len(packs)
                inputs = {key: torch.cat([pack[key] for pack in packs]) for key in packs[0]}
                yield inputs, torch.cat([pack.labels for pack in packs])


def check_rules(rules: Rules, dp: int, seq_len: int, rows: int, snapshot: int | None) -> None:
    """Raise UserError if a feed's packs are not rows of torchtitan's batches, or checkpoints fall within steps.

    ``rows``: packs of a batch on each of ``dp`` ranks. ``snapshot``: batches between two checkpoints.
    """
    if rules.batch is not None or rules.packs_ramp is not None:
        raise UserError(
            "got steps with a varying number of packs, expected the same number for each update of torchtitan. Set "
            "rules.step to {packs: N}"
        )
    if rules.warmup is not None or rules.budget != seq_len:
        length = "a growing budget" if rules.warmup is not None else f"{rules.budget} tokens"
        raise UserError(
            f"got packs of {length}, expected packs of seq_len={seq_len} tokens. Set training.seq_len to rules.budget, "
            f"and remove rules.warmup"
        )
    packs = rules.packs // dp
    if rows < 1 or packs % rows or (snapshot is not None and snapshot * rows % packs):
        every = f" and checkpoints every {snapshot * rows} packs" if snapshot is not None else ""
        raise UserError(
            f"got batches of {rows} packs{every} on each rank, expected whole steps of {packs} packs. Set "
            f"training.global_batch_size to {rules.packs}, and local_batch_size to a divisor of {packs}"
        )
