"""``bshd``: what NeMo AutoModel's ``packed_sequence_thd_collater`` returns, a pack a row.

AutoModel keeps lengths, not boundaries, and knows no segment without a sample: the tail of a pack is folded into its
last sample's slot, positions going on. Rows of several packs have different numbers of samples, and -1000 where one has
fewer. Labels are shifted, as in AutoModel's own datasets. It shards for context parallelism itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from streampack.core.model.samples import I64, IGNORE_INDEX
from streampack.errors import UserError
from streampack.packs.columns import Column, Columns
from streampack.packs.slabs import Slabs
from streampack.views.tensors import ValuesByName, beside, cut, tensor

SENTINEL = -1000
"""A length that is none, where a row has fewer samples than another."""


def build_batches(
    columns: Columns, of_packs: ValuesByName, slabs: Slabs, supplied: bool
) -> tuple[ValuesByName, ValuesByName]:
    """``input_ids``, ``labels``, ``position_ids`` int64 [1, T]; ``seq_lens`` and ``seq_lens_padded`` int64
    [1, samples], real lengths and slots (of an empty pack 0 and T); ``qkv_format``, always ``thd``. Beside them all
    else that packs have. Positions that are ``supplied`` are as they were sent, [1, T] or [3, 1, T].
    """
    lengths, slots, bounds, tails = _lengths(columns)
    keys: ValuesByName = {}
    for name in ("input_ids", "labels"):
        column = columns.attributes[name]
        if isinstance(column, Column):
            keys[name] = cut(tensor(column.values), column.bounds, rows=1)
    keys["position_ids"] = (
        [positions.unsqueeze(-2) for positions in of_packs["position_ids"]]
        if supplied
        else _positions(columns, tails, slabs)
    )
    keys["seq_lens"] = cut(torch.from_numpy(lengths), bounds, rows=1)
    keys["seq_lens_padded"] = cut(torch.from_numpy(slots), bounds, rows=1)
    keys["qkv_format"] = ["thd"] * columns.count
    return keys, beside(of_packs, "input_ids", "labels", "position_ids")


def _lengths(columns: Columns) -> tuple[I64, I64, list[int], I64]:
    """Of all packs' samples real lengths and slots, int64; where each pack's begin, and each one's tail, int64 [packs]:
    its tokens, which the last slot has, too.
    """
    real, padded = columns.attributes["cu_seqlens"], columns.attributes["cu_seqlens_padded"]
    assert isinstance(real, Column)
    assert isinstance(padded, Column)
    between = np.array(padded.bounds[1:-1], np.int64) - 1  # differences from one pack to the next
    lengths, slots = (np.delete(np.diff(each.values), between).astype(np.int64) for each in (real, padded))
    segments = np.diff(padded.bounds) - 1
    counts = columns.attributes["num_samples"]
    assert isinstance(counts, list)
    samples = np.maximum(counts, 1)
    last = np.cumsum(segments) - 1
    tails = np.where(segments > samples, slots[last], 0)
    gone = last[segments > samples]
    slots[gone - 1] += slots[gone]
    bounds = [0, *np.cumsum(samples).tolist()]
    return np.delete(lengths, gone), np.delete(slots, gone), bounds, tails


def _positions(columns: Columns, tails: I64, slabs: Slabs) -> list[Any]:
    """Of each pack, [1, T], going on in its tail."""
    column = columns.attributes["position_ids"]
    assert isinstance(column, Column)
    values = np.frombuffer(slabs.take(column.values.nbytes), np.int64)
    values[:] = column.values
    for end, size in zip(column.bounds[1:], tails.tolist(), strict=True):
        if size:
            values[end - size : end] = np.arange(1, size + 1) + values[end - size - 1]
    return cut(torch.from_numpy(values), column.bounds, rows=1)


def stack(batches: Sequence[Mapping[str, Any]], multiple: int = 1) -> dict[str, Any]:
    """Several packs' views as one batch, [B, S] and [B, most samples]: what the collater makes of as many.

    Rows of padding, whose labels count nowhere, make B a multiple of ``multiple``: AutoModel cuts a batch into as many
    chunks for its pipeline, and leaves out what is over. Raises UserError for packs of different lengths, for none, and
    for those in another format.

    >>> batch = stack(step, multiple=pipeline_micro_batches)  # doctest: +SKIP
    """
    if multiple < 1:
        raise UserError(f"got multiple={multiple}, expected 1 or more: the chunks of a pipeline")
    if not all("seq_lens" in batch for batch in batches):
        raise UserError("got packs in another format, expected bshd: connect(format='bshd')")
    widths = sorted({batch["input_ids"].shape[-1] for batch in batches})
    if len(widths) != 1:
        raise UserError(f"got packs of {widths} tokens, expected one length: set rules.shape: fixed in broker.yaml")
    rows = [*batches, *[_padding_like(batches[0])] * (-len(batches) % multiple)]
    found = {name: torch.cat([row[name] for row in rows], -2) for name in ("input_ids", "labels", "position_ids")}
    for name in ("seq_lens", "seq_lens_padded"):
        lengths = [each for row in rows for each in row[name]]
        found[name] = pad_sequence(lengths, batch_first=True, padding_value=SENTINEL)
    return {**found, "qkv_format": "thd"}


def _padding_like(batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """A row of padding alone."""
    ids, positions = batch["input_ids"], batch["position_ids"]
    places = torch.arange(ids.shape[-1], device=ids.device).expand(positions.shape)
    none = batch["seq_lens"].new_zeros(1, 1)
    return {
        "input_ids": torch.zeros_like(ids), "labels": torch.full_like(ids, IGNORE_INDEX), "position_ids": places,
        "seq_lens": none, "seq_lens_padded": none + ids.shape[-1],
    }  # fmt: skip


def strip(lengths: torch.Tensor) -> list[torch.Tensor]:
    """``seq_lens`` or ``seq_lens_padded`` [B, most samples] by row, [samples], without the sentinel."""
    return [row[row != SENTINEL] for row in lengths]


def thd_chunks(batch: Mapping[str, Any], num_chunks: int) -> list[dict[str, Any]]:
    """A batch of B rows in ``num_chunks`` parts for the micro-batches of a pipeline, every row in one of them: the
    first ``B % num_chunks`` have a row more.

    Of each ``input_ids``, ``labels``, ``position_ids`` int64 and ``padding_mask`` bool [tokens], ``cu_seqlens`` int32
    [samples + 1], the boundaries of storage, ``max_seqlen`` int32 [] and ``qkv_format``: what AutoModel's models get of
    a batch. Three positions a token are [3, 1, tokens]. Raises UserError for more chunks than rows.
    """
    count = len(batch["seq_lens"])
    if not 0 < num_chunks <= count:
        raise UserError(f"got num_chunks={num_chunks} of {count} rows, expected 1 to {count}")
    return [_thd(batch, rows) for rows in torch.arange(count).tensor_split(num_chunks)]


def _thd(batch: Mapping[str, Any], rows: torch.Tensor) -> dict[str, Any]:
    names = ("input_ids", "labels", "position_ids")
    rows = rows.to(batch["input_ids"].device)
    found = {name: batch[name].index_select(-2, rows).flatten(-2) for name in names}
    if batch["position_ids"].ndim > 2:
        found["position_ids"] = found["position_ids"].unsqueeze(-2)
    real, slots = (torch.cat(strip(batch[name][rows])) for name in ("seq_lens", "seq_lens_padded"))
    ends = slots.cumsum(0)
    place = torch.arange(int(ends[-1]), device=rows.device) - (ends - slots).repeat_interleave(slots)
    return {
        **found, "padding_mask": place >= real.repeat_interleave(slots),
        "cu_seqlens": torch.nn.functional.pad(ends, (1, 0)).int(), "max_seqlen": slots.max().int(), "qkv_format": "thd",
    }  # fmt: skip
