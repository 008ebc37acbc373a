"""``torchtitan``: packs for torchtitan's trainer, which takes ``(batch, batch.labels)`` of a dataloader.

T is the run's budget and must be torchtitan's ``training.seq_len``. The trainer finds the samples of a pack by
positions that are 0, and passes every key but ``input`` to the model. A view therefore has only the keys ``input`` and
``positions``. The trainer also shards for context parallelism itself. This is the interface of release 0.3. Later
releases take the tensors without the first dimension, as ``batch["input"][0]``.
"""

from __future__ import annotations

from streampack.core.model.rules import Rules
from streampack.packs.columns import Columns
from streampack.packs.slabs import Slabs
from streampack.views.tensors import ValuesByName, positions_of, rows_of


def build_batches(
    columns: Columns, of_packs: ValuesByName, slabs: Slabs, rules: Rules
) -> tuple[ValuesByName, ValuesByName]:  # fmt: skip
    """Return the keys of some packs in ``torchtitan``, and the packs' other values, each a list by name.

    - Keys: ``input`` and ``positions``, int64 [1, T].
    - Other values: ``labels``, int64 [1, T], -100 where no label counts; ``input_ids`` and ``position_ids``, which are
      the keys' tensors; and the pack's remaining values.
    """
    keys: ValuesByName = {"input": rows_of(columns, "input_ids"), "positions": positions_of(of_packs)}
    own = {"input_ids": keys["input"], "position_ids": keys["positions"]}
    return keys, {**of_packs, **own, "labels": rows_of(columns, "labels")}
