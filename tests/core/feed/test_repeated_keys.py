"""Samples with keys: a job of several processes pushes again after each failure, and each key is in one step, once."""

from __future__ import annotations

from collections import Counter

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from streampack.core.broker import Broker
from streampack.core.journal.journal import Journal
from streampack.core.journal.key_index import KEY_BYTES, KeyIndex
from streampack.core.journal.log_effects import Append
from streampack.core.journal.log_records import ChunkAdmitted, KeysKept, SamplesRejected, StepFormed, WriteCommitted
from streampack.core.model.capacity import Capacity, FeedPlan
from streampack.core.model.samples import ROW, index_of
from streampack.core.protocol.events import Tick
from streampack.core.sessions.pushing.push_buffer import size_of
from streampack.core.sessions.pushing.push_session import EndPartition, EndWrite, Push, PushSession
from tests.world.live import RUN
from tests.world.rollouts import PARTITIONS, RULES, Unsafe, pusher, rollout_chunk

KEYS = 12
"""Rows of each job."""


def digest(key: int) -> bytes:
    return key.to_bytes(KEY_BYTES, "little")


class Jobs(Unsafe):
    """Jobs that write the same rows one after the other; their processes die and push rows again, in any order."""

    def __init__(self, seed: int) -> None:
        self.job = 0
        """The job that writes: its write has the same number."""
        self.safe: set[tuple[int, int]] = set()
        """(write, key) of the samples that were said to be durable."""
        self.sent: dict[int, list[tuple[int, int, int]]] = {p: [] for p in range(PARTITIONS)}
        """(sequence number, write, key) of what each process has pushed and was not told to be durable."""
        self.num_processes = 0
        super().__init__(seed, discards=False)

    def start_producer(self, streams: list[str]) -> bytes:
        self.pushers = [self.begin(partition) for partition in range(PARTITIONS)]
        return b""

    def begin(self, partition: int) -> PushSession:
        """A process of the job, in place of one that has died with what it had."""
        self.num_processes += 1
        self.sent[partition] = []
        peer = b"push%d" % self.num_processes
        session = pusher(f"pusher{self.num_processes}", partition, self.num_processes)
        self.peers = {**getattr(self, "peers", {}), partition: peer}
        self.producers[peer] = session
        self._to_producer(peer, Tick(self.now))
        return session

    def kill(self, partition: int) -> None:
        self.producers.pop(self.peers[partition], None)
        self.pushers[partition] = self.begin(partition)

    def work(self, partition: int) -> None:
        session, peer = self.pushers[partition], self.peers[partition]
        for seq, write, key in list(self.sent[partition]):
            if seq < session.buffer.durable_seq:
                self.sent[partition].remove((seq, write, key))
                self.safe.add((write, key))
        if session.begun and not self.over:
            first = session.buffer.next_seq
            count = self.rng.randint(1, 3)
            keys = [self.rng.randrange(KEYS) for _ in range(count)]
            write = max(self.job - (self.rng.random() < 0.1), 0)  # a process of the last job may not be dead at all
            chunk = msgspec.structs.replace(
                rollout_chunk(partition, first, first + count), keys=b"".join(map(digest, keys)), write=write
            )
            if len(self.sent[partition]) < 9 and session.room(size_of(chunk)):
                self.sent[partition] += [(first + i, write, key) for i, key in enumerate(keys)]
                self._to_producer(peer, Push(chunk))
            if all((self.job, key) in self.safe for key in range(KEYS)):
                if session.write > self.job:
                    self.job += 1
                else:
                    self._to_producer(peer, EndWrite(self.job))
        elif session.begun and not session.end_requested:
            self._to_producer(peer, EndPartition())


@given(st.lists(st.tuples(st.sampled_from(["turns", "kill", "broker", "back"]), st.integers(0, 9)), max_size=14),
       st.integers(0, 999))  # fmt: skip
