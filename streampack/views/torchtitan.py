"""``torchtitan``: ``(batch, batch.labels)`` is what its trainer takes of a dataloader.

T is the run's budget, which is to be torchtitan's ``training.seq_len``, with a ``local_batch_size`` of 1. torchtitan
reads the samples of a pack off its positions, a new one wherever they are 0, and passes every key but ``input`` on to
the model: so there are no more than these two. It shards for context parallelism itself. All this is its release 0.3;
what comes after it takes the three flat, ``batch["input"][0]``.
"""

from __future__ import annotations

from streampack.packs.columns import Column, Columns
from streampack.views.tensors import ValuesByName, cut, tensor


def build_batches(columns: Columns, of_packs: ValuesByName) -> tuple[ValuesByName, ValuesByName]:
    """``input`` and ``positions`` int64 [1, T]. Beside them ``labels`` int64 [1, T], -100 where none counts,
    ``input_ids`` and ``position_ids``, which are the keys', and all else that packs have.
    """
    ids, labels = columns.attributes["input_ids"], columns.attributes["labels"]
    assert isinstance(ids, Column)
    assert isinstance(labels, Column)
    keys: ValuesByName = {
        "input": cut(tensor(ids.values), ids.bounds, rows=1),
        "positions": [positions.unsqueeze(-2) for positions in of_packs["position_ids"]],
    }
    own = {"input_ids": keys["input"], "position_ids": keys["positions"]}
    return keys, {**of_packs, **own, "labels": cut(tensor(labels.values), labels.bounds, rows=1)}
