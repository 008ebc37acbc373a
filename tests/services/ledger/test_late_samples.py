"""The ledger finds samples that waited by the number that they were sent with, and the values that were reported."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from streampack_services.audit.verify import verify
from streampack_services.audit.why import why_step
from streampack_services.audit.why_sample import why_sample
from streampack_services.ledger.ledger import Ledger

from streampack.core.journal.log_records import (
    Base,
    ChunkCompleted,
    ChunkStaged,
    FeedFacts,
    Record,
    StepFormed,
    ValuesReported,
)
from streampack.core.model.fields import Field
from streampack.core.model.rules import Rules, StreamRules
from streampack.core.model.samples import ROW
from streampack.errors import LedgerDamaged, UserError
from tests.core.results.values_desk import CP, DP, SAMPLES, STEPS, ValuesDesk, part_of
from tests.services.recorded import entries, ledger_of, with_values
from tests.world.late_rollouts import NAMES, Late, played
from tests.world.paced_rollouts import Paced
from tests.world.rollouts import PARTITIONS, Story, stories

WAITED = f"its late fields ({', '.join(NAMES)})"


def check(records: list[Record], waited: str) -> None:
    """Every sample that was sent is found by its number, at the place that its index has."""
    came, packed = dict[int, int](), dict[int, list[int]]()
    admitted: dict[tuple[int, int], tuple[int, int]] = {}
    for lsn, record in enumerate(records):
        if isinstance(record, ChunkStaged):
            came[record.partition] = record.base_seq + len(record.lengths_u32) // 4
        elif isinstance(record, ChunkCompleted):
            for at, sent in enumerate(np.frombuffer(record.sent_u64, "<u8").tolist()):
                admitted[record.partition, sent] = (record.base_seq + at, lsn)
        elif isinstance(record, StepFormed):
            for index in np.frombuffer(record.rows, ROW)["index"].tolist():
                packed.setdefault(index, []).append(record.step)
    with ledger_of(records) as ledger:
        assert verify(ledger)["named"] == []
        for partition in range(PARTITIONS):
            for sent in range(came.get(partition, 0)):
                found = why_sample(ledger, f"rollouts:{partition}:{sent}")
                place = admitted.get((partition, sent))
                completed_by = None if place is None else place[1]
                assert found["sent"] == {"seq": sent, "waited_for": waited, "record": completed_by}
                assert (found["partition"], found["seq"]) == (partition, None if place is None else place[0])
                if place is None:
                    assert (found["index"], found["is"], found["places"]) == (None, "waiting", [])
                    assert found["why"] == f"the sample waits for {waited}"
                    continue
                assert found["index"] == place[0] * PARTITIONS + partition
                assert found == why_sample(ledger, f"rollouts:{found['index']}")
                assert [each["step"] for each in found["places"]] == packed.get(found["index"], [])
                assert (found["is"] == "step") == any(each["counts"] for each in found["places"])
            after = why_sample(ledger, f"rollouts:{partition}:{came.get(partition, 0) + 7}")
            assert after["is"] in ("waiting", "none")
            assert "has not come yet" in after["why"] or f"ended after {came[partition]} samples" in after["why"]


@given(stories(), st.integers(0, 999), st.booleans(), st.floats(0, 1))
@settings(max_examples=15)
def test_a_sample_is_found_by_the_number_that_it_was_sent_with(
    story: Story, seed: int, discards: bool, part: float
) -> None:
    records = played(Late(seed, discards=discards), story).records()
    first = next((lsn for lsn, record in enumerate(records) if isinstance(record, ChunkStaged)), 0)
    check(records[: max(first, round(part * len(records)))], WAITED)
    check(records, WAITED)


def test_a_sample_that_waited_for_its_turn_is_found_by_its_number() -> None:
    live = Paced(3, 1, 4)
    live.finish()
    check(live.records(), "its turn")


RULES = Rules(
    budget=64, packs=1, merge="arrival", streams=(StreamRules("rollouts", 1.0, 2, pushed=True),),
    fields=(Field(name="reward", dtype="float32", axis="sample", late=True),),
)  # fmt: skip


def a_base() -> Base:
    return Base(run=1, run_name="late", epoch=1, feeds={"train": FeedFacts(rules=RULES)}, streams={})


def completed(base_seq: int, sent: list[int], **more: Any) -> ChunkCompleted:
    lengths = np.full(len(sent), 3, "<u4").tobytes()
    columns = dict.fromkeys(("lengths_u32", "crcs_u32", "loss_tokens_u32"), lengths)
    return ChunkCompleted(
        stream="rollouts", partition=0, base_seq=base_seq, cursor=(0, 0, 0), sent_u64=np.array(sent, "<u8").tobytes(),
        **columns | more,
    )  # fmt: skip


def test_a_sample_that_was_dropped_because_a_value_did_not_come_says_so() -> None:
    dropped = completed(0, [4, 2], lengths_u32=bytes(8), rejected={"late_timeout": 2})
    with ledger_of([a_base(), dropped]) as ledger:
        found = why_sample(ledger, "rollouts:0:2")
        assert (found["index"], found["is"], found["why"]) == (2, "rejected", "late_timeout")
        assert found["sent"]["waited_for"] == "its late fields (reward)"


def test_a_sample_that_is_admitted_twice_is_found() -> None:
    with ledger_of([a_base(), completed(0, [4, 2]), completed(2, [3, 2])]) as ledger:
        assert verify(ledger)["named"] == ["rollouts:0:2 was admitted more than once"]


def test_a_ledger_that_begins_later_says_what_it_does_not_know() -> None:
    staged = ChunkStaged(
        stream="rollouts", partition=0, base_seq=8, lengths_u32=bytes(4), crcs_u32=bytes(4), loss_tokens_u32=bytes(4),
        cursor=(0, 0, 0),
    )  # fmt: skip
    with Ledger(Path(":memory:")) as ledger:
        ledger.update(entries([a_base()] * 5 + [a_base(), staged], 5))
        found = why_sample(ledger, "rollouts:0:3")
        assert (found["is"], found["why"]) == (
            "unrecorded", "the ledger begins with record 5, and an earlier one may have admitted the sample"
        )  # fmt: skip


def test_numbers_that_name_no_sample_are_refused() -> None:
    with ledger_of([a_base()]) as ledger:
        with pytest.raises(UserError, match="got partition 2 of stream 'rollouts', expected a partition below 2"):
            why_sample(ledger, "rollouts:2:0")
        with pytest.raises(UserError, match="STREAM:PARTITION:SEQ"):
            why_sample(ledger, "rollouts:0:x")


@given(st.integers(0, 9999))
def test_the_reported_values_are_those_that_subscribers_get(seed: int) -> None:
    """Ranks report in any order, some of them in two attempts; some steps are never complete."""
    rng, desk = Random(seed), ValuesDesk(True)
    parts = [(step, dp, cp) for step in range(STEPS) for dp in range(DP) for cp in range(CP)]
    for attempt in (1, 2):
        for step, dp, cp in rng.sample(parts, rng.randrange(len(parts) + 1)):
            desk.perform(desk.values.report(b"t", *part_of(step, attempt, dp, cp), 0, STEPS))
    desk.sync()
    for _ in range(STEPS):
        desk.ask()
    records = [msgspec.msgpack.decode(record, type=ValuesReported) for record in desk.log]
    with ledger_of([a_base(), *records]) as ledger:
        for step in range(STEPS):
            found = {name: each for each in ledger.reported("train", step, 0) for name in each.names}
            told = {message.step: values for message, values in desk.had}
            assert [name for name, each in found.items() if each.complete] == ["loss"] * (step in told)
            if step in told:
                by_sample = found["loss"].by_sample
                assert [values["loss"] for values in by_sample.values()] == told[step]
                first = step * DP * SAMPLES
                assert list(by_sample) == [(0, index, 0) for index in range(first, first + DP * SAMPLES)]


@given(stories(), st.integers(0, 99))
@settings(max_examples=10)
def test_why_shows_the_values_of_each_step(story: Story, seed: int) -> None:
    live = played(Late(seed, discards=True), story)
    with ledger_of(with_values(live.records(), {"entropy": 0.5, "loss": float("nan")})) as ledger:
        for partition in range(PARTITIONS):
            for sent in range(live.wanted):
                found = why_sample(ledger, f"rollouts:{partition}:{sent}")
                for place in found["places"]:
                    assert place["values"] == {"entropy": found["index"] / 2, "loss": "nan"}
                    if place["counts"]:
                        step = why_step(ledger, place["step"])
                        samples = [sample for pack in step["packs"] for sample in pack["samples"]]
                        assert {s["index"]: s["values"]["entropy"] for s in samples} == {
                            s["index"]: s["index"] / 2 for s in samples
                        }
                        mean = sum(s["index"] for s in samples) / 2 / len(samples)
                        assert step["reported"]["entropy"] == {"samples": len(samples), "mean": pytest.approx(mean)}


def test_values_that_some_ranks_have_not_reported_are_not_shown_as_the_values() -> None:
    live = played(Late(4), [])
    records = [
        msgspec.structs.replace(record, parts=2) if isinstance(record, ValuesReported) else record
        for record in with_values(live.records(), {"loss": 1.0})
    ]
    with ledger_of(records) as ledger:
        step = why_step(ledger, 0)
        assert (step["reported"], step["partly_reported"]) == ({}, ["loss"])
        sample = step["packs"][0]["samples"][0]
        (place,) = why_sample(ledger, f"rollouts:{sample['index']}")["places"]
        assert (place["values"], place["partly_reported"]) == ({}, ["loss"])


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE completed SET base = base + 1", "UPDATE completed SET sent = x'00ff00000000000000'",
        "UPDATE reported SET body = zeroblob(40)", "UPDATE staged SET upto = upto + 1", "DELETE FROM staged",
        "DELETE FROM reported",
    ],
)  # fmt: skip
def test_a_damaged_row_of_a_sample_that_waited_is_never_used(statement: str, tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger_of(with_values(played(Late(4), []).records(), {"loss": 1.0}), path).close()
    with sqlite3.connect(path) as db:
        db.execute(statement)
    db.close()
    with Ledger(path) as ledger:
        assert verify(ledger)["findings"]["damaged"] > 0
        if statement.startswith("UPDATE"):
            place = "0:999" if "staged" in statement else "0:0"
            with pytest.raises(LedgerDamaged, match="does not match its checksum"):
                why_sample(ledger, f"rollouts:{place}")
