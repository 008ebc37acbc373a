"""NeMo-RL: feed the ``train`` and ``get_logprobs`` of its policy workers with the micro-batches of a step.

``shard`` returns what ``BatchedDataDict.shard_by_batch_size`` returns for a rank: right-padded rows, and which of them
share a micro-batch. The worker's loss, its packing of rows and its normalization stay as they are. It reads packs as
``sequence_packing`` and padded micro-batches as ``dynamic_batching``.

Read with NeMo-RL at 7ea279a.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from streampack.core.model.fields import LABELS, LOSS_MASK, POSITION_IDS
from streampack.core.model.rules import Rules
from streampack.core.model.samples import IGNORE_INDEX
from streampack.errors import UserError
from streampack.packs.pack import Pack

__all__ = ["shard"]


def shard(packs: Iterable[Any], rules: Rules | None, **values: Any) -> Any:
    """Return the micro-batches of this rank as NeMo-RL's workers take them.

    Args:
        packs: A step of a loader with ``format="numpy"`` for ``train``, or what ``step.regroup`` returns for
            ``get_logprobs``. Both have the same rows in the same order.
        rules: ``step.rules``.
        values: More values of the rows by name, [rows, S, ...], such as ``prev_logprobs``. They are cut, or filled
            with 0.

    Returns:
        A ``SlicedDataDict`` of one global batch with ``input_ids``, ``token_mask`` [rows, S], ``input_lengths``,
        ``sample_mask`` [rows], the declared fields and ``values``. A value of token i is at place i, also for fields
        with ``align: target``. Rows of padding are last; their ``sample_mask`` is 0.

    Raises:
        UserError: The packs have another format, are parts of a context-parallel rank, share tokens or hold media. Or
            the run declares ``labels`` or ``position_ids``, or this rank has more rows of padding than samples.

    Example:
        >>> batch = shard(step, step.rules)  # doctest: +SKIP
        >>> worker.train(batch, loss_fn, gbs=step.num_samples)  # doctest: +SKIP
    """
    from nemo_rl.distributed.batched_data_dict import SlicedDataDict

    columns, bounds, widths = rows_of(packs, rules)
    for name, value in values.items():
        shape = columns["input_ids"].shape
        fitted = value.new_zeros((*shape, *value.shape[2:]))
        part = value[: shape[0], : shape[1]]
        fitted[: part.shape[0], : part.shape[1]] = part
        columns[name] = fitted
    batch = SlicedDataDict(columns)
    batch.micro_batch_indices, batch.micro_batch_lengths = [bounds], [widths]
    batch.elem_counts_per_gb = [len(columns["input_ids"])]
    return batch


def rows_of(packs: Iterable[Any], rules: Rules | None) -> tuple[dict[str, torch.Tensor], list[list[int]], list[int]]:
    """Return the rows of ``packs``, and of each micro-batch its rows [begin, end] and their length.

    For packs, the length is that of all samples with padding. Arguments and errors are those of ``shard``.
    """
    if rules is None:
        raise UserError("got no rules, expected those of a step that a loader has made: step.rules")
    kept: list[Pack] = [pack for pack in packs if rules.padded or pack.num_samples]
    for pack in kept[:1]:
        _check(pack, rules)
    spans = [(pack, at) for pack in kept for at in range(pack.num_samples)]
    counts = [len(pack.padding_mask) // pack.max_seqlen if rules.padded else pack.num_samples for pack in kept]
    rows, samples = sum(counts), len(spans)
    if rows >= 2 * samples:
        raise UserError(
            f"got {samples} samples and {rows - samples} rows of padding on this rank, expected more samples than "
            f"padding, since NeMo-RL counts rows. Use steps of more samples, or fewer ranks"
        )
    lengths = np.array([int(np.diff(pack.cu_seqlens)[at]) for pack, at in spans] + [1] * (rows - samples))
    widths = [pack.max_seqlen if rules.padded else int(pack.cu_seqlens_padded[pack.num_samples]) for pack in kept]
    longest = max(widths) if rules.padded else int(lengths.max())
    columns: dict[str, Any] = {
        "input_ids": np.zeros((rows, longest), np.int64), "token_mask": np.zeros((rows, longest), np.float32),
        "input_lengths": lengths, "sample_mask": (np.arange(rows) < samples).astype(np.float32),
    }  # fmt: skip
    fields = [field for field in rules.fields if field.name != LOSS_MASK]
    for field in fields:
        kind = kept[0].fields[field.name]
        columns[field.name] = np.zeros(
            (rows, longest, *kind.shape[1:]) if field.axis == "token" else (rows, *kind.shape[1:]), kind.dtype
        )
    for row, (pack, at) in enumerate(spans):
        begin, size = int(pack.cu_seqlens_padded[at]), int(lengths[row])
        columns["input_ids"][row, :size] = pack.input_ids[begin : begin + size]
        columns["token_mask"][row, 1:size] = pack.labels[begin : begin + size - 1] != IGNORE_INDEX
        for field in fields:
            of_pack = pack.fields[field.name]
            if field.axis == "sample":
                columns[field.name][row] = of_pack[at]
            elif field.align == "target":
                columns[field.name][row, 1:size] = of_pack[begin : begin + size - 1]
            else:
                columns[field.name][row, :size] = of_pack[begin : begin + size]
    ends = np.cumsum(counts).tolist()
    bounds = [[end - count, end] for end, count in zip(ends, counts, strict=True)]
    return {name: torch.from_numpy(column) for name, column in columns.items()}, bounds, widths


def _check(pack: Any, rules: Rules) -> None:
    """Raise UserError for packs that NeMo-RL's rows cannot hold."""
    if not isinstance(pack, Pack):
        raise UserError('got packs of another format, expected a loader with format="numpy"')
    if pack.cp > 1 and pack.layout != "whole":
        raise UserError(f"got packs with `cp_layout: {pack.layout}`, expected whole, because NeMo-RL cuts rows itself")
    if rules.share is not None or rules.has_extra_bytes:
        raise UserError("got samples that share tokens or have media, expected rows of tokens. Send whole samples")
    for name in (LABELS, POSITION_IDS):
        if any(field.name == name for field in rules.fields):
            raise UserError(
                f"got a field {name}, which NeMo-RL derives from tokens, expected none. Remove it, or use loss_mask"
            )
