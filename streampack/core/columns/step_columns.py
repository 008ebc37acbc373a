"""The columns of a step's packs, by name: little-endian numbers of each pack, or of each sample.

A step is dealt as columns. ``StepPart`` and ``NodePart`` carry cuts of them. A new column stands in
``OptionalColumns``, which is their base. ``BY_RULES`` takes it from the ``SampleTable``, and may give it to packs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from msgspec import UNSET, Struct, UnsetType

from streampack.core.media.media_counts import STEP_COLUMNS, MediaColumns
from streampack.core.model.bounded import Name
from streampack.core.model.rules import Rules
from streampack.core.model.samples import I64, SampleTable

StepColumns = Mapping[str, bytes]
"""The columns of some packs by name, without those that the run does not have."""

PACK_BYTES: Mapping[str, int] = {
    "packs_u32": 4, "counts_u32": 4, "loss_tokens_u32": 4, "widths_u32": 4, "rows_u32": 4, "group_firsts_u32": 4,
    "group_sizes_u32": 4,
}  # fmt: skip
"""Bytes of a pack in each column that has a value for each pack."""


class OfFeed(Struct, frozen=True):
    """A message about one feed."""

    feed: Name


class OptionalColumns(OfFeed, frozen=True, kw_only=True):
    """Columns of the n samples of a message that only some runs have.

    Attributes:
        shared_u32: [n], tokens that each sample shares with the sample before it; absent without trees.
        longest_u32: [n], tokens of the longest sample over all ranks at each sample's place; absent unless rules are
            ``padded``.
        media: Columns of the samples' media; absent if the run has no fields for them.
    """

    shared_u32: bytes | UnsetType = UNSET
    longest_u32: bytes | UnsetType = UNSET
    media: MediaColumns | UnsetType = UNSET


class ByRules(NamedTuple):
    """A column that the rules may ask for.

    Attributes:
        column: The column of the ``SampleTable``, which the message has as uint32.
        is_there: Returns True if the rules ask for it.
        in_packs: The dtype in which packs have it as an attribute with the name of ``column``; None if they do not.
    """

    column: str
    is_there: Callable[[Rules], bool]
    in_packs: type[np.integer[Any]] | None = None


BY_RULES: Mapping[str, ByRules] = {
    "shared_u32": ByRules("shared", lambda rules: rules.share is not None, np.int32),
    **{name: ByRules(column, lambda rules: rules.has_extra_bytes) for name, column in STEP_COLUMNS.items()},
}
"""Columns of samples that only some runs have, by name."""
SAMPLE_BYTES: Mapping[str, int] = {
    "lengths_u32": 4, "streams_u32": 4, "indices_u64": 8, "parts_u32": 4, "longest_u32": 4,
    **{name: 4 for name in BY_RULES if name not in STEP_COLUMNS},
}  # fmt: skip
"""Bytes of a sample in each column that has a value for each sample, except those of media."""
MEDIA_BYTES: Mapping[str, int] = dict.fromkeys(STEP_COLUMNS, 4)
"""Bytes of a sample in each column of ``MediaColumns``."""
_OF_SAMPLES = {**SAMPLE_BYTES, **MEDIA_BYTES}
IN_PACKS = tuple(column.column for column in BY_RULES.values() if column.in_packs is not None)
"""Attributes of a pack with a number for each of its samples, [num_samples]; None in runs without the column."""


def columns_by_rules(rules: Rules, table: SampleTable, handles: I64) -> dict[str, bytes]:
    """Return the columns of samples that the rules ask for; ``handles`` int64 [n]."""
    return {
        name: getattr(table, column.column)[handles].astype("<u4").tobytes()
        for name, column in BY_RULES.items()
        if column.is_there(rules)
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
    return {name: b"".join(cut[name] for cut in cuts) for name in cuts[0]}
