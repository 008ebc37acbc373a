"""Trainers go back and what was pushed since is dropped, at any moment, whatever is killed: counted, and in no step."""

from __future__ import annotations

from collections import Counter

import numpy as np
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from streampack.core.form.former import Former
from streampack.core.journal.log_records import ChunkAdmitted, LineageBegan, SamplesRejected
from streampack.core.merge.schedule import merge_of
from streampack.core.model.samples import ROW, SampleTable, index_of
from tests.world.planned import tokens_of
from tests.world.rollouts import PARTITIONS, RULES, Rollouts, Story, Unsafe, length_of, stories


def recorded(live: Rollouts) -> tuple[list[tuple[int, int, int, bool]], Counter[int]]:
    """(partition, first sample, count, is it lost) of each chunk in the log; how often each index was dropped."""
    chunks: list[tuple[int, int, int, int]] = []
    lost: set[int] = set()
    dropped: Counter[int] = Counter()
    for lsn, record in enumerate(live.records()):
        if isinstance(record, ChunkAdmitted):
            chunks.append((lsn, record.partition, record.base_seq, len(record.lengths_u32) // 4))
        elif isinstance(record, LineageBegan) and record.since is not None:
            lost |= {at for at, *_ in chunks if at >= record.since}
        elif isinstance(record, SamplesRejected):
            dropped.update(np.frombuffer(record.indices_u64, "<u8").tolist())
            assert set(record.reasons) == {"discarded"}
    return [(*chunk, lsn in lost) for lsn, *chunk in chunks], dropped  # type: ignore[misc]


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


@given(stories(), st.integers(0, 999))
def test_samples_pushed_since_are_dropped_and_counted_and_all_others_are_in_the_steps(story: Story, seed: int) -> None:
    live = Rollouts(seed)
    chains = live.play([("push", 12), *story])
    check(live, chains)


def check(live: Rollouts, chains: list[bytes]) -> None:
    """Every dropped sample is counted, and all others are in the steps."""
    assert all("after the end of the partition" in error for error in live.errors), "one whose end was safe asks again"
    chunks, dropped = recorded(live)
    lost = [index_of(np.arange(first, first + count), p, PARTITIONS) for p, first, count, gone in chunks if gone]
    assert dropped == Counter(index for part in lost for index in np.asarray(part).tolist())
    assert sum(count for _, _, count, _ in chunks) == PARTITIONS * live.wanted
    assert chains == planned(chunks)
    lineages = sum(isinstance(record, LineageBegan) for record in live.records())
    assert lineages <= live.backs, "trainers that go on where a broker was killed have not gone back"


@given(stories(), st.integers(0, 999))
def test_samples_pushed_since_are_dropped_and_counted_where_the_log_loses_unsafe_records(
    story: Story, seed: int
) -> None:
    live = Unsafe(seed)
    for what, n in [("push", 12), *story]:
        live.do("back" if what == "torn" else what, n)
        if what == "torn":
            live.backs += 1  # let in or not, they have gone back for the next broker, too: it may not know of it
            for _ in range(5 * n):
                live.turn()
            live.start_broker()
    check(live, live.play([]))


def test_trainers_that_were_let_in_where_they_went_back_to_go_back_again_if_the_log_lost_it() -> None:
    """They say that they go on in a lineage that the next broker knows nothing of: what was pushed since is dropped
    there, too, and by the one after it not again.
    """
    again = 0
    for seed in range(16):
        live = Unsafe(seed)
        live.wanted = 60
        live.until(lambda live=live: live.had >= 6)  # type: ignore[misc]
        live.go_back(live.had - 3)
        live.until(lambda live=live: live.client is not None and live.client._going_on >= 0)  # type: ignore[misc]
        lineage = live.feed.history.lineage
        told = lineage == 1 and not any(isinstance(r, LineageBegan) for r in live.records()[: live.disk.safe_upto])
        if not told:
            continue
        live.disk.records[live.disk.safe_upto :] = []  # all that is not safe
        for _ in range(2):
            live.start_broker()
            live.until(lambda live=live: live.is_attached)  # type: ignore[misc]
        live.backs = 1
        check(live, live.play([]))
        again += any(isinstance(record, LineageBegan) for record in live.records())
    assert again


def test_trainers_that_go_on_when_a_broker_was_killed_have_not_gone_back() -> None:
    """The log said of fewer steps that they were returned than were: who asked for the next seemed to go back from
    those that had been formed since, and rollouts were dropped, though nobody had lost a step.
    """
    for seed in range(24):
        live = Rollouts(seed)
        live.wanted = 60
        for turns in (40 + 7 * seed % 300, 40):
            for _ in range(turns):
                live.turn()
            live.start_broker()
        live.play([])
        assert not any(isinstance(record, LineageBegan | SamplesRejected) for record in live.records())


def test_new_trainers_that_begin_where_the_last_ended_have_not_gone_back_however_soon_they_come() -> None:
    """The broker before was killed, and had formed steps ahead: rollouts were dropped where they came before the next
    had formed these again.
    """
    for seed in range(16):
        live = Rollouts(seed)
        live.wanted = 60
        live.until(lambda live=live: live.had >= 6)  # type: ignore[misc]
        step = live.had
        live.start_broker()
        live.start_trainer(step)
        live.play([])
        assert not any(isinstance(record, LineageBegan) for record in live.records())
