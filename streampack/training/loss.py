"""Applies a loss written for one sample to packs: divides a model's output for a pack into its samples.

In every layout, the tokens of a sample that a rank holds are contiguous in the rank's outputs, real tokens before
padding. So a sample is found by two boundaries, which follow from the pack's ``slices``. For ``zigzag`` over W ranks a
sample begins at ``cu_seqlens_padded[i] / W``.

The gradient of a step must not depend on which samples shared a pack. So each sample's loss is a sum, and the
sums of all packs on all ranks add up. One denominator of the whole step divides the total. ``packed_loss`` computes one
pack's part. It works with any loss, and does not communicate with other ranks.

A pack whose samples share tokens has T rows of outputs, and P rows of values for all tokens of each sample. ``Pack``
explains both. A loss gets the P rows that it would get without sharing. ``target_logprobs`` turns T rows of logits into
P log-probs without a copy of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import Any, Literal

import numpy as np
import torch

from streampack.core.model.fields import CU_ITEMS, CU_PATCHES
from streampack.core.model.samples import I64, IGNORE_INDEX
from streampack.errors import UserError
from streampack.packs.pack import Pack
from streampack.views.view import View, canonical


def per_sample(
    outputs: torch.Tensor, pack: Pack | View, axis: Literal["token", "item", "patch"] = "token"
) -> list[torch.Tensor]:
    """Split a tensor with one row for each token of a pack into its samples, without padding.

    Args:
        outputs: Tensor [T', ...] such as logits, log-probs, labels or a declared field, where T' is the tokens that
            this rank holds. Also [1, T', ...], as models of transformers return, or [B, S', ...] for padded
            micro-batches. If samples may share tokens, also [P, ...], such as labels.
        pack: The pack that the outputs belong to.
        axis: ``"item"`` or ``"patch"`` for a tensor with one row for each media item, or for each patch of all items.

    Returns:
        ``num_samples`` views of ``outputs``, [n, ...] each, in the pack's order; n is the sample's real tokens that
        this rank holds. Without context parallelism these are all tokens of the sample; a shard may hold 0. Rows that
        samples share are copied for each of them.

    Raises:
        UserError: ``outputs`` does not have one row for each token.

    Example:
        >>> lengths = [len(one) for one in per_sample(batch.labels, batch)]  # doctest: +SKIP
    """
    numpy_pack = canonical(pack)
    if axis != "token":
        return list(torch.split_with_sizes(outputs, _extra_sizes(outputs, numpy_pack, axis)))
    if numpy_pack.path_index is not None and numpy_pack.cu_paths is not None:
        on_paths = _on_paths(outputs, pack, numpy_pack.path_index)[: int(numpy_pack.cu_paths[-1])]
        return list(torch.split_with_sizes(on_paths, np.diff(numpy_pack.cu_paths).tolist()))
    rows = _by_token(outputs, pack, len(numpy_pack.padding_mask))
    sizes = np.diff(_bounds(numpy_pack).ravel(), prepend=0, append=len(rows))
    return list(torch.split_with_sizes(rows, sizes.tolist()))[
        1::2
    ]  # n separate slices would each allocate a gradient of full size


def _extra_sizes(outputs: torch.Tensor, pack: Pack, axis: str) -> list[int]:
    """Return the items, or the patches, of each sample of a pack. Raises UserError if ``outputs`` has other rows."""
    if CU_ITEMS not in pack.fields:
        raise UserError(f"got axis={axis!r} for a pack without media, expected fields of axis item or patch in the run")
    items = np.asarray(pack.fields[CU_ITEMS], np.int64)
    bounds = items if axis == "item" else np.asarray(pack.fields[CU_PATCHES], np.int64)[items]
    if len(outputs) != bounds[-1]:
        raise UserError(f"got {len(outputs)} rows, expected {int(bounds[-1])}, one for each {axis} of the pack")
    sizes: list[int] = np.diff(bounds).tolist()
    return sizes


def packed_loss(
    loss_fn: Callable[..., torch.Tensor], outputs: torch.Tensor, pack: Pack | View, *values: torch.Tensor,
    denominator: float, averaged_over: int = 1, token_sum: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Return one pack's part of a step's loss: the sum of each sample's loss, divided by the step's denominator.

    Sum the gradients of all micro-batches and ranks: the result does not depend on which samples share a pack. An
    empty pack has loss 0 and gradients 0, so all ranks can reduce together.

    Args:
        loss_fn: Function of one sample's rows of ``outputs`` and of each of ``values``, [n, ...] each. It returns one
            number: the sum over tokens for a mean over the step's tokens, or the sample's mean for a mean over samples.
            For a sample without learned tokens, it must return 0, as ``sum() / count.clamp(min=1)`` does.
        outputs: Tensor [T', ...] with one row for each token that this rank holds, such as logits. Also [1, T', ...],
            or [B, S', ...] for padded micro-batches. If samples may share tokens, also [P, ...].
        pack: The pack that the outputs belong to.
        values: Further tensors of the same form for ``loss_fn``, such as labels or advantages.
        denominator: The step's denominator over all ranks and micro-batches: ``step.num_loss_tokens``,
            ``step.num_samples``, or a sum of weights.
        averaged_over: Number by which the framework divides gradients: 1 if gradients are summed over ranks, dp * cp
            for DDP and FSDP. If the framework also divides by the number of micro-batches, multiply by that number.
        token_sum: True if the loss of a sample is a sum over its tokens. Required if cp ranks share samples, since only
            such parts add up.

    Returns:
        A scalar tensor with gradients.

    Raises:
        UserError: cp ranks share samples and ``token_sum`` is False, ``denominator`` is below 0, ``averaged_over`` is
            below 1, or ``loss_fn`` returns more than one number.

    Example:
        >>> def loss_fn(logits, labels):
        ...     return torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        >>> loss = packed_loss(  # doctest: +SKIP
        ...     loss_fn, model(batch.input_ids), batch, batch.labels, denominator=step.num_loss_tokens
        ... )
    """
    numpy_pack = canonical(pack)
    if numpy_pack.cp > 1 and numpy_pack.layout != "whole" and not token_sum:
        raise UserError(
            f"got a part of each sample on this rank (cp={numpy_pack.cp}, {numpy_pack.layout}), expected a loss that "
            f"is a sum over tokens. Pass token_sum=True for such a loss. For other losses, set `cp_layout: whole` in "
            f"broker.yaml"
        )
    if averaged_over < 1:
        raise UserError(
            f"got averaged_over={averaged_over}, expected at least 1. Pass dp * cp if gradients are averaged over "
            f"ranks, or 1 if they are summed"
        )
    if not denominator >= 0:
        raise UserError(
            f"got denominator={denominator}, expected at least 0. Pass step.num_loss_tokens or step.num_samples"
        )
    total = outputs[:0].sum()
    for parts in zip(*(per_sample(value, pack) for value in (outputs, *values)), strict=True):
        if len(parts[0]):
            total = total + _one_number(loss_fn(*parts))
    return total * (averaged_over / (denominator or 1))  # a step without learned tokens has loss 0, not 0 / 0


def target_logprobs(logits: torch.Tensor, labels: torch.Tensor, pack: Pack | View) -> torch.Tensor:
    """Return the log-probability of each label, without a copy of the logits.

    If samples share tokens, a shared token has a label for each of the samples. Its row of logits is used for all of
    these labels, and its gradient is the sum over them.

    Args:
        logits: Tensor [T', V] or [1, T', V] with a row for each token that this rank holds. Sums over V are computed in
            this dtype.
        labels: ``batch.labels``: int64 [T'] or [1, T'], where each row is the token after; [P] if samples may share
            tokens.
        pack: The pack that the logits belong to.

    Returns:
        Tensor [T'], or [P] if samples may share tokens; 0 where the label is -100.

    Raises:
        UserError: ``logits`` or ``labels`` does not have one row for each token.

    Example:
        >>> logprobs = target_logprobs(model(batch), batch.labels, batch)  # doctest: +SKIP
        >>> loss = packed_loss(grpo, logprobs, batch, batch.old_logprobs, denominator=n)  # doctest: +SKIP
    """
    numpy_pack = canonical(pack)
    rows = _by_token(logits, pack, len(numpy_pack.padding_mask))
    index = torch.arange(len(rows), device=rows.device)
    if numpy_pack.path_index is not None:
        index = _path_index(pack, rows.device)
    targets = labels.reshape(-1).to(rows.device)
    if len(targets) != len(index):
        raise UserError(f"got labels of shape {list(labels.shape)}, expected [{len(index)}]")
    counts = targets != IGNORE_INDEX
    logprobs = rows[index, targets.clamp(min=0)] - torch.logsumexp(rows, -1)[index]
    return torch.where(counts, logprobs, 0)  # no shape depends on values, for which a device would have to wait


def reduce_metrics(metrics: Iterable[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """Combine the metrics of samples, micro-batches or ranks by name, without gradients.

    Names that end in ``_min`` or ``_max`` are combined by minimum or maximum, all others by sum. Divide sums by a
    denominator of the whole step: a mean of means would depend on the packing.

    Args:
        metrics: Dicts of numbers or tensors by name. A name may be missing in some dicts, as for an empty pack.

    Returns:
        A dict with one tensor for each name.

    Example:
        >>> found = reduce_metrics([{"ratio_max": 1.5, "clipped": 2}, {"ratio_max": 1.25, "clipped": 1}, {}])
        >>> {name: value.item() for name, value in found.items()}
        {'ratio_max': 1.5, 'clipped': 3}
    """
    by_name: dict[str, list[torch.Tensor]] = {}
    for named in metrics:
        for name, value in named.items():
            by_name.setdefault(name, []).append(torch.as_tensor(value).detach())
    return {name: _reduced(name, torch.stack(values)) for name, values in by_name.items()}


def _reduced(name: str, values: torch.Tensor) -> torch.Tensor:
    """Reduce stacked values of one metric by minimum, maximum or sum, as its name says."""
    if name.endswith("_min"):
        return values.amin(0)
    return values.amax(0) if name.endswith("_max") else values.sum(0)


def _one_number(loss: torch.Tensor) -> torch.Tensor:
    """Return ``loss`` as a scalar tensor. Raises UserError if it has more than one element."""
    if loss.numel() != 1:
        raise UserError(
            f"got a loss of shape {list(loss.shape)} for one sample, expected one number. Return the sum of the "
            f"sample's losses"
        )
    return loss.reshape(())


def _by_token(outputs: torch.Tensor, pack: Pack | View, num_rows: int) -> torch.Tensor:
    """Return ``outputs`` as [``num_rows``, ...], one row per token. Raises UserError for another length."""
    shape, shown = outputs.shape, getattr(getattr(pack, "labels", None), "shape", ())
    rowed = len(shown) == 2 and shape[:2] == shown  # with one token, the other test is ambiguous
    if rowed or (shape[:1] != (num_rows,) and len(shape) > 1 and prod(shape[:2]) == num_rows):
        return outputs.flatten(0, 1)
    if shape[:1] != (num_rows,):
        raise UserError(f"got outputs of shape {list(shape)}, expected shape [{num_rows}, ...] or [1, {num_rows}, ...]")
    return outputs


def _on_paths(outputs: torch.Tensor, pack: Pack | View, path_index: I64) -> torch.Tensor:
    """Return ``outputs`` [T, ...] or [P, ...] as [P, ...], a row for each token of each sample.

    Raises UserError for another length.
    """
    shape, size, tokens = outputs.shape, len(path_index), len(canonical(pack).padding_mask)
    rows = outputs[0] if shape[:1] == (1,) and len(shape) > 1 and shape[1] in (size, tokens) else outputs
    if len(rows) == size:
        return rows
    if len(rows) != tokens:
        raise UserError(
            f"got outputs of shape {list(shape)}, expected [{tokens}, ...], a row for each token of the pack, or "
            f"[{size}, ...], a row for each token of each sample"
        )
    return rows[_path_index(pack, rows.device)]


def _path_index(pack: Pack | View, device: torch.device) -> torch.Tensor:
    """Return the pack's ``path_index`` on a device; a view on that device has it there."""
    return torch.as_tensor(pack.path_index).to(device)


def _bounds(pack: Pack) -> I64:
    """Return where each sample's real tokens begin and end among the rank's tokens, rising, int64 [samples, 2]."""
    cu, real = pack.cu_seqlens_padded.astype(np.int64), np.diff(pack.cu_seqlens).astype(np.int64)
    start, stop = pack.slices.T
    segment = np.searchsorted(cu, start, side="right") - 1
    kept = np.zeros(pack.num_segments, np.int64)
    np.add.at(kept, segment, np.clip(cu[segment] + real[segment] - start, 0, stop - start))
    places = np.cumsum(stop - start) - (stop - start)
    begin = np.full(pack.num_segments, len(pack.padding_mask))
    np.minimum.at(begin, segment, places)
    begin = np.minimum.accumulate(begin[::-1])[::-1]  # samples on other ranks are empty, at the place of the next
    return np.stack([begin, begin + kept], axis=1)[: pack.num_samples]
