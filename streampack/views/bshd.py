"""``bshd``: batches for NeMo AutoModel, as its ``packed_sequence_thd_collater`` returns; a row is a pack.

AutoModel stores lengths, not boundaries, and has no segment without a sample. Tail padding therefore belongs to the
last sample, and positions continue there. Rows have different numbers of samples; -1000 fills the shorter lists of
lengths. Labels are shifted, as in AutoModel's own datasets. AutoModel shards for context parallelism itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from streampack.core.model.fields import POSITION_IDS
from streampack.core.model.rules import Rules
from streampack.core.model.samples import I64, IGNORE_INDEX
from streampack.errors import UserError
from streampack.packs.columns import Columns
from streampack.packs.slabs import Slabs
from streampack.views.tensors import ValuesByName, column_of, cut, other_values, positions_of, rows_of

__all__ = ["stack", "strip", "thd_chunks"]

SENTINEL = -1000
"""Filler for lists of lengths, in rows with fewer samples than others."""


def build_batches(
    columns: Columns, of_packs: ValuesByName, slabs: Slabs, rules: Rules
) -> tuple[ValuesByName, ValuesByName]:  # fmt: skip
    """Return the keys of some packs in ``bshd``, and the packs' other values, each a list by name.

    - ``input_ids``, ``labels``, ``position_ids``: int64 [1, T]; if samples bring positions, those, [1, T] or
      [3, 1, T].
    - ``seq_lens``, ``seq_lens_padded``: int64 [1, samples], tokens of each sample, real and padded; 0 and T of an empty
      pack.
    - ``qkv_format``: always ``thd``.
    """
    lengths, slots, bounds, tails = _lengths(columns)
    keys: ValuesByName = {}
    if "input_ids" in of_packs:
        keys |= {name: rows_of(columns, name) for name in ("input_ids", "labels")}
    supplied = any(field.name == POSITION_IDS for field in rules.fields)
    keys["position_ids"] = positions_of(of_packs) if supplied else _positions(columns, tails, slabs)
    keys["seq_lens"] = cut(torch.from_numpy(lengths), bounds, rows=1)
    keys["seq_lens_padded"] = cut(torch.from_numpy(slots), bounds, rows=1)
    keys["qkv_format"] = ["thd"] * columns.count
    return keys, other_values(of_packs, "input_ids", "labels", "position_ids")


def _lengths(columns: Columns) -> tuple[I64, I64, list[int], I64]:
    """Return four sequences that describe the samples of some packs, in tokens.

    They are: real lengths [samples], padded lengths [samples], bounds of each pack's samples [packs + 1], and tail
    padding [packs]. The padded length of a pack's last sample includes the tail padding.
    """
    real, padded = column_of(columns, "cu_seqlens"), column_of(columns, "cu_seqlens_padded")
    between = np.array(padded.bounds[1:-1], np.int64) - 1  # np.diff across two packs
    lengths, slots = (np.delete(np.diff(bounds.values), between).astype(np.int64) for bounds in (real, padded))
    segments = np.diff(padded.bounds) - 1
    counts = columns.attributes["num_samples"]
    assert isinstance(counts, list)
    samples = np.maximum(counts, 1)
    last = np.cumsum(segments) - 1
    tails = np.where(segments > samples, slots[last], 0)
    tail_places = last[segments > samples]
    slots[tail_places - 1] += slots[tail_places]
    ends = np.cumsum(samples).tolist()
    return np.delete(lengths, tail_places), np.delete(slots, tail_places), [0, *ends], tails


def _positions(columns: Columns, tails: I64, slabs: Slabs) -> list[Any]:
    """Return each pack's position ids [1, T]; ``tails``, int64 [packs] tokens of tail padding, continue the count."""
    column = column_of(columns, "position_ids")
    values = np.frombuffer(slabs.take(column.values.nbytes), np.int64)
    values[:] = column.values
    for end, size in zip(column.bounds[1:], tails.tolist(), strict=True):
        if size:
            values[end - size : end] = np.arange(1, size + 1) + values[end - size - 1]
    return cut(torch.from_numpy(values), column.bounds, rows=1)


