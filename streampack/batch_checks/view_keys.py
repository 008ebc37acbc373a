"""Checks the keys that a framework's view adds to a pack."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streampack.batch_checks.expectations import equal
from streampack.batch_checks.pack_check import PackCheck
from streampack.batch_checks.view_check import format_of, numpy_of
from streampack.core.model.samples import IGNORE_INDEX
from streampack.packs.pack import Pack


def check_keys(batch: Any, check: PackCheck) -> None:
    """Check the keys that the view of a batch adds to the pack, if any. Raises InvariantError."""
    if isinstance(batch, Pack):
        return
    keys = {name: numpy_of(value) for name, value in batch.items()}
    match format_of(keys):
        case "hf":
            _check_hf(keys, check)
        case "megatron":
            equal("cu_seqlens", check.what, keys["cu_seqlens"], keys["cu_seqlens_padded"])
            if "labels" in keys:
                _agree(keys, "loss_mask", check, check.pack["labels"] != IGNORE_INDEX)
        case "bshd":
            _check_bshd(keys, check)


def _check_hf(keys: Mapping[str, Any], check: PackCheck) -> None:
    """Check the keys of the format ``hf``: boundaries of keys, segment numbers, unshifted and shifted labels."""
    equal("cu_seq_lens_k", check.what, keys["cu_seq_lens_k"], keys["cu_seq_lens_q"])
    equal("max_length_k", check.what, keys["max_length_k"], keys["max_length_q"])
    _agree(keys, "seq_idx", check, check.segment)
    if "labels" in keys:
        equal("labels", f"{check.what}, position 0", int(keys["labels"][0, 0]), IGNORE_INDEX)
    if "shift_labels" in keys:
        _agree(keys, "shift_labels", check, check.pack["labels"])


def _agree(keys: Mapping[str, Any], name: str, check: PackCheck, expected: Any) -> None:
    """Check that the array [1, T] under a key has the ``expected`` values [T]."""
    equal(name, f"{check.what}, its shape", keys[name].shape, (1, len(expected)))
    check.agree(name, keys[name][0], expected)


def _check_bshd(keys: Mapping[str, Any], check: PackCheck) -> None:
    """Check the keys of the format ``bshd``: lengths of samples with and without padding, tail in the last one."""
    count = max(int(check.pack["num_samples"]), 1)
    slots = check.slots[:count].copy()
    slots[-1] += check.slots[count:].sum()
    equal("seq_lens", check.what, keys["seq_lens"], check.lengths[None, :count])
    equal("seq_lens_padded", check.what, keys["seq_lens_padded"], slots[None])
