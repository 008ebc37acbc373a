"""Trainers that report values of their samples, and publish policies; and programs that read these values.

A rank reports the values of a step before it is done with the step. The first rank publishes a policy after each step.
Both wait for the broker's answer, as ``Step.report`` and ``Client.publish`` do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec.structs import replace

from streampack.core.protocol.events import Effect, Event
from streampack.core.protocol.message import Envelope
from streampack.core.protocol.result_messages import AskResults, Noted, Publish, ReportValues, Results
from streampack.core.protocol.step_part import StepPart
from streampack.core.sessions.client_events import Deliver
from streampack.core.sessions.telling_session import Tell, TellingSession
from tests.simulation.client import Checkpoint, ClientProcess
from tests.simulation.data import Id
from tests.simulation.processes import TICK_S, Process

if TYPE_CHECKING:
    from streampack.core.model.mesh import Mesh
    from tests.simulation.job import Job
    from tests.simulation.rl.world import LoopWorld

LIFE = 1 << 20
"""Added to values for each time that all trainers were started again: they train a step with other results."""
NAMES = ("length", "loss")


def loss_of(one: Id, life: int) -> int:
    """The loss of a sample, in a life of the job."""
    return one[0] * 7 + one[1] * 13 + one[2] * 5 + LIFE * life


def ids_of(message: StepPart | Results) -> list[Id]:
    """The ids of the samples in a message."""
    columns = (message.streams_u32, "<u4"), (message.indices_u64, "<u8"), (message.parts_u32, "<u4")
    return list(zip(*(np.frombuffer(column, kind).tolist() for column, kind in columns), strict=True))


class TellerProcess(Process):
    """A connection by which a program tells the broker something; messages wait for their answers."""

    kind = "teller"

    def __init__(self, world: LoopWorld, name: str) -> None:
        self.name = name
        self.session = TellingSession()
        self._then: dict[int, Callable[[Envelope], None]] = {}
        super().__init__(world, self.session)

    def ask(
        self, message: Publish | ReportValues | AskResults, then: Callable[[Envelope], None],
        payload: tuple[Any, ...] = (),
    ) -> None:  # fmt: skip
        """Send a message, and call ``then`` with its answer."""
        number = self.session.open.take_number()
        self._then[number] = then
        self.handle(Tell(replace(message, number=number), payload))

    def handle(self, event: Event) -> None:
        super().handle(event)
        while self.session.answers and self.alive:
            number = next(iter(self.session.answers))
            self._then.pop(number)(self.session.answers.pop(number))

    def perform(self, effect: Effect) -> None:
        raise AssertionError(f"results: {effect}")


class LoopTrainer(ClientProcess):
    """One rank, which reports its values before it returns a step."""

    world: LoopWorld

    def __init__(self, job: Job, name: str, mesh: Mesh, begin: Checkpoint) -> None:
        self.teller: TellerProcess | None = None
        super().__init__(job, name, mesh, begin)
        self.teller = TellerProcess(self.world, name)
        self._told: tuple[int, int] | None = None
        """(iteration, step) that is being reported, or was reported last."""
        self._may_return = False
        self.ids_of: dict[int, list[Id]] = {}
        """The samples of each step that came."""
        self.lineage = 0
        if self._publishes:
            self.world.clock.after(TICK_S, self._publish_first)

    @property
    def _publishes(self) -> bool:
        return self.mesh.ranks == (0,) * len(self.mesh.ranks)

    @property
    def _speaks(self) -> bool:
        mesh, alone = self.mesh, self.world.reduces_same
        return not (mesh.tp_rank or mesh.pp_rank != mesh.pp - 1 or (alone and mesh.cp_rank))

    def kill(self) -> None:
        super().kill()
        if self.teller is not None:
            self.teller.kill()

    def freeze(self, seconds: float) -> None:
        super().freeze(seconds)
        if self.teller is not None:
            self.teller.freeze(seconds)

    def perform(self, effect: Effect) -> None:
        if isinstance(effect, Deliver):
            messages = [part.message for part in effect.parts if isinstance(part.message, StepPart)]
            self.lineage = messages[0].lineage
            self.ids_of[messages[0].step] = [one for message in messages for one in ids_of(message)]
        super().perform(effect)

    def work_done(self, iteration: int, step: int) -> None:
        if not self.alive or not self._working or (iteration, step) != (self.iteration, self.done):
            return
        if self.frozen:
            self.world.clock.after(TICK_S, self.work_done, iteration, step)
        elif self._told != (iteration, step):
            self._told, self._may_return = (iteration, step), False
            self._report(step)
        elif self._may_return:
            super().work_done(iteration, step)

    def _report(self, step: int) -> None:
        """Report the values of this rank's samples of ``step``."""
        attached, mesh = self.session.attached, self.mesh
        ids = self.ids_of[step]
        if not self._speaks or not self.world.reports:
            self._publish(step + 1)
            return
        alone = self.world.reduces_same
        lineage = self.lineage if attached is None else attached.lineage
        columns = np.array(ids, np.int64).reshape(-1, 3)
        loss = np.array([loss_of(one, self.life) for one in ids], "<f8")
        if not alone and mesh.cp > 1:
            loss = loss + 3 if mesh.cp_rank == 0 else np.full(len(ids), -3.0 / (mesh.cp - 1))
        length = np.full(len(ids), 1.0 if alone else 1.0 / mesh.cp)
        message = ReportValues(
            feed=self.job.feed, number=0, lineage=lineage, step=step, attempt=self.session.last_attempt,
            part=mesh.dp_rank if alone else mesh.dp_cp_rank,
            parts=mesh.dp if alone else mesh.dp * mesh.cp, names=NAMES,
            streams_u32=columns[:, 0].astype("<u4").tobytes(), indices_u64=columns[:, 1].astype("<u8").tobytes(),
            parts_u32=columns[:, 2].astype("<u4").tobytes(),
        )  # fmt: skip
        payload = (length.astype("<f8").tobytes(), loss.astype("<f8").tobytes())
        assert self.teller is not None
        self.teller.ask(message, lambda answer: self._noted(answer, lambda: self._publish(step + 1)), payload)

    def _noted(self, answer: Envelope, then: Callable[[], None]) -> None:
        message = answer.message
        assert isinstance(message, Noted), message
        assert not message.refusal, f"results: {self.name} was refused: {message.refusal}"
        then()

    def _publish_first(self) -> None:
        """Publish the policy with which this process begins, once the broker has answered."""
        if not self.alive:
            return
        if self.session.epoch == 0 or self.frozen or self.teller is None:
            self.world.clock.after(TICK_S, self._publish_first)
        elif self.world.publishes and self._told is None:  # else a newer version is on its way
            self._publish_version(self.begin.step, lambda: None)

    def _publish(self, version: int) -> None:
        if self._publishes and self.world.publishes:
            self._publish_version(version, self._return)
        else:
            self._return()

    def _publish_version(self, version: int, then: Callable[[], None]) -> None:
        assert self.teller is not None
        message = Publish(
            feed=self.job.feed, number=0, version=version, step=version, attempt=self.session.last_attempt
        )
        self.teller.ask(message, lambda answer: self._noted(answer, then))

    def _return(self) -> None:
        assert self._told is not None
        self._may_return = True
        self.work_done(*self._told)


