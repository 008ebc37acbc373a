"""A program that pushes samples of its own: each exists once, and what was not acknowledged dies with the process.

``Birth`` n of a partition is the n-th sample that any of its processes ever made. ``Births`` remembers what became of
each, for the checks: what was said to be safe must be in the log, once (I9).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from crc32c import crc32c
from msgspec.structs import replace

from streampack.core.journal.log_records import ChunkAdmitted, ChunkStaged
from streampack.core.protocol.events import Effect, Event, Report
from streampack.core.sessions.producer_base import Chunk, Finish, Leave
from streampack.core.sessions.pushing.push_buffer import CHUNK_BYTES, PushBuffer, size_of
from streampack.core.sessions.pushing.push_session import EndBatch, EndPartition, Push, PushSession
from tests.simulation.offline import samples_of
from tests.simulation.processes import Process, chunk_of

if TYPE_CHECKING:
    from tests.simulation.data import Case
    from tests.simulation.world import World
    from tests.world.disk import Disk

BUFFER_BYTES = 6 << 10
SAMPLE_BYTES = 3 * 4
"""Of the buffer, beside its tokens: a length, a checksum, a count of tokens with loss."""
MEDIA_COUNT_BYTES = 2 * 4
"""Bytes of the buffer that a sample with media takes for its number of items and for its bytes of media."""


class Sent(NamedTuple):
    """A sample as it was sent: which it was, and the process that sent it."""

    birth: int
    process: int


@dataclass
class Births:
    """Of one partition: ``next`` was not made yet, ``safe`` were acknowledged, and at which sequence number."""

    case: Case
    stream: int
    partition: int
    next: int = 0
    safe: dict[int, int] = field(default_factory=dict)
    sent: dict[int, Sent] = field(default_factory=dict)
    """The sample that was sent last with each sequence number."""
    versions: dict[int, int] = field(default_factory=dict)
    """The policy that made each sample, in a paced stream."""
    forgotten: set[int] = field(default_factory=set)
    """Samples of which a broker did not know while they were made."""
    safe_upto: int = 0
    """Some process knows that all samples below this number are safe."""

    @property
    def count(self) -> int:
        """How many there will be."""
        return len(self.case.lengths(self.stream, self.partition))

    def crc(self, birth: int) -> int:
        return int(crc32c(self.case.tokens(self.stream, self.partition, birth).tobytes()))

    def check(self, disk: Disk) -> None:
        """All that was acknowledged is in the log at its place, and nothing twice."""
        found: list[int] = []
        kind = ChunkStaged if self.case.is_staged else ChunkAdmitted
        for lsn in range(len(disk.records)):
            record, payload = disk.decode(lsn)
            if not isinstance(record, kind) or record.stream != self.case.names[self.stream]:
                continue
            if record.partition == self.partition:
                assert record.base_seq == len(found)
                found += [int(crc32c(sample.tobytes())) for sample in samples_of(self.case, record, payload)]
        for birth, seq in self.safe.items():
            assert seq < len(found), f"I9: sample {seq} was acknowledged and is lost"
            assert found[seq] == self.crc(birth), f"I9: sample {seq} was acknowledged and is another"
        made = [self.crc(birth) for birth in range(self.next)]
        place = 0
        for crc in found:  # in the order in which they were made, each once, whatever was lost with its process
            assert crc in made[place:], "I9: a pushed sample is in the log twice, or out of its order"
            place = made.index(crc, place) + 1


class PusherProcess(Process):
    """Pushes one partition: samples of random number at a time, ends of batches, and at last the end."""

    kind = "producer"

    def __init__(self, world: World, name: str, stream: str, partition: int, pid: int) -> None:
        self.name, self.stream, self.partition = name, stream, partition
        self.case = world.case_of[stream]
        self.births = world.births[stream, partition]
        self.session = PushSession(
            run=0, producer=name, process=pid, host="host", pid=pid, stream=stream, partition=partition,
            buffer=PushBuffer(BUFFER_BYTES),
        )  # fmt: skip
        self._unsafe: list[tuple[int, int]] = []
        self._ended = False
        super().__init__(world, self.session)
        world.clock.after(0.0, self._work)

    def leave(self) -> None:
        """Stop with a farewell, whatever is not safe yet."""
        super().handle(Leave())

    def handle(self, event: Event) -> None:
        super().handle(event)
        durable = self.session.buffer.durable_seq
        if self.session.begun:
            self.births.safe_upto = max(self.births.safe_upto, durable)
        while self._unsafe and self._unsafe[0][1] < durable:
            birth, seq = self._unsafe.pop(0)
            self.births.safe[birth] = seq

    def perform(self, effect: Effect) -> None:
        if isinstance(effect, Finish):
            self.alive = False
            over = self.births.next >= self.births.count
            assert not effect.error or (effect.code == "ended" and over) or effect.code == "partition_taken", effect
            if effect.code != "ended" and not (self._ended and self.session.flushed):
                self.world.clock.after(3.0, self.world.start_again, self)
        else:
            assert isinstance(effect, Report), effect

    def _work(self) -> None:
        if not self.alive:
            return
        if self.session.begun and not self.frozen:
            self._push()
        if self.alive:
            self.world.clock.after(self.world.rng.expovariate(1 / self.world.read_s), self._work)

    def _push(self) -> None:
        """What a rollout worker does next."""
        births, buffer, batch = self.births, self.session.buffer, self.case.batch
        if self._ended:
            if self.session.flushed:
                self.leave()
        elif buffer.next_mark < births.next // batch and births.next < births.count:
            self.handle(EndBatch(buffer.next_mark))
        elif births.next >= births.count:
            self._ended = True
            self.handle(EndPartition())
        else:
            room = self.case.rules.budget
            first, stop = births.next, births.next + 1
            case, offsets = self.case, self.case.offsets(births.stream, self.partition)
            sizes = case.byte_offsets(births.stream, self.partition)
            most = min(births.count, first - first % batch + batch, first + self.world.rng.randint(1, 6))
            while (
                stop < most
                and offsets[stop + 1] - offsets[first] <= room
                and sizes[stop + 1] - sizes[first] <= case.chunk_bytes
            ):
                stop += 1
            each = SAMPLE_BYTES + (MEDIA_COUNT_BYTES if case.rules.media_fields else 0)
            num_bytes = sizes[stop] - sizes[first] + (stop - first) * each
            if self.session.room(num_bytes + CHUNK_BYTES):
                chunk = chunk_of(self.case, (self.stream, self.partition), (0, 0), first, stop)
                assert size_of(chunk) == num_bytes + CHUNK_BYTES or self.case.rules.fields
                chunk = replace(chunk, keep=self.case.keep(births.stream, self.partition, first, stop))
                if self.case.rules.share and first % 5:
                    chunk = tree_of(chunk, self.case, births.stream, self.partition, first)
                self._push_chunk(chunk, first, stop)

    def _push_chunk(self, chunk: Chunk, first: int, stop: int) -> None:
        """Push the samples ``first`` to ``stop`` that were ever made."""
        births, seq = self.births, self.session.buffer.next_seq
        births.next = stop
        self._unsafe += [(birth, seq + birth - first) for birth in range(first, stop)]
        births.sent |= {seq + birth - first: Sent(birth, self.session.process) for birth in range(first, stop)}
        self.handle(Push(chunk))


def tree_of(chunk: Chunk, case: Case, stream: int, partition: int, first: int) -> Chunk:
    """A chunk of samples from ``first`` on with the tokens that they share once."""
    samples = [case.tokens(stream, partition, seq) for seq in range(first, first + chunk.num_samples)]
    shared = case.shared(samples)
    payload = b"".join(one[count:].tobytes() for one, count in zip(samples, shared.tolist(), strict=True))
    return replace(chunk, payload=(payload,), shared_u32=shared.astype("<u4").tobytes())
