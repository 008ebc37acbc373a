"""Two ranks attach to a broker's readers, in every order that a job and its network can bring about.

``Walk`` joins real ``ClientSession``s to real ``Readers`` by links that keep the order of messages and may break.
At each turn something happens at random: a message arrives, a link breaks, a process is replaced, a trainer begins
another round, perhaps from another checkpoint, the broker restarts, or time passes. The worlds of the simulation move
through the same phases with steps, producers and a log; some of the rarest transitions come about only here.
"""

from __future__ import annotations

import random
from collections import deque

from streampack.core.model.mesh import Mesh
from streampack.core.model.rules import Rules
from streampack.core.model.samples import SampleTable
from streampack.core.model.snapshot import Snapshot
from streampack.core.protocol.effects import SendShard, SendTrainer
from streampack.core.protocol.events import Effect, Event, FromBroker, Send, Tick
from streampack.core.protocol.message import Bye, Envelope, Identity, Who
from streampack.core.protocol.step_part import StepPart
from streampack.core.protocol.trainer_messages import Attach, MixedStream, State
from streampack.core.serve.readers import Readers
from streampack.core.sessions.client_events import Begin, Broken, Deliver, Detach, Ended, Returned
from streampack.core.sessions.client_session import ClientSession
from streampack.core.stats.data_wait import Missing
from tests.world.made_up import chain_of, made_up_step, snapshot_at

DP, STEPS, AHEAD = 2, 3, 2
TICK_S = 0.5
RARE = ("break", "replace", "crash", "leave", "restart")
MOVES = (
    ("deliver",) * 12 + ("tick",) * 6 + ("begin", "begin", "return", *RARE),
    ("deliver",) * 60 + ("tick",) * 12 + ("return",) * 8 + ("begin", *RARE),
    ("deliver",) * 20 + ("tick",) * 20 + ("begin",),
)
"""How often each move is made: under many faults, under few, and where links are slow and all processes live."""


class Feed:
    """What the readers ask of their feed: any step can be gone to."""

    def __init__(self) -> None:
        self.readers: Readers | None = None

    def waiting_for(self) -> Missing:
        return Missing("forming", "the step is being packed")

    def all_rules(self) -> list[Rules]:
        return [Rules(budget=16, packs=4)]

    def unfit(self, step: int, given: Snapshot | None) -> tuple[str, str] | None:
        return None

    def rewind(self, step: int, given: Snapshot | None, back: bool) -> list[Effect]:
        return []

    def knows(self, given: Snapshot) -> bool:
        return True

    def state_of(self, step: int) -> State | list[Effect]:
        return []

    def commit(self, step: int) -> list[Effect]:
        return []

    def mixture(self) -> list[MixedStream]:
        return []


class Rank:
    """A process of one rank, and its link to the broker."""

    def __init__(self, name: str, peer: bytes, rank: int, ready: bool, iteration: int) -> None:
        self.session = ClientSession(
            run=1, feed="train", reader=name, host="host", pid=1, mesh=Mesh(dp=DP, dp_rank=rank), ready=ready,
            iteration=iteration,
        )  # fmt: skip
        self.name, self.rank = name, rank
        self.had = 0
        """Steps before are delivered."""
        self.link(peer)

    def link(self, peer: bytes) -> None:
        """Connect anew. What was on its way is lost."""
        self.peer = peer
        self.up: deque[Envelope] = deque()
        self.down: deque[Envelope] = deque()


