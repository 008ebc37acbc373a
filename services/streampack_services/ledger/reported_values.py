"""Put the values together that ranks reported for a step: of one attempt, and summed over context-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from streampack.core.journal.log_records import ValuesReported
from streampack.core.results.merge_parts import MergedValues, merge_parts

SampleId = tuple[int, int, int]
"""Stream number, index and part of a sample."""


@dataclass(frozen=True)
class ReportedValues:
    """Values of a step that were reported together.

    Attributes:
        names: Names of the values.
        merged: Ids and values of the samples.
        complete: True if all ranks have reported.
    """

    names: tuple[str, ...]
    merged: MergedValues
    complete: bool

    @cached_property
    def by_sample(self) -> dict[SampleId, dict[str, float]]:
        """Values by name, for each sample."""
        columns = [column.tolist() for column in self.merged.values]
        rows = zip(*columns, strict=True)
        ids = map(tuple, self.merged.ids.tolist())
        return {each: dict(zip(self.names, row, strict=True)) for each, row in zip(ids, rows, strict=True)}


def values_of(parts: Iterable[ValuesReported]) -> list[ReportedValues]:
    """Return the values of one step in one lineage, by the names that were reported together.

    The first attempt of which every rank has reported counts, as for subscribers; without one, the newest attempt.

    Args:
        parts: Reports of ranks, in the order of the log.
    """
    complete: dict[tuple[str, ...], list[ValuesReported]] = {}
    pending: dict[tuple[str, ...], dict[int, ValuesReported]] = {}
    for part in parts:
        if part.names in complete:
            continue
        mine = pending.setdefault(part.names, {})
        newest = max((each.attempt for each in mine.values()), default=part.attempt)
        if part.attempt > newest:
            mine.clear()
        if part.attempt >= newest:
            mine[part.part] = part
        if len(mine) >= part.parts:
            complete[part.names] = list(pending.pop(part.names).values())
    found = [(names, mine, True) for names, mine in complete.items()]
    found += [(names, list(mine.values()), False) for names, mine in pending.items()]
    return [
        ReportedValues(names, merge_parts(mine), whole)
        for names, mine, whole in sorted(found, key=lambda each: each[0])
    ]
