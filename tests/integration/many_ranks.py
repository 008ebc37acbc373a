"""Every rank of a mesh in one thread: the clients' own state machines on real sockets, and no arrays.

What a broker and those who watch it see of hundreds of trainers, at the cost of one. Each rank takes steps at a pace of
its own: the fast ones wait for the slow.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product

import zmq

from streampack.client.reading_stats import ReadingFigures
from streampack.core.model.mesh import Mesh
from streampack.core.protocol.events import Effect, FromBroker, Send, Tick
from streampack.core.sessions.client_events import Deliver, Detach, Returned
from streampack.core.sessions.client_session import ClientSession
from streampack.transport.sockets import HIGH_WATER
from streampack.wire import frames as wire
from tests.integration.running import PATIENCE_S

TICK_S = 0.2
STATS_S = 1.0


@dataclass
class _Rank:
    session: ClientSession
    socket: zmq.Socket[bytes]
    step_s: float
    figures: ReadingFigures = field(default_factory=ReadingFigures)
    have: int = 0
    taken: int = 0
    since: float = 0.0
    """When the step that is trained was taken."""
    is_dead: bool = False
    """It does nothing any more, as if its process had been killed or stopped."""

    def take(self, now: float) -> None:
        """The next step, where it is there and none is in use."""
        if self.taken < self.have and not self.since:
            self.figures.end_wait(True)
            self.figures.note_step(0, 0)  # nobody has built its packs
            self.taken += 1
            self.since = now

    def give_back(self, now: float) -> bool:
        """Whether it has been trained for long enough; the next is waited for from then on."""
        if not self.since or now - self.since < self.step_s:
            return False
        self.since = 0.0
        self.figures.begin_wait()
        return True


class ManyRanks:
    """``sizes`` of the mesh (dp, cp, pp); ``step_s(number of a rank)``: seconds that it trains a step."""

    def __init__(self, endpoint: str, sizes: dict[str, int], step_s: Callable[[int], float]) -> None:
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 4096)
        self._poller = zmq.Poller()
        self.ranks: list[_Rank] = []
        self._stop = threading.Event()
        dp, cp, pp = (sizes.get(axis, 1) for axis in ("dp", "cp", "pp"))
        for number, (i, j, k) in enumerate(product(range(dp), range(cp), range(pp))):
            mesh = Mesh(dp=dp, cp=cp, pp=pp, dp_rank=i, cp_rank=j, pp_rank=k)
            session = ClientSession(
                run=0,
                feed="train",
                reader=f"rank-{number}",
                host=f"node{number // 8:02d}",
                pid=1000 + number,
                mesh=mesh,
            )
            socket = self._context.socket(zmq.DEALER)
            socket.setsockopt(zmq.LINGER, 200)
            socket.setsockopt(zmq.RCVHWM, HIGH_WATER)
            socket.connect(endpoint)
            self._poller.register(socket, zmq.POLLIN)
            self.ranks.append(_Rank(session, socket, step_s(number)))
        self._of = {rank.socket: rank for rank in self.ranks}
        self._thread = threading.Thread(target=self._run, name="many-ranks")
        self._thread.start()

    def kill(self, number: int) -> None:
        """End a rank, as if its process had been killed or stopped."""
        self.ranks[number].is_dead = True

    def close(self) -> None:
        """All ranks leave."""
        self._stop.set()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        ticked = counted = 0.0
        for rank in self.ranks:
            rank.figures.begin_wait()
        while not self._stop.is_set():
            for socket, _ in self._poller.poll(20):
                self._receive(self._of[socket])
            now = time.monotonic()
            if now - counted >= STATS_S:
                counted = now
                for rank in self.ranks:
                    rank.session.stats, rank.session.starvation = rank.figures.counts(0), rank.figures.starvation()
            if now - ticked >= TICK_S:
                ticked = now
                for rank in self.ranks:
                    if not rank.is_dead:
                        self._perform(rank, rank.session.handle(Tick(now)))
            for rank in self.ranks:
                if not rank.is_dead and rank.give_back(now):
                    self._perform(rank, rank.session.handle(Returned(rank.taken)))
                if not rank.is_dead:
                    rank.take(now)
        for rank in self.ranks:
            self._perform(rank, rank.session.handle(Detach()))
            rank.socket.close()
        self._context.term()

    def _receive(self, rank: _Rank) -> None:
        while True:
            try:
                frames = rank.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            if not rank.is_dead:
                self._perform(rank, rank.session.handle(FromBroker(wire.decode(frames))))

    def _perform(self, rank: _Rank, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                rank.socket.send_multipart(wire.encode(effect.envelope), zmq.NOBLOCK)
            elif isinstance(effect, Deliver):
                rank.have += 1
        rank.figures.set_cause(*rank.session.cause)


@contextmanager
def many_ranks(endpoint: str, sizes: dict[str, int], step_s: Callable[[int], float]) -> Iterator[ManyRanks]:
    """Closed in the end."""
    ranks = ManyRanks(endpoint, sizes, step_s)
    try:
        yield ranks
    finally:
        ranks.close()
