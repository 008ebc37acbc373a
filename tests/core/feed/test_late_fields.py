"""Late fields: every sample is admitted once, with the values that were given to it, in the order of completion."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streampack.core.journal.log_records import (
    ChunkCompleted,
    ChunkStaged,
    EndStaged,
    StreamFacts,
)
from streampack.core.model.rules import Batch
from streampack.core.sessions.producer_base import Leave
from streampack.core.sessions.pushing.push_session import Push
from tests.world.late_rollouts import FIELDS, Late, check_late, late_chunk, played
from tests.world.rollouts import PARTITIONS, Story, pusher, stories


@given(stories(), st.integers(0, 999), st.booleans(), st.booleans())
@settings(max_examples=20)
def test_each_sample_is_admitted_once_with_its_values(story: Story, seed: int, discards: bool, groups: bool) -> None:
    live = played(Late(seed, discards=discards, groups=groups), story)
    check_late(live)
    assert not any(answer.refusal for answer in live.answers_to_amends)


@given(stories(), st.integers(0, 999), st.booleans(), st.booleans())
@settings(max_examples=20)
def test_values_that_come_too_late_are_refused_by_sample(story: Story, seed: int, discards: bool, groups: bool) -> None:
    live = played(Late(seed, discards=discards, groups=groups, late_timeout_s=1), story)
    check_late(live)
    dropped = {
        (record.partition, seq) for record in live.records() if isinstance(record, ChunkCompleted) and record.rejected
        for seq in np.frombuffer(record.sent_u64, "<u8").tolist()
    }  # fmt: skip
    late = {sample for sample, reason in live.not_stored.items() if reason == "late_timeout"}
    assert late <= dropped
    assert not any(answer.refusal for answer in live.answers_to_amends)


def test_values_come_too_late_in_the_stories() -> None:
    reasons = set[str]()
    for seed in range(8):
        live = played(Late(seed, late_timeout_s=1), [("push", 4), ("turns", 9), ("kill", 0)])
        reasons |= set(live.not_stored.values())
    assert reasons == {"late_timeout"}


def test_a_staged_partition_takes_no_sample_after_its_end_also_from_another_process() -> None:
    """The end is not safe yet when another process begins, and samples before it wait for values."""
    live = Late(1, amends=False)
    live.wanted, live.over = 9, True
    live.until(lambda: any(isinstance(record, EndStaged) for record in live.records()))
    partition = next(record.partition for record in live.records() if isinstance(record, EndStaged))
    live._to_producer(b"push%d" % partition, Leave())
    other = pusher("other", partition, 99)
    live.producers[b"other"] = other
    live.until(lambda: other.begun)
    assert (other.ended, other.buffer.next_seq) == (True, 9)
    live._to_producer(b"other", Push(late_chunk(partition, 9, 10)))
    chunks = [each for each in live.records() if isinstance(each, ChunkStaged) and each.partition == partition]
    assert sum(len(chunk.lengths_u32) // 4 for chunk in chunks) == 9


def test_dropped_samples_are_known_after_their_records_are_deleted() -> None:
    live = played(Late(4, late_timeout_s=1), [("push", 4), ("turns", 9), ("kill", 0)])
    facts = live.core.leases.records.facts()["rollouts"]
    facts = msgspec.msgpack.decode(msgspec.msgpack.encode(facts), type=StreamFacts)
    next_ = Late(4, late_timeout_s=1).core.leases
    next_.records.learn("rollouts", facts)
    for p in range(PARTITIONS):
        before, staged = (leases.partitions.intakes[p].staged for leases in (live.core.leases, next_))
        assert before is not None
        assert staged is not None
        assert staged.drops.ranges == before.drops.ranges
        assert {staged.drop_reason(seq) for seq in range(live.wanted)} <= {"", "late_timeout"}
    assert any(facts.dropped or ())


@given(stories(), st.integers(0, 999))
@settings(max_examples=20)
def test_a_batch_keeps_its_samples_however_late_their_values_come(story: Story, seed: int) -> None:
    live = played(Late(seed, batch=Batch()), [move for move in story if move[0] not in ("back", "torn")])
    check_late(live)


def test_the_order_is_that_of_completion() -> None:
    orders = set()
    for seed in range(5):
        live = played(Late(seed), [("push", 4), ("turns", 9)])
        orders.add(tuple(
            seq for record in live.records() if isinstance(record, ChunkCompleted) and record.partition == 0
            for seq in np.frombuffer(record.sent_u64, "<u8").tolist()
        ))  # fmt: skip
    assert len(orders) == 5, "it depends on when values came"


@pytest.mark.parametrize("default", [None, 0.5])
def test_values_that_never_come_are_filled_in_or_their_samples_dropped(default: float | None) -> None:
    fields = (FIELDS[0], *(msgspec.structs.replace(each, default=default) for each in FIELDS[1:]))
    live = Late(1, amends=False, late_timeout_s=30, fields=fields)
    live.play([("push", 3)])
    records = [record for record in live.records() if isinstance(record, ChunkCompleted)]
    lengths = [length for record in records for length in np.frombuffer(record.lengths_u32, "<u4").tolist()]
    assert len(lengths) == PARTITIONS * live.wanted
    assert any(lengths) == (default is not None)
    if default is None:
        assert sum(record.rejected["late_timeout"] for record in records) == PARTITIONS * live.wanted
