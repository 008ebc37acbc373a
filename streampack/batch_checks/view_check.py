"""Converts a batch of any view to the names and shapes of the canonical pack, so that one check serves all views.

Only the view's own values are used, so the check sees any change that was made to the view.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from streampack.batch_checks.expectations import equal, expect
from streampack.core.columns.step_columns import IN_PACKS
from streampack.core.model.fields import LOSS_MASK, POSITION_IDS
from streampack.core.model.rules import Rules
from streampack.core.model.samples import IGNORE_INDEX
from streampack.errors import InvariantError
from streampack.packs.pack import Pack

Checked = Mapping[str, Any]
"""A batch in the names of the canonical pack, as numpy arrays."""
_KEYS = {
    "hf": {"cu_seqlens_padded": "cu_seq_lens_q", "max_seqlen": "max_length_q"},
    "megatron": {"input_ids": "tokens"},
    "torchtitan": {"input_ids": "input", "position_ids": "positions"},
}
"""Keys of a framework's format that stand for other names of the canonical pack."""


def canonical(batch: Any) -> Checked:
    """Return a batch's values as numpy arrays by the canonical pack's names. Raises InvariantError."""
    if isinstance(batch, Pack):
        return batch
    beside, keys = (
        {name: numpy_of(value) for name, value in values.items()} for values in (getattr(batch, "rest", {}), batch)
    )
    format, rules = format_of(keys), getattr(batch, "rules", None)
    values = {**beside, **keys, **{name: keys.get(key) for name, key in _KEYS.get(format, {}).items()}}
    if format:
        _unrow(values, "input_ids", "labels", "position_ids")
    match format:
        case "hf":
            if values["position_ids"].ndim == 2:  # three positions for each token
                own, values["position_ids"] = values["position_ids"][0], values["position_ids"][1:]
                begins = np.repeat(values["cu_seqlens_padded"][:-1], np.diff(values["cu_seqlens_padded"]))
                equal("position_ids", "a pack, its first row", own, np.arange(len(own)) - begins)
            for field in rules.all_fields if rules is not None else ():
                if field.of_media and values.get(field.name, values) is None:
                    values[field.name] = np.zeros((0, *field.shape))
            if "labels" in values:
                values["labels"] = np.append(values["labels"][1:], IGNORE_INDEX)
        case "megatron":
            _unrow(values, "cu_seqlens_padded")
            equal("max_seqlen", "a pack, its shape", keys["max_seqlen"].shape, (1,))
            values["max_seqlen"] = keys["max_seqlen"].item()
            for name in ("cu_seqlens", LOSS_MASK):  # keys whose values differ from the pack's
                values.pop(name, None)
                values |= {name: beside[name]} if name in beside else {}
        case "bshd":
            if "cu_seqlens_padded" in values:
                _restart_in_tail(values, rules)
    if rules is not None and values.pop("static_shapes", False):
        _drop_empty_segments(values, rules)
    if rules is not None and rules.padded and "attention_mask" in values:
        _flatten(values, rules)
    missing = {"cu_seqlens", "cu_seqlens_padded", "sample_ids", "slices", "position_ids"} - set(values)
    if missing:
        raise InvariantError(f"keys: got a batch without {', '.join(sorted(missing))}, expected a pack")
    return values


def format_of(keys: Mapping[str, Any]) -> str:
    """Return the name of the framework whose keys a batch has; empty for the canonical pack's keys."""
    if "cu_seq_lens_q" in keys:
        return "hf"
    if getattr(keys.get("cu_seqlens_padded"), "ndim", 0) == 2:
        return "megatron"
    if isinstance(keys.get("qkv_format"), str):
        return "bshd"
    return "torchtitan" if set(keys) == {"input", "positions"} else ""


def _unrow(values: dict[str, Any], *names: str) -> None:
    """Replace arrays [..., 1, T] by arrays [..., T], in place, and remove entries that are None.

    A stage of a pipeline may lack some arrays. Raises InvariantError for another shape.
    """
    for name in names:
        if values.get(name) is None:
            values.pop(name, None)
            continue
        row = values[name]
        expect(row.ndim > 1 and row.shape[-2] == 1, name, f"got the shape {row.shape}, expected [1, T]")
        values[name] = row[..., 0, :]


def _drop_empty_segments(values: dict[str, Any], rules: Rules) -> None:
    """Remove what static shapes add at the end of boundaries and of samples' fields, in place.

    Raises InvariantError if an added segment is not empty, or an added value is not the field's ``pad``.
    """
    samples, segments, most = values["num_samples"], values["num_segments"], rules.max_samples_per_pack or 0
    for name in ("cu_seqlens", "cu_seqlens_padded"):
        equal(name, "a pack with static shapes, its length", len(values[name]), most + 2)
        added = values[name][segments:]
        equal(name, "empty segments at the end of a pack", added, np.full_like(added, added[0]))
        values[name] = values[name][: segments + 1]
    if "cu_paths" in values:
        values["cu_paths"] = values["cu_paths"][: samples + 1]
    values |= {name: values[name][:samples] for name in values.keys() & IN_PACKS}
    equal("max_seqlen", "a pack with static shapes", int(values["max_seqlen"]), rules.budget)
    values["max_seqlen"] = int(np.diff(values["cu_seqlens_padded"]).max())
    for field in rules.fields:
        if field.axis == "sample":
            equal(field.name, "a pack with static shapes, its length", len(values[field.name]), most)
            added = values[field.name][samples:]
            equal(field.name, "samples that a pack lacks", added, np.full_like(added, field.pad))
            values[field.name] = values[field.name][:samples]


def _restart_in_tail(values: dict[str, Any], rules: Rules | None) -> None:
    """Make the positions of the tail count from 0, as in the canonical pack, in place.

    In the format ``bshd``, the positions of the tail continue the positions of the last sample.
    """
    begin, end = values["cu_seqlens_padded"][values["num_samples"] :][[0, -1]].tolist()
    supplied = rules is not None and any(field.name == POSITION_IDS for field in rules.fields)
    places = values["position_ids"].copy()
    if 0 < begin < end == len(places) and not supplied:
        places[begin:] -= places[begin - 1] + 1
        values["position_ids"] = places


def _flatten(values: dict[str, Any], rules: Rules) -> None:
    """Flatten the rows of a padded micro-batch to the arrays of one pack, in place.

    Labels that the model itself shifts are replaced by shifted labels. Raises InvariantError.
    """
    if "shift_labels" in values:
        ends = np.full((len(values["labels"]), 1), IGNORE_INDEX)
        shifted = np.concatenate([values["labels"][:, 1:], ends], axis=1)
        equal("shift_labels", "a padded micro-batch", values["shift_labels"], shifted)
        values["labels"] = shifted
    by_row = [field.name for field in rules.fields if field.axis == "token"]
    for name in {"input_ids", "labels", "padding_mask", "attention_mask", *by_row} & set(values) - {POSITION_IDS}:
        values[name] = values[name].reshape(-1, *values[name].shape[2:])
    places = values[POSITION_IDS]
    values[POSITION_IDS] = places.reshape(*places.shape[:-2], -1)


def numpy_of(value: Any) -> Any:
    """Convert a tensor on any device to a numpy array, bfloat16 to float32; return other values as they are."""
    if not hasattr(value, "detach"):
        return value
    tensor = value.detach().cpu()
    return (tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy()
