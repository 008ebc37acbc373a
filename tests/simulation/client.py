"""A trainer's process, of one rank: takes the steps in order, works on each for a while, and returns it.

Now and then it takes a checkpoint as a trainer does: it asks what must be in it, stores that, and says that it
is durable. What it holds then is what its job may go back to.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec import UNSET

from streampack.core.model.mesh import Mesh
from streampack.core.model.snapshot import Snapshot
from streampack.core.protocol.events import Effect, Event, Unsent
from streampack.core.protocol.message import Envelope
from streampack.core.protocol.trainer_messages import AskState, Commit, Committed, State
from streampack.core.sessions.client_events import Again, Answered, Ask, Begin, Broken, Deliver, Detach, Ended, Returned
from streampack.core.sessions.client_phases import ClientPhase
from streampack.core.sessions.client_session import ClientSession
from streampack.core.sessions.route import RelayLost, Reroute, Route
from streampack.core.sessions.routed_client import RoutedClient, SendProbe
from tests.simulation.processes import TICK_S, Process

if TYPE_CHECKING:
    from tests.simulation.job import Job


@dataclass(frozen=True)
class Checkpoint:
    """What a trainer begins with: the iteration, the next step, the digest of those before, and perhaps a snapshot."""

    iteration: int = 0
    step: int = 0
    chain: bytes = b""
    snapshot: Snapshot | None = None


class ClientProcess(Process):
    """One rank of a job, in the ``life``-th time that all its ranks were started."""

    kind = "client"

    def __init__(self, job: Job, name: str, mesh: Mesh, begin: Checkpoint) -> None:
        self.job, self.name, self.mesh, self.life = job, name, mesh, job.life
        rules = job.case.rules
        relays = job.world.relays
        self.host = relays.host_of(job, mesh.ranks) if relays is not None else None
        self.session = ClientSession(
            run=0, feed=job.feed, reader=name, host="host" if self.host is None else self.host.name, pid=1, mesh=mesh,
            prefetch=job.prefetch, next_step=begin.step, chain=begin.chain, iteration=begin.iteration,
            snapshot=begin.snapshot, ready=not job.world.claims_first, variable_lengths=mesh.pp > 1,
            knows_stages=True if rules.stages or rules.in_turn else UNSET,  # others have the bytes of earlier versions
        )  # fmt: skip
        route = None
        if relays is not None and self.host is not None and self.host.has_relay:
            route = Route(name, insists=relays.rng.random() < relays.insists, healthy_s=relays.healthy_s)
        self.routed = RoutedClient(self.session, route)
        self.begin = begin
        self.fenced_by = 0
        """The broker, by its epoch, that must tell it that its rank is another's."""
        self.iteration, self.done, self.chain = begin.iteration, begin.step, begin.chain
        self.ended: tuple[int, bytes] | None = None
        self._ready: deque[tuple[int, bytes]] = deque()
        self._working = self._through = False
        self.asked_at: float | None = None
        """Since when a question of it is open."""
        self.asked_state = 0
        """The step of that question."""
        super().__init__(job.world, self.session)
        if job.world.claims_first:
            job.world.clock.after(random.Random(f"{job.world.seed} {name}").expovariate(2.0), self._begin)

    def _begin(self) -> None:
        """Say where it begins, some time after it asked for its rank."""
        if self.frozen:
            self.world.clock.after(TICK_S, self._begin)
        elif self.alive:
            begin = self.begin
            self.handle(Begin(begin.step, begin.chain, begin.iteration, snapshot=begin.snapshot))

    def handle(self, event: Event) -> None:
        super().handle(event)
        phase, session = self.session.phase, self.session
        assert phase.attached == (session.attached is not None) or phase is ClientPhase.OVER, session.phases
        ended = phase in (ClientPhase.ENDED, ClientPhase.ENDED_ATTACHING)
        assert ended == (self.ended is not None) or phase is ClientPhase.OVER, session.phases

    def decide(self, event: Event) -> list[Effect]:
        return self.routed.handle(event)

    def send(self, envelope: Envelope) -> None:
        if not self.routed.by_relay:
            super().send(envelope)
        elif self.host is not None and not self.host.to_relay(self, envelope):
            assert not self.session.handle(Unsent(envelope))

    def reconnect(self) -> None:
        """New connections; while the route leads through a relay, there is none to the broker."""
        super().reconnect()
        if self.routed.by_relay:
            self.world.disconnect(self)
        if self.host is not None and self.host.has_relay and self in self.host.links.values():
            self.host.leave(self)
            self.world.clock.after(0.0, self.handle, RelayLost())

    def kill(self) -> None:
        super().kill()
        if self.host is not None:
            self.host.leave(self)

    @property
    def in_job(self) -> bool:
        """It is the rank's process, and not one that was replaced and does not know it yet."""
        return self.job.clients.get(self.mesh.ranks) is self

    def leave(self) -> None:
        """Detach, as a client that is closed does."""
        self.handle(Detach())
        self.kill()

    def perform(self, effect: Effect) -> None:
        if isinstance(effect, Deliver):
            step = self.job.delivered(self, effect.parts)
            assert step.lineage == effect.attached.lineage, "R5: a step of another lineage was delivered"
            self._ready.append((step.step, step.chain))
            self._work()
        elif isinstance(effect, Ended):
            assert self.ended is None, "R8: ended twice"
            self.ended = (effect.num_steps, effect.chain)
            self.world.note("ended", self.name, self.iteration, *self.ended)
            self._work()
        elif isinstance(effect, Answered):
            self.asked_at = None
            self._answered(effect)
        elif isinstance(effect, Reroute):
            self.world.note("route", self.name, effect.by_relay, effect.why)
            self.world.disconnect(self)
            if not effect.by_relay:
                self.peer = self.world.connect(self)
        elif isinstance(effect, SendProbe):
            if self.host is not None:
                self.host.to_relay(self, effect.envelope)
        else:
            assert isinstance(effect, Broken), effect
            self.job.refused(self, effect)

    def _work(self) -> None:
        if self._working or self._through or not self.in_job:
            return
        self._through = self.job.returned(self)
        if self._through or not self._ready:
            return
        self._working = True
        step, _ = self._ready[0]
        self.job.take(self, step)

    def work_done(self, iteration: int, step: int) -> None:
        """``step`` is done with, if it is in hand; said by the job, which may have ranks wait for each other."""
        if not self.alive or not self._working or (iteration, step) != (self.iteration, self.done):
            return
        if self.frozen:
            self.world.clock.after(TICK_S, self.work_done, iteration, step)
            return
        self._working = False
        _, self.chain = self._ready.popleft()
        self.done = step + 1
        self.handle(Returned(self.done))
        if self.asked_at is None and self.job.wants_checkpoint():
            self.asked_at, self.asked_state = self.world.clock.now, self.done
            self.handle(Ask(AskState(feed=self.job.feed, step=self.done)))
        self._work()

    def _answered(self, effect: Answered) -> None:
        message = effect.message
        if isinstance(message, State):
            if self.job.saved(self, message) and self.job.commits and self.world.rng.random() < 0.7:
                self._commit(self.job.durable())
        else:
            assert isinstance(message, Committed)
            self.job.committed(message.step)

    def _commit(self, step: int) -> None:
        """Say that the checkpoint before ``step`` is durable, if there is one."""
        if step:
            self.asked_at, self.asked_state = self.world.clock.now, step
            self.job.tells(step)
            self.handle(Ask(Commit(feed=self.job.feed, step=step)))

    def again(self, iteration: int) -> None:
        """Begin the iteration after ``iteration``, once."""
        if not self.alive or iteration != self.iteration:
            return
        if self.frozen:
            self.world.clock.after(TICK_S, self.again, iteration)
            return
        self.iteration, self.done, self.chain, self.ended = iteration + 1, 0, b"", None
        self._ready.clear()
        self._through = False
        self.handle(Again())

    def state(self) -> Checkpoint:
        """Where it is, for the process that takes its place."""
        if (self.iteration, self.done) == (self.begin.iteration, self.begin.step):
            return self.begin
        return Checkpoint(self.iteration, self.done, self.chain)
