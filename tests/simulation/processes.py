"""The processes of a simulated run: the real state machines in shells that share one virtual world.

Each shell does what its daemon does (perform effects, feed events, tick) with the clock and the
links of its ``World``; none decides anything. What they see is checked in ``checks``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from streampack.core.protocol.events import Effect, Event, FromBroker, Report, Send, Tick
from streampack.core.protocol.message import Envelope
from streampack.core.protocol.producer_messages import Offer
from streampack.core.sessions.client_session import ClientSession
from streampack.core.sessions.producer_base import Chunk, Finish, Leave, PartitionKey, Session
from streampack.core.sessions.producer_session import (
    EndOfPartition,
    Forget,
    LeasePhase,
    ProducerSession,
    Read,
    ReadFirst,
)
from streampack.core.sessions.pushing.amend_session import AmendSession
from streampack.core.sessions.pushing.push_session import PushSession
from streampack.core.sessions.relaying.relay_session import RelaySession
from streampack.core.sessions.telling_session import TellingSession
from tests.simulation.data import Case
from tests.world.chunks import columns

if TYPE_CHECKING:
    from tests.simulation.world import World

TICK_S = 0.25
Machine = ProducerSession | PushSession | AmendSession | ClientSession | RelaySession | TellingSession


class Mortal(ABC):
    """A process that can be killed, and frozen as by SIGSTOP or a hung host. It gets ticks."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.alive, self.frozen = True, False
        self._inbox: list[Event] = []

    @abstractmethod
    def handle(self, event: Event) -> None:
        """Handle an event."""

    def kill(self) -> None:
        self.alive = False

    def freeze(self, seconds: float) -> None:
        """Do nothing for a while; messages wait."""
        self.frozen = True
        self.world.clock.after(seconds, self._thaw)

    def acts_on(self, event: Event) -> bool:
        """Is the process there to handle an event? If it is frozen, the event waits."""
        if self.alive and self.frozen and not isinstance(event, Tick):
            self._inbox.append(event)
        return self.alive and not self.frozen

    def _thaw(self) -> None:
        self.frozen = False
        waiting, self._inbox = self._inbox, []
        for event in waiting:
            self.handle(event)

    def _tick(self) -> None:
        self.handle(Tick(self.world.clock.now))
        if self.alive:
            self.world.clock.after(TICK_S, self._tick)


class Process(Mortal):
    """What producers and clients share: a state machine and a peer name."""

    kind = ""

    name = ""

    def __init__(self, world: World, machine: Machine) -> None:
        super().__init__(world)
        self._machine = machine
        self.reconnect()
        world.clock.after(world.rng.random() * TICK_S, self._tick)

    def reconnect(self) -> None:
        """A new connection: what is on its way to the old one is lost, what came from it may still arrive."""
        self.world.disconnect(self)
        self.peer = self.world.connect(self)

    def kill(self) -> None:
        super().kill()
        self.world.disconnect(self)

    def handle(self, event: Event) -> None:
        if not self.acts_on(event):
            return
        stale = isinstance(event, FromBroker) and event.envelope.epoch < self._machine.epoch
        before = repr(self._machine) if stale else ""
        effects = self.decide(event)
        if stale:
            assert not effects, f"R5: a message of an older broker had effects {effects}"
            assert repr(self._machine) == before, "R5: a message of an older broker changed something"
        for effect in effects:
            if isinstance(effect, Send):
                self.send(effect.envelope)
            else:
                self.perform(effect)

    def decide(self, event: Event) -> list[Effect]:
        return self._machine.handle(event)

    def send(self, envelope: Envelope) -> None:
        self.world.to_broker(self, envelope)

    @abstractmethod
    def perform(self, effect: Effect) -> None:
        """Perform an effect that sends nothing."""


class ProducerProcess(Process):
    """A producer of some streams, reading chunks of random sizes."""

    kind = "producer"

    def __init__(self, world: World, name: str, streams: list[str], pid: int) -> None:
        self.name, self.streams = name, streams
        self._at: dict[tuple[PartitionKey, Session], int] = {}
        self._leaving = False
        offers = [Offer(stream=stream, source_digest="data") for stream in streams]
        self.session = ProducerSession(run=0, producer=name, host="host", pid=pid, offers=offers)
        super().__init__(world, self.session)

    def leave(self) -> None:
        """Stop with a farewell."""
        self._leaving = True
        self.handle(Leave())

    def handle(self, event: Event) -> None:
        super().handle(event)
        for held in self.session.held.values():
            phase = held.phases.now
            assert phase is not LeasePhase.OVER, held.phases
            assert (phase is LeasePhase.HOLDING) == (held.chunk is not None), held.phases

    def perform(self, effect: Effect) -> None:
        if isinstance(effect, Read):
            self.world.clock.after(self.world.rng.expovariate(1 / self.world.read_s), self._read, effect)
        elif isinstance(effect, Forget):
            self._at.pop((effect.key, effect.session), None)
        elif isinstance(effect, Finish):
            assert not effect.error, effect
            self.alive = False
            if not self._leaving and effect.code != "stopped":
                self.world.dismissed(self)
        else:
            assert isinstance(effect, Report | ReadFirst), effect

    def _read(self, read: Read) -> None:
        lease, key = read.lease, (read.lease.stream, read.lease.partition)
        held = self.session.held.get(key)
        if not self.alive or held is None or held.session != read.session or held.ended:
            return
        case = self.world.case_of[lease.stream]
        stream = case.names.index(lease.stream)
        seq = self._at.get((key, read.session))
        if seq is None:
            seq = lease.cursor[0] if lease.cursor is not None else lease.first_seq
            assert seq == lease.first_seq, "a cursor that is not where the lease begins"
        assert seq == read.seq
        offsets = case.byte_offsets(stream, lease.partition)
        count = len(offsets) - 1
        if seq >= count:
            self.handle(EndOfPartition(key, read.session))
            return
        stop, pass_end = seq + 1, seq - seq % case.pass_samples + case.pass_samples
        most = self.world.rng.randint(1, 12)
        while stop < min(count, pass_end, seq + most) and offsets[stop + 1] - offsets[seq] <= lease.max_chunk_bytes:
            stop += 1
        self._at[key, read.session] = stop
        self.handle(chunk_of(case, key, read.session, seq, stop))


def chunk_of(case: Case, key: PartitionKey, session: Session, start: int, stop: int) -> Chunk:
    """Samples ``start`` to ``stop`` of a partition, as a producer sends them; the cursor is ``stop``."""
    stream, partition = case.names.index(key[0]), key[1]
    lengths = case.lengths(stream, partition)[start:stop]
    samples = [case.tokens(stream, partition, seq).tobytes() for seq in range(start, stop)]
    fields = (
        b"".join(case.value(field, stream, partition, seq).tobytes() for seq in range(start, stop))
        for field in case.sent_fields
    )
    media, offsets = case.media_frames(stream, partition, range(start, stop)), case.byte_offsets(stream, partition)
    return Chunk(
        stream=key[0], partition=key[1], session=session, num_bytes=offsets[stop] - offsets[start], cursor=(stop, 0, 0),
        **columns(lengths.tolist(), [case.sent_crc(stream, partition, seq) for seq in range(start, stop)]),
        payload=(b"".join(samples), *fields, *media),
        pass_ended=stop % case.pass_samples == 0 or stop == len(case.lengths(stream, partition)),
    )  # fmt: skip
