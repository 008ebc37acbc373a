"""Arguments of Megatron-LM, and rules of feeds, that go together; used by ``streampack.integrations.megatron``."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

from msgspec import UNSET

from streampack.core.model.rules import Rules
from streampack.errors import UserError
from streampack.integrations.checks.fixed_steps import Check


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
        "overlap_moe_expert_parallel_comm": (False, "Its forward step drops the boundaries of samples"),
        "hybrid_context_parallel": (
            False,
            "In pretrain, Megatron plans it itself. For `cp: dynamic`, use integrations.megatron.hybrid_cp",
        ),
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
    pp = getattr(args, "pipeline_model_parallel_size", 1)
    if pp > 1 and not hasattr(args, "dataloader_inter_document_masking"):
        raise UserError(
            f"got pipeline_model_parallel_size={pp} with a Megatron-LM before 0.19, expected 0.19 or newer. Older "
            f"versions of get_batch drop the boundaries of samples on middle stages"
        )
    if valid_feed is None and getattr(args, "eval_iters", None):
        raise UserError(
            f"got eval_iters={args.eval_iters} without valid_feed, expected a feed to evaluate on. Set eval_iters to "
            f"0, or pass valid_feed, the name of a finite feed"
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


def checker(args: Any, cp: int, batch: str = "global_batch_size") -> Check:
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
