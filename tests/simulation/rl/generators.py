"""Programs of a paced stream: each generates several samples at a time, and asks before it begins one.

Samples of one policy are generated for different times, and some are not sent in the end. Groups begin and are sent as
a whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from streampack.core.protocol.events import Event
from streampack.core.sessions.pushing.push_buffer import CHUNK_BYTES
from streampack.core.sessions.pushing.push_session import BeginSamples, EndPartition, GiveBack, WantTickets
from tests.simulation.processes import chunk_of
from tests.simulation.pushers import SAMPLE_BYTES, PusherProcess

if TYPE_CHECKING:
    from tests.simulation.rl.world import LoopWorld


@dataclass(eq=False)
class InHand:
    """Samples that are being generated.

    ``forgotten``: the broker did not know of them. Their program was silent for long, or they were begun with a ticket
    of a broker that had been replaced.
    """

    count: int
    version: int
    ready_at: float
    forgotten: bool = False


class GeneratorProcess(PusherProcess):
    """Generates samples of one partition, if the stream is paced; else it pushes them as other programs do."""

    world: LoopWorld

    def __init__(self, world: LoopWorld, name: str, stream: str, partition: int, pid: int) -> None:
        self.in_hand: list[InHand] = []
        self._wanted = 0
        self._foreign = 0
        """Tickets up to this number were given by a broker that had been replaced."""
        super().__init__(world, name, stream, partition, pid)

    def handle(self, event: Event) -> None:
        granted = self.session.tickets.granted
        super().handle(event)
        if self.session.tickets.granted > granted and self.session.epoch < self.world.broker.epoch:
            self._foreign = self.session.tickets.granted

    def forget(self) -> None:
        """Note that the broker does not know of the samples that are generated, or sent and not safe."""
        for samples in self.in_hand:
            samples.forgotten = True
        self.births.forgotten |= {birth for birth, _ in self._unsafe}

    def _push(self) -> None:
        if not self.case.rules.paces:
            super()._push()
            return
        births, now = self.births, self.world.clock.now
        if self._ended:
            if self.session.flushed:
                self.leave()
            return
        ready = [each for each in self.in_hand if each.ready_at <= now]
        if ready:
            self._finish(self.world.rng.choice(ready))
        elif births.next >= births.count and not self.in_hand:
            self._ended = True
            self.handle(EndPartition())
        elif births.count - births.next > sum(each.count for each in self.in_hand):
            self._begin()

    def _begin(self) -> None:
        """Begin samples, as ``wait_to_start`` does: the program waits until it has tickets for all of them."""
        rng, tickets, world = self.world.rng, self.session.tickets, self.world
        version = self.session.policy_version
        if version is None or len(self.in_hand) >= world.strands:
            return
        if not self._wanted:
            left = self.births.count - self.births.next - sum(each.count for each in self.in_hand)
            self._wanted = min(left, rng.randint(1, world.most_at_once))
            self.handle(WantTickets(tickets.begun + self._wanted))
        if tickets.granted < tickets.begun + self._wanted:
            return
        count, self._wanted = self._wanted, 0
        seconds = rng.expovariate(1 / world.generate_s) * (10 if rng.random() < 0.1 else 1)
        foreign = tickets.begun < self._foreign or self.session.epoch < world.broker.epoch
        self.in_hand.append(InHand(count, version, world.clock.now + seconds, foreign))
        self.handle(BeginSamples(count))

    def _finish(self, done: InHand) -> None:
        """Send samples that were generated, or give them back."""
        births, rng = self.births, self.world.rng
        if rng.random() < 0.05:
            self.in_hand.remove(done)
            self.handle(GiveBack(done.count, done.version))
            return
        first, stop = births.next, births.next + done.count
        offsets = self.case.offsets(births.stream, self.partition)
        num_bytes = (offsets[stop] - offsets[first]) * self.case.token_bytes + done.count * SAMPLE_BYTES
        if not self.session.room(num_bytes + CHUNK_BYTES):
            return
        self.in_hand.remove(done)
        chunk = chunk_of(self.case, (self.stream, self.partition), (0, 0), first, stop)
        keep = self.case.keep(births.stream, self.partition, first, stop)
        births.versions |= dict.fromkeys(range(first, stop), done.version)
        if done.forgotten:
            births.forgotten |= set(range(first, stop))
        self._push_chunk(replace(chunk, keep=keep, policy_version=done.version), first, stop)
