"""Megatron-LM: a provider of data iterators for ``--dataloader-type external``.

Megatron requests one micro-batch after another from its iterator. A micro-batch is a pack, and ``seq_length`` is the
budget. An iteration is a step if ``global_batch_size`` is the number of packs of a step.

The first tensor-parallel rank reads on every pipeline stage, since middle stages need the boundaries of samples.
Megatron's ``get_batch`` sends packs to the other tensor ranks and shards packs for context parallelism. Each
context-parallel rank therefore reads whole packs.

Megatron calls ``save_state`` on the ranks that write the loader's state into ``dataloader_save``. The script
``pretrain_gpt.py`` has no option for this folder, so the provider sets it to ``save``. Megatron does not restore the
state; the provider does. States are equal on all ranks, so one file suffices, on any mesh. The tracker file, which
Megatron writes last, names the newest durable iteration. That iteration is committed when the next one is saved.

Megatron cannot change ``seq_length`` or ``global_batch_size`` while it trains. A stage with other packs ends training
with StageEnds. With ``rampup_batch_size``, the stages of broker.yaml must have the same sizes at the same iterations;
``check_rampup`` says the lines to write.

The module uses Megatron-LM's arguments (``get_args()``) and the ranks of ``megatron.core.parallel_state``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from msgspec import UNSET

from streampack.client.connect import Client, connect
from streampack.core.model.rules import Rules
from streampack.errors import StateError, UserError
from streampack.integrations.checks.fixed_steps import Check, FixedSteps, check_stages
from streampack.integrations.checks.tried_versions import Tried

__all__ = ["TrainIterator", "datasets_provider"]

TRIED = Tried("megatron-core", "0.16.1")
USED = tuple(
    f"get_{part}_{what}"
    for part in ("data_parallel", "context_parallel", "tensor_model_parallel", "pipeline_model_parallel")
    for what in ("world_size", "rank")
)
"""Functions of Megatron's ``parallel_state`` that this module calls."""

Iterators = tuple["TrainIterator | None", "Iterator[Any] | None", None]


def datasets_provider(
    get_args: Callable[[], Any], *, endpoint: str | None = None, feed: str = "train", valid_feed: str | None = None
) -> Callable[..., Iterators]:
    """Return the ``train_valid_test_datasets_provider`` for Megatron's ``pretrain``.

    The provider returns (train iterator, validation iterator, None), or (None, None, None) on ranks that do not read.
    It raises UserError if Megatron's arguments do not match the feed, and what ``connect`` raises.

    Args:
        get_args: Megatron's ``get_args``.
        endpoint: Address of the broker, as for ``connect``.
        feed: Name of the feed to train on.
        valid_feed: Name of the feed to evaluate on; each evaluation takes its first ``eval_iters`` steps. Default: no
            evaluation.

    Returns:
        The provider.

    Example:
        >>> from megatron.training import get_args, pretrain  # doctest: +SKIP
        >>> provider = datasets_provider(get_args)  # doctest: +SKIP
        >>> pretrain(config, provider, ModelType.encoder_or_decoder, forward_step)  # doctest: +SKIP
    """

    def provider(train_val_test_num_samples: Any = None, vp_stage: int | None = None) -> Iterators:
        """Return (train, validation, None) iterators, or (None, None, None) on a rank that does not read."""
        TRIED.check(parallel_state, *USED)
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
    """Iterator of the training feed's packs, in the format ``megatron``.

    The iterator begins after the checkpoint that Megatron has loaded, if ``args.iteration`` is not 0.

    Args:
        loader: Loader of the training feed.
        args: Megatron's arguments.

    Raises:
        StateError: The checkpoint's folder holds no state of the loader.

    Example:
        >>> train, valid, _ = datasets_provider(get_args)()  # doctest: +SKIP
        >>> pack = next(train)  # doctest: +SKIP
    """

    def __init__(self, loader: Client, args: Any) -> None:
        self._loader, self._tracker = loader, None
        self._check = _checker(args, loader.mesh.cp)
        self._steps: FixedSteps | None = None  # begins with the first pack: a state is loaded before
        self._packs: Iterator[Any] = iter(())
        self._iteration, self._step = args.iteration, -1
        self._saved: dict[int, int] = {}  # saved iteration -> index of the last step before
        if args.save and loader.mesh.dp_rank == loader.mesh.cp_rank == 0:
            self._tracker = Path(args.save) / "latest_checkpointed_iteration.txt"
        if args.iteration:
            loader.load_state_dict(saved_state([args.dataloader_save, getattr(args, "load", None)], args.iteration))

    def __iter__(self) -> TrainIterator:
        return self

    def __next__(self) -> Any:
        """Return the next pack. Raises UserError at the end of the feed, where Megatron could not stop.

        Raises StageEnds, at each call, if a stage has other packs than Megatron's arguments say.
        """
        if self._steps is None:
            self._steps = FixedSteps(self._loader, self._check)
        try:
            while (pack := next(self._packs, None)) is None:
                self._packs = iter(next(self._steps))
        except StopIteration:
            raise UserError(
                f"got the end of the feed after iteration {self._iteration}, expected packs for all iterations. Set "
                f"train_iters to {self._iteration}, or set passes or repeat of the streams"
            ) from None
        if pack.micro_batch + 1 == pack.num_micro_batches:
            self._iteration, self._step = self._iteration + 1, pack.step
        return pack

    def save_state(self) -> dict[str, Any]:
        """Return the loader's state for a new checkpoint, and commit the newest durable checkpoint.

        Returns:
            A dict that holds only what JSON can hold.
        """
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
        """Close the loader and release the rank."""
        self._loader.close()


