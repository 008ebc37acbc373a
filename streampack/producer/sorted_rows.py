"""Find sources whose files are sorted, and that are read too few files or row groups at a time to be mixed.

A few rows at several places of the files show it. The signal is clear: all rows of a place have one value of a column
such as ``label``, and places differ. Or the lengths at each place are apart from those at every other place. For data
in a random order both are practically impossible.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from streampack.core.model.fields import Field
from streampack.sources.records import RawSample
from streampack.sources.walk import Places

PLACES, ROWS = 8, 8
KINDS = ("class", "label", "source", "category", "domain", "dataset", "language", "lang", "topic", "subset")
"""Columns whose values say of which kind a row is."""


def kind_fields() -> tuple[dict[str, str], tuple[Field, ...]]:
    """Return the setting ``fields`` and the declarations with which the values of ``KINDS`` are read as they are."""
    names = {f"kind_{key}": key for key in KINDS}
    return names, tuple(Field(name=name, dtype="reference", axis="item") for name in names)


def sorted_advice(places: Places) -> str:
    """Return a sentence about data that is sorted and hardly mixed, with what to write; empty if there is none."""
    if places.together > PLACES // 2 or places.together >= places.total or len(places.samples) < 2:
        return ""
    good = [[row for row in rows if row.reason is None] for rows in places.samples]
    if any(len(rows) < ROWS for rows in good):
        return ""
    by = next((f"one {key!r} each" for key in KINDS if _is_sorted_by(good, f"kind_{key}")), "")
    if not by and not _has_lengths_apart(good):
        return ""
    return (
        f"the rows at {len(good)} places of the files have {by or 'lengths apart from each other'}, so the data is "
        f"sorted. Only {places.together} of {places.total} files or row groups are read at a time, so packs have few "
        f"kinds of samples. Write `open_shards: 32` here, which takes more memory, or shuffle the rows in the files"
    )


def _is_sorted_by(places: Sequence[Sequence[RawSample]], name: str) -> bool:
    """Return whether each place has one value of a field, and places differ."""
    values = [{repr(row.fields.get(name)) for row in rows} for rows in places]
    return all(len(group) == 1 for group in values) and len(set.union(*values)) > 1


def _has_lengths_apart(places: Sequence[Sequence[RawSample]]) -> bool:
    """Return whether the lengths of different places do not overlap, for at least four places."""
    bounds = sorted((min(sizes), max(sizes)) for sizes in ([len(row.tokens) for row in rows] for rows in places))
    return len(bounds) >= 4 and all(low[1] < high[0] for low, high in pairwise(bounds))
