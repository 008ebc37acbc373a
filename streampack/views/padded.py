"""Padded micro-batches: their arrays as rows [B, S], and their views."""

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
    """Return the arrays of a padded micro-batch as rows, without a copy.

    A row holds one sample; if this rank has one sample fewer than others, its last row is padding. B is the number of
    rows and S their length. This rank holds S' tokens of each row: S / cp, or S in the layout ``whole``.

    Args:
        pack: A micro-batch of a feed with ``rules.padded``.
        rules: The run's rules, ``loader.rules``.

    Returns:
        A dict of arrays by name:

        - ``input_ids``, ``labels``: int64 [B, S']; missing in the middle stages of a pipeline.
        - ``padding_mask``: bool [B, S'], True at padding.
        - ``attention_mask``: int64 [B, S'], 1 at real tokens.
        - ``position_ids``: int64 [B, S'], or [3, B, S'] if samples came with three positions for each token.
        - Declared fields of axis ``token``: [B, S', ...], or [B, S, ...] if replicated.

    Raises:
        UserError: The feed serves packs, whose samples have no rows.

    Example:
        >>> loader = streampack.connect("tcp://node0:7402", format="numpy")  # doctest: +SKIP
        >>> input_ids = rows(next(loader), loader.rules)["input_ids"]  # doctest: +SKIP
    """
    if not rules.padded:
        raise UserError(
            "got a pack, expected a micro-batch of a feed with rules.padded. Samples of a pack are not in separate rows"
        )
    num_rows = int(pack.cu_seqlens_padded[-1]) // pack.max_seqlen
    names = [name for name in ("input_ids", "labels", "padding_mask") if name in pack]
    names += [field.name for field in rules.fields if field.axis == "token" and field.name in pack.fields]
    arrays = {name: pack[name].reshape(num_rows, -1, *pack[name].shape[1:]) for name in names}
    places = pack.position_ids
    arrays["position_ids"] = places.reshape(*places.shape[:-1], num_rows, -1)
    return arrays | {"attention_mask": (~arrays["padding_mask"]).astype(np.int64)}


def padded_view(pack: Pack, format: str, rules: Rules, halves: frozenset[str]) -> View:
    """Return a padded micro-batch as a view in ``format``; the fields named in ``halves`` become bfloat16."""
    from streampack.views.tensors import tensor

    arrays = {**pack, **rows(pack, rules)}
    values = {k: tensor(v, k in halves) if isinstance(v, np.ndarray) else v for k, v in arrays.items()}
    keys = _of_rows(values, format)
    return View(keys, pack, {name: value for name, value in values.items() if name not in keys}, rules)


def _of_rows(pack: dict[str, Any], format: str) -> dict[str, Any]:
    """Return the keys of a padded micro-batch's view in ``format``; ``thd`` has the keys of ``padded``.

    For ``hf``, move ``labels`` one to the right, since the model moves them back. The original labels are stored in
    ``pack`` as ``shift_labels``.
    """
    import torch

    names = ["input_ids", "labels", "attention_mask", "position_ids"]
    if format.startswith("hf") and "labels" in pack:
        pack["shift_labels"] = pack["labels"]
        pack["labels"] = torch.nn.functional.pad(pack["labels"][:, :-1], (1, 0), value=IGNORE_INDEX)
        names += ["shift_labels"] if format == "hf_shifted" else []
    return {name: pack[name] for name in names if name in pack}
