"""TRL's GRPO: form the micro-batches of a generation batch by length, with less padding.

TRL splits a generation batch at random, and pads all of its micro-batches to the longest prompt and the longest
completion. ``install`` changes this for one trainer. ``plan_step`` plans the rollouts of an optimizer step over all
micro-batches and ranks, and each micro-batch is padded to its own longest rollout. Micro-batches and ranks then have
about as many tokens each. Generation, rewards and TRL's loss stay as they are.

A micro-batch may have more or fewer rollouts than one of TRL. Where TRL's loss is a mean over rollouts, ``install``
weights it by their number. So the loss and the gradients of an optimizer step are those of TRL. ``install`` rejects
settings with a loss that depends on which rollouts share a micro-batch.

"""

from __future__ import annotations

import math
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from streampack.errors import UserError
from streampack.integrations.checks.tried_versions import Tried
from streampack.planning import StepPlan, plan_step

__all__ = ["install", "plan_micro_batches"]

TRIED = Tried("trl", "1.16.0")
USED = (
    "_prepare_inputs", "_compute_loss", "_buffered_inputs", "_step", "_entropy_bonus_enabled", "top_entropy_quantile",
    "aux_loss_enabled", "loss_type", "pad_to_multiple_of", "accelerator",
)  # fmt: skip
"""Attributes of a ``GRPOTrainer`` that this module uses."""

MEANS = frozenset({"grpo", "sapo", "dr_grpo", "luspo"})
"""Losses that are means over the rollouts of a micro-batch."""

SUMS = frozenset({"dapo", "cispo", "vespo"})
"""Losses that are sums, divided by the tokens of the generation batch."""

PADDING = {
    "prompt_ids": 0, "prompt_mask": 0, "completion_ids": 0, "completion_mask": 0, "tool_mask": 1,
    "old_per_token_logps": 0, "ref_per_token_logps": 0, "sampling_per_token_logps": 0, "importance_sampling_ratio": 1,
    "advantages": 0,
}  # fmt: skip
"""Fields of a rollout, and their values at padding."""

ABSOLUTE = ("dynamic", "longrope")
"""Types of rotary positions that depend on the padded length."""

SHARE = "streampack_share"
"""Rollouts of a micro-batch, relative to their mean number."""


def install(trainer: Any) -> None:
    """Make a ``GRPOTrainer`` plan its micro-batches with streampack. Call it before ``train()``, on every rank.

    A second call changes nothing.

    Args:
        trainer: The trainer. ``per_device_train_batch_size`` becomes the mean number of rollouts in a micro-batch.

    Raises:
        UserError: The loss of this trainer would change, or this version of TRL is not known.

    Example:
        >>> trainer = GRPOTrainer(...)  # doctest: +SKIP
        >>> streampack.integrations.trl_grpo.install(trainer)  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """
    if not any(kind.__name__ == "GRPOTrainer" for kind in type(trainer).__mro__):
        raise UserError(f"got a trainer of type {type(trainer).__name__}, expected a GRPOTrainer of {TRIED.package}")
    TRIED.check(trainer, *USED)
    if getattr(trainer._compute_loss, "__module__", "") == __name__:
        return
    _check(trainer)
    prepare, compute_loss = trainer._prepare_inputs, trainer._compute_loss
    planned: Any = None

    def prepare_inputs(batch: Any) -> Any:
        """Return the micro-batch of this step. Plans the generation batch when TRL has made it."""
        nonlocal planned
        inputs = prepare(batch)
        if not trainer.model.training:
            return inputs
        if trainer._buffered_inputs is not planned:
            planned = trainer._buffered_inputs = _planned(trainer, trainer._buffered_inputs)
        return planned[trainer._step % len(planned)]

    def weighted_loss(model: Any, inputs: dict[str, Any]) -> Any:
        """Return TRL's loss of a micro-batch, weighted by its number of rollouts where TRL takes their mean."""
        return compute_loss(model, inputs) * inputs.get(SHARE, 1)

    trainer._prepare_inputs, trainer._compute_loss = prepare_inputs, weighted_loss