@settings(max_examples=25)
def test_each_key_of_a_write_is_admitted_once_and_none_that_was_durable_is_lost(
    story: list[tuple[str, int]], seed: int
) -> None:
    live = Jobs(seed)
    for what, n in [*story, ("turns", 9)]:
        if what == "turns":
            for _ in range(30 * n):
                live.turn()
        elif what == "kill":
            live.kill(n % PARTITIONS)
        elif what == "broker":
            live.start_broker()
        else:
            live.go_back(max(live.had - n, 0))
    live.over = True
    live.finish()
    admitted, dropped, current = Counter[tuple[int, int]](), set[int](), 0
    kept, packed, rejected = set[int](), set[int](), set[int]()
    for record in live.records():
        if isinstance(record, WriteCommitted):
            assert record.write == current
            current += 1
        elif isinstance(record, ChunkAdmitted):
            seqs = record.base_seq + np.arange(len(record.lengths_u32) // 4)
            indices = np.asarray(index_of(seqs, record.partition, PARTITIONS)).tolist()
            assert record.keyed
            flags = record.keyed.repeated or bytes(len(indices))
            for i, (index, gone) in enumerate(zip(indices, flags, strict=True)):
                key = int.from_bytes(record.keyed.digests[KEY_BYTES * i : KEY_BYTES * (i + 1)], "little")
                known = admitted[record.keyed.write, key] > 0
                assert bool(gone) == (known or record.keyed.write < current)
                admitted[record.keyed.write, key] += not gone
                (dropped if gone else kept).add(index)
        elif isinstance(record, SamplesRejected):
            assert set(record.reasons) == {"repeated"}
            rejected.update(np.frombuffer(record.indices_u64, "<u8").tolist())
        elif isinstance(record, StepFormed):
            packed.update(np.frombuffer(record.rows, ROW)["index"].tolist())
    assert all(count <= 1 for count in admitted.values())
    live.safe -= {(write, key) for write, key in live.safe if write < current and not admitted[write, key]}
    assert all(admitted[each] == 1 for each in live.safe), "a durable sample is lost"
    assert all(admitted[write, key] == 1 for write in range(current) for key in range(KEYS)), (
        "a committed job lacks rows"
    )
    assert (packed, rejected) == (kept, dropped), "steps hold what was admitted, and nothing is unaccounted for"
    assert live.core.leases.partitions.streams["rollouts"].keys.write == current


def test_some_jobs_are_committed_and_some_keys_repeated() -> None:
    """So that the test above is one."""
    live = Jobs(5)
    for _ in range(3000):
        live.turn()
    records = live.records()
    assert sum(isinstance(record, WriteCommitted) for record in records) > 3
    assert (
        sum(isinstance(record, ChunkAdmitted) and bool(record.keyed and record.keyed.repeated) for record in records)
        > 9
    )


@given(st.integers(0, 999), st.integers(1, 400))
@settings(max_examples=15)
def test_keys_are_known_when_the_records_of_their_chunks_are_gone(seed: int, turns: int) -> None:
    live = Jobs(seed)
    for _ in range(turns):
        live.turn()
    first = len(live.disk.records)
    records = live.core.leases.records
    for effect in [*records.keep_keys(first), *live.core.journal.append(live.core.base())]:
        assert isinstance(effect, Append)
        live.disk.append(effect.record, effect.payload)
    other = Broker(
        run=RUN, epoch=99, feeds=[FeedPlan("train", RULES, 1 << 16)], capacity=Capacity(64, 32, 1 << 20),
        journal=Journal(keeps=True), run_name="live",
    )  # fmt: skip
    for lsn, record in list(enumerate(live.records()))[first:]:
        other.recover(lsn, record)
    before, after = (each.leases.partitions.streams["rollouts"].keys for each in (live.core, other))
    assert (after.write, after._known) == (before.write, before._known)
    assert list(other.leases.records.keep_keys(first)) == [], "they are not recorded twice"
    assert not after._known or any(isinstance(record, KeysKept) for record in live.records()[first:])


@given(st.lists(st.tuples(st.lists(st.integers(0, 9), max_size=5), st.integers(0, 2)), max_size=12))
def test_the_index_is_a_set_that_each_commit_empties(chunks: list[tuple[list[int], int]]) -> None:
    index, known = KeyIndex(100), set[int]()
    for lsn, (keys, commits) in enumerate(chunks):
        seen = set(known)
        expected = [key in seen or seen.add(key) is not None for key in keys]  # type: ignore[func-returns-value]
        known |= set(keys)
        assert index.add(b"".join(map(digest, keys)), index.write, lsn).tolist() == expected
        assert index.add(b"".join(map(digest, keys)), index.write - 1, lsn).all(), "a late chunk is dropped whole"
        assert (len(index), index.room) == (len(known), 100 - len(known))
        if commits == 2:
            index.commit(lsn)
            known.clear()
            assert (index.safe_write(lsn), index.safe_write(lsn + 1)) == (index.write - 1, index.write)


def test_a_full_index_takes_no_more_until_the_write_is_committed() -> None:
    live = Jobs(1)
    index = live.core.leases.partitions.streams["rollouts"].keys
    index.limit = KEYS // 2
    for _ in range(2000):
        live.turn()
    assert KEYS // 2 - 3 < len(index) <= KEYS // 2
    assert live.job == 0
    waits = [pusher.waiting_for() for pusher in live.pushers]
    assert any("limits.keys" in text for text in waits), waits
    index.limit = KEYS + 3  # a chunk has up to 3 keys, and is admitted whole
    for _ in range(2000):
        live.turn()
    assert live.job > 0
