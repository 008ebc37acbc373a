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
        return {sample_id: dict(zip(self.names, row, strict=True)) for sample_id, row in zip(ids, rows, strict=True)}


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
        of_attempt = pending.setdefault(part.names, {})
        newest = max((report.attempt for report in of_attempt.values()), default=part.attempt)
        if part.attempt > newest:
            of_attempt.clear()
        if part.attempt >= newest:
            of_attempt[part.part] = part
        if len(of_attempt) >= part.parts:
            complete[part.names] = list(pending.pop(part.names).values())
    reports = [(names, of_attempt, True) for names, of_attempt in complete.items()]
    reports += [(names, list(of_attempt.values()), False) for names, of_attempt in pending.items()]
    return [
        ReportedValues(names, merge_parts(of_attempt), whole)
        for names, of_attempt, whole in sorted(reports, key=lambda report: report[0])
    ]