def saved_state(folders: Iterable[Any], iteration: int) -> dict[str, Any]:
    """Return the loader's state that data-parallel rank 0 saved at ``iteration``; valid for all ranks.

    The first of ``folders`` with such a file counts; a folder may be None. Raises StateError without a file.
    """
    name = f"iter_{iteration:07d}/mp_rank_*/train_dataloader_dprank000.pt"
    places = [Path(folder) for folder in folders if folder is not None]
    files = [file for folder in places for file in sorted(folder.glob(name))]
    if not files:
        raise StateError(
            f"got no file {name} in {' or '.join(map(str, places)) or 'any folder'}, expected the loader's state of "
            f"the checkpoint. Copy the file there, or set finetune to restart the data"
        )
    state: dict[str, Any] = torch.load(files[0], weights_only=True)["dataloader_state_dict"]
    return state


def _connect(endpoint: str | None, feed: str, args: Any, batch: str) -> Client:
    """Connect with Megatron's mesh and check the feed's rules; ``batch`` as for ``check_rules``. Raises UserError."""
    ranks = parallel_state
    mesh = {
        "dp": ranks.get_data_parallel_world_size(), "dp_rank": ranks.get_data_parallel_rank(),
        "cp": ranks.get_context_parallel_world_size(), "cp_rank": ranks.get_context_parallel_rank(),
        "tp": ranks.get_tensor_model_parallel_world_size(), "tp_rank": 0,  # the only one that reads
        "pp": ranks.get_pipeline_model_parallel_world_size(), "pp_rank": ranks.get_pipeline_model_parallel_rank(),
    }  # fmt: skip
    loader = connect(endpoint, feed=feed, mesh=mesh, readers={"tp": [0]}, format="megatron")
    try:
        if batch == "global_batch_size" and getattr(args, "rampup_batch_size", None):
            check_rampup(loader.rules, args)
        advice = "Set train_iters or exit_interval to that step, so that Megatron saves there"
        check_stages(loader, _checker(args, loader.mesh.cp, batch), advice)
    except UserError:
        loader.close()
        raise
    return loader


def evaluations(loader: Any, num_steps: int) -> Iterator[Any]:
    """Yield packs without end: for each evaluation the first ``num_steps`` steps, or an infinite feed's next steps."""
    while True:
        for step in islice(loader.steps(), num_steps):
            yield from step


def check_args(args: Any, valid_feed: str | None = None) -> None:
    """Raise UserError for arguments of Megatron-LM that packs do not support, or for evaluations without a feed."""
    wanted = {
        "dataloader_type": ("external", "This provider returns iterators, not datasets"),
        "micro_batch_size": (
            1,
            "A micro-batch is one pack. For larger micro-batches, raise seq_length and rules.budget",
        ),
        "eval_micro_batch_size": (1, "A micro-batch is one pack"),
        "calculate_per_token_loss": (
            True,
            "Packs have different numbers of labels, so the mean of their mean losses would be biased",
        ),
        "virtual_pipeline_model_parallel_size": (None, "Each virtual stage of a rank would read different packs"),
        "hybrid_context_parallel": (False, "Hybrid context parallelism forms packs itself"),
        "create_attention_mask_in_dataloader": (False, "Packs have sample boundaries instead of an attention mask"),
        "step_batch_size_schedule": (
            None,
            "Write each size as a stage with `step: {packs: N}`, and train each stage with its own global_batch_size",
        ),
        "full_validation": (False, "The number of packs of a feed is unknown before the feed ends"),
    }
    for name, (expected, why) in wanted.items():
        got = getattr(args, name, expected)
        if got != expected:
            raise UserError(f"got {name}={got!r}, expected {expected!r}. {why}")
    if not (getattr(args, "dataloader_inter_document_masking", False) or getattr(args, "sft", False)):
        raise UserError(
            "got neither dataloader_inter_document_masking nor sft, expected one of them. Without them, get_batch "
            "drops the boundaries of samples, and samples of a pack attend to each other"
        )
    cp = getattr(args, "context_parallel_size", 1)
    if cp > 1 and not getattr(args, "sft", False):
        raise UserError(
            f"got context_parallel_size={cp} without sft, expected sft. Without sft, get_batch gives each rank a part "
            f"of the row, but attention expects a part of each sample"
        )
    if getattr(args, "mtp_num_layers", None) and getattr(args, "pipeline_model_parallel_layout", None):
        raise UserError(
            "got mtp_num_layers and pipeline_model_parallel_layout, expected at most one of them. With both, a middle "
            "pipeline stage may predict tokens, but middle stages read no tokens"
        )
    if valid_feed is None and getattr(args, "eval_iters", None):
        raise UserError(
            f"got eval_iters={args.eval_iters} without valid_feed, expected a feed to evaluate on. Set eval_iters to "
            f"0, or pass valid_feed to datasets_provider"
        )


