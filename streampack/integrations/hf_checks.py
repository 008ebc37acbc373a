"""Check that a Trainer's settings suit packs: before its construction, and once it has its accelerator.

The checks reject settings that would train on other steps than the loader's, divide by another denominator, or let
samples attend to each other (``hf_isolation``). They also reject requests that the Trainer would ignore. Settings
without effect are accepted. Each error says what to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from streampack.errors import MeshError, UserError
from streampack.integrations import hf_isolation

_OF_DATASETS = ("train_dataset", "eval_dataset", "data_collator", "formatting_func")
_BY_POSITIONS = ("sdpa", "eager", "flex_attention")
"""Attention implementations that find samples by position_ids alone; flash attention gets their boundaries."""
_EXPECTED: tuple[tuple[str, Any, str], ...] = (
    ("gradient_accumulation_steps", 1, "an update is a step of the loader, whose micro-batches rules.step says"),
    ("auto_find_batch_size", False, "packs have the length that rules.budget says: lower it there"),
    ("train_sampling_strategy", "random", "the broker orders samples: see rules.balance and streams"),
    ("batch_eval_metrics", False, "the Trainer would not know the last batch: it computes metrics of all at the end"),
    ("use_cache", False, "with a cache the samples of a pack see each other"),
    ("packing", False, "the broker packs"),
    ("padding_free", False, "packs are that already"),
    ("eval_packing", False, "the broker packs"),
    ("completion_only_loss", False, "declare the field loss_mask in broker.yaml: prompts and completions have it"),
    ("assistant_only_loss", False, "declare the field loss_mask in broker.yaml: chats have it"),
)
"""Settings of TrainingArguments and SFTConfig: name, required value unless unset, and advice for the error."""


def is_sft(kind: type, args: Any) -> bool:
    """Return True if the class derives from TRL's SFTTrainer. Raises UserError for other trainers of TRL."""
    names = [base.__name__ for base in kind.__mro__ if base.__module__.split(".")[0] == "trl"]
    if names and "SFTTrainer" not in names:
        raise UserError(f"got TRL's {names[0]}, expected SFTTrainer or transformers' Trainer: its batches are no packs")
    if names and not hasattr(args, "dataset_kwargs"):
        raise UserError(f"got {type(args).__name__} for an SFTTrainer, expected trl.SFTConfig: give it that")
    return bool(names)


def arguments(args: Any, given: Mapping[str, Any], steps_per_epoch: int | None) -> None:
    """Check the arguments of a Trainer before its construction. Raises UserError."""
    for name in _OF_DATASETS:
        if given.get(name) is not None:
            raise UserError(f"got {name} beside a loader, expected none: loader= and eval_loader= give the batches")
    if args is None or not (args.max_steps > 0 or (steps_per_epoch or 0) > 0):
        got = "no arguments" if args is None else f"max_steps={args.max_steps}"
        raise UserError(
            f"got {got}, expected max_steps of at least 1, or num_train_epochs together with steps_per_epoch= of the "
            f"trainer. A loader does not know the length of its feed; 'streampack plan' reports it"
        )
    _settings(args)


def _settings(args: Any) -> None:
    """Check TrainingArguments or SFTConfig against the required values. Raises UserError."""
    for name, expected, do in _EXPECTED:
        value = getattr(args, name, expected)
        if value is not None and value != expected:
            raise UserError(f"got {name}={value!r}, expected {expected!r}: {do}")


def loaders(found: Sequence[Any]) -> None:
    """Check loaders: the first is for training, the others for evaluation. Raises UserError."""
    for loader in found:
        if loader.format not in ("hf", "hf_shifted"):
            raise UserError(f"got a loader with format={loader.format!r}, expected 'hf': connect(..., format='hf')")
    for loader in found[1:]:
        if not loader.rules.finite:
            raise UserError("got an eval_loader that never ends, expected streams without repeat: an evaluation ends")
    if len({id(loader) for loader in found}) < len(found):
        raise UserError("got one loader for training and evaluation, expected one of each feed: connect(feed='valid')")


def trainer(made: Any, found: Sequence[Any]) -> None:
    """Check a constructed Trainer, its model and its processes. Raises UserError, MeshError."""
    args = made.args
    _settings(args)  # accelerator_config may have changed settings
    if args.n_gpu > 1:
        raise UserError(f"got {args.n_gpu} GPUs in one process, expected one: start with torchrun, a process for each")
    if made.get_cp_size() > 1 or made.get_sp_size() > 1:
        raise UserError(
            f"got context parallelism cp={made.get_cp_size()} sp={made.get_sp_size()}, expected none: transformers "
            f"cuts a pack without regard to its samples. Take format='thd' and your own attention, or a smaller budget"
        )
    if not (made.model_accepts_loss_kwargs or made.compute_loss_func):
        raise UserError(
            f"got {type(made.model).__name__}, to which this Trainer passes no num_items_in_batch, expected a model "
            f"whose forward takes it. Or give compute_loss_func, a sum of losses divided by it"
        )
    if args.world_size > 1 and not args.average_tokens_across_devices:
        raise UserError(
            "got average_tokens_across_devices=False, expected True: a step has one denominator, of all ranks"
        )
    attached(made, found)


def attached(made: Any, found: Sequence[Any]) -> None:
    """Check that loaders fit the Trainer's processes and model. Raises UserError, MeshError."""
    for loader in found:
        _check_mesh(loader.mesh, made.args, made.get_tp_size())
        _check_positions(loader.rules, getattr(made.model, "config", None))
    sharded = made.is_fsdp_enabled or made.is_deepspeed_enabled or made.get_tp_size() > 1
    if not sharded and not all(loader.rules.padded for loader in found):
        with made.accelerator.autocast():
            hf_isolation.check(made.model)


def _check_mesh(mesh: Any, args: Any, tp: int) -> None:
    """Raise MeshError unless a loader's mesh matches the Trainer's processes."""
    sizes = (args.world_size // tp, 1, tp, 1)
    if mesh.sizes != sizes or (tp == 1 and mesh.dp_rank != args.process_index):
        raise MeshError(
            f"got a loader of {mesh} in process {args.process_index} of {args.world_size} (tp={tp}), expected "
            f"dp={sizes[0]} tp={tp}: connect(mesh={{'dp': args.world_size, 'dp_rank': args.process_index}})"
        )


def _check_positions(rules: Any, config: Any) -> None:
    """Raise UserError if samples bring position ids and the model's attention finds samples by position ids."""
    kind = getattr(config, "_attn_implementation", None)
    if kind in _BY_POSITIONS and any(field.name == "position_ids" for field in rules.fields):
        raise UserError(
            f"got declared position_ids with attn_implementation={kind!r}, expected flash attention: the others find a "
            f"pack's samples by positions that begin at 0, which declared ones need not"
        )
