"""``hf``: batches for ``model(**batch)``, as transformers' ``DataCollatorWithFlattening`` returns.

Boundaries are padded ones. Padding after a sample continues the sample's positions and ``seq_idx``; tail padding is a
sequence of its own. Labels at padding are -100. The format ``hf_shifted`` adds ``shift_labels``, so that a model need
not shift labels.

Models with three positions for each token (Qwen2-VL) take a fourth row, the positions in each sample, in front of them.
They find the samples of a pack by this row. Fields of media are keys under their names; they are None, the models'
default, in a pack without media. So is the field ``token_type_ids``, by which Gemma 3 finds the tokens of images.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from streampack.core.model.fields import CU_ITEMS
from streampack.core.model.rules import Rules
from streampack.core.model.samples import I32, IGNORE_INDEX
from streampack.packs.columns import Column, Columns
from streampack.packs.slabs import Slabs
from streampack.views.tensors import ValuesByName, column_of, cut, other_values, positions_of, rows_of

TYPES = "token_type_ids"
"""Field of axis ``token`` that is 1 for tokens of images; models take it under this name."""


def build_batches(
    columns: Columns, of_packs: ValuesByName, slabs: Slabs, rules: Rules, shifted: bool = False
) -> tuple[ValuesByName, ValuesByName]:  # fmt: skip
    """Return the keys of some packs in ``hf``, and the packs' other values, each a list by name.

    - ``input_ids``, ``labels``, ``position_ids``: int64 [1, T]; with ``shifted``, also ``shift_labels``. If samples
      bring three positions for each token, ``position_ids`` is [4, 1, T].
    - ``seq_idx``: int32 [1, T], the number of each token's segment.
    - ``cu_seq_lens_q``, ``cu_seq_lens_k``: int32 [segments + 1], padded boundaries.
    - ``max_length_q``, ``max_length_k``: int, tokens of the longest segment.
    """
    bounds = column_of(columns, "cu_seqlens_padded")
    tokens: ValuesByName = {}
    if "input_ids" in of_packs:
        labels = column_of(columns, "labels")
        # The model moves labels back by one: put the label of token i at i + 1. Each pack's last label, -100, comes
        # to the first token of the next pack.
        unshifted = np.frombuffer(slabs.take(labels.values.nbytes), np.int64)
        unshifted[0], unshifted[1:] = IGNORE_INDEX, labels.values[:-1]
        tokens["input_ids"] = rows_of(columns, "input_ids")
        tokens["labels"] = cut(torch.from_numpy(unshifted), labels.bounds, rows=1)
        if shifted:
            tokens["shift_labels"] = rows_of(columns, "labels")
    widths = [0, *np.cumsum(bounds.values[np.array(bounds.bounds[1:]) - 1], dtype=np.int64).tolist()]
    numbers = np.frombuffer(slabs.take(4 * widths[-1]), np.int32)
    _number(bounds, numbers)
    sent = of_packs["position_ids"]
    of_media = [field.name for field in rules.all_fields if field.of_media and field.name in of_packs]
    with_items = [bool(items[-1]) for items in of_packs[CU_ITEMS]] if of_media else []
    types = [TYPES] if TYPES in of_packs else []
    keys = {
        **tokens,
        "position_ids": (
            _positions(sent, bounds, widths, slabs) if sent and sent[0].ndim > 1 else positions_of(of_packs)
        ),
        "seq_idx": cut(torch.from_numpy(numbers), widths, rows=1),
        "cu_seq_lens_q": of_packs["cu_seqlens_padded"],
        "cu_seq_lens_k": of_packs["cu_seqlens_padded"],
        "max_length_q": of_packs["max_seqlen"],
        "max_length_k": of_packs["max_seqlen"],
        **{
            name: [value if has else None for value, has in zip(of_packs[name], with_items, strict=True)]
            for name in of_media
        },
        **{name: [row[None] for row in of_packs[name]] for name in types},
    }
    return keys, other_values(of_packs, "input_ids", "labels", "position_ids", *of_media, *types)


def _positions(positions: list[Any], bounds: Column, widths: list[int], slabs: Slabs) -> list[Any]:
    """Return each pack's positions [4, 1, T]: the positions in each segment, and the three that were sent.

    ``bounds``: padded boundaries. ``widths``: tokens before each pack, and of all packs.
    """
    own = np.frombuffer(slabs.take(8 * widths[-1]), np.int64)
    for begin, ends in zip(widths, bounds.rows(), strict=False):
        own[begin : begin + int(ends[-1])] = np.arange(int(ends[-1])) - np.repeat(ends[:-1], np.diff(ends))
    rows = cut(torch.from_numpy(own), widths, rows=1)
    return [torch.cat([row, sent]).unsqueeze(-2) for row, sent in zip(rows, positions, strict=True)]


def _number(bounds: Column, numbers: I32) -> None:
    """Fill ``numbers``, int32 [N], with each token's segment number in its pack; ``bounds``: padded boundaries."""
    ends = np.array(bounds.bounds[1:]) - 1
    counts, widths = np.diff(bounds.bounds) - 1, bounds.values[ends].astype(np.int64)
    begins = np.delete(bounds.values + np.repeat(np.cumsum(widths) - widths, counts + 1), ends)
    steps = np.ones(len(begins), np.int32)
    steps[np.cumsum(counts)[:-1]] -= counts[:-1]
    steps[0] = 0
    numbers.fill(0)
    numbers[begins] = steps
    np.cumsum(numbers, out=numbers)
