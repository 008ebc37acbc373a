"""A ledger names the first step in which two runs differ, with the reason, and has the notes of skips."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from streampack_services.audit.compare_runs import compare
from streampack_services.audit.verify import verify
from streampack_services.audit.why import why_step

from streampack.core.journal.log_records import LineageBegan, Record, SourceAccepted, StepFormed, StepsSkipped
from streampack.core.model.rules import Rules
from streampack.errors import UserError
from tests.services.recorded import FEED, TWO_STREAMS, Run, ledger_of, resealed, rows_in, with_rows

LENGTHS = [[40 + (7 * p + 13 * i) % 150 for i in range(60)] for p in range(4)]


def records_of(rules: Rules = TWO_STREAMS) -> list[Record]:
    run = Run(rules, LENGTHS)
    for p in range(4):
        run.feed(p, 60)
    return run.records


def compared(one: list[Record], other: list[Record]) -> dict[str, Any]:
    with ledger_of(one) as first, ledger_of(other) as second:
        return compare(first, second, None)


def step_of(records: list[Record], number: int) -> StepFormed:
    return next(record for record in records if isinstance(record, StepFormed) and record.step == number)


def test_two_runs_with_the_same_rules_and_data_are_equal() -> None:
    result = compared(records_of(), records_of())
    assert (result["equal"], result["step"], result["why"]) == (True, None, [])
    assert result["steps"] == result["ends"] == [result["compared"]] * 2


def test_other_rules_are_named_at_the_first_step_that_differs() -> None:
    web, code = TWO_STREAMS.streams
    other = replace(TWO_STREAMS, seed=5, streams=(replace(web, weight=0.5), code))
    result = compared(records_of(), records_of(other))
    assert (result["equal"], result["step"]) == (False, 0)
    differ = ("seed: default -> 5", "streams.web.weight: 0.7 -> 0.5")
    assert {f"The rules differ: {line}." for line in differ} <= set(result["why"])


def test_a_changed_sample_is_named_with_the_stream_whose_data_differs() -> None:
    records = records_of()
    step = step_of(records, 3)
    rows = rows_in(step).copy()
    rows["crc"][2] ^= 1
    other = resealed([
        with_rows(step, rows, np.frombuffer(step.counts_u32, "<u4")) if record is step else record for record in records
    ])  # fmt: skip
    digests = [[SourceAccepted(stream="code", source_digest=digest)] for digest in ("aaaa", "bbbb")]
    result = compared([*records, *digests[0]], [*other, *digests[1]])
    assert result["step"] == 3
    name = f"{('web', 'code')[rows['stream'][2]]}:{rows['index'][2]}"
    assert "Stream code has other data: the digests of its source are aaaa and bbbb." in result["why"]
    assert any(why.startswith(f"Samples have other tokens or fields: {name}") for why in result["why"])


@pytest.mark.parametrize("first", [True, False])
def test_runs_that_differ_by_skips_alone_are_said_to_have_the_same_samples_in_all_steps(first: bool) -> None:
    skips = StepsSkipped(feed=FEED, first=2, last=4, note="spike"), StepsSkipped(feed=FEED, first=6, last=6, note="")
    skipping = [*records_of(), *skips]
    runs = (skipping, records_of()) if first else (records_of(), skipping)
    result = compared(*runs)
    assert (result["equal"], result["step"], result["digests"]) == (False, 2, None)
    assert result["compared"] == result["last"] + 1 == result["steps"][0]
    which = "first" if first else "second"
    assert result["why"] == [f"Only the {which} run skips steps 2 to 4 (spike).", f"Only the {which} run skips step 6."]


def test_a_skip_does_not_hide_a_later_step_with_other_samples() -> None:
    records = records_of()
    step = step_of(records, 5)
    rows = rows_in(step).copy()
    rows["crc"][0] ^= 1
    other = resealed([
        with_rows(step, rows, np.frombuffer(step.counts_u32, "<u4")) if record is step else record for record in records
    ])  # fmt: skip
    result = compared([*records, StepsSkipped(feed=FEED, first=2, last=2, note="")], other)
    assert (result["equal"], result["step"], result["last"]) == (False, 2, 5)
    assert result["digests"][0] != result["digests"][1]
    assert result["why"][0] == "Only the first run skips step 2."
    assert result["why"][1].startswith("Samples have other tokens or fields: ")


def test_the_note_of_a_skip_is_shown_at_each_of_its_steps() -> None:
    with ledger_of([*records_of(), StepsSkipped(feed=FEED, first=2, last=4, note="spike")]) as ledger:
        notes = [why_step(ledger, step)["skip_notes"] for step in range(1, 6)]
    assert notes == [[], ["spike"], ["spike"], ["spike"], []]


def test_a_lineage_without_steps_has_the_steps_before_it() -> None:
    records = [record for record in records_of() if not (isinstance(record, StepFormed) and record.step > 5)]
    with ledger_of([*records[:-1], LineageBegan(feed=FEED, lineage=1, step=4, why="went back")]) as ledger:
        with pytest.raises(UserError, match=r"Step 4 of feed 'train' is not formed yet\. The last step is 3\.$"):
            why_step(ledger, 4)
        assert why_step(ledger, 3)["step"] == 3


def test_samples_whose_content_came_before_are_counted_as_passes() -> None:
    records = records_of()
    steps = [record for record in records if isinstance(record, StepFormed)]

    def repeated(step: StepFormed) -> StepFormed:
        rows = rows_in(step).copy()
        rows["crc"], rows["length"][rows["part"] == 0] = rows["index"] // 12, 40
        rows["loss_tokens"] = rows["length"] - 1
        return with_rows(step, rows, np.frombuffer(step.counts_u32, "<u4"))

    with ledger_of(resealed([repeated(r) if r in steps else r for r in records])) as ledger:
        streams = verify(ledger)["feeds"]["train"]["streams"]
    for row in streams.values():
        assert row["again"] == row["samples"] - round(row["samples"] / row["passes"])
        assert row["passes"] > 5
