"""NeMo AutoModel: a dataset and a collater for its recipes' YAML, each named by ``_target_``.

AutoModel builds its own dataloader around the dataset, for ``packed_sequence.prepacked: true``. A batch is what
AutoModel's ``packed_sequence_thd_collater`` returns. All ranks of one data-parallel rank read the same packs, since
AutoModel shards batches for the other axes itself.

A step of streampack is an update if ``step_scheduler.global_batch_size`` is the number of packs of a step. AutoModel
tells a dataset nothing of its schedule, so the YAML repeats this number. AutoModel cannot change it while it trains: a
stage with other packs ends training with StageEnds.

Flash attention of transformers separates the samples of a batch of one row. It takes each row of a larger batch as one
sample. The collater ``one_row`` therefore refuses several rows. Transformer Engine takes any number of
rows: use ``streampack.views.bshd.stack`` with it.

AutoModel begins no checkpoint before the last one is durable. Each call of ``state_dict`` therefore commits the
checkpoint before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from torch.utils.data import IterableDataset, get_worker_info

from streampack.client.connect import connect
from streampack.core.model.rules import Rules
from streampack.errors import UserError
from streampack.integrations.checks.checkpointed import CheckpointedLoader
from streampack.integrations.checks.fixed_steps import FixedSteps, check_stages
from streampack.integrations.checks.rank_copies import copies_of
from streampack.integrations.checks.tried_versions import Tried
from streampack.views.bshd import stack

__all__ = ["StreampackDataset", "one_row"]

TRIED = Tried("nemo-automodel", "0.7.0")


def one_row(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the pack of a batch of one row, as AutoModel's ``packed_sequence_thd_collater`` does.

    Args:
        rows: A list of one pack.

    Returns:
        A dict with ``input_ids``, ``labels`` and ``position_ids``, int64 [1, T]; ``seq_lens`` and ``seq_lens_padded``,
        int64 [1, samples]; and ``qkv_format``.

    Raises:
        UserError: There are several rows.

    Example:
        >>> batch = one_row([pack])  # doctest: +SKIP
    """
    if len(rows) != 1:
        raise UserError(
            f"got step_scheduler.local_batch_size={len(rows)}, expected 1, because flash attention of transformers "
            f"separates the samples of one row alone. Set it to 1, and rules.budget {len(rows)} times as large. Models "
            f"with Transformer Engine can use streampack.views.bshd.stack as collate_fn"
        )
    return stack(rows)


class StreampackDataset(CheckpointedLoader, IterableDataset[Any]):
    """Dataset of AutoModel's recipes that reads packs from a broker.

    Args:
        global_batch_size: ``step_scheduler.global_batch_size``; must be the number of packs of a step.
        endpoint: Address of the broker, as for ``connect``. Default: the environment variable STREAMPACK_ENDPOINT.
        feed: Name of the feed in broker.yaml.
        max_packs: End after this many packs over all ranks, as ``packed_sequence.max_packs`` does: a multiple of
            ``global_batch_size``. With it, AutoModel knows how long an epoch is. Default: read to the end of the feed.
        prefetch: Number of steps to keep ready beyond the step in use.

    Raises:
        UserError: The feed's steps do not match AutoModel's updates; the message says what to set.
        StageEnds: While iterating, a stage begins whose steps do not match AutoModel's updates.
        MeshError: As for ``connect``; likewise Unreachable and Rejected.

    Example:
        >>> dataset = StreampackDataset(64, "tcp://node0:7402").shard(8, rank)  # doctest: +SKIP
    """

    _step_key = "step_scheduler.global_batch_size"

    def __init__(
        self,
        global_batch_size: int,
        endpoint: str | None = None,
        feed: str = "train",
        max_packs: int | None = None,
        prefetch: int = 2,
    ) -> None:
        TRIED.warn()
        if max_packs is not None and (max_packs < 1 or max_packs % global_batch_size):
            raise UserError(
                f"got max_packs={max_packs}, expected a multiple of global_batch_size, {global_batch_size}. Set "
                f"max_packs to {max(max_packs // global_batch_size, 1) * global_batch_size}"
            )
        self._packs, self._endpoint, self._feed, self._prefetch = global_batch_size, endpoint, feed, prefetch
        self._max_steps = None if max_packs is None else max_packs // global_batch_size

    def shard(self, num_shards: int, index: int) -> StreampackDataset:
        """Connect to the broker as this data-parallel rank; AutoModel calls it on all ranks.

        Args:
            num_shards: Number of data-parallel ranks.
            index: This process's data-parallel rank.

        Returns:
            This dataset.
        """
        copies, copy = copies_of(num_shards, index)
        mesh = {"dp": num_shards, "dp_rank": index, "tp": copies, "tp_rank": copy}
        self._dp, self._commits = num_shards, index == copy == 0
        self._loader = connect(self._endpoint, feed=self._feed, mesh=mesh, format="bshd", prefetch=self._prefetch)
        try:
            check_stages(
                self._loader, self._check, "Set step_scheduler.max_steps to that step, so that AutoModel saves there"
            )
        except UserError:
            self._loader.close()
            raise
        return self

    def _check(self, rules: Rules, step: int) -> None:
        check_rules(rules, self._packs)

    def __iter__(self) -> Iterator[Any]:
        if get_worker_info() is not None:
            self.__getstate__()
        for step in FixedSteps(self._loader, self._check):
            if self._max_steps is not None and step.index >= self._max_steps:
                return
            for taken, pack in enumerate(step, 1):
                self._step, self._left = step.index, len(step) - taken
                yield pack

    def __len__(self) -> int:
        if self._max_steps is None:
            raise TypeError("a feed has no length; set max_packs")
        return self._max_steps * self._packs // self._dp

    def __getstate__(self) -> NoReturn:
        raise UserError(
            "got dataloader.num_workers above 0, expected 0, because the loader fetches steps ahead itself, and each "
            "worker would read everything again. Set dataloader.num_workers: 0"
        )

    def shuffle(self, seed: int = 0, *, buffer_size: int = 0) -> NoReturn:
        """Raise UserError: AutoModel would shuffle or pack again, which the broker has done.

        Args:
            seed: Ignored, like ``buffer_size``.
            buffer_size: Ignored.
        """
        raise UserError(
            "got a request to shuffle packs, expected none, because the broker orders and packs samples. Set "
            "dataloader.shuffle: false and packed_sequence.prepacked: true"
        )


def check_rules(rules: Rules, packs: int) -> None:
    """Raise UserError if a feed's steps are not updates of ``packs`` packs."""
    if rules.batch is not None or rules.packs_ramp is not None:
        raise UserError(
            "got steps with a varying number of packs, expected the same number for each update of AutoModel. Set "
            "rules.step to {packs: N}"
        )
    if rules.packs != packs:
        raise UserError(
            f"got steps of {rules.packs} packs, expected global_batch_size={packs}. Set global_batch_size of "
            f"step_scheduler and of the dataset to {rules.packs}"
        )