class Walk:
    """One random walk; ``run`` makes ``turns`` moves. Raises ``InternalError`` for a transition that may not be."""

    def __init__(self, seed: int) -> None:
        self.rng, self.now, self.epoch, self.names = random.Random(seed), 0.0, 0, 0
        self.moves = self.rng.choice(MOVES)
        self.ranks: list[Rank] = []
        self.zombies: list[Rank] = []
        self._start_broker()
        for rank in range(DP):
            self.ranks.append(self._process(rank, 0))

    def run(self, turns: int) -> None:
        for _ in range(turns):
            getattr(self, f"_{self.rng.choice(self.moves)}")()

    # Moves

    def _deliver(self) -> None:
        rank = self.rng.choice([*self.ranks, *self.zombies])
        if rank.up and self.rng.random() < 0.5:
            self._to_broker(rank.peer, rank.up.popleft())
        elif rank.down:
            self._to_client(rank, FromBroker(rank.down.popleft()))

    def _tick(self) -> None:
        self.now += self.rng.choice((TICK_S, TICK_S, 4.0))
        self._perform(self.readers.tick(self.now))
        for rank in [*self.ranks, *self.zombies]:
            self._to_client(rank, Tick(self.now))

    def _begin(self) -> None:
        """A trainer begins its first round, or breaks one off; mostly all ranks do."""
        step = self.rng.randint(0, STEPS)
        snapshot = snapshot_at(self.rng.randint(0, step)) if self.rng.random() < 0.6 else None
        chosen = self.ranks if self.rng.random() < 0.7 else [self.rng.choice(self.ranks)]
        newest = max(rank.session.iteration for rank in self.ranks)
        for rank in chosen:
            rank.had = step
            self._to_client(rank, Begin(step, chain_of(step) if step else b"", newest + 1, snapshot=snapshot))

    def _return(self) -> None:
        rank = self.rng.choice(self.ranks)
        self._to_client(rank, Returned(rank.had))

    def _break(self) -> None:
        self.rng.choice(self.ranks).link(self._name())

    def _replace(self) -> None:
        """A process is started for a rank whose process may live on for a while."""
        at = self.rng.randrange(DP)
        if self.rng.random() < 0.3:
            self.zombies = [self.ranks[at]]
        self.ranks[at] = self._process(at, self.ranks[at].session.iteration)

    def _crash(self) -> None:
        """All processes are started again, as after a crash of the job."""
        newest = max(rank.session.iteration for rank in self.ranks)
        self.ranks = [self._process(rank, newest) for rank in range(DP)]

    def _leave(self) -> None:
        for zombie in self.zombies:
            self._to_client(zombie, Detach())
        at = self.rng.randrange(DP)
        self._to_client(self.ranks[at], Detach())
        self.zombies = [self.ranks[at]]
        self.ranks[at] = self._process(at, self.ranks[at].session.iteration)

    def _restart(self) -> None:
        if self.rng.random() < 0.3:
            self._start_broker()

    # What carries them out

    def _start_broker(self) -> None:
        self.epoch += 1
        self.readers = Readers(
            Identity(1, self.epoch), "train", Rules(budget=16, packs=4), "zigzag", SampleTable(), Feed()
        )
        for rank in self.ranks:
            rank.link(self._name())

    def _process(self, rank: int, iteration: int) -> Rank:
        return Rank(f"r{self._name().decode()}", self._name(), rank, self.rng.random() < 0.5, iteration)

    def _name(self) -> bytes:
        self.names += 1
        return b"%d" % self.names

    def _to_broker(self, peer: bytes, envelope: Envelope) -> None:
        message = envelope.message
        if isinstance(message, Attach | Bye) or self.readers.knows(peer):
            self._perform(self.readers.receive(peer, envelope, self.now))
        else:  # as the broker does
            self._perform([SendTrainer(peer, Envelope(run=1, epoch=self.epoch, fence=0, message=Who()))])
        steps = self.readers.steps
        while steps.formed_upto < min(steps.released_upto + AHEAD, STEPS):
            self._perform(self.readers.add(made_up_step(steps.formed_upto)))
        if steps.end is None and steps.formed_upto >= STEPS and self.rng.random() < 0.5:
            self._perform(self.readers.finish(STEPS, chain_of(STEPS)))

    def _perform(self, effects: list[Effect]) -> None:
        links = {rank.peer: rank for rank in [*self.ranks, *self.zombies]}
        for effect in effects:
            if isinstance(effect, SendTrainer | SendShard) and effect.peer in links:
                links[effect.peer].down.append(effect.envelope)

    def _to_client(self, rank: Rank, event: Event) -> None:
        for effect in rank.session.handle(event):
            if isinstance(effect, Send):
                rank.up.append(effect.envelope)
            elif isinstance(effect, Deliver):
                for part in effect.parts:
                    assert isinstance(part.message, StepPart)
                    rank.had = part.message.step + 1
            elif isinstance(effect, Broken) and rank in self.ranks:
                self.ranks[rank.rank] = self._process(rank.rank, rank.session.iteration)
            else:
                assert not isinstance(effect, Ended) or effect.num_steps == STEPS
