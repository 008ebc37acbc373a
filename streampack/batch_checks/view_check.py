"""Converts a batch of any view to the names and shapes of the canonical pack, so that one check serves all views.

Only the view's own values are used, so the check sees any change that was made to the view.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from streampack.batch_checks.expectations import equal, expect
from streampack.core.model.fields import LOSS_MASK, POSITION_IDS
from streampack.core.model.rules import Rules
from streampack.core.model.samples import IGNORE_INDEX
from streampack.errors import InvariantError
from streampack.packs.pack import Pack

Checked = Mapping[str, Any]
"""A batch in the names of the canonical pack, as numpy arrays."""


def canonical(batch: Any) -> Checked:
    """Return a batch's values as numpy arrays by the canonical pack's names. Raises InvariantError."""
    if isinstance(batch, Pack):
        return batch
    beside, keys = ({name: numpy_of(value) for name, value in of.items()} for of in (getattr(batch, "rest", {}), batch))
    found, rules = {**beside, **keys}, getattr(batch, "rules", None)
    match format_of(keys):
        case "hf":
            _unrow(found, "input_ids", "labels", "position_ids")
            found["cu_seqlens_padded"], found["max_seqlen"] = found["cu_seq_lens_q"], found["max_length_q"]
            if found["position_ids"].ndim == 2:  # three positions for each token
                own, found["position_ids"] = found["position_ids"][0], found["position_ids"][1:]
                begins = np.repeat(found["cu_seqlens_padded"][:-1], np.diff(found["cu_seqlens_padded"]))
                equal("position_ids", "a pack, its first row", own, np.arange(len(own)) - begins)
            for field in rules.media_fields if rules is not None else ():
                if found.get(field.name, found) is None:
                    found[field.name] = np.zeros((0, *field.shape))
            if "labels" in found:
                found["labels"] = np.append(found["labels"][1:], IGNORE_INDEX)
        case "megatron":
            found["input_ids"] = keys.get("tokens")
            _unrow(found, "input_ids", "labels", "position_ids", "cu_seqlens_padded")
            equal("max_seqlen", "a pack, its shape", keys["max_seqlen"].shape, (1,))
            found["max_seqlen"] = keys["max_seqlen"].item()
            for name in ("cu_seqlens", LOSS_MASK):  # keys whose values differ from the pack's
                found.pop(name, None)
                found |= {name: beside[name]} if name in beside else {}
        case "bshd":
            _unrow(found, "input_ids", "labels", "position_ids")
            if "cu_seqlens_padded" in found:
                _restart_in_tail(found, rules)
        case "torchtitan":
            found |= {"input_ids": keys["input"], "position_ids": keys["positions"]}
            _unrow(found, "input_ids", "labels", "position_ids")
    if rules is not None and found.pop("static_shapes", False):
        _drop_empty_segments(found, rules)
    if rules is not None and rules.padded and "attention_mask" in found:
        _flatten(found, rules)
    missing = {"cu_seqlens", "cu_seqlens_padded", "sample_ids", "slices", "position_ids"} - set(found)
    if missing:
        raise InvariantError(f"keys: got a batch without {', '.join(sorted(missing))}, expected a pack")
    return found


def format_of(keys: Mapping[str, Any]) -> str:
    """Return the name of the framework whose keys a batch has; empty for the canonical pack's keys."""
    if "cu_seq_lens_q" in keys:
        return "hf"
    if getattr(keys.get("cu_seqlens_padded"), "ndim", 0) == 2:
        return "megatron"
    if isinstance(keys.get("qkv_format"), str):
        return "bshd"
    return "torchtitan" if set(keys) == {"input", "positions"} else ""


def _unrow(found: dict[str, Any], *names: str) -> None:
    """Replace arrays [..., 1, T] by arrays [..., T], in place, and remove entries that are None.

    A stage of a pipeline may lack some arrays. Raises InvariantError for another shape.
    """
    for name in names:
        if found.get(name) is None:
            found.pop(name, None)
            continue
        row = found[name]
        expect(row.ndim > 1 and row.shape[-2] == 1, name, f"got the shape {row.shape}, expected [1, T]")
        found[name] = row[..., 0, :]


def _drop_empty_segments(found: dict[str, Any], rules: Rules) -> None:
    """Remove what static shapes add at the end of boundaries and of samples' fields, in place.

    Raises InvariantError if an added segment is not empty, or an added value is not the field's ``pad``.
    """
    samples, segments, most = found["num_samples"], found["num_segments"], rules.max_samples_per_pack or 0
    for name in ("cu_seqlens", "cu_seqlens_padded"):
        equal(name, "a pack with static shapes, its length", len(found[name]), most + 2)
        added = found[name][segments:]
        equal(name, "empty segments at the end of a pack", added, np.full_like(added, added[0]))
        found[name] = found[name][: segments + 1]
    if "cu_paths" in found:
        found |= {"cu_paths": found["cu_paths"][: samples + 1], "shared": found["shared"][:samples]}
    equal("max_seqlen", "a pack with static shapes", int(found["max_seqlen"]), rules.budget)
    found["max_seqlen"] = int(np.diff(found["cu_seqlens_padded"]).max())
    for field in rules.fields:
        if field.axis == "sample":
            equal(field.name, "a pack with static shapes, its length", len(found[field.name]), most)
            added = found[field.name][samples:]
            equal(field.name, "samples that a pack lacks", added, np.full_like(added, field.pad))
            found[field.name] = found[field.name][:samples]


def _restart_in_tail(found: dict[str, Any], rules: Rules | None) -> None:
    """Make the positions of the tail count from 0, as in the canonical pack, in place.

    In the format ``bshd``, the positions of the tail continue the positions of the last sample.
    """
    begin, end = found["cu_seqlens_padded"][found["num_samples"] :][[0, -1]].tolist()
    supplied = rules is not None and any(field.name == POSITION_IDS for field in rules.fields)
    places = found["position_ids"].copy()
    if 0 < begin < end == len(places) and not supplied:
        places[begin:] -= places[begin - 1] + 1
        found["position_ids"] = places


def _flatten(found: dict[str, Any], rules: Rules) -> None:
    """Flatten the rows of a padded micro-batch to the arrays of one pack, in place.

    Labels that the model itself shifts are replaced by shifted labels. Raises InvariantError.
    """
    if "shift_labels" in found:
        ends = np.full((len(found["labels"]), 1), IGNORE_INDEX)
        shifted = np.concatenate([found["labels"][:, 1:], ends], axis=1)
        equal("shift_labels", "a padded micro-batch", found["shift_labels"], shifted)
        found["labels"] = shifted
    by_row = [field.name for field in rules.fields if field.axis == "token"]
    for name in {"input_ids", "labels", "padding_mask", "attention_mask", *by_row} & set(found) - {POSITION_IDS}:
        found[name] = found[name].reshape(-1, *found[name].shape[2:])
    places = found[POSITION_IDS]
    found[POSITION_IDS] = places.reshape(*places.shape[:-2], -1)


def numpy_of(value: Any) -> Any:
    """Convert a tensor on any device to a numpy array, bfloat16 to float32; return other values as they are."""
    if not hasattr(value, "detach"):
        return value
    tensor = value.detach().cpu()
    return (tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy()
