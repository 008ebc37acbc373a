"""Two programs push batches to a broker that drains, crashes and restarts, over links that lose messages.

``PushWalk`` joins real ``PushSession``s to a real ``Broker``, whose log is safe some time after it was written. The
worlds of the simulation have no broker that drains, and their links break too seldom between a lease and its credit.
"""

from __future__ import annotations

import random

from streampack.core.model.rules import Batch
from streampack.core.protocol.effects import Drain
from streampack.core.protocol.events import Tick
from tests.world.marked_rollouts import Batches
from tests.world.rollouts import PARTITIONS, Unsafe, pusher

MOVES = ("turn",) * 60 + ("lose",) * 12 + ("crash",) * 4 + ("drain",) + ("replace",) * 2
"""How often each move is made: a rare transition needs crashes and losses close together."""


class PushWalk(Unsafe, Batches):
    """One random walk; ``run`` makes ``turns`` moves. Raises ``InternalError`` for a transition that may not be."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        sizes = [(rng.randint(0, 4), rng.randint(0, 4)) for _ in range(rng.randint(1, 4))]
        super().__init__(Batch(min_samples=1), sizes, seed, marks=True, waits=False)
        self.stop_trainer()  # a trainer ends when its broker drains; the programs do not need one

    def run(self, turns: int) -> None:
        for _ in range(turns):
            getattr(self, f"_{self.rng.choice(MOVES)}")()

    def _turn(self) -> None:
        self.turn()

    def _lose(self) -> None:
        """What is on its way to and from a program is lost."""
        peer = b"push%d" % self.rng.randrange(PARTITIONS)
        for way in (b"s", b">"):
            self._links.pop(way + peer, None)

    def _crash(self) -> None:
        self.start_broker()

    def _drain(self) -> None:
        """The broker begins to stop. A later crash ends it."""
        self.handle(Drain())

    def _replace(self) -> None:
        """A program is started again. Its buffer is lost."""
        partition, self._names = self.rng.randrange(PARTITIONS), self._names + 1
        peer = b"push%d" % partition
        self.pushers[partition] = self.producers[peer] = pusher(f"again{self._names}", partition, 100 + self._names)
        self._to_producer(peer, Tick(self.now))
