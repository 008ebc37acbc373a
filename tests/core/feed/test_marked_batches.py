"""Batches of a broker that runs: what programs push before their marks, or so many samples, whatever is killed."""

from __future__ import annotations

import re

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streampack.core.journal.log_records import StepFormed
from streampack.core.model.capacity import needed_tokens, wanted_tokens
from streampack.core.model.rules import Batch, Rules
from streampack.core.model.samples import ROW
from streampack.core.sessions.pushing.push_buffer import size_of
from streampack.core.sessions.pushing.push_session import EndBatch, EndPartition, Push
from tests.core.feed import test_going_back as rollouts
from tests.core.feed.test_going_back import PARTITIONS, Rollouts, chunk_of

Ids = set[tuple[int, int]]
"""(partition, sequence number) of samples."""


class Batches(Rollouts):
    """Each partition pushes ``sizes[b][partition]`` samples to batch b, marks its end where ``marks``, and is over at
    the end of the last. With ``waits`` nothing of batch b is pushed before the rank has had step b - 1.
    """

    def __init__(
        self, batch: Batch, sizes: list[tuple[int, int]], seed: int, *, marks: bool, waits: bool, quota: int = 64
    ) -> None:
        self.sizes, self.marks, self.waits = sizes, marks, waits
        before = rollouts.RULES
        rollouts.RULES = msgspec.structs.replace(before, batch=batch)
        try:
            super().__init__(seed, discards=False, quota=quota)
        finally:
            rollouts.RULES = before

    def turn(self) -> None:
        partition = self.rng.randrange(PARTITIONS)
        session, ends = self.pushers[partition], np.cumsum([size[partition] for size in self.sizes]).tolist()
        peer, first = b"push%d" % partition, session.buffer.next_seq
        marked = session.buffer.next_mark if self.marks else sum(end <= first for end in ends)
        if not session.begun or session.end_requested or (self.waits and self.client is not None and marked > self.had):
            pass
        elif marked == len(ends):
            self._to_producer(peer, EndPartition())
        elif first < ends[marked]:
            chunk = chunk_of(partition, first, min(first + self.rng.randint(1, 3), ends[marked]))
            if session.room(size_of(chunk)):
                self._to_producer(peer, Push(chunk))
        elif self.marks:
            self._to_producer(peer, EndBatch(marked))
        super(Rollouts, self).turn()

    def steps(self) -> list[Ids]:
        """The samples of each step, as the log has them."""
        found: dict[int, Ids] = {}
        for record in self.records():
            if isinstance(record, StepFormed):
                rows = np.frombuffer(record.rows, ROW)
                ids = [divmod(index, PARTITIONS)[::-1] for index in rows["index"].tolist()]
                assert len(set(ids)) == len(ids)
                assert found.setdefault(record.step, set(ids)) == set(ids), "the second time it is another"
        return [found[step] for step in range(len(found))]

    def batches(self) -> list[Ids]:
        """The samples of each batch, as they are marked."""
        ends = np.cumsum([(0, 0), *self.sizes], axis=0).tolist()
        return [
            {(p, seq) for p in range(PARTITIONS) for seq in range(ends[b][p], ends[b + 1][p])}
            for b in range(len(self.sizes))
        ]


def sizes(least: int = 0) -> st.SearchStrategy[list[tuple[int, int]]]:
    size = st.integers(least, 7)
    return st.lists(st.tuples(size, size), min_size=1, max_size=6)


def stories() -> st.SearchStrategy[list[tuple[str, int]]]:
    return st.lists(st.tuples(st.sampled_from(["turns", "read", "kill", "back"]), st.integers(0, 6)), max_size=8)


def tell(live: Batches, story: list[tuple[str, int]]) -> list[bytes]:
    for what, n in story:
        rollouts.do(live, what, n)
    return live.finish()


@given(sizes(), st.integers(1, 9), stories(), st.integers(0, 999))
@settings(deadline=None, max_examples=60)
def test_a_step_is_what_was_marked_as_one_batch_and_small_ones_wait_for_the_next(
    sizes: list[tuple[int, int]], least: int, story: list[tuple[str, int]], seed: int
) -> None:
    live = Batches(Batch(min_samples=least), sizes, seed, marks=True, waits=False)
    tell(live, story)
    expected, held = list[Ids](), set[tuple[int, int]]()
    for batch in live.batches():
        held |= batch
        if len(held) >= least:
            expected.append(held)
            held = set()
    assert live.steps() == expected + ([held] if held else [])


@given(sizes(1), stories(), st.integers(0, 999))
@settings(deadline=None, max_examples=40)
def test_programs_may_wait_for_each_step_before_they_push_the_next_batch(
    sizes: list[tuple[int, int]], story: list[tuple[str, int]], seed: int
) -> None:
    live = Batches(Batch(), sizes, seed, marks=True, waits=True)
    tell(live, story)
    assert live.steps() == live.batches()


