"""Batches of a broker that runs: what programs push before their marks, or so many samples, whatever is killed."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streampack.core.model.capacity import needed_tokens, wanted_tokens
from streampack.core.model.rules import Batch, Rules
from streampack.core.sessions.pushing.push_session import EndBatch, EndPartition
from tests.world.marked_rollouts import Batches, Ids
from tests.world.rollouts import PARTITIONS, Rollouts, Story, rollout_chunk


def sizes(least: int = 0) -> st.SearchStrategy[list[tuple[int, int]]]:
    size = st.integers(least, 7)
    return st.lists(st.tuples(size, size), min_size=1, max_size=6)


def batch_stories() -> st.SearchStrategy[Story]:
    return st.lists(st.tuples(st.sampled_from(["turns", "read", "kill", "back"]), st.integers(0, 6)), max_size=8)


@given(sizes(), st.integers(1, 9), batch_stories(), st.integers(0, 999))
@settings(max_examples=25)
def test_a_step_is_what_was_marked_as_one_batch_and_small_ones_wait_for_the_next(
    sizes: list[tuple[int, int]], least: int, story: Story, seed: int
) -> None:
    live = Batches(Batch(min_samples=least), sizes, seed, marks=True, waits=False)
    live.play(story)
    expected, held = list[Ids](), set[tuple[int, int]]()
    for batch in live.batches():
        held |= batch
        if len(held) >= least:
            expected.append(held)
            held = set()
    assert live.steps() == expected + ([held] if held else [])


@given(sizes(1), batch_stories(), st.integers(0, 999))
@settings(max_examples=20)
def test_programs_may_wait_for_each_step_before_they_push_the_next_batch(
    sizes: list[tuple[int, int]], story: Story, seed: int
) -> None:
    live = Batches(Batch(), sizes, seed, marks=True, waits=True)
    live.play(story)
    assert live.steps() == live.batches()


@given(st.integers(1, 4), st.integers(1, 5), batch_stories(), st.integers(0, 999))
@settings(max_examples=20)
def test_a_step_is_formed_as_soon_as_its_number_of_samples_is_there(
    size: int, count: int, story: Story, seed: int
) -> None:
    live = Batches(Batch(samples=PARTITIONS * size), [(size, size)] * count, seed, marks=False, waits=True)
    live.play(story)
    assert [len(step) for step in live.steps()] == [PARTITIONS * size] * count
    assert set().union(*live.steps()) == set().union(*live.batches())


@given(sizes(), st.integers(1, 9), batch_stories(), st.integers(0, 999))
@settings(max_examples=20)
def test_a_mark_closes_a_batch_of_so_many_samples_too(
    sizes: list[tuple[int, int]], size: int, story: Story, seed: int
) -> None:
    live = Batches(Batch(samples=size), sizes, seed, marks=True, waits=False)
    live.play(story)
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

    def work(self, partition: int) -> None:
        if not self.plan:
            for program, session in enumerate(self.pushers):
                if not session.end_requested:
                    self.tell(program, EndPartition())
        elif self.pushers[self.plan[0][0]].begun:
            self.go_on(*self.plan[0])

    def go_on(self, partition: int, batch: int) -> None:
        """Go on with a batch of a partition, if there is room."""
        first, end = self.pushers[partition].buffer.next_seq, sum(size[partition] for size in self.sizes[: batch + 1])
        if first == end:
            self.tell(partition, EndBatch(batch))
            self.plan.pop(0)
        else:
            self.push(partition, rollout_chunk(partition, first, min(first + 3, end)))


@given(st.integers(20, 60), st.lists(st.integers(0, 9), min_size=2, max_size=4), st.integers(0, 999))
@settings(max_examples=10)
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
