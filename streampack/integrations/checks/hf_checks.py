"""Check that a Trainer's settings suit packs: before its construction, and once it has its accelerator.

The checks reject settings that would train on other steps than the loader's, divide by another denominator, or let
samples attend to each other (``views.isolation``). They also reject requests that the Trainer would ignore. Settings
without effect are accepted. Each error says what to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from streampack.errors import MeshError, UserError
from streampack.integrations.checks.tried_versions import Tried
from streampack.views.isolation import hf_dependence
from streampack.views.isolation.hf_isolation import BY_POSITIONS

TRIED = Tried("transformers", "5.24.0")
USED = (
    "get_batch_samples", "training_step", "compute_loss", "compute_loss_context_manager", "_prepare_inputs",
    "get_train_dataloader", "get_eval_dataloader", "get_test_dataloader", "evaluation_loop", "prediction_step", "log",
    "get_tp_size", "get_cp_size", "get_sp_size",
)  # fmt: skip
"""Methods of a Trainer that ``PackedTrainerMixin`` replaces or calls."""
_OF_DATASETS = ("train_dataset", "eval_dataset", "data_collator", "formatting_func")
_EXPECTED: tuple[tuple[str, Any, str], ...] = (
    ("gradient_accumulation_steps", 1, "Set the number of micro-batches of an update with rules.step in broker.yaml"),
    ("auto_find_batch_size", False, "The budget sets the length of packs. Lower rules.budget in broker.yaml"),
    (
        "train_sampling_strategy",
        "random",
        "The broker orders samples. Set rules.balance and streams instead",
    ),
    (
        "batch_eval_metrics",
        False,
        "The Trainer cannot recognize a loader's last batch, which completes the metrics",
    ),
    ("use_cache", False, "With a cache, the samples of a pack attend to each other"),
    ("packing", False, "The broker packs the samples already"),
    ("padding_free", False, "The loader's packs are padding-free already"),
    ("eval_packing", False, "The broker packs the samples already"),
    (
        "completion_only_loss",
        False,
        "Declare the field loss_mask in broker.yaml instead. Completions set its values",
    ),
    ("assistant_only_loss", False, "Declare the field loss_mask in broker.yaml instead. Chats set its values"),
)
"""Settings of TrainingArguments and SFTConfig: name, required value unless unset, and advice for the error."""


def is_sft(kind: type, args: Any) -> bool:
    """Return True if the class derives from TRL's SFTTrainer. Raises UserError for other trainers of TRL."""
    names = [base.__name__ for base in kind.__mro__ if base.__module__.split(".")[0] == "trl"]
    if names and "SFTTrainer" not in names:
        raise UserError(
            f"got TRL's {names[0]}, whose batches are not packs, expected SFTTrainer or transformers' Trainer"
        )
    if names and not hasattr(args, "dataset_kwargs"):
        raise UserError(f"got {type(args).__name__} as the arguments of an SFTTrainer, expected trl.SFTConfig")
    return bool(names)


def methods(kind: type) -> None:
    """Check the methods of a Trainer's class. Raises UserError."""
    for base in kind.__mro__:
        if base.__module__ == "transformers.trainer":
            TRIED.check(base, *USED)


def arguments(args: Any, given: Mapping[str, Any], steps_per_epoch: int | None) -> None:
    """Check the arguments of a Trainer before its construction. Raises UserError."""
    for name in _OF_DATASETS:
        if given.get(name) is not None:
            raise UserError(
                f"got {name} together with a loader, expected no {name}. Pass the data only with loader= and "
                f"eval_loader="
            )
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
            raise UserError(f"got {name}={value!r}, expected {expected!r}. {do}")


def loaders(all_loaders: Sequence[Any]) -> None:
    """Check loaders: the first is for training, the others for evaluation. Raises UserError."""
    for loader in all_loaders:
        if loader.format not in ("hf", "hf_shifted"):
            raise UserError(f"got a loader with format={loader.format!r}, expected 'hf'. Pass format='hf' to connect()")
    for loader in all_loaders[1:]:
        if not loader.rules.finite:
            raise UserError(
                "got an eval_loader that never ends, expected streams without repeat, so that the evaluation ends"
            )
    if len({id(loader) for loader in all_loaders}) < len(all_loaders):
        raise UserError(
            "got the same loader for training and evaluation, expected one loader for each feed. Make the second one "
            "with connect(feed='valid')"
        )


def trainer(made: Any, all_loaders: Sequence[Any]) -> None:
    """Check a constructed Trainer, its model and its processes. Raises UserError, MeshError."""
    args = made.args
    _settings(args)  # accelerator_config may have changed settings
    if args.n_gpu > 1:
        raise UserError(
            f"got {args.n_gpu} GPUs in one process, expected one GPU. Start one process for each GPU with torchrun"
        )
    if made.get_cp_size() > 1 or made.get_sp_size() > 1:
        raise UserError(
            f"got context parallelism cp={made.get_cp_size()} sp={made.get_sp_size()}, expected none, because "
            f"transformers splits a pack without regard to its samples. Use format='thd' with your own attention, or "
            f"a smaller budget"
        )
    if not (made.model_accepts_loss_kwargs or made.compute_loss_func):
        raise UserError(
            f"got {type(made.model).__name__}, to which this Trainer passes no num_items_in_batch, expected a model "
            f"whose forward accepts num_items_in_batch. Or pass a compute_loss_func that divides the sum of losses by "
            f"num_items_in_batch"
        )
    if args.world_size > 1 and not args.average_tokens_across_devices:
        raise UserError(
            "got average_tokens_across_devices=False, expected True, because all ranks of a step share one denominator"
        )
    attached(made, all_loaders)


def attached(made: Any, all_loaders: Sequence[Any]) -> None:
    """Check that loaders fit the Trainer's processes and model. Raises UserError, MeshError."""
    for loader in all_loaders:
        _check_mesh(loader.mesh, made.args, made.get_tp_size())
        _check_positions(loader.rules, getattr(made.model, "config", None))
    sharded = made.is_fsdp_enabled or made.is_deepspeed_enabled or made.get_tp_size() > 1
    if not sharded and not all(loader.rules.padded for loader in all_loaders):
        with made.accelerator.autocast():
            hf_dependence.check(made.model)


def _check_mesh(mesh: Any, args: Any, tp: int) -> None:
    """Raise MeshError unless a loader's mesh matches the Trainer's processes."""
    sizes = (args.world_size // tp, 1, tp, 1)
    if mesh.sizes != sizes or (tp == 1 and mesh.dp_rank != args.process_index):
        raise MeshError(
            f"got a loader with {mesh} in process {args.process_index} of {args.world_size} (tp={tp}), expected "
            f"dp={sizes[0]} tp={tp}. Call connect(mesh={{'dp': args.world_size, 'dp_rank': args.process_index}})"
        )


def _check_positions(rules: Any, config: Any) -> None:
    """Raise UserError if samples bring position ids and the model's attention finds samples by position ids."""
    kind = getattr(config, "_attn_implementation", None)
    if kind in BY_POSITIONS and any(field.name == "position_ids" for field in rules.fields):
        raise UserError(
            f"got declared position_ids with attn_implementation={kind!r}, expected flash attention. Other "
            f"implementations find the samples of a pack by position ids that restart at 0, but declared position ids "
            f"need not restart"
        )
