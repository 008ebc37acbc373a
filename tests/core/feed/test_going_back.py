"""Trainers go back and what was pushed since is dropped, at any moment, whatever is killed: counted, and in no step."""

from __future__ import annotations

from collections import Counter

import numpy as np
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from streampack.core.form.former import Former
from streampack.core.journal.log_effects import Safe
from streampack.core.journal.log_records import ChunkAdmitted, LineageBegan, SamplesRejected
from streampack.core.merge.schedule import merge_of
from streampack.core.model.rules import Rules, StreamRules
from streampack.core.model.samples import ROW, SampleTable, index_of
from streampack.core.protocol.events import Tick
from streampack.core.sessions.producer_base import Chunk
from streampack.core.sessions.pushing.push_buffer import PushBuffer, size_of
from streampack.core.sessions.pushing.push_session import EndPartition, Push, PushSession
from tests.core.live import Live
from tests.core.planned import tokens_of

PARTITIONS = 2
RULES = Rules(
    budget=32, packs=2, window=4, seed=3, merge="arrival",
    streams=(StreamRules("rollouts", 1.0, PARTITIONS, pushed=True),),
)  # fmt: skip


def length_of(partition: int, seq: int) -> int:
    return 1 + (7 * seq + 5 * partition) % 15


class Rollouts(Live):
    """A run whose samples are pushed: ``wanted`` of each partition, and once it is ``over`` no more."""

    buffer_bytes = 1 << 16

    def __init__(self, seed: int, *, discards: bool = True, quota: int = 64) -> None:
        self.wanted, self.over = 0, False
        self.pushers: list[PushSession] = []
        self.backs = 0
        """How often trainers that are new have come, at a step that was formed: at most."""
        super().__init__(RULES, {}, seed, discards=discards, quota=quota)

    def start_producer(self, streams: list[str]) -> bytes:
        """A program for each partition."""
        peer = b""
        for partition in range(PARTITIONS):
            peer = b"push%d" % partition
            self.pushers.append(PushSession(
                run=0, producer=f"pusher{partition}", process=partition + 1, host="host", pid=partition,
                stream="rollouts", partition=partition, buffer=PushBuffer(self.buffer_bytes),
            ))  # fmt: skip
            self.producers[peer] = self.pushers[-1]
            self._to_producer(peer, Tick(self.now))
        return peer

    def turn(self) -> None:
        """Somebody may push."""
        partition = self.rng.randrange(PARTITIONS)
        session = self.pushers[partition]
        first = session.buffer.next_seq
        if session.begun and first < self.wanted:
            chunk = chunk_of(partition, first, min(first + self.rng.randint(1, 3), self.wanted))
            if session.room(size_of(chunk)):
                self._to_producer(b"push%d" % partition, Push(chunk))
        elif session.begun and self.over and not session.end_requested:
            self._to_producer(b"push%d" % partition, EndPartition())
        super().turn()

    @property
    def is_safe(self) -> bool:
        """All that is wanted is in the log."""
        return all(pusher.buffer.durable_seq >= self.wanted for pusher in self.pushers)

    def recorded(self) -> tuple[list[tuple[int, int, int, bool]], Counter[int]]:
        """(partition, first sample, count, is it lost) of each chunk in the log; how often each index was dropped."""
        chunks: list[tuple[int, int, int, int]] = []
        lost: set[int] = set()
        dropped: Counter[int] = Counter()
        for lsn, record in enumerate(self.records()):
            if isinstance(record, ChunkAdmitted):
                chunks.append((lsn, record.partition, record.base_seq, len(record.lengths_u32) // 4))
            elif isinstance(record, LineageBegan) and record.since is not None:
                lost |= {at for at, *_ in chunks if at >= record.since}
            elif isinstance(record, SamplesRejected):
                dropped.update(np.frombuffer(record.indices_u64, "<u8").tolist())
                assert set(record.reasons) == {"discarded"}
        return [(*chunk, lsn in lost) for lsn, *chunk in chunks], dropped  # type: ignore[misc]


class Unsafe(Rollouts):
    """The log is safe some time after it was written to, and a broker that is killed loses of the rest what is drawn:
    as when the power fails.
    """

    safe_upto = 0

    def start_broker(self, lost: bool = False) -> None:
        del self.disk.records[self.rng.randint(self.safe_upto, len(self.disk.records)) :]
        self.safe_upto = len(self.disk.records)
        super().start_broker(lost)

    def _safe(self) -> None:
        if self.safe_upto < len(self.disk.records) and not self._links.get(b"disk"):
            self._post(b"disk", self._written, None)

    def _written(self, _: None) -> None:
        self.safe_upto = self.rng.randint(self.safe_upto + 1, len(self.disk.records))
        self._perform(self.broker.handle(Safe(self.safe_upto)))
        self._safe()


def chunk_of(partition: int, first: int, stop: int) -> Chunk:
    lengths = np.array([length_of(partition, seq) for seq in range(first, stop)])
    samples = [tokens_of("rollouts", partition, seq, length_of(partition, seq)) for seq in range(first, stop)]
    return Chunk(
        stream="rollouts", partition=partition, session=(0, 0), lengths_u32=lengths.astype("<u4").tobytes(),
        crcs_u32=np.array([crc32c(sample) for sample in samples], "<u4").tobytes(),
        loss_tokens_u32=(lengths - 1).astype("<u4").tobytes(),
        num_bytes=4 * int(lengths.sum()), cursor=(stop, 0, 0), rejected={}, payload=(b"".join(samples),),
    )  # fmt: skip


def planned(chunks: list[tuple[int, int, int, bool]]) -> list[bytes]:
    """The digest of each step and all before it, of what is not lost, in the order in which it came."""
    table, merge = SampleTable(64), merge_of(RULES)
    former = Former(RULES, table)
    for p, first, count, lost in chunks:
        seqs = np.arange(first, first + count)
        lengths = np.array([0 if lost else length_of(p, seq) for seq in seqs.tolist()], np.int64)
        handles = np.full(count, -1, np.int64)
        if not lost:
            rows = np.zeros(count, ROW)
            rows["index"], rows["length"], rows["loss_tokens"] = index_of(seqs, p, PARTITIONS), lengths, lengths - 1
            rows["crc"] = [crc32c(tokens_of("rollouts", p, seq, length_of(p, seq))) for seq in seqs.tolist()]
            handles = table.enter(rows)
        merge.push(p, handles, lengths, np.zeros(count, np.int64))
    for p in range(PARTITIONS):
        merge.end(p)
    taken = merge.take(1 << 40)
    former.admit(taken.handles, taken.lengths)
    assert merge.closed
    former.closed = True
    chains: list[bytes] = []
    while (request := former.request()) is not None:
        chains += [step.chain for step in former.apply(request.choose())]
    return chains + [step.chain for step in former.cut()]


def moves() -> st.SearchStrategy[list[tuple[str, int]]]:
    names = st.sampled_from(["push", "push", "read", "read", "kill", "back", "turns", "torn"])
    return st.lists(st.tuples(names, st.integers(0, 12)), min_size=2, max_size=14)


def do(live: Rollouts, what: str, n: int) -> None:
    """One thing that happens to a run."""
    if what == "push":
        live.wanted += 3 * n
    elif what == "turns":
        for _ in range(8 * n):
            live.turn()
    elif what == "read":  # as far as what is pushed goes
        for _ in range(60 * n):
            live.turn()
    elif what == "kill":
        live.start_broker()
    elif what == "back":
        live.backs += 1
        live.go_back(max(live.had - n, 0))
    elif what == "torn":  # killed while it goes to another lineage, of which the log has some records
        before = live.feed.history.lineage
        live.backs += 2  # to the next broker they are new, too
        live.go_back(max(live.had - n, 0))
        for _ in range(200):
            length = len(live.disk.records)
            live.turn()
            if live.feed.history.lineage > before:
                del live.disk.records[length + n % (len(live.disk.records) - length) :]
                live.start_broker()
                break


@given(moves(), st.integers(0, 999))
@settings(deadline=None)
def test_samples_pushed_since_are_dropped_and_counted_and_all_others_are_in_the_steps(
    story: list[tuple[str, int]], seed: int
) -> None:
    live = Rollouts(seed)
    for what, n in [("push", 12), *story]:
        do(live, what, n)
    check(live)


def check(live: Rollouts) -> None:
    """To the end: what was dropped is counted, all else is in the steps."""
    live.over = True
    chains = live.finish()
    assert all("after the end of the partition" in error for error in live.errors), "one whose end was safe asks again"
    chunks, dropped = live.recorded()
    lost = [index_of(np.arange(first, first + count), p, PARTITIONS) for p, first, count, gone in chunks if gone]
    assert dropped == Counter(index for part in lost for index in np.asarray(part).tolist())
    assert sum(count for _, _, count, _ in chunks) == PARTITIONS * live.wanted
    assert chains == planned(chunks)
    lineages = sum(isinstance(record, LineageBegan) for record in live.records())
    assert lineages <= live.backs, "trainers that go on where a broker was killed have not gone back"


@given(moves(), st.integers(0, 999))
@settings(deadline=None)
def test_samples_pushed_since_are_dropped_and_counted_where_the_log_loses_unsafe_records(
    story: list[tuple[str, int]], seed: int
) -> None:
    live = Unsafe(seed)
    for what, n in [("push", 12), *story]:
        do(live, "back" if what == "torn" else what, n)
        if what == "torn":
            live.backs += 1  # let in or not, they have gone back for the next broker, too: it may not know of it
            for _ in range(5 * n):
                live.turn()
            live.start_broker()
    check(live)


def test_trainers_that_were_let_in_where_they_went_back_to_go_back_again_if_the_log_lost_it() -> None:
    """They say that they go on in a lineage that the next broker knows nothing of: what was pushed since is dropped
    there, too, and by the one after it not again.
    """
    again = 0
    for seed in range(40):
        live = Unsafe(seed)
        live.wanted = 60
        live.until(lambda live=live: live.had >= 6)  # type: ignore[misc]
        live.go_back(live.had - 3)
        live.until(lambda live=live: live.client is not None and live.client._going_on >= 0)  # type: ignore[misc]
        lineage = live.feed.history.lineage
        told = lineage == 1 and not any(isinstance(r, LineageBegan) for r in live.records()[: live.safe_upto])
        if not told:
            continue
        live.disk.records[live.safe_upto :] = []  # all that is not safe
        for _ in range(2):
            live.start_broker()
            live.until(lambda live=live: live.is_attached)  # type: ignore[misc]
        live.backs = 1
        check(live)
        again += any(isinstance(record, LineageBegan) for record in live.records())
    assert again


def test_trainers_that_go_on_when_a_broker_was_killed_have_not_gone_back() -> None:
    """The log said of fewer steps that they were returned than were: who asked for the next seemed to go back from
    those that had been formed since, and rollouts were dropped, though nobody had lost a step.
    """
    for seed in range(60):
        live = Rollouts(seed)
        live.wanted = 60
        for turns in (40 + 7 * seed % 300, 40):
            for _ in range(turns):
                live.turn()
            live.start_broker()
        live.over = True
        live.finish()
        assert not any(isinstance(record, LineageBegan | SamplesRejected) for record in live.records())


def test_new_trainers_that_begin_where_the_last_ended_have_not_gone_back_however_soon_they_come() -> None:
    """The broker before was killed, and had formed steps ahead: rollouts were dropped where they came before the next
    had formed these again.
    """
    for seed in range(40):
        live = Rollouts(seed)
        live.wanted = 60
        live.until(lambda live=live: live.had >= 6)  # type: ignore[misc]
        step = live.had
        live.start_broker()
        live.start_trainer(step)
        live.over = True
        live.finish()
        assert not any(isinstance(record, LineageBegan) for record in live.records())
