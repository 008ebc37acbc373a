"""The columns of a step's packs, by name: little-endian numbers of each pack, or of each sample.

A step is dealt as columns. ``StepPart`` and ``NodePart`` carry cuts of them. A new column stands here and in
``StepPart``, whose docstring says what it holds. ``BY_RULES`` takes it from the ``SampleTable``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec import UNSET

from streampack.core.media.media_counts import MediaColumns
from streampack.core.model.rules import Rules
from streampack.core.model.samples import I64, SampleTable

StepColumns = Mapping[str, bytes]
"""The columns of some packs by name, without those that the run does not have."""

PACK_BYTES: Mapping[str, int] = {
    "packs_u32": 4, "counts_u32": 4, "loss_tokens_u32": 4, "widths_u32": 4, "rows_u32": 4
}  # fmt: skip
"""Bytes of a pack in each column that has a value for each pack."""
SAMPLE_BYTES: Mapping[str, int] = {
    "lengths_u32": 4, "streams_u32": 4, "indices_u64": 8, "parts_u32": 4, "shared_u32": 4
}  # fmt: skip
"""Bytes of a sample in each column that has a value for each sample."""
MEDIA_BYTES: Mapping[str, int] = dict.fromkeys(MediaColumns.__struct_fields__, 4)
"""Bytes of a sample in each column of ``MediaColumns``."""
_OF_SAMPLES = {**SAMPLE_BYTES, **MEDIA_BYTES}


class ByRules(NamedTuple):
    """A column that the rules may ask for: a column of the ``SampleTable``, as uint32."""

    column: str
    is_there: Callable[[Rules], bool]


BY_RULES: Mapping[str, ByRules] = {
    "shared_u32": ByRules("shared", lambda rules: rules.share is not None),
    "items_u32": ByRules("items", lambda rules: rules.has_extra_bytes),
    "bytes_u32": ByRules("extra_bytes", lambda rules: rules.has_extra_bytes),
}
"""Columns of samples that only some runs have, by name."""


def columns_by_rules(rules: Rules, table: SampleTable, handles: I64) -> dict[str, bytes]:
    """Return the columns of samples that the rules ask for; ``handles`` int64 [n]."""
    return {
        name: getattr(table, each.column)[handles].astype("<u4").tobytes()
        for name, each in BY_RULES.items()
        if each.is_there(rules)
    }


def columns_of(part: Any) -> dict[str, bytes]:
    """Return the columns of a ``StepPart``."""
    columns = {name: column for name in (*PACK_BYTES, *SAMPLE_BYTES) if (column := getattr(part, name))}
    if part.media is not UNSET:
        columns |= {name: getattr(part.media, name) for name in MEDIA_BYTES}
    return columns


def fields_of(columns: StepColumns) -> dict[str, Any]:
    """Return columns as fields of a ``StepPart``; empty ones are absent."""
    fields: dict[str, Any] = {name: column for name, column in columns.items() if column and name not in MEDIA_BYTES}
    if MEDIA_BYTES.keys() <= columns.keys():
        fields["media"] = MediaColumns(**{name: columns[name] for name in MEDIA_BYTES})
    return fields


def cut(columns: StepColumns, packs: tuple[int, int], samples: tuple[int, int]) -> dict[str, bytes]:
    """Return the columns of packs [first, stop), which hold samples [first, stop)."""
    slices: dict[str, bytes] = {}
    for name, column in columns.items():
        (first, stop), width = (packs, PACK_BYTES[name]) if name in PACK_BYTES else (samples, _OF_SAMPLES[name])
        slices[name] = column[width * first : width * stop]
    return slices


def joined(cuts: Sequence[StepColumns]) -> dict[str, bytes]:
    """Return the columns of several cuts of the same step, one after another."""
    return {name: b"".join(each[name] for each in cuts) for name in cuts[0]}
