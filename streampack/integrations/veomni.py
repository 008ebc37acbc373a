"""VeOmni: a dataset and a dataloader for its configuration, both named ``streampack``.

Importing this module registers both. VeOmni's text trainer then reads packs from a broker: ``data.train_path`` is the
broker's address, ``data.datasets_type`` and ``data.dataloader.type`` are ``streampack``.

The micro-batches are those of VeOmni's own collator. A pack is split into its samples, and the collator joins them as
it joins those of VeOmni's buffer. The collator also shards them for sequence parallelism, so all ranks of one
data-parallel rank read the same packs. Padding of packs is left out; VeOmni pads by ``pad_to_length``.

The label of a sample's first token is always -100, since no token predicts it. VeOmni's own loader keeps that label for
the first sample of a micro-batch, and counts it among the tokens of the loss.

VeOmni trains on any number of micro-batches, so stages may change it. It cannot change its own settings while it
trains: where a stage no longer matches them, training ends with StageEnds. An epoch of VeOmni has ``train_steps``
steps; the feed goes on in the next epoch.

VeOmni may write a checkpoint in the background, and begins none before the last one is durable. Each call of
``state_dict`` therefore commits the checkpoint before the last one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

try:
    from veomni.data.data_collator import MainCollator
    from veomni.data.data_loader import DATALOADER_REGISTRY
    from veomni.data.dataset import DATASET_REGISTRY
    from veomni.distributed.parallel_state import get_parallel_state
except ImportError as error:
    raise ImportError(f"got no VeOmni with its registries of data ({error}), expected veomni 0.1.12") from None

from streampack.client.connect import connect
from streampack.core.model.rules import Rules
from streampack.core.model.samples import IGNORE_INDEX
from streampack.errors import UserError
from streampack.integrations.checks.checkpointed import CheckpointedLoader
from streampack.integrations.checks.fixed_steps import FixedSteps, check_stages
from streampack.integrations.checks.tried_versions import Tried
from streampack.packs.pack import Pack

__all__ = ["VeomniDataLoader", "VeomniFeed"]

MicroBatch = dict[str, Any]

TRIED = Tried("veomni", "0.1.12")
TRIED.check(DATALOADER_REGISTRY, "register")


@DATASET_REGISTRY.register("streampack")
class VeomniFeed(IterableDataset[Any]):
    """The feed that VeOmni's configuration names; ``VeomniDataLoader`` reads it. VeOmni passes the arguments.

    Args:
        train_path: Address of the broker, as for ``connect``.
        source_name: Name of the feed in broker.yaml; ``train`` by default.
        data_type: Must be ``plaintext``: producers send token ids, and VeOmni has nothing to tokenize.

    Raises:
        UserError: ``data_type`` is another one.

    Example:
        >>> feed = VeomniFeed("tcp://node0:7402")  # doctest: +SKIP
    """

    def __init__(self, train_path: str, source_name: str | None = None, data_type: str = "plaintext", **_: Any) -> None:
        if data_type != "plaintext":
            raise UserError(
                f"got data.data_type={data_type!r}, expected 'plaintext'. Set data.data_type: plaintext. Producers "
                f"apply chat templates, and labels come from the broker"
            )
        self.endpoint, self.feed = train_path, source_name or "train"

    def __iter__(self) -> Iterator[Any]:
        raise UserError(
            "got data.datasets_type: streampack with another dataloader, expected both. Set data.dataloader.type: "
            "streampack"
        )


@dataclass(frozen=True, kw_only=True)
class Settings:
    """VeOmni's settings that a feed's rules must match.

    Attributes:
        dyn_bsz: True if a micro-batch is filled up to a number of tokens; False if a step has a number of samples.
        budget: Tokens of a micro-batch, with ``dyn_bsz``.
        packs: Micro-batches of a step on all ranks, with ``dyn_bsz``.
        samples: Samples of a step, without ``dyn_bsz``.
        warmup: First tokens of a micro-batch and steps to grow from there, or None.
    """

    dyn_bsz: bool
    budget: int
    packs: int
    samples: int
    warmup: tuple[int, int] | None


@DATALOADER_REGISTRY.register("streampack")
class VeomniDataLoader(CheckpointedLoader):
    """Dataloader of VeOmni's text trainer that reads packs from a broker.

    An item is a list of this rank's micro-batches of a step, each a dict as VeOmni's ``MainCollator`` returns. At the
    end of a feed, all ranks end after the same step. VeOmni passes the arguments.

    Args:
        dataset: The ``VeomniFeed`` of ``data.datasets_type: streampack``.
        collate_fn: VeOmni's ``MainCollator``.
        dyn_bsz: ``train.dyn_bsz``; True for steps of packs, False for steps of ``train.global_batch_size`` samples.
        micro_batch_size: ``train.micro_batch_size``. With ``dyn_bsz``, a pack has so many times ``max_seq_len`` tokens.
        global_batch_size: ``train.global_batch_size``.
        max_seq_len: ``data.max_seq_len``.
        train_steps: Steps that VeOmni trains.
        bsz_warmup_ratio: ``train.bsz_warmup_ratio``.
        bsz_warmup_init_mbtoken: ``train.bsz_warmup_init_mbtoken``.
        dyn_bsz_count_mode: ``train.dyn_bsz_count_mode``.

    Raises:
        UserError: The feed's packs do not match VeOmni's settings; the message says what to set.
        StageEnds: While iterating, a stage begins whose packs do not match VeOmni's settings.
        MeshError: As for ``connect``; likewise Unreachable and Rejected.

    Example:
        >>> # in train.yaml: data: {datasets_type: streampack, dataloader: {type: streampack}}
    """

    _behind = 2

    def __init__(
        self,
        dataset: Any,
        *,
        collate_fn: Callable[[list[MicroBatch]], MicroBatch],
        dyn_bsz: bool,
        micro_batch_size: int,
        global_batch_size: int,
        max_seq_len: int,
        train_steps: int,
        bsz_warmup_ratio: float,
        bsz_warmup_init_mbtoken: int,
        dyn_bsz_count_mode: str,
        **_: Any,
    ) -> None:
        if not isinstance(dataset, VeomniFeed):
            raise UserError(
                "got data.dataloader.type: streampack with another dataset, expected both. Set data.datasets_type: "
                "streampack, and data.train_path to the broker's address"
            )
        own = getattr(collate_fn, "metadata_collate_func", None) or getattr(collate_fn, "data_collate_info", None)
        if type(collate_fn) is not MainCollator or own:
            raise UserError(
                f"got the collator {type(collate_fn).__name__} with rules of its own, expected VeOmni's MainCollator "
                f"of text. Use veomni.trainer.text_trainer.TextTrainer"
            )
        if dyn_bsz_count_mode != "total":
            raise UserError(
                f"got train.dyn_bsz_count_mode={dyn_bsz_count_mode!r}, expected 'total', because budgets count all "
                f"tokens. Set train.dyn_bsz_count_mode: total"
            )
        growth = int(train_steps * bsz_warmup_ratio) if dyn_bsz else 0
        self._settings = Settings(
            dyn_bsz=dyn_bsz,
            budget=micro_batch_size * max_seq_len,
            packs=global_batch_size // micro_batch_size,
            samples=global_batch_size,
            warmup=(bsz_warmup_init_mbtoken, growth) if growth else None,
        )
        place = get_parallel_state()
        mesh = {"dp": place.dp_size, "dp_rank": place.dp_rank, "tp": place.sp_size, "tp_rank": max(place.sp_rank, 0)}
        self._collate, self._commits = collate_fn, mesh["dp_rank"] == mesh["tp_rank"] == 0
        self._loader = connect(dataset.endpoint, feed=dataset.feed, mesh=mesh, format="numpy")
        self._thread = threading.get_ident()
        try:
            check_stages(
                self._loader, self._check, "Set train.max_steps to that step, so that VeOmni's last checkpoint is there"
            )
        except UserError:
            self._loader.close()
            raise

    def _check(self, rules: Rules, step: int) -> None:
        check_rules(rules, self._settings)

    def __iter__(self) -> VeomniDataLoader:
        return self

    def __next__(self) -> list[MicroBatch]:
        if threading.get_ident() != self._thread:
            raise UserError(
                "got data.dataloader.use_background_prefetcher: true, expected false, because the loader fetches steps "
                "ahead itself. Set it to false"
            )
        if self._step < 0:
            self._steps = FixedSteps(self._loader, self._check)
        step = next(self._steps)
        self._step = step.index
        return [self._collate(samples_of(pack)) for pack in step]


def samples_of(pack: Pack) -> list[MicroBatch]:
    """Return the samples of a pack as VeOmni's data transforms do: ``input_ids``, ``attention_mask``, ``labels``.

    Each is an int64 tensor [tokens of the sample]. Labels are not shifted; the first is -100.

    Raises:
        UserError: No token of the pack has a label.
    """
    if not pack.num_loss_tokens:
        raise UserError(
            f"got no loss token in pack {pack.pack} of step {pack.step}, expected at least one, because VeOmni takes "
            f"the mean over a micro-batch's loss tokens. Reject such samples with `no_loss_tokens: drop`, and set "
            f"`empty: error` for steps of batches"
        )
    samples = []
    lengths = np.diff(pack.cu_seqlens)[: pack.num_samples].tolist()
    for begin, length in zip(pack.cu_seqlens_padded.tolist(), lengths, strict=False):
        ids = torch.tensor(pack.input_ids[begin : begin + length])
        labels = torch.full_like(ids, IGNORE_INDEX)
        labels[1:] = torch.tensor(pack.labels[begin : begin + length - 1])
        samples.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    return samples


def check_rules(rules: Rules, settings: Settings) -> None:
    """Raise UserError if a feed's steps do not match VeOmni's settings, or have more than its text trainer takes."""
    extra = [field.name for field in rules.all_fields] or [key for key in ("share", "padded") if getattr(rules, key)]
    if extra:
        raise UserError(
            f"got a feed with {', '.join(extra)}, expected samples of token ids and labels alone, because VeOmni's "
            f"text trainer takes nothing else. Remove rules.{'fields' if rules.all_fields else extra[0]}"
        )
    if not settings.dyn_bsz:
        if rules.batch is None or rules.batch.samples != settings.samples:
            raise UserError(
                f"got steps of {_size(rules)}, expected batches of {settings.samples} samples, because train.dyn_bsz "
                f"is false. Set rules.step to {{samples: {settings.samples}}}, or train.dyn_bsz: true"
            )
        return
    if rules.batch is not None or rules.packs != settings.packs:
        raise UserError(
            f"got steps of {_size(rules)}, expected {settings.packs} packs, because train.dyn_bsz is true. Set "
            f"train.global_batch_size to the packs of a step times train.micro_batch_size, or train.dyn_bsz: false"
        )
    if rules.budget != settings.budget:
        raise UserError(
            f"got packs of {rules.budget} tokens, expected {settings.budget}, train.micro_batch_size times "
            f"data.max_seq_len. Set data.max_seq_len to rules.budget, and train.micro_batch_size: 1"
        )
    growth = None if rules.warmup is None else (rules.warmup.init, rules.warmup.steps)
    if growth != settings.warmup:
        got = "no rules.warmup" if growth is None else f"rules.warmup {{init: {growth[0]}, steps: {growth[1]}}}"
        if settings.warmup is None:
            raise UserError(f"got {got}, but VeOmni's settings have none. Remove rules.warmup")
        init, steps = settings.warmup
        raise UserError(
            f"got {got}, expected {{init: {init}, steps: {steps}}} by train.bsz_warmup_init_mbtoken and "
            f"train.bsz_warmup_ratio. Set rules.warmup so, or train.bsz_warmup_ratio: 0"
        )


def _size(rules: Rules) -> str:
    """Return a text for the size of a step."""
    if rules.batch is None:
        return f"{rules.packs} packs"
    return "closed batches" if rules.batch.samples is None else f"batches of {rules.batch.samples} samples"