def rampup_sizes(args: Any) -> list[tuple[int, int]]:
    """Return the iterations at which ``rampup_batch_size`` changes the batch size, and the sizes from there on.

    Megatron counts the samples (packs) of all iterations before. It computes the size as
    ``RampupBatchsizeNumMicroBatchesCalculator`` of megatron.core does.

    >>> from types import SimpleNamespace
    >>> rampup_sizes(SimpleNamespace(global_batch_size=8, rampup_batch_size=[4, 2, 24]))
    [(0, 4), (3, 6), (5, 8)]
    """
    start, increment, samples = map(int, args.rampup_batch_size)
    every = samples / max((args.global_batch_size - start) // increment, 1)
    sizes, consumed, iteration = [(0, start)], 0, 0
    while sizes[-1][1] < args.global_batch_size:
        consumed, iteration = consumed + sizes[-1][1], iteration + 1
        size = args.global_batch_size if consumed > samples else start + int(consumed / every) * increment
        if size != sizes[-1][1]:
            sizes.append((iteration, size))
    return sizes


def check_rampup(rules: Rules, args: Any) -> None:
    """Raise UserError unless the stages of a run have the sizes of ``rampup_batch_size``; the text has those to write.

    Args:
        rules: The rules with which the run began, and its stages.
        args: Megatron's arguments.
    """
    sizes = rampup_sizes(args)
    changes = [(stage.at.step, stage.rules.packs) for stage in rules.stages if stage.rules.packs is not UNSET]
    got = [(0, rules.packs), *changes]
    if got == sizes:
        return
    lines = [f"  - {{name: batch-{n}, at: {{step: {at}}}, rules: {{step: {{packs: {n}}}}}}}" for at, n in sizes[1:]]
    raise UserError(
        f"got rampup_batch_size={args.rampup_batch_size} and steps whose numbers of packs are {got}, as (first step, "
        f"packs), expected {sizes}. Write in broker.yaml `rules.step.packs: {sizes[0][1]}` and\n\nstages:\n"
        + "\n".join(lines)
    )


def _checker(args: Any, cp: int, batch: str = "global_batch_size") -> Check:
    """Return the check of the rules of a step, as ``check_rules`` has them."""
    ramps = batch == "global_batch_size" and getattr(args, "rampup_batch_size", None)
    sizes = rampup_sizes(args) if ramps else []

    def check(rules: Rules, step: int) -> None:
        """Raise UserError if ``rules`` do not match Megatron's iterations from ``step`` on."""
        packs = sizes[bisect_right(sizes, step, key=lambda size: size[0]) - 1][1] if sizes else None
        check_rules(rules, args, cp, batch, packs)

    return check


def check_rules(
    rules: Rules, args: Any, cp: int, batch: str = "global_batch_size", packs: int | None = None
) -> None:  # fmt: skip
    """Raise UserError if a feed's packs and steps do not match Megatron's micro-batches and iterations.

    ``cp``: number of context-parallel ranks. ``batch``: name of the argument with the number of packs of an iteration.
    ``packs``: the number itself, if ``rampup_batch_size`` gives another one for some iterations.
    """
    if rules.batch is not None or rules.warmup is not None or rules.packs_ramp is not None:
        varies = rules.batch is not None or rules.packs_ramp is not None
        got = "steps with a varying number of packs" if varies else "a growing budget"
        raise UserError(
            f"got {got}, expected the same number and length of packs in every step. Set rules.step to {{packs: N}}, "
            f"and remove rules.warmup"
        )
    if rules.budget != args.seq_length:
        raise UserError(
            f"got packs of {rules.budget} tokens with seq_length={args.seq_length}, expected equal lengths. Set "
            f"seq_length to rules.budget"
        )
    size = getattr(args, batch, args.global_batch_size) if packs is None else packs
    if rules.packs != size:
        raise UserError(
            f"got steps of {rules.packs} packs with {batch}={size}, expected equal numbers. Set {batch} to "
            f"rules.step.packs"
        )
    if cp > 1 and rules.align.sample % (2 * cp):
        raise UserError(
            f"got samples padded to multiples of {rules.align.sample} tokens with {cp} context-parallel ranks, "
            f"expected multiples of {2 * cp}, because each sample is split into {2 * cp} parts. Set planned_mesh.cp "
            f"before the run starts"
        )
