"""``hf``: batches for ``model(**batch)``, as transformers' ``DataCollatorWithFlattening`` returns.

Boundaries are padded ones. Padding after a sample continues the sample's positions and ``seq_idx``; tail padding is a
sequence of its own. Labels at padding are -100. The format ``hf_shifted`` adds ``shift_labels``, so that a model need
not shift labels.
"""

from __future__ import annotations

import numpy as np
import torch

from streampack.core.model.samples import I32, IGNORE_INDEX
from streampack.packs.columns import Column, Columns
from streampack.packs.slabs import Slabs
from streampack.views.tensors import ValuesByName, cut, other_values, tensor


def build_batches(
    columns: Columns, of_packs: ValuesByName, slabs: Slabs, shifted: bool
) -> tuple[ValuesByName, ValuesByName]:
    """Return the keys of some packs in ``hf``, and the packs' other values, each a list by name.

    - ``input_ids``, ``labels``, ``position_ids``: int64 [1, T]; with ``shifted``, also ``shift_labels``.
    - ``seq_idx``: int32 [1, T], the number of each token's segment.
    - ``cu_seq_lens_q``, ``cu_seq_lens_k``: int32 [segments + 1], padded boundaries.
    - ``max_length_q``, ``max_length_k``: int, tokens of the longest segment.
    """
    bounds = columns.attributes["cu_seqlens_padded"]
    assert isinstance(bounds, Column)
    found: ValuesByName = {}
    if "input_ids" in of_packs:
        ids, labels = columns.attributes["input_ids"], columns.attributes["labels"]
        assert isinstance(ids, Column)
        assert isinstance(labels, Column)
        # The model moves labels back by one: put the label of token i at i + 1. Each pack's last label, -100, comes
        # to the first token of the next pack.
        unshifted = np.frombuffer(slabs.take(labels.values.nbytes), np.int64)
        unshifted[0], unshifted[1:] = IGNORE_INDEX, labels.values[:-1]
        found["input_ids"] = cut(tensor(ids.values), ids.bounds, rows=1)
        found["labels"] = cut(torch.from_numpy(unshifted), labels.bounds, rows=1)
        if shifted:
            found["shift_labels"] = cut(tensor(labels.values), labels.bounds, rows=1)
    widths = [0, *np.cumsum(bounds.values[np.array(bounds.bounds[1:]) - 1], dtype=np.int64).tolist()]
    numbers = np.frombuffer(slabs.take(4 * widths[-1]), np.int32)
    _number(bounds, numbers)
    keys = {
        **found,
        "position_ids": [positions.unsqueeze(-2) for positions in of_packs["position_ids"]],
        "seq_idx": cut(torch.from_numpy(numbers), widths, rows=1),
        "cu_seq_lens_q": of_packs["cu_seqlens_padded"],
        "cu_seq_lens_k": of_packs["cu_seqlens_padded"],
        "max_length_q": of_packs["max_seqlen"],
        "max_length_k": of_packs["max_seqlen"],
    }
    return keys, other_values(of_packs, "input_ids", "labels", "position_ids")


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
