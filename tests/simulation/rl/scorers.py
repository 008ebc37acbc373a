"""Programs that give the late values of samples which other programs have sent; each may die and be started again.

A scorer knows the ids of all samples that were sent, and gives values until it has heard that they are safe. A new
process of a scorer does not know what the last one has given, and gives it again. Sometimes a scorer is early: it gives
values to samples that are not safe yet. Only those may be refused, if the sample was lost with its process. In a run
with a timeout a scorer may be too late. An answer that names no sample means that the log has the values of all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from crc32c import crc32c
from msgspec import UNSET

from streampack.core.model.fields import Field
from streampack.core.protocol.events import Effect, Event, Report
from streampack.core.protocol.producer_messages import ANY_PROCESS, Amend, Amended
from streampack.core.sessions.producer_base import Finish, Leave
from streampack.core.sessions.pushing.amend_session import AmendSession, GiveValues
from tests.simulation.processes import Process
from tests.simulation.pushers import Births

if TYPE_CHECKING:
    from tests.simulation.rl.world import LoopWorld

MOST_OPEN = 6


class Given(NamedTuple):
    """Samples and fields that one message gives values for. ``safe``: the samples are known to be safe."""

    births: Births
    seqs: tuple[int, ...]
    names: tuple[str, ...]
    process: int
    safe: bool


class ScorerProcess(Process):
    """Gives values of the late fields ``names`` to samples of all partitions of a stream."""

    kind = "producer"
    world: LoopWorld

    def __init__(self, world: LoopWorld, name: str, stream: str, names: tuple[str, ...], pid: int) -> None:
        self.name, self.stream, self.names = name, stream, names
        self.session = AmendSession(run=0, producer=name, host="host", pid=pid, stream=stream)
        self._open: dict[int, Given] = {}
        self._done = defaultdict[int, set[tuple[int, str]]](set)
        """(sequence number, field) of the values that are known to be safe, by partition."""
        super().__init__(world, self.session)
        world.clock.after(0.0, self._work)

    @property
    def _births(self) -> Iterable[Births]:
        return [births for (stream, _), births in self.world.births.items() if stream == self.stream]

    def leave(self) -> None:
        """Stop with a farewell, whatever is not safe yet."""
        super().handle(Leave())

    def handle(self, event: Event) -> None:
        super().handle(event)
        for number in [number for number in self._open if number not in self.session.open]:
            self._answered(self._open.pop(number), self.session.refused.pop(number, Amended(number=number)))

    def perform(self, effect: Effect) -> None:
        if isinstance(effect, Finish):
            self.alive = False
            assert not effect.error or effect.code == "ended", effect
            assert not effect.error or all(self.world.read_out(job) for job in self.world.jobs.values()), effect
        else:
            assert isinstance(effect, Report), effect

    def _answered(self, given: Given, answer: Amended) -> None:
        births, case = given.births, given.births.case
        reasons = {seq: reason for reason, seqs in (answer.refused or {}).items()
                   for seq in np.frombuffer(seqs, "<u8").tolist()}  # fmt: skip
        for seq in given.seqs:
            one, reason = births.sent.get(seq), reasons.get(seq, "")
            where = f"late values: sample {seq} of {case.names[births.stream]} {births.partition}: {answer}"
            if reason == "lost":
                assert one is None or one.process != given.process, where
            elif reason in ("", "ended"):
                lacking = [name for name in given.names if not self.world.is_amended(births, seq, name)]
                assert reason or not lacking, f"{where}, and the log lacks {lacking}"
            else:  # a record of a chunk says how many of its samples were dropped for each reason, not which
                assert one is not None, where
                assert any(self._may_be(each, births, seq, one.birth) for each in reason.split(" or ")), where
        assert bool(answer.refusal) == ("lost" in reasons.values()), answer
        assert not (given.safe and answer.refusal), f"late values: {given} was refused: {answer}"
        if given.safe:
            self._done[births.partition] |= {(seq, name) for seq in given.seqs for name in given.names}

    def _may_be(self, reason: str, births: Births, seq: int, birth: int) -> bool:
        """Return True if a sample may have been dropped for a reason."""
        if reason == "empty":
            return not births.case.lengths(births.stream, births.partition)[birth]
        if reason == "late_timeout":
            self.world.too_late.add((births.stream, births.partition, seq))
            return bool(births.case.rules.late_timeout_s)
        return reason == "overlong" and bool(births.case.rules.media_fields)  # more media than a pack may have

    def _work(self) -> None:
        if not self.alive:
            return
        if self.session.terms is not None and not self.frozen:
            self._give()
        if self.alive:
            timeout_s = self.world.jobs["train"].case.rules.late_timeout_s or 0
            tardy_s = 2 * timeout_s if timeout_s and self.world.rng.random() < 0.02 else 0.0
            self.world.clock.after(tardy_s + self.world.rng.expovariate(1 / self.world.score_s), self._work)

    def _give(self) -> None:
        """Give values to some samples of a partition that are safe, or to one that is not."""
        rng = self.world.rng
        births = rng.choice(list(self._births))
        names = tuple(rng.sample(self.names, rng.randint(1, len(self.names))))
        early = [seq for seq in births.sent if births.safe_upto <= seq < births.safe_upto + 3]
        if early and rng.random() < self.world.early:
            self._send(births, (rng.choice(early),), names, safe=False)
            return
        has = self._done[births.partition] | {
            (seq, name) for each in self._open.values() if each.births is births and each.safe
            for seq in each.seqs for name in each.names
        }  # fmt: skip
        seqs = [seq for seq in range(births.safe_upto) if any((seq, name) not in has for name in names)]
        if rng.random() < 0.05:  # a program may give values again
            seqs = list(range(births.safe_upto))
        if seqs and sum(each.safe for each in self._open.values()) < MOST_OPEN:
            first = rng.randrange(len(seqs)) if rng.random() < 0.3 else 0
            chosen = seqs[first : first + rng.randint(1, 6)]
            self._send(births, tuple(rng.sample(chosen, len(chosen))), names, safe=True)

    def _send(self, births: Births, seqs: tuple[int, ...], names: tuple[str, ...], safe: bool) -> None:
        """Give values to samples of one process; or to those of any process, if it is not known which that was."""
        process = births.sent[seqs[0]].process
        if safe and self.world.rng.random() < 0.3:
            process = ANY_PROCESS
        else:
            seqs = tuple(seq for seq in seqs if births.sent[seq].process == process)
        number = self.session.open.take_number()
        self._open[number] = Given(births, seqs, names, process, safe)
        self.handle(self.values(births, seqs, names, number, process))

    @staticmethod
    def values(
        births: Births, seqs: tuple[int, ...], names: tuple[str, ...], number: int, process: int
    ) -> GiveValues:  # fmt: skip
        """Return the message with the values of some samples."""
        case = births.case
        fields: list[Field] = [next(each for each in case.late_fields if each.name == name) for name in names]
        made = [births.sent[seq].birth for seq in seqs]
        columns = [
            [case.value(field, births.stream, births.partition, birth).tobytes() for birth in made] for field in fields
        ]
        lengths = case.lengths(births.stream, births.partition)[made].astype("<u4").tobytes()
        message = Amend(
            stream=case.names[births.stream], partition=births.partition, number=number, process=process,
            seqs_u64=np.array(seqs, "<u8").tobytes(), names=names,
            crcs_u32=np.array([[crc32c(value) for value in column] for column in columns], "<u4").tobytes(),
            lengths_u32=lengths if any(field.axis == "token" for field in fields) else UNSET,
        )  # fmt: skip
        return GiveValues(message, tuple(b"".join(column) for column in columns))
