"""Hosts of a simulated run, and the relays on some of them: the real session in a shell.

Between a relay and the ranks of its host messages keep their order, and none is lost while both live. They go
through the real codec. What the relay and the broker say to each other goes over the bad network.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from streampack.core.protocol.events import Effect, Event, Report
from streampack.core.protocol.message import Envelope
from streampack.core.sessions.relaying.relay_events import FromReader, NotDelivered, SendFor, SendReader, Stop
from streampack.core.sessions.relaying.relay_session import RelaySession
from streampack.core.sessions.route import RelayLost
from streampack.core.sessions.routed_client import FromRelay
from streampack.wire import frames as wire
from tests.simulation.processes import Process

if TYPE_CHECKING:
    from tests.simulation.client import ClientProcess
    from tests.simulation.job import Job
    from tests.simulation.world import World

MOST_STEPS = 5
"""Steps that a relay may have beyond its memory: those of its first request, and the next step of a reader."""
LOCAL_S = 0.0005
"""Delay of a message between a relay and a rank of its host."""


class Host:
    """A host, with a relay or without; ``links`` are the connections of its ranks to the relay that lives now."""

    def __init__(self, relays: Relays, name: str, has_relay: bool) -> None:
        self.relays, self.name, self.has_relay = relays, name, has_relay
        self.clock = relays.world.clock
        self.relay: RelayProcess | None = None
        self.links: dict[bytes, ClientProcess] = {}
        self._num_links = self._num_relays = 0
        if has_relay:
            self.start()

    def start(self) -> None:
        """Start a relay, which knows nothing."""
        if self.relay is None or not self.relay.alive:
            self._num_relays += 1
            self.relay = RelayProcess(self, f"{self.name}.{self._num_relays}")

    def ended(self) -> None:
        """The relay is gone: the ranks notice that, each a moment later."""
        lost, self.links = list(self.links.values()), {}
        for client in lost:
            self.clock.after(self.relays.rng.random() * 0.2, client.handle, RelayLost())

    def leave(self, client: ClientProcess) -> None:
        """A rank has closed its connection to the relay."""
        self.links = {peer: other for peer, other in self.links.items() if other is not client}

    def to_relay(self, client: ClientProcess, envelope: Envelope) -> bool:
        """Carry a message of a rank to the relay; return whether there is one."""
        relay = self.relay
        if relay is None or not relay.alive:
            return False
        peer = next((peer for peer, other in self.links.items() if other is client), None)
        if peer is None:
            self._num_links += 1
            peer = b"%s:%d" % (self.name.encode(), self._num_links)
            self.links[peer] = client
        self.clock.after(LOCAL_S, relay.handle, FromReader(peer, _copied(envelope)))
        return True

    def to_client(self, peer: bytes, envelope: Envelope) -> bool:
        """Carry a message of the relay to a rank; return whether the rank is there and its queue has room."""
        client, relays = self.links.get(peer), self.relays
        if client is None or not client.alive or (relays.full and relays.rng.random() < relays.full):
            return False
        self.clock.after(LOCAL_S, client.handle, FromRelay(_copied(envelope)))
        return True


def _copied(envelope: Envelope) -> Envelope:
    return wire.decode([memoryview(frame).tobytes() for frame in wire.encode(envelope)])


class RelayProcess(Process):
    """The relay of a host, until it is killed."""

    kind = "relay"

    def __init__(self, host: Host, name: str) -> None:
        self.host, self.name = host, name
        self.session = RelaySession(name, host.relays.memory_bytes)
        super().__init__(host.relays.world, self.session)

    def kill(self) -> None:
        super().kill()
        self.host.ended()

    def stop(self) -> None:
        """End as a service that is told to."""
        self.handle(Stop())
        self.kill()

    def handle(self, event: Event) -> None:
        super().handle(event)
        self.host.relays.check(self.session)

    def perform(self, effect: Effect) -> None:
        if isinstance(effect, SendFor):
            self.world.to_broker(self, effect.envelope, effect.reader)
        elif isinstance(effect, SendReader):
            if not self.host.to_client(effect.peer, effect.envelope):
                self.handle(NotDelivered(effect.peer, effect.envelope))
        else:
            assert isinstance(effect, Report), effect


class Relays:
    """The hosts of a run, and what goes wrong with their relays. ``rng`` decides it, beside the world's."""

    def __init__(self, world: World, wide: bool) -> None:
        self.world, self.rng = world, random.Random(f"{world.seed} relays")
        self.wide = wide
        """There are 4 hosts, each with a relay, and 2 tensor-parallel ranks for each shard."""
        rng = self.rng
        self.memory_bytes = rng.choice((64 << 20,) * 5 + (8000, 4000, 4000, 300))
        self.full = rng.choice((0.0, 0.0, 0.02))
        """Share of messages to ranks that find their queue full."""
        self.healthy_s = rng.choice((1.0, 3.0, 8.0))
        self.isolates = rng.random() < 0.1
        """Relays lose the broker for good. A rank that insists on its relay could not go on."""
        self.insists = 0.0 if self.isolates else 0.1
        """Share of ranks that wait until their relay has answered once."""
        self.hosts: list[Host] = []

    def start(self, jobs: list[Job]) -> None:
        """Start the relays, and choose the meshes of the jobs whose ranks they serve."""
        for job in jobs:
            job.choose_tp_and_pp()
        count = self.rng.randint(1, 4)
        without = self.rng.randrange(count) if count > 1 and self.rng.random() < 0.4 else -1
        if self.wide:
            count, without = 4, -1
        self.hosts = [Host(self, f"host{n}", n != without) for n in range(count)]
        self.world.clock.after(0.0, self._plan)

    # Faults

    def _plan(self) -> None:
        faults = [self.kill, self.freeze, self.stop, self.outage, self.reconnect]
        if self.isolates:
            faults = [self.isolate]
        for fault in self.rng.sample(faults, min(self.rng.choice((0, 1, 1, 2, 3)), len(faults))):
            for _ in range(self.rng.randint(1, 3)):
                self.world.clock.after(self.rng.uniform(0.1, self.world.quiet_at), self._happens, fault)

    def _happens(self, fault: Callable[[RelayProcess], float]) -> None:
        """Let a fault happen to any relay that works; it lasts some seconds, and heals."""
        relays = [host.relay for host in self.hosts if host.relay is not None]
        relays = [relay for relay in relays if relay.alive and not relay.frozen]
        if relays:
            relay = self.rng.choice(relays)
            seconds = fault(relay)
            self.world.note(fault.__name__, relay.name, seconds)
            self.world.quiet_at = max(self.world.quiet_at, self.world.clock.now + seconds)

    def kill(self, relay: RelayProcess) -> float:
        """The relay is killed, and another is started later."""
        relay.kill()
        return self._start_again(relay)

    def stop(self, relay: RelayProcess) -> float:
        """The relay is stopped, as a service is."""
        relay.stop()
        return self._start_again(relay)

    def _start_again(self, relay: RelayProcess) -> float:
        seconds = self.rng.choice((0.0, self.rng.uniform(0, 2), self.rng.uniform(0, 10)))
        self.world.clock.after(seconds, relay.host.start)
        return seconds

    def freeze(self, relay: RelayProcess) -> float:
        """The relay hangs, and wakes up with what it knew and what was said to it."""
        seconds = self.rng.choice((2.0, 6.0, 20.0))
        relay.freeze(seconds)
        return seconds

    def outage(self, relay: RelayProcess) -> float:
        """The link to the broker carries nothing for a while, in one direction or in both."""
        seconds, cut = self.rng.uniform(0.5, 18.0), self.world.network.cut
        for link in self.rng.choice(((b"<",), (b">",), (b"<", b">"))):
            cut.add(link + relay.peer)
            self.world.clock.after(seconds, cut.discard, link + relay.peer)
        return seconds

    def isolate(self, relay: RelayProcess) -> float:
        """The relay and the broker never hear of each other again; their ranks must do without."""
        self.world.network.cut |= {b"<" + relay.peer, b">" + relay.peer}
        return 0.0

    def reconnect(self, relay: RelayProcess) -> float:
        """The relay has another connection to the broker, and does not notice."""
        relay.reconnect()
        return 0.0

    def host_of(self, job: Job, ranks: tuple[int, int, int, int]) -> Host:
        """Return the host where a rank's process is started: neighbors are on one, mostly."""
        if self.rng.random() < 0.05:
            return self.rng.choice(self.hosts)
        every = [mesh.ranks for mesh in job.meshes()]
        return self.hosts[every.index(ranks) * len(self.hosts) // len(every)]

    def check(self, session: RelaySession) -> None:
        """A relay's memory is bounded, and its books are right."""
        for feed in session.feeds.values():
            kept = sum(step.num_bytes for step in feed._steps.values())
            assert kept == feed.num_bytes, "a relay counts its memory wrongly"
            most = self.memory_bytes + MOST_STEPS * feed.largest_step
            assert feed.num_bytes <= most, f"a relay keeps {feed.num_bytes} bytes"
        queued = sum(reader.flow.queued_bytes for reader in session.readers.values())
        assert session.readers.flows.queued_bytes == queued, "a relay counts the bytes on their way wrongly"