@given(st.integers(1, 4), st.integers(1, 5), stories(), st.integers(0, 999))
@settings(deadline=None, max_examples=40)
def test_a_step_is_formed_as_soon_as_its_number_of_samples_is_there(
    size: int, count: int, story: list[tuple[str, int]], seed: int
) -> None:
    live = Batches(Batch(samples=PARTITIONS * size), [(size, size)] * count, seed, marks=False, waits=True)
    tell(live, story)
    assert [len(step) for step in live.steps()] == [PARTITIONS * size] * count
    assert set().union(*live.steps()) == set().union(*live.batches())


@given(sizes(), st.integers(1, 9), stories(), st.integers(0, 999))
@settings(deadline=None, max_examples=40)
def test_a_mark_closes_a_batch_of_so_many_samples_too(
    sizes: list[tuple[int, int]], size: int, story: list[tuple[str, int]], seed: int
) -> None:
    live = Batches(Batch(samples=size), sizes, seed, marks=True, waits=False)
    tell(live, story)
    expected = [len(batch) for batch in live.batches()]
    assert [len(step) for step in live.steps()] == [
        n for total in expected for n in [size] * (total // size) + ([total % size] if total % size else [])
    ]


class OneThread(Batches):
    """One thread pushes to both partitions, and waits while a buffer is full: it pushes each batch to partition 0 and
    ends it before it ends the batch before on partition 1.
    """

    buffer_bytes = 2 * 1024

    def __init__(self, sizes: list[tuple[int, int]], seed: int) -> None:
        count = len(sizes)
        turns = [[(0, batch), (1, batch - 1)] for batch in range(1, count)]
        self.plan = [(0, 0), *(turn for pair in turns for turn in pair), (1, count - 1)]
        super().__init__(Batch(), sizes, seed, marks=True, waits=False, quota=1 << 14)

    def turn(self) -> None:
        if not self.plan:
            for peer in (b"push0", b"push1"):
                if not self.pushers[int(peer[-1:])].end_requested:
                    self._to_producer(peer, EndPartition())
        elif self.pushers[self.plan[0][0]].begun:
            self.push(*self.plan[0])
        super(Rollouts, self).turn()

    def push(self, partition: int, batch: int) -> None:
        """Go on with a batch of a partition, if there is room."""
        session, peer = self.pushers[partition], b"push%d" % partition
        first, end = session.buffer.next_seq, sum(size[partition] for size in self.sizes[: batch + 1])
        if first == end:
            self._to_producer(peer, EndBatch(batch))
            self.plan.pop(0)
            return
        chunk = chunk_of(partition, first, min(first + 3, end))
        if session.room(size_of(chunk)):
            self._to_producer(peer, Push(chunk))


@given(st.integers(20, 60), st.lists(st.integers(0, 9), min_size=2, max_size=4), st.integers(0, 999))
@settings(deadline=None, max_examples=20)
def test_one_thread_may_push_a_batch_before_it_ends_the_last_one_on_another_partition(
    large: int, small: list[int], seed: int
) -> None:
    """A batch has more samples than may wait otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("streampack.core.intake.intake.MAX_UNMERGED", 8)
        live = OneThread([(large, size) for size in small], seed)
        live.finish()
    assert live.steps() == live.batches()


def test_a_wait_for_a_partition_that_neither_pushes_nor_ends_its_batch_says_both() -> None:
    live = Batches(Batch(samples=10), [(4, 0), (4, 0)], 1, marks=True, waits=False)
    live.until(lambda: live.pushers[1].begun)
    del live.producers[b"push1"]  # its program does nothing
    live.until(lambda: live.pushers[0].end_requested and live.pushers[0].flushed)
    waits = live.feed.waiting_for()
    assert waits.reason == "stream"
    assert waits.detail == (
        "no sample and no end_of_batch call for batch 0 has come from stream 'rollouts' partition 1 of 2 (held by "
        "the producer at host:1), but another partition ended this batch"
    )


def test_a_batch_that_does_not_fit_in_memory_is_said_and_no_hang() -> None:
    live = Batches(Batch(), [(200, 200)], 1, marks=True, waits=False)
    live.until(lambda: live.feed.failed)
    assert "for the batch of step 0. The batch is incomplete, but the memory is full" in live.feed.failed
    assert live.feed.waiting_for()[0] == "failed"
    assert live.feed.unfit(0, None) == ("memory", live.feed.failed), "a trainer that comes later hears it, too"


@pytest.mark.parametrize("rules", [Rules(batch=Batch(samples=100)), Rules(batch=Batch())])
def test_how_long_a_batch_is_nobody_knows_beforehand(rules: Rules) -> None:
    assert needed_tokens(rules, 10) <= wanted_tokens(rules, 10) <= 3 * 100 * rules.budget


def test_a_rank_that_waits_for_a_batch_hears_whose_end_is_missing() -> None:
    live = Batches(Batch(), [(2, 1), (2, 1)], 3, marks=True, waits=True)
    live.read(1)
    for _ in range(50):
        super(Rollouts, live).turn()  # nobody pushes any more
    missing = live.feed.waiting_for()
    assert missing.reason == "stream"
    partition = re.fullmatch(
        r"the end_of_batch call for batch 1 of stream 'rollouts' partition (\d) from the producer at .+", missing.detail
    )
    assert partition is not None, missing.detail
    assert missing.batch, "such a wait is normal"
