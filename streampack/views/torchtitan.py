"""``torchtitan``: packs for torchtitan's trainer, which takes ``(batch, batch.labels)`` of a dataloader.

T is the run's budget and must be torchtitan's ``training.seq_len``. The trainer finds the samples of a pack by
positions that are 0, and passes every key but ``input`` to the model. A view therefore has only the keys ``input`` and
``positions``. The trainer also shards for context parallelism itself. This is the interface of release 0.3. Later
releases take the tensors without the first dimension, as ``batch["input"][0]``.
"""

from __future__ import annotations

from streampack.packs.columns import Column, Columns
from streampack.views.tensors import ValuesByName, cut, tensor


def build_batches(columns: Columns, of_packs: ValuesByName) -> tuple[ValuesByName, ValuesByName]:
    """Return the keys of some packs in ``torchtitan``, and the packs' other values, each a list by name.

    - Keys: ``input`` and ``positions``, int64 [1, T].
    - Other values: ``labels``, int64 [1, T], -100 where no label counts; ``input_ids`` and ``position_ids``, which are
      the keys' tensors; and the pack's remaining values.
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
