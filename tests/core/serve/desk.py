"""Readers of a feed with steps that are made up, and processes that come, ping and go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from streampack.core.model.mesh import Mesh, ReadBy
from streampack.core.model.rules import Rules
from streampack.core.model.samples import SampleTable
from streampack.core.model.snapshot import Snapshot
from streampack.core.protocol.effects import Release, SendShard, SendTrainer
from streampack.core.protocol.events import Effect, Report
from streampack.core.protocol.message import Envelope, Identity, Message, Who
from streampack.core.protocol.step_part import StepPart
from streampack.core.protocol.trainer_messages import (
    AskSnapshot,
    Attach,
    Attached,
    Brought,
    Get,
    MixedStream,
    ReaderPing,
    State,
)
from streampack.core.serve.readers import Readers
from streampack.core.stats.data_wait import Missing
from tests.world.made_up import chain_of, made_up_step

EPOCH, TICK_S = 4, 0.25


M = TypeVar("M", bound=Message)


SNAPSHOTS: dict[bytes, Snapshot] = {}
"""The checkpoints that processes attach with, by process."""


class Desk:
    """Readers of a feed that forms ``ahead`` steps beyond what all ranks have returned, and what they were told."""

    def __init__(self, ahead: int = 6, packs: int = 4, layout: str = "zigzag") -> None:
        self.now, self.ahead, self.durable = 0.0, ahead, True
        self.brings = True
        """Processes that are asked for their snapshot send it."""
        rules = self.rules = Rules(budget=16, packs=packs)
        self.readers = Readers(
            Identity(1, EPOCH), "train", rules, layout, SampleTable(), self
        )  # fmt: skip
        self.waiting_for: Callable[[], Missing] = lambda: Missing("forming", "of samples")
        self.rewinds: list[tuple[int, Snapshot | None]] = []
        self.skipped: set[int] = set()
        self.said: list[tuple[bytes, Envelope]] = []
        self.log: list[str] = []
        self.alive: dict[str, bytes] = {}
        """Processes that ping, and their peers."""

    def unfit(self, step: int, given: Snapshot | None) -> tuple[str, str] | None:
        return None

    def all_rules(self) -> list[Rules]:
        return [self.rules]

    def knows(self, given: Snapshot) -> bool:
        return True

    def rewind(self, step: int, snapshot: Snapshot | None, back: bool) -> list[Effect]:
        self.rewinds.append((step, snapshot))
        return []

    def mixture(self) -> list[MixedStream]:
        return []

    def state_of(self, step: int) -> State | list[Effect]:
        return State(feed="train", lineage=0, step=step, chain=chain_of(step), snapshot=None)

    def commit(self, step: int) -> list[Effect]:
        return self.readers.questions.committed(step) if self.durable else []

    def perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, SendTrainer | SendShard):
                self.said.append((effect.peer, effect.envelope))
            elif isinstance(effect, Report):
                self.log.append(effect.text)
            else:
                assert isinstance(effect, Release), effect

    def form(self) -> None:
        """Form as many steps as may be kept."""
        readers = self.readers
        while readers.steps.formed_upto < readers.steps.released_upto + self.ahead and not readers.steps.draining:
            number = readers.steps.formed_upto
            self.perform(readers.add(made_up_step(number), number in self.skipped))

    def say(self, peer: bytes, message: Message, fence: int | None = None, epoch: int = EPOCH) -> None:
        """A message, by default of the attempt that its sender was last told of."""
        if not isinstance(message, Attach) and not self.readers.knows(peer):
            self.said.append((peer, Envelope(run=1, epoch=EPOCH, fence=0, message=Who())))  # as the broker does
            return
        fence = self.fence(peer) if fence is None else fence
        known = len(self.said)
        self.perform(self.readers.receive(peer, Envelope(run=1, epoch=epoch, fence=fence, message=message), self.now))
        for to, envelope in self.said[known:]:
            if isinstance(asked := envelope.message, AskSnapshot) and self.brings:
                self.say(to, Brought(feed="train", digest=asked.digest, snapshot=SNAPSHOTS[asked.digest]))
        self.form()

    def fence(self, peer: bytes) -> int:
        """The attempt that a process believes to be in."""
        return max((e.fence for to, e in self.said if to == peer and isinstance(e.message, Attached)), default=0)

    def come(self, name: str, step: int = 0, *, dp: int = 2, rank: int = 0, **more: Any) -> bytes:
        """A process attaches, and pings from now on."""
        peer = self.alive[name] = name.encode()
        self.say(peer, attach(name, step, dp=dp, rank=rank, **more), fence=0)
        return peer

    def come_all(self, prefix: str, step: int = 0, *, dp: int = 2, **more: Any) -> list[bytes]:
        return [self.come(f"{prefix}{rank}", step, dp=dp, rank=rank, **more) for rank in range(dp)]

    def take(self, name: str, upto: int, done: int | None = None) -> None:
        """A process asks for the steps before ``upto`` and has returned those before ``done``, or all."""
        stop, done = max(upto, 1), upto if done is None else done
        self.say(name.encode(), Get(feed="train", lineage=0, start=0, stop=stop, done_upto=done, request=0))
        self.say(name.encode(), ping(name, done))

    def die(self, *names: str) -> None:
        """SIGKILL: nothing more is heard."""
        for name in names:
            del self.alive[name]

    def wait(self, seconds: float) -> None:
        """Time passes; a process that lives pings every second."""
        until = self.now + seconds
        while self.now < until:
            self.now += TICK_S
            self.perform(self.readers.tick(self.now))
            self.form()
            if self.now % 1.0 == 0:
                for name, peer in self.alive.items():
                    self.say(peer, ping(name, have=max(self.steps(name), default=-1) + 1))

    def heard(self, peer: bytes | str, kind: type[M]) -> list[M]:
        peer = peer.encode() if isinstance(peer, str) else peer
        return [e.message for to, e in self.said if to == peer and isinstance(e.message, kind)]

    def steps(self, name: str) -> list[int]:
        return [part.step for part in self.heard(name, StepPart)]

    @property
    def attempt(self) -> int:
        return self.readers.attempts.number

    def state(self) -> list[Any]:
        """All that decides what is served, but not when anybody was heard."""
        readers = self.readers
        rows = sorted(
            (r.name, r.peer, r.ready, r.iteration, r.first_step, r.entered, r.receiver.flow.sent_upto)
            for r in readers.registry
        )
        return [
            self.attempt,
            readers.attempts.iteration,
            readers.steps.released_upto,
            readers.steps.formed_upto,
            dict(readers.steps.returned),
            *rows,
        ]


def attach(
    name: str, step: int = 0, *, dp: int = 2, rank: int = 0, ready: bool = True, iteration: int = 0,
    chain: bytes | None = None, readers: ReadBy | None = None, snapshot: Snapshot | None = None, **more: Any,
) -> Attach:  # fmt: skip
    chain = (chain_of(step) if step else b"") if chain is None else chain
    if snapshot is not None:
        SNAPSHOTS[snapshot.digest] = snapshot
    return Attach(
        feed="train", reader=name, host=f"host-of-{name}", pid=1, mesh=Mesh(dp=dp, dp_rank=rank), next_step=step,
        chain=chain, iteration=iteration, readers=readers or ReadBy(), ready=ready,
        snapshot_digest=snapshot.digest if snapshot is not None else b"", **more,
    )  # fmt: skip


def ping(name: str, done: int = 0, have: int = 0, **more: Any) -> ReaderPing:
    return ReaderPing(feed="train", reader=name, done_upto=done, have_upto=max(have, done), **more)


def reading(upto: int = 4, dp: int = 2, ahead: int = 6) -> Desk:
    """Ranks ``a0``, ``a1`` ... that have returned all steps before ``upto``."""
    desk = Desk(ahead)
    desk.come_all("a", dp=dp)
    for rank in range(dp):
        desk.take(f"a{rank}", upto)
    assert desk.readers.steps.released_upto == upto
    desk.wait(1.0)
    return desk
