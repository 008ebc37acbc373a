"""``max_policy_lag``: what a policy made that was too old when it came is in no step, counted, whoever is killed."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.core.journal.history import ChunkPlace, History
from streampack.core.journal.log_records import ChunkAdmitted, LineageBegan, SamplesRejected, StepFormed
from streampack.core.model.rules import Rules
from streampack.core.model.samples import ROW, index_of
from streampack.core.sessions.producer_base import Chunk
from tests.world.rollouts import PARTITIONS, Rollouts, Story, rules_with, stories


class Policies(Rollouts):
    """Programs whose policy grows with what they have sent, as fast as ``pace`` says; some chunks say no version."""

    def __init__(self, lag: int, pace: tuple[int, int], seed: int, *, discards: bool) -> None:
        self.pace = pace
        super().__init__(seed, rules_with(max_policy_lag=lag), discards=discards)

    def next_chunk(self, partition: int, first: int) -> Chunk:
        chunk = super().next_chunk(partition, first)
        version = first // self.pace[partition] if self.rng.random() < 0.8 else msgspec.UNSET
        return msgspec.structs.replace(chunk, policy_version=version)


@given(st.integers(0, 4), st.tuples(*[st.integers(1, 9)] * 2), stories(), st.integers(0, 999), st.booleans())
def test_stale_samples_follow_from_the_recorded_order_alone(
    lag: int, pace: tuple[int, int], story: Story, seed: int, discards: bool
) -> None:
    live = Policies(lag, pace, seed, discards=discards)
    live.play([("push", 8), *story], torn=False)
    packed, rejected = set[int](), dict[int, set[str]]()
    came = list[tuple[int, int, set[int]]]()  # (record, version, samples) of what is not lost
    stale, lost = set[int](), set[int]()
    for lsn, record in enumerate(live.records()):
        if isinstance(record, LineageBegan):
            assert record.since is not None
            lost |= {i for at, _, samples in came if at >= record.since for i in samples}
            packed -= lost
            came = [each for each in came if each[0] < record.since]
        elif isinstance(record, ChunkAdmitted):
            seqs = record.base_seq + np.arange(len(record.lengths_u32) // 4)
            samples = set(np.asarray(index_of(seqs, record.partition, PARTITIONS)).tolist())
            version = -1 if record.policy_version is msgspec.UNSET else record.policy_version
            newest = max((each for _, each, _ in came), default=-1)
            assert bool(record.stale) == (0 <= version < newest - lag)
            stale |= samples if record.stale else set()
            came.append((lsn, version, samples))
        elif isinstance(record, SamplesRejected):
            for index in np.frombuffer(record.indices_u64, "<u8").tolist():
                rejected.setdefault(index, set()).update(record.reasons)
        elif isinstance(record, StepFormed):
            packed.update(np.frombuffer(record.rows, ROW)["index"].tolist())
    every = set(range(PARTITIONS * live.wanted))
    assert not packed & stale
    assert packed | set(rejected) == every, "nothing is unaccounted for"
    assert {index for index, why in rejected.items() if "policy_lag" in why} <= stale
    assert stale | lost == set(rejected)
    assert live.feed.history.newest_version == max((version for _, version, _ in came), default=-1)


def test_a_version_that_lags_by_as_much_as_is_allowed_is_taken() -> None:
    history = History(Rules(max_policy_lag=2), 1)
    assert not history.is_stale(0)
    history.add_chunk(ChunkPlace(0, 0, 1, 0, version=7))
    assert [history.is_stale(version) for version in (-1, 4, 5, 9)] == [False, True, False, False]
    assert not History(Rules(), 1).is_stale(0)


def test_the_newest_version_is_known_when_the_records_that_said_it_are_gone() -> None:
    history = History(Rules(max_policy_lag=2), 1)
    assert history.facts(0).newest_version is msgspec.UNSET, "and logs without versions are as they were"
    history.add_chunk(ChunkPlace(0, 0, 1, 0, version=7))
    facts = msgspec.msgpack.decode(msgspec.msgpack.encode(history.facts(0)), type=type(history.facts(0)))
    other = History(Rules(max_policy_lag=2), 1)
    other.recover(facts, 0)
    assert other.is_stale(4)


def test_policies_begin_again_where_rollouts_are_discarded() -> None:
    """The trainers went back to an older policy: what it makes is not too old for what is gone."""
    history = History(Rules(max_policy_lag=1), 1)
    for lsn, version in ((3, 4), (8, 9)):
        history.add_chunk(ChunkPlace(0, lsn, 1, lsn, version=version))
    history.branch(1, 2, None)
    assert history.is_stale(5)
    history.branch(2, 2, 5)
    assert [history.is_stale(version) for version in (2, 3, 5)] == [True, False, False]


@pytest.mark.parametrize("lag", [-1, 1.5, "2"])
def test_a_lag_is_an_integer_from_0_on(lag: object) -> None:
    with pytest.raises(msgspec.ValidationError, match="max_policy_lag"):
        msgspec.convert({"max_policy_lag": lag}, Rules)
