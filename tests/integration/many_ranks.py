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

from streampack import wire
from streampack.core.client_events import Deliver, Detach, Returned
from streampack.core.client_session import ClientSession
from streampack.core.events import Effect, FromBroker, Send, Tick
from streampack.core.messages import Mesh
from streampack.transport import HIGH_WATER
from tests.integration.running import PATIENCE_S

TICK_S = 0.2


@dataclass
class _Rank:
    session: ClientSession
    socket: zmq.Socket[bytes]
    step_s: float
    have: int = 0
    done: int = 0
    since: float = field(default_factory=time.monotonic)
    """When the step that is trained, or the wait for it, began."""
    trained_s: float = 0.0
    waited_s: float = 0.0

    def stats(self) -> dict[str, float]:
        """Of what a client says those that the page shows."""
        return {"starved_fraction": self.waited_s / max(self.waited_s + self.trained_s, 1e-9), "steps": self.done}


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

    def close(self) -> None:
        """All ranks leave."""
        self._stop.set()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        ticked = 0.0
        while not self._stop.is_set():
            for socket, _ in self._poller.poll(20):
                self._receive(self._of[socket])
            now = time.monotonic()
            if now - ticked >= TICK_S:
                ticked = now
                for rank in self.ranks:
                    rank.session.stats = rank.stats()
                    self._perform(rank, rank.session.handle(Tick(now)))
            self._train(now)
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
            self._perform(rank, rank.session.handle(FromBroker(wire.decode(frames))))

    def _perform(self, rank: _Rank, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                rank.socket.send_multipart(wire.encode(effect.envelope), zmq.NOBLOCK)
            elif isinstance(effect, Deliver):
                now = time.monotonic()
                if rank.have == rank.done:
                    rank.waited_s, rank.since = rank.waited_s + now - rank.since, now
                rank.have += 1

    def _train(self, now: float) -> None:
        """Those that are through with a step return it, and begin the next or wait for it."""
        for rank in self.ranks:
            if rank.have > rank.done and now - rank.since >= rank.step_s:
                rank.done += 1
                rank.trained_s, rank.since = rank.trained_s + now - rank.since, now
                self._perform(rank, rank.session.handle(Returned(rank.done)))


@contextmanager
def many_ranks(endpoint: str, sizes: dict[str, int], step_s: Callable[[int], float]) -> Iterator[ManyRanks]:
    """Closed in the end."""
    ranks = ManyRanks(endpoint, sizes, step_s)
    try:
        yield ranks
    finally:
        ranks.close()