class SubscriberProcess(TellerProcess):
    """Reads reported values from a cursor on, one step at a time. What it has read is kept in ``kept``."""

    def __init__(self, world: LoopWorld, name: str, kept: Kept) -> None:
        super().__init__(world, name)
        self.world: LoopWorld = world
        self.kept = kept
        world.clock.after(world.rng.random(), self._next)

    def _next(self) -> None:
        if not self.alive:
            return
        if self.frozen:
            self.world.clock.after(TICK_S, self._next)
            return
        ask = AskResults(feed=self.kept.feed, number=0)
        cursor = self.kept.cursor
        self.ask(ask if cursor is None else replace(ask, cursor=cursor), self._came)

    def _came(self, answer: Envelope) -> None:
        message = answer.message
        assert isinstance(message, Results), message
        if self.kept.cursor is None:
            self.kept.begin(message.cursor)
        else:
            self.kept.take(message, answer.payload)
        self.world.clock.after(self.world.rng.expovariate(20), self._next)


class Kept:
    """The steps that a subscriber has read, and its cursor. A new process of it begins with both."""

    def __init__(self, world: LoopWorld, feed: str, cursor: int | None) -> None:
        self.world, self.feed, self.cursor = world, feed, cursor
        self.first: int | None = cursor
        self.steps: dict[tuple[int, int], tuple[Results, dict[Id, float]]] = {}
        """The values of the samples of each (lineage, step)."""
        self.order: list[int] = []

    def begin(self, cursor: int) -> None:
        """Read what is reported from now on."""
        self.cursor = self.first = cursor

    def take(self, message: Results, payload: tuple[Any, ...]) -> None:
        """Keep a step's values. A step that comes again after the cursor went back must be the same."""
        assert self.cursor is not None
        assert message.cursor > self.cursor, "results: a cursor went back"
        assert message.names == NAMES, message.names
        length, loss = (np.frombuffer(frame, "<f8").tolist() for frame in payload)
        assert set(length) <= {1.0}, f"results: parts of step {message.step} are missing or came twice: {length}"
        ids = ids_of(message)
        assert len(set(ids)) == len(ids), "results: a sample came twice in a step"
        found = replace(message, number=0), dict(zip(ids, loss, strict=True))
        before = self.steps.setdefault((message.lineage, message.step), found)
        assert before[1] == found[1], f"results: step {message.step} came with other values the second time"
        assert before[0].cursor == found[0].cursor, f"results: step {message.step} came twice"
        self.cursor = message.cursor
        self.order.append(message.cursor)
