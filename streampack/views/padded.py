"""Padded micro-batches: their arrays by row, and as a view."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from streampack.core.model.rules import Rules
from streampack.core.model.samples import IGNORE_INDEX
from streampack.errors import UserError
from streampack.packs.pack import Pack
from streampack.views.view import View


def rows(pack: Pack, rules: Rules) -> dict[str, NDArray[Any]]:
    """The arrays of a padded micro-batch by row, in its memory: one a sample, and one of padding where ranks are short.

    B rows of S tokens, of which this rank holds S' (S / cp, or S in the layout ``whole``). ``input_ids``, ``labels``,
    ``padding_mask`` and, int64, 1 at real tokens, ``attention_mask`` [B, S']; ``position_ids`` [B, S'], or as supplied
    [3, B, S']; declared fields of axis ``token`` [B, S', ...] ([B, S, ...] where replicated). Raises UserError for a
    pack.
    """
    if not rules.padded:
        raise UserError(
            "got a pack, expected a micro-batch of a feed with rules.padded: samples of a pack have no rows"
        )
    num_rows = int(pack.cu_seqlens_padded[-1]) // pack.max_seqlen
    names = [name for name in ("input_ids", "labels", "padding_mask") if name in pack]
    names += [field.name for field in rules.fields if field.axis == "token" and field.name in pack.fields]
    found = {name: pack[name].reshape(num_rows, -1, *pack[name].shape[1:]) for name in names}
    places = pack.position_ids
    found["position_ids"] = places.reshape(*places.shape[:-1], num_rows, -1)
    return found | {"attention_mask": (~found["padding_mask"]).astype(np.int64)}


def padded_view(pack: Pack, format: str, rules: Rules, halves: frozenset[str]) -> View:
    """Return a padded micro-batch as a view in ``format``. The fields ``halves`` are bfloat16."""
    from streampack.views.tensors import tensor

    arrays = {**pack, **rows(pack, rules)}
    values = {k: tensor(v, k in halves) if isinstance(v, np.ndarray) else v for k, v in arrays.items()}
    keys = _of_rows(values, format)
    return View(keys, pack, {name: value for name, value in values.items() if name not in keys}, rules)


def _of_rows(pack: dict[str, Any], format: str) -> dict[str, Any]:
    """What of a padded micro-batch is keys, in ``thd`` those of ``padded``; what a model shifts back is in ``hf``
    beside it as ``shift_labels``.
    """
    import torch

    names = ["input_ids", "labels", "attention_mask", "position_ids"]
    if format.startswith("hf") and "labels" in pack:
        pack["shift_labels"] = pack["labels"]
        pack["labels"] = torch.nn.functional.pad(pack["labels"][:, :-1], (1, 0), value=IGNORE_INDEX)
        names += ["shift_labels"] if format == "hf_shifted" else []
    return {name: pack[name] for name in names if name in pack}
