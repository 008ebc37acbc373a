"""verl: split batches into micro-batches with streampack's packers, and keep rollouts in a pushed stream.

``install`` replaces verl's ``rearrange_micro_batches`` in this process. Workers then run fewer micro-batches, because
streampack fills each one up to the token limit. Each sample is in one micro-batch, and verl restores the order of
results. So losses stay as they are.

``push`` and ``pull`` make a pushed stream the replay buffer: rollouts survive a crash of every process. The run
declares the fields that are pushed, such as ``response_mask``, ``rollout_log_probs`` and ``advantages``, each with
``align: token``, and ``prompt_length`` with ``axis: sample`` and dtype ``int64``.

"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, SupportsIndex

import numpy as np
import torch
from torch import distributed

from streampack.errors import SampleError, UserError
from streampack.integrations.checks.tried_versions import Tried
from streampack.packs.step import Step
from streampack.planning import plan_step
from streampack.producer.push import Producer

__all__ = ["install", "pull", "push", "rearrange_micro_batches"]

TRIED = Tried("verl", "0.9.1")
PROMPT_LENGTH = "prompt_length"
"""Field with the number of prompt tokens of each sample."""


def install() -> None:
    """Make verl's workers in this process split batches with streampack.

    Call it in each worker, before the first batch. ``use_dynamic_bsz`` must be true, as it is by default.

    Raises:
        UserError: This version of verl does not have the function that is replaced, or it takes other arguments.

    Example:
        >>> streampack.integrations.verl.install()  # doctest: +SKIP
    """
    from verl.utils import seqlen_balancing
    from verl.workers.engine import utils

    for module in (seqlen_balancing, utils):
        TRIED.check(module, "rearrange_micro_batches")
        TRIED.check_parameters(module.rearrange_micro_batches, rearrange_micro_batches)
        setattr(module, "rearrange_micro_batches", rearrange_micro_batches)  # noqa: B010 - it is another module's


def rearrange_micro_batches(
    batch: Any,
    max_token_len: int,
    dp_group: Any = None,
    num_batches_divided_by: int | None = None,
    same_micro_num_in_dp: bool = True,
    min_num_micro_batch: int | None = None,
    use_dynamic_bsz_balance: bool = True,
    force_group_size: int = 1,
) -> tuple[list[Any], list[list[int]]]:
    """Split a batch into micro-batches of at most ``max_token_len`` tokens, as verl's function of this name does.

    Args:
        batch: TensorDict with ``input_ids``, nested or [B, S] with ``attention_mask``.
        max_token_len: Most tokens of a micro-batch.
        dp_group: Process group of the data-parallel ranks.
        num_batches_divided_by: The number of micro-batches is a multiple of this.
        same_micro_num_in_dp: True if all ranks of ``dp_group`` must have the same number of micro-batches.
        min_num_micro_batch: Least number of micro-batches.
        use_dynamic_bsz_balance: True to put the most expensive micro-batches in the middle, for pipelines.
        force_group_size: So many samples that follow each other stay in one micro-batch.

    Returns:
        The micro-batches, and the places of their samples in ``batch``.

    Raises:
        SampleError: A sample or a group does not fit, or there are too few for all ranks to have as many micro-batches.

    Example:
        >>> micro_batches, places = rearrange_micro_batches(batch, max_token_len=16384)  # doctest: +SKIP
    """
    from verl.utils import tensordict_utils

    ids = batch["input_ids"]
    lengths = ids.offsets().diff() if ids.is_nested else batch["attention_mask"].sum(dim=1)
    units = lengths.cpu().numpy().astype(np.int64)
    if len(units) % force_group_size:
        raise SampleError(f"got {len(units)} samples, expected a multiple of {force_group_size} (force_group_size)")
    units = units.reshape(-1, force_group_size).sum(axis=1)
    order, multiple = "small_at_edges" if use_dynamic_bsz_balance else "packer", num_batches_divided_by or 1

    def planned(least: int) -> list[list[int]]:
        """Return the units of each micro-batch, at least ``least`` of them, none empty."""
        plan = plan_step(
            units, budget=int(max_token_len), micro_batch_multiple=multiple, min_micro_batches=least, order=order,
            empty="error",
        )  # fmt: skip
        return plan.packs[0]

    packs = planned(min_num_micro_batch or 1)
    if distributed.is_initialized() and same_micro_num_in_dp and dp_group is not None:
        agreed = torch.tensor([len(packs), -len(units)], device=lengths.device)
        distributed.all_reduce(agreed, op=distributed.ReduceOp.MAX, group=dp_group)
        most, fewest = int(agreed[0]), -int(agreed[1])
        if most > fewest:
            raise SampleError(f"got a rank with {fewest} samples or groups, expected {most}, one for each micro-batch")
        packs = packs if len(packs) == most else planned(most)
    places = [
        [at for unit in pack for at in range(unit * force_group_size, (unit + 1) * force_group_size)] for pack in packs
    ]
    return [tensordict_utils.index_select_tensor_dict(batch, each) for each in places], places


def push(
    producer: Producer, batch: Mapping[str, torch.Tensor], policy_version: SupportsIndex | None = None,
    fields: Sequence[str] = ("response_mask",), group_size: int = 1,
) -> list[int]:  # fmt: skip
    """Send the rollouts of a batch to the broker, without padding.

    Args:
        producer: The producer of this worker's partition.
        batch: A ``TensorDict`` or a mapping with ``input_ids`` and ``attention_mask`` [B, S], and ``fields`` [B, R]
            with a value for each response token. Prompts are padded on the left, and responses on the right.
        policy_version: Version of the policy that made the rollouts.
        fields: Names of fields of the run that the batch has.
        group_size: Rollouts of a prompt, which follow each other; each group is sent whole.

    Returns:
        The sequence number of each rollout.

    Raises:
        SampleError: A rollout is invalid, or its fields do not fit.

    Example:
        >>> push(rollouts, data.batch, version, ("response_mask", "advantages"), group_size=8)  # doctest: +SKIP
    """
    ids, mask = batch["input_ids"].cpu(), batch["attention_mask"].cpu().bool()
    responses = batch[fields[0]].shape[1]
    rows: list[dict[str, Any]] = []
    for at in range(len(ids)):
        kept, held = mask[at], mask[at, -responses:]
        prompt = int(kept[:-responses].sum())
        values = {name: torch.cat([torch.zeros(prompt), batch[name][at].cpu().float()[held]]) for name in fields}
        rows.append({"input_ids": ids[at][kept].numpy(), PROMPT_LENGTH: prompt, **values})
    numbers: list[int] = []
    for first in range(0, len(rows), group_size):
        numbers += producer.send_group(rows[first : first + group_size], policy_version=policy_version)
    return numbers


def pull(step: Step[Any], fields: Sequence[str] = ("response_mask",), pad_token_id: int = 0) -> dict[str, torch.Tensor]:
    """Return this rank's rollouts of a step in verl's layout: prompts padded on the left, responses on the right.

    Args:
        step: A step of a loader with ``format="numpy"``.
        fields: Names of the fields that ``push`` has sent.
        pad_token_id: Token id at padding.

    Returns:
        ``input_ids``, ``attention_mask`` and ``position_ids`` [B, S], ``prompts`` [B, P], ``responses`` [B, R], and the
        fields [B, R]. ``DataProto.from_single_dict`` makes a batch of it.

    Raises:
        UserError: The step's packs are not in the format ``numpy``.

    Example:
        >>> batch = DataProto.from_single_dict(pull(step, ("response_mask", "advantages")))  # doctest: +SKIP
    """
    samples: list[tuple[int, torch.Tensor, list[torch.Tensor]]] = []
    for pack in step:
        if not isinstance(pack.input_ids, np.ndarray):
            raise UserError('got packs of another format, expected a loader with format="numpy"')
        begins, sizes = pack.cu_seqlens_padded.tolist(), np.diff(pack.cu_seqlens).tolist()
        for at in range(pack.num_samples):
            span = slice(begins[at], begins[at] + sizes[at])
            values = [torch.as_tensor(np.asarray(pack[name][span], np.float32)) for name in fields]
            tokens = torch.as_tensor(pack.input_ids[span].astype(np.int64))
            samples.append((int(pack[PROMPT_LENGTH][at]), tokens, values))
    most = max((prompt for prompt, *_ in samples), default=0)
    longest = max((len(ids) - prompt for prompt, ids, _ in samples), default=0)
    ids = torch.full((len(samples), most + longest), pad_token_id)
    mask = torch.zeros_like(ids)
    columns = {name: torch.zeros(len(samples), longest) for name in fields}
    for at, (prompt, tokens, values) in enumerate(samples):
        span = slice(most - prompt, most - prompt + len(tokens))
        ids[at, span], mask[at, span] = tokens, 1
        for name, each in zip(fields, values, strict=True):
            columns[name][at, : len(tokens) - prompt] = each[prompt:]
    return {
        "input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(dim=1) - 1).clamp(min=0),
        "prompts": ids[:, :most], "responses": ids[:, most:], **columns,
    }  # fmt: skip
