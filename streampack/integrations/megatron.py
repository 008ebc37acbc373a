"""Megatron-LM: a provider of data iterators for ``--dataloader-type external``.

Megatron asks its iterator for one micro-batch after another: a micro-batch is a pack, ``seq_length`` the budget, and an
iteration a step where ``global_batch_size`` is its number of packs. Each first tensor-parallel rank reads, on every
stage, since middle ones take the boundaries of samples; ``get_batch`` sends packs to the other tensor ranks and shards
them for context parallelism, so each context-parallel rank reads whole ones.

Megatron has ``save_state`` called by the ranks that write the loader's state into ``dataloader_save``, for which
``pretrain_gpt.py`` has no option: it is made ``save``. Megatron restores nothing. States are equal on all ranks, so one
file is enough to go on from, on any mesh. What is durable is said by the tracker file that Megatron writes last, also
where it saves in the background: the newest iteration that it names is committed when the next is saved.

Knows of Megatron-LM its arguments (``get_args()``) alone; ranks are those of ``megatron.core.parallel_state``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state

from streampack.client.connect import Client, connect
from streampack.core.model.rules import Rules
from streampack.errors import StateError, UserError

Iterators = tuple["TrainIterator | None", "Iterator[Any] | None", None]


def datasets_provider(
    get_args: Callable[[], Any], *, endpoint: str | None = None, feed: str = "train", valid_feed: str | None = None
) -> Callable[..., Iterators]:
    """What ``pretrain`` takes as ``train_valid_test_datasets_provider``: gives (train, valid, None), on ranks that do
    not read (None, None, None).

    Each evaluation is over the first ``eval_iters`` steps of ``valid_feed``. Raises UserError for arguments with which
    Megatron would train on something else than the loader's steps, and what ``connect`` does.

    >>> from megatron.training import get_args, pretrain  # doctest: +SKIP
    >>> pretrain(config, datasets_provider(get_args), ModelType.encoder_or_decoder, forward_step)  # doctest: +SKIP
    """

    def provider(train_val_test_num_samples: Any = None, vp_stage: int | None = None) -> Iterators:
        args = get_args()
        check_args(args, valid_feed)
        args.dataloader_save = getattr(args, "dataloader_save", None) or args.save
        if parallel_state.get_tensor_model_parallel_rank():
            return None, None, None
        train = TrainIterator(_connect(endpoint, feed, args, "global_batch_size"), args)
        if valid_feed is None:
            return train, None, None
        valid = _connect(endpoint, valid_feed, args, "eval_global_batch_size")
        return train, evaluations(valid, args.eval_iters), None

    provider.is_distributed = True  # type: ignore[attr-defined]
    return provider


class TrainIterator:
    """The train feed's packs, ``format="megatron"``, from where the checkpoint that Megatron has loaded says."""

    def __init__(self, loader: Client, args: Any) -> None:
        self._loader, self._tracker = loader, None
        self._iteration, self._step = args.iteration, -1
        self._saved: dict[int, int] = {}  # by iteration, the last step before it
        if args.save and loader.mesh.dp_rank == loader.mesh.cp_rank == 0:
            self._tracker = Path(args.save) / "latest_checkpointed_iteration.txt"
        if args.iteration:
            loader.load_state_dict(saved_state([args.dataloader_save, getattr(args, "load", None)], args.iteration))

    def __iter__(self) -> TrainIterator:
        return self

    def __next__(self) -> Any:
        """The next micro-batch. Raises UserError after the last one, which Megatron must not come to."""
        try:
            pack = next(self._loader)
        except StopIteration:
            raise UserError(
                f"got the end of the feed after iteration {self._iteration}, expected packs for all of them: set "
                f"train_iters to that, or passes or repeat of the streams"
            ) from None
        if pack.micro_batch + 1 == pack.num_micro_batches:
            self._iteration, self._step = self._iteration + 1, pack.step
        return pack

    def save_state(self) -> dict[str, Any]:
        """The loader's state, for the checkpoint that is being made; commits the newest one that is durable."""
        state = self._loader.state_dict()
        if self._tracker is not None:
            durable = self._tracker.read_text().strip() if self._tracker.exists() else ""
            if durable.isdecimal() and int(durable) in self._saved:
                self._loader.commit(self._saved[int(durable)])
                self._saved = {iteration: step for iteration, step in self._saved.items() if iteration > int(durable)}
            if self._step >= 0:
                self._saved[self._iteration] = self._step
        return state

    def close(self) -> None:
        """Give the rank up."""
        self._loader.close()


def saved_state(folders: Iterable[Any], iteration: int) -> dict[str, Any]:
    """The state that data-parallel rank 0 saved, which is that of all, by any mesh: of the first folder that has it,
    any may be None. Raises StateError if none has it.
    """
    name = f"iter_{iteration:07d}/mp_rank_*/train_dataloader_dprank000.pt"
    given = [Path(folder) for folder in folders if folder is not None]
    found = [file for folder in given for file in sorted(folder.glob(name))]
    if not found:
        raise StateError(
            f"got no {name} in {' or '.join(map(str, given)) or 'any folder'}, expected the loader's state of the "
            f"checkpoint: copy it there, or begin the data anew with finetune"
        )
    state: dict[str, Any] = torch.load(found[0], weights_only=True)["dataloader_state_dict"]
    return state


