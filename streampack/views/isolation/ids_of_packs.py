"""The token ids of batches in the formats ``hf`` and ``hf_shifted``, which are ids of several samples in one row."""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

_by_id: WeakValueDictionary[int, Any] = WeakValueDictionary()


def note(ids: Any) -> None:
    """Remember the tensor ``input_ids`` of a batch, as long as it is used."""
    _by_id[id(ids)] = ids


def is_of_pack(ids: Any) -> bool:
    """Return True if ``ids`` is the tensor ``input_ids`` of a batch."""
    return ids is not None and _by_id.get(id(ids)) is ids
