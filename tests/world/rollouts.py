"""A run whose samples are pushed, and what may happen to it."""

from __future__ import annotations

import msgspec
from hypothesis import strategies as st

from streampack.core.model.rules import Rules, StreamRules
from streampack.core.protocol.events import Event, Tick
from streampack.core.sessions.producer_base import Chunk
from streampack.core.sessions.pushing.push_buffer import PushBuffer, size_of
from streampack.core.sessions.pushing.push_session import EndPartition, Push, PushSession
from tests.world.chunks import chunk_of
from tests.world.live import Live, SlowDisk
from tests.world.planned import tokens_of

PARTITIONS = 2
RULES = Rules(
    budget=32, packs=2, window=4, seed=3, merge="arrival",
    streams=(StreamRules("rollouts", 1.0, PARTITIONS, pushed=True),),
)  # fmt: skip
Story = list[tuple[str, int]]
"""What happens, and how much of it."""


def rules_with(**changes: object) -> Rules:
    """The rules of rollouts, with changes."""
    return msgspec.structs.replace(RULES, **changes)


def length_of(partition: int, seq: int) -> int:
    return 1 + (7 * seq + 5 * partition) % 15


def rollout_chunk(partition: int, first: int, stop: int) -> Chunk:
    """Samples ``first`` to ``stop`` of a partition."""
    samples = [tokens_of("rollouts", partition, seq, length_of(partition, seq)) for seq in range(first, stop)]
    return chunk_of(("rollouts", partition), samples, (stop, 0, 0))


def pusher(
    name: str, partition: int, number: int, stream: str = "rollouts", buffer_bytes: int = 1 << 16
) -> PushSession:
    """A program that pushes a partition."""
    return PushSession(
        run=0, producer=name, process=number, host="host", pid=partition, stream=stream, partition=partition,
        buffer=PushBuffer(buffer_bytes),
    )  # fmt: skip


class Rollouts(Live):
    """A run whose samples are pushed: ``wanted`` of each partition, and once it is ``over`` no more."""

    buffer_bytes = 1 << 16

    def __init__(self, seed: int, rules: Rules = RULES, *, discards: bool = True, quota: int = 64) -> None:
        self.wanted, self.over = 0, False
        self.pushers: list[PushSession] = []
        self.backs = 0
        """How often trainers that are new have come, at a step that was formed: at most."""
        super().__init__(rules, {}, seed, discards=discards, quota=quota)

    def start_producer(self, streams: list[str]) -> bytes:
        """A program for each partition."""
        peer = b""
        for partition in range(PARTITIONS):
            peer = b"push%d" % partition
            self.pushers.append(pusher(f"pusher{partition}", partition, partition + 1, buffer_bytes=self.buffer_bytes))
            self.producers[peer] = self.pushers[-1]
            self._to_producer(peer, Tick(self.now))
        return peer

    def turn(self) -> None:
        """Somebody may push."""
        self.work(self.rng.randrange(PARTITIONS))
        super().turn()

    def work(self, partition: int) -> None:
        """The program of a partition pushes a chunk, or ends."""
        session = self.pushers[partition]
        if session.begun and session.buffer.next_seq < self.wanted:
            self.push(partition, self.next_chunk(partition, session.buffer.next_seq))
        elif session.begun and self.over and not session.end_requested:
            self.tell(partition, EndPartition())

    def next_chunk(self, partition: int, first: int) -> Chunk:
        """The samples that a program pushes next, if there is room."""
        return rollout_chunk(partition, first, min(first + self.rng.randint(1, 3), self.wanted))

    def push(self, partition: int, chunk: Chunk) -> bool:
        """Push a chunk if there is room."""
        has_room = self.pushers[partition].room(size_of(chunk))
        if has_room:
            self.tell(partition, Push(chunk))
        return has_room

    def tell(self, partition: int, event: Event) -> None:
        """Have the program of a partition do something."""
        self._to_producer(b"push%d" % partition, event)

    def do(self, what: str, n: int) -> None:
        """One thing that happens to a run."""
        if what == "push":
            self.wanted += 3 * n
        elif what in ("turns", "read"):  # read: as far as what is pushed goes
            for _ in range({"turns": 8, "read": 60}[what] * n):
                self.turn()
        elif what == "kill":
            self.start_broker()
        elif what == "back":
            self.backs += 1
            self.go_back(max(self.had - n, 0))
        elif what == "torn":
            self._tear(n)

    def _tear(self, n: int) -> None:
        """Kill the broker while it goes to another lineage, of which the log has some records."""
        before = self.feed.history.lineage
        self.backs += 2  # to the next broker they are new, too
        self.go_back(max(self.had - n, 0))
        for _ in range(200):
            length = len(self.disk.records)
            self.turn()
            if self.feed.history.lineage > before:
                del self.disk.records[length + n % (len(self.disk.records) - length) :]
                self.start_broker()
                break

    def play(self, story: Story, *, torn: bool = True) -> list[bytes]:
        """Everything in turn, then the end. Unless brokers may be ``torn``, their trainers only go back."""
        for what, n in story:
            self.do("back" if what == "torn" and not torn else what, n)
        self.over = True
        return self.finish()


class Unsafe(SlowDisk, Rollouts):
    """A broker that is killed loses what is drawn of what is not safe, as when the power fails."""

    def start_broker(self, lost: bool = False) -> None:
        self.disk.crash(self.rng)
        super().start_broker(lost)


def stories() -> st.SearchStrategy[Story]:
    """Stories of pushing programs, trainers and brokers."""
    names = st.sampled_from(["push", "push", "read", "read", "kill", "back", "turns", "torn"])
    return st.lists(st.tuples(names, st.integers(0, 8)), min_size=2, max_size=10)