def plan_micro_batches(lengths: list[int], micro_batches: int, ranks: int = 1) -> StepPlan:
    """Plan padded micro-batches: a fixed number of them, with as few tokens as possible in the largest.

    Args:
        lengths: Tokens of each rollout; at least one rollout for each micro-batch and rank.
        micro_batches: Number of micro-batches of each rank.
        ranks: Number of data-parallel ranks.

    Returns:
        A plan in the mode ``padded``. All ranks have as many rollouts in a micro-batch.

    Example:
        >>> plan_micro_batches([9, 2, 3, 8, 2, 3], micro_batches=2).packs
        [[[3, 0], [1, 4, 2, 5]]]
    """
    most = int(max(lengths))
    low, high = most, most * -(-len(lengths) // ranks)
    while low < high:
        budget = (low + high) // 2
        if plan_step(lengths, budget, ranks, mode="padded").num_micro_batches > micro_batches:
            low = budget + 1
        else:
            high = budget
    return plan_step(lengths, low, ranks, mode="padded", min_micro_batches=micro_batches)


def _check(trainer: Any) -> None:
    """Raise UserError if the loss depends on which rollouts share a micro-batch, or on their padding."""
    known, config = MEANS | SUMS, trainer.model.config.get_text_config()
    rotary = getattr(config, "rope_parameters", None) or {}
    kinds = [each for each in rotary.values() if isinstance(each, dict)] or [rotary]
    absolute = any(each.get("rope_type") in ABSOLUTE or "llama_4_scaling_beta" in each for each in kinds)
    if trainer.loss_type not in known:
        got, expected = f"loss_type={trainer.loss_type!r}", f"one of {', '.join(sorted(known))}"
    elif trainer._entropy_bonus_enabled:
        got, expected = "an entropy bonus", "entropy_coef=0 and use_adaptive_entropy=False"
    elif trainer.top_entropy_quantile < 1:
        got, expected = f"top_entropy_quantile={trainer.top_entropy_quantile}", "1.0"
    elif trainer.aux_loss_enabled:
        got, expected = "a load-balancing loss of experts", "router_aux_loss_coef=0"
    elif not rotary or absolute or getattr(config, "attention_chunk_size", None):
        raise UserError(
            f"got a model of type {config.model_type!r} with absolute positions, expected relative (rotary) positions "
            f"(rope_parameters of its config), because other padding moves tokens"
        )
    else:
        return
    raise UserError(f"got {got}, expected {expected}, because this loss depends on which rollouts share a micro-batch")


def _planned(trainer: Any, batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return this rank's micro-batches in place of those of TRL, as many of them."""
    ranks, rank = trainer.accelerator.num_processes, trainer.accelerator.process_index
    block = math.gcd(len(batches), trainer.args.gradient_accumulation_steps)  # all of one optimizer step
    total, device = batches[0]["num_items_in_batch"], trainer.accelerator.device
    micro_batches: list[dict[str, Any]] = []
    for first in range(0, len(batches), block):
        rows = [row for batch in batches[first : first + block] for row in _rows(batch)]
        if ranks > 1:
            rows = gather_object([{name: value.cpu() for name, value in row.items()} for row in rows])
        lengths = [len(row["prompt_ids"]) + len(row["completion_ids"]) for row in rows]
        for places in plan_micro_batches(lengths, block, ranks).packs[rank]:
            made = _stacked([rows[at] for at in places], trainer.pad_to_multiple_of or 1, device)
            share = len(places) * block * ranks / len(rows) if trainer.loss_type in MEANS else 1
            micro_batches.append({**made, "num_items_in_batch": total, SHARE: share})
    return micro_batches


def _rows(batch: dict[str, Any]) -> list[dict[str, Tensor]]:
    """Return the rollouts of a micro-batch without padding; at least one token of each prompt and completion."""
    fields = {name: value for name, value in batch.items() if value is not None and name != "num_items_in_batch"}
    if unknown := sorted(fields.keys() - PADDING.keys()):
        raise UserError(f"got rollouts with {', '.join(unknown)}, expected rollouts of text")
    width = batch["completion_ids"].shape[1]
    prompts, completions = (batch[f"{name}_mask"].sum(dim=1).clamp(min=1).tolist() for name in ("prompt", "completion"))

    def row(at: int) -> dict[str, Tensor]:
        """Return a rollout, with numbers by token or by rollout."""
        return {
            name: value[at, -prompts[at] :] if name.startswith("prompt_")
            else value.expand(-1, width)[at, : completions[at]] if value.ndim > 1
            else value[at]
            for name, value in fields.items()
        }  # fmt: skip

    return [row(at) for at in range(len(prompts))]


def _stacked(rows: list[dict[str, Tensor]], multiple: int, device: torch.device) -> dict[str, Tensor]:
    """Return rollouts as a micro-batch: prompts padded on the left, completions on the right."""
    stacked = {}
    for name in rows[0]:
        values = [row[name].to(device) for row in rows]
        if not values[0].ndim:
            stacked[name] = torch.stack(values)
            continue
        left = name.startswith("prompt_")
        made = pad_sequence(values, True, PADDING[name], "left" if left else "right")
        more = -made.shape[1] % multiple
        stacked[name] = pad(made, (more, 0) if left else (0, more), value=PADDING[name])
    return stacked