def stack(batches: Sequence[Mapping[str, Any]], multiple: int = 1) -> dict[str, Any]:
    """Stack packs in the format ``bshd`` into one batch, as AutoModel's collater does.

    Args:
        batches: Packs of equal length in the format ``bshd``, at least one, such as a ``Step``.
        multiple: The number of rows B is a multiple of this; rows of padding are added. AutoModel's pipeline needs the
            number of its micro-batches, since it drops rows that are left over.

    Returns:
        A dict by name:

        - ``input_ids``, ``labels``: int64 [B, S]; labels of padding rows are -100.
        - ``position_ids``: int64 [B, S] or [3, B, S].
        - ``seq_lens``, ``seq_lens_padded``: int64 [B, most samples], filled with -1000.
        - ``qkv_format``: ``thd``.

    Raises:
        UserError: There are no packs, their lengths differ, or they are in another format.

    Example:
        >>> batch = stack(step, multiple=pipeline_micro_batches)  # doctest: +SKIP
    """
    if multiple < 1:
        raise UserError(
            f"got multiple={multiple}, expected at least 1. Pass the number of micro-batches of the pipeline, or 1 "
            f"without one"
        )
    if not all("seq_lens" in batch for batch in batches):
        raise UserError("got packs in another format, expected bshd. Pass format='bshd' to connect()")
    widths = sorted({batch["input_ids"].shape[-1] for batch in batches})
    if len(widths) != 1:
        raise UserError(
            f"got packs of {widths} tokens, expected packs of one length. Set `rules.shape: fixed` in broker.yaml"
        )
    rows = [*batches, *[_padding_like(batches[0])] * (-len(batches) % multiple)]
    stacked = {name: torch.cat([row[name] for row in rows], -2) for name in ("input_ids", "labels", "position_ids")}
    for name in ("seq_lens", "seq_lens_padded"):
        lengths = [of_row for row in rows for of_row in row[name]]
        stacked[name] = pad_sequence(lengths, batch_first=True, padding_value=SENTINEL)
    return {**stacked, "qkv_format": "thd"}


def _padding_like(batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return a row of padding with the shapes and the device of ``batch``."""
    ids, positions = batch["input_ids"], batch["position_ids"]
    places = torch.arange(ids.shape[-1], device=ids.device).expand(positions.shape)
    none = batch["seq_lens"].new_zeros(1, 1)
    return {
        "input_ids": torch.zeros_like(ids), "labels": torch.full_like(ids, IGNORE_INDEX), "position_ids": places,
        "seq_lens": none, "seq_lens_padded": none + ids.shape[-1],
    }  # fmt: skip


def strip(lengths: torch.Tensor) -> list[torch.Tensor]:
    """Return the lengths of each row without the filler -1000.

    Args:
        lengths: ``seq_lens`` or ``seq_lens_padded`` of a stacked batch, int64 [B, most samples].

    Returns:
        B tensors [samples of the row].

    Example:
        >>> [row.tolist() for row in strip(torch.tensor([[5, 3, -1000], [2, 2, 4]]))]
        [[5, 3], [2, 2, 4]]
    """
    return [row[row != SENTINEL] for row in lengths]


def thd_chunks(batch: Mapping[str, Any], num_chunks: int) -> list[dict[str, Any]]:
    """Split a stacked batch of B rows into the micro-batches of a pipeline, as inputs of AutoModel's models.

    Args:
        batch: A batch of ``stack``.
        num_chunks: Number of micro-batches, 1 to B. The first B % num_chunks of them have one row more.

    Returns:
        For each micro-batch, a dict by name:

        - ``input_ids``, ``labels``, ``position_ids``: int64 [tokens]; three positions per token are [3, 1, tokens].
        - ``padding_mask``: bool [tokens], True at padding.
        - ``cu_seqlens``: int32 [samples + 1], cumulative padded lengths.
        - ``max_seqlen``: int32 [], the longest padded length.
        - ``qkv_format``: ``thd``.

    Raises:
        UserError: ``num_chunks`` is below 1 or above B.

    Example:
        >>> chunks = thd_chunks(stack(step), num_chunks=2)  # doctest: +SKIP
    """
    count = len(batch["seq_lens"])
    if not 0 < num_chunks <= count:
        raise UserError(f"got num_chunks={num_chunks} of {count} rows, expected 1 to {count}")
    return [_thd(batch, rows) for rows in torch.arange(count).tensor_split(num_chunks)]


def _thd(batch: Mapping[str, Any], rows: torch.Tensor) -> dict[str, Any]:
    """Return some rows of a stacked batch, by number, as one micro-batch of ``thd_chunks``."""
    names = ("input_ids", "labels", "position_ids")
    rows = rows.to(batch["input_ids"].device)
    flat = {name: batch[name].index_select(-2, rows).flatten(-2) for name in names}
    if batch["position_ids"].ndim > 2:
        flat["position_ids"] = flat["position_ids"].unsqueeze(-2)
    real, slots = (torch.cat(strip(batch[name][rows])) for name in ("seq_lens", "seq_lens_padded"))
    ends = slots.cumsum(0)
    place = torch.arange(int(ends[-1]), device=rows.device) - (ends - slots).repeat_interleave(slots)
    return {
        **flat, "padding_mask": place >= real.repeat_interleave(slots),
        "cu_seqlens": torch.nn.functional.pad(ends, (1, 0)).int(), "max_seqlen": slots.max().int(), "qkv_format": "thd",
    }  # fmt: skip
