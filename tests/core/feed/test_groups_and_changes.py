"""Groups in a feed whose rules change: a stream that is removed leaves no part of one, nor do many put it off."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from streampack.core.journal.log_records import ChunkAdmitted, LineageBegan, StepFormed
from streampack.core.model.capacity import needed_tokens
from streampack.core.model.rule_changes import Reweigh
from streampack.core.model.rules import Batch, Rules, StreamRules
from streampack.core.model.samples import ROW, Keep
from streampack.core.sessions.pushing.push_buffer import size_of
from streampack.core.sessions.pushing.push_session import EndPartition, Push, PushSession
from tests.world.live import Live
from tests.world.rollouts import pusher, rollout_chunk

STREAMS = ("rollouts", "others")
RULES = Rules(
    budget=64, packs=1, window=2, merge="arrival",
    streams=tuple(StreamRules(name, 1.0, 1, pushed=True) for name in STREAMS),
)  # fmt: skip
Found = dict[tuple[int, int], tuple[int, int, int]]
"""By stream and index of a sample: step, pack, and place in it."""


class TwoStreams(Live):
    """Two programs that push groups of ``size``, each kept in one pack, or in one step where those are batches, up to
    ``wanted`` times ``size`` samples.
    """

    def __init__(self, seed: int, size: int, rules: Rules = RULES, memory: int | None = None) -> None:
        self.size, self.wanted, self.over = size, 0, False
        self.keep: Keep = "pack" if rules.batch is None else "step"
        self.pushers: list[PushSession] = []
        super().__init__(rules, {}, seed, quota=512, memory=memory)

    def start_producer(self, streams: list[str]) -> bytes:
        for number, stream in enumerate(STREAMS):
            self.pushers.append(pusher(stream, 0, number + 1, stream))
            self.producers[stream.encode()] = self.pushers[-1]
        return b""

    def turn(self) -> None:
        """Somebody may push."""
        session = self.rng.choice(self.pushers)
        first, peer = session.buffer.next_seq, session.stream.encode()
        if session.begun and first < self.size * self.wanted:
            chunk = msgspec.structs.replace(rollout_chunk(0, first, first + self.next_size()), keep=self.keep)
            if session.room(size_of(chunk)):
                self._to_producer(peer, Push(chunk))
        elif session.begun and self.over and not session.end_requested:
            self._to_producer(peer, EndPartition())
        super().turn()

    def next_size(self) -> int:
        """Samples of the next group."""
        return self.size

    def places(self) -> Found:
        """Where each sample is."""
        found: Found = {}
        for record in self.records():
            assert not isinstance(record, LineageBegan)
            if isinstance(record, StepFormed):
                packs = np.split(np.frombuffer(record.rows, ROW), np.cumsum(np.frombuffer(record.counts_u32, "<u4")))
                for p, pack in enumerate(packs):
                    for at, row in enumerate(pack):
                        found[int(row["stream"]), int(row["index"])] = record.step, p, at
        return found


def moves() -> st.SearchStrategy[list[tuple[str, int]]]:
    names = st.sampled_from(["push", "push", "read", "kill", "back", "turns", "remove"])
    return st.lists(st.tuples(names, st.integers(0, 9)), min_size=2, max_size=14)


def do(live: TwoStreams, what: str, n: int) -> None:
    """One thing that happens to a run."""
    if what == "push":
        live.wanted += n
    elif what == "kill":
        live.start_broker()
    elif what == "back":
        live.go_back(max(live.had - n, 0))
    elif what == "remove":
        live.ask(Reweigh({"rollouts": 0.0}))
    else:
        for _ in range({"turns": 8, "read": 60}[what] * n):
            live.turn()


@given(moves(), st.integers(0, 999), st.integers(2, 6))
@example([("kill", 6), ("turns", 4), ("kill", 3), ("remove", 7)], 21, 6)
def test_a_stream_that_is_removed_leaves_no_part_of_a_group(story: list[tuple[str, int]], seed: int, size: int) -> None:
    """The example: the last snapshot was taken inside a group, and the next broker had not come so far again."""
    live = TwoStreams(seed, size)
    for what, n in [("push", 6), *story]:
        do(live, what, n)
    live.over = True
    live.finish()
    places = live.places()
    for record in live.records():
        if isinstance(record, ChunkAdmitted):
            stream = STREAMS.index(record.stream)
            group = [places.get((stream, record.base_seq + i)) for i in range(size)]
            if group[0] is None:
                assert live.changes()
                assert (stream, group) == (0, [None] * size)
            else:
                step, pack, at = group[0]
                assert group == [(step, pack, at + i) for i in range(size)]


class Mixed(TwoStreams):
    """Single samples, and groups of fifteen, which nearly fill the memory."""

    def next_size(self) -> int:
        return self.rng.choice([1, 1, 1, 15])


def test_a_change_fails_no_feed_whose_memory_is_full_within_a_group() -> None:
    """The batch before the group is whole, and nothing but its step makes room for the rest of the group."""
    rules = msgspec.structs.replace(RULES, batch=Batch(samples=2))
    for seed in (18, 49, 82, 105):
        live = Mixed(seed, 1, rules, needed_tokens(rules, rules.budget) + 30)
        live.wanted, live.over = 135, True
        live.read(1 + seed % 4)
        live.ask(Reweigh({"rollouts": 0.0}), live.feed.next_step + 2)
        live.finish()
        assert live.changes()


@pytest.mark.parametrize("seed", [90, 256, 369, 380, 816])
def test_a_change_that_waits_for_a_group_leaves_recorded_steps_as_they_are_when_the_broker_is_killed(seed: int) -> None:
    """In the first broker the memory is full within a group when the change is due, so a step is formed before the
    change has a position. The next broker merges less before that step and could give the change an earlier position.
    """
    rules = msgspec.structs.replace(RULES, batch=Batch(samples=2), window=20)
    live = Mixed(seed, 1, rules, needed_tokens(rules, rules.budget) + 30)
    live.wanted, live.over = 135, True
    live.read(1 + seed % 4)
    answer = live.ask(Reweigh({"rollouts": 0.0}), live.feed.next_step + 2)
    live.until(lambda: live.feed.history.num_steps > answer.step)
    assert not live.changes(), "the change waits for the group"
    formed = live.feed.history.num_steps
    live.start_broker()
    live.finish()
    [change] = live.changes()
    assert change.step >= formed