def _connect(endpoint: str | None, feed: str, args: Any, batch: str) -> Client:
    ranks = parallel_state
    mesh = {
        "dp": ranks.get_data_parallel_world_size(), "dp_rank": ranks.get_data_parallel_rank(),
        "cp": ranks.get_context_parallel_world_size(), "cp_rank": ranks.get_context_parallel_rank(),
        "tp": ranks.get_tensor_model_parallel_world_size(),
        "pp": ranks.get_pipeline_model_parallel_world_size(), "pp_rank": ranks.get_pipeline_model_parallel_rank(),
    }  # fmt: skip
    loader = connect(endpoint, feed=feed, mesh=mesh, readers={"tp": [0]}, format="megatron")
    try:
        check_rules(loader.rules, args, loader.mesh.cp, batch)
    except UserError:
        loader.close()
        raise
    return loader


def evaluations(loader: Any, num_steps: int) -> Iterator[Any]:
    """Packs of the first ``num_steps`` steps, over and over; of a feed without an end, of the next ones."""
    while True:
        for step in islice(loader.steps(), num_steps):
            yield from step


def check_args(args: Any, valid_feed: str | None = None) -> None:
    """Raises UserError for arguments of Megatron-LM that packs do not go with, whatever they hold, and for evaluations
    without a feed.
    """
    wanted = {
        "dataloader_type": ("external", "this provider's iterators are no datasets"),
        "micro_batch_size": (1, "a micro-batch is a pack: make seq_length and the budget larger"),
        "eval_micro_batch_size": (1, "a micro-batch is a pack"),
        "calculate_per_token_loss": (True, "packs differ in how many labels count, and a mean of means is biased"),
        "virtual_pipeline_model_parallel_size": (None, "each of a rank's stages would read packs of its own"),
        "hybrid_context_parallel": (False, "it makes packs itself"),
        "create_attention_mask_in_dataloader": (False, "packs have boundaries, and no mask to send"),
        "rampup_batch_size": (None, "a step has the same number of packs from the first on"),
        "step_batch_size_schedule": (None, "a step has the same number of packs from the first on"),
        "full_validation": (False, "how many packs a feed has is not known before its end"),
    }
    for name, (expected, why) in wanted.items():
        got = getattr(args, name, expected)
        if got != expected:
            raise UserError(f"got {name}={got!r}, expected {expected!r}: {why}")
    if not (getattr(args, "dataloader_inter_document_masking", False) or getattr(args, "sft", False)):
        raise UserError(
            "got neither dataloader_inter_document_masking nor sft, expected one of them: without, get_batch drops the "
            "boundaries of samples, which see each other then"
        )
    cp = getattr(args, "context_parallel_size", 1)
    if cp > 1 and not getattr(args, "sft", False):
        raise UserError(
            f"got context_parallel_size={cp} without sft, expected both: without, get_batch gives ranks parts of the "
            f"row, where attention takes them for parts of each sample"
        )
    if getattr(args, "mtp_num_layers", None) and getattr(args, "pipeline_model_parallel_layout", None):
        raise UserError(
            "got mtp_num_layers and pipeline_model_parallel_layout, expected one of them: a stage in the middle that "
            "predicts tokens reads none"
        )
    if valid_feed is None and getattr(args, "eval_iters", None):
        raise UserError(
            f"got eval_iters={args.eval_iters} and no valid_feed, expected what to evaluate on: set eval_iters to 0, "
            f"or valid_feed of datasets_provider"
        )


def check_rules(rules: Rules, args: Any, cp: int, batch: str = "global_batch_size") -> None:
    """Raises UserError for a feed whose packs and steps are not Megatron's micro-batches and iterations, with ``cp``
    context-parallel ranks; ``batch`` is the argument that says how many packs an iteration has.
    """
    if rules.batch is not None or rules.warmup is not None:
        got = "a budget that grows" if rules.batch is None else "steps that are batches, whose packs differ in number"
        raise UserError(f"got {got}, expected packs alike in every step: set rules.step to {{packs: N}}, and no warmup")
    if rules.budget != args.seq_length:
        raise UserError(
            f"got packs of {rules.budget} tokens and seq_length={args.seq_length}, expected the same: set seq_length "
            f"to rules.budget"
        )
    size = getattr(args, batch, args.global_batch_size)
    if rules.packs != size:
        raise UserError(
            f"got steps of {rules.packs} packs and {batch}={size}, expected the same: set {batch} to rules.step.packs"
        )
    if cp > 1 and rules.align.sample % (2 * cp):
        raise UserError(
            f"got samples padded to multiples of {rules.align.sample} with {cp} context-parallel ranks, expected "
            f"multiples of {2 * cp}, so many parts each is cut into: set planned_mesh.cp before the run starts"
        )
