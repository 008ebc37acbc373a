"""The log of reported values, and a subscriber."""

from __future__ import annotations

import msgspec
import numpy as np

from streampack.core.journal.journal import Journal
from streampack.core.journal.log_effects import Append, Recall, Recalled
from streampack.core.journal.log_records import ValuesReported
from streampack.core.model.samples import I64
from streampack.core.protocol.effects import SendTrainer
from streampack.core.protocol.events import Effect
from streampack.core.protocol.message import Envelope, Identity
from streampack.core.protocol.result_messages import AskResults, Noted, ReportValues, Results
from streampack.core.results.step_values import StepValues

STEPS, DP, CP, SAMPLES = 4, 2, 2, 3


def where(ids: I64) -> tuple[I64, I64]:
    return ids[:, 1] % 2, ids[:, 1] // 2


def part_of(step: int, attempt: int, dp: int, cp: int) -> tuple[ReportValues, tuple[bytes, ...]]:
    """Return what a rank reports. Both context-parallel ranks have the same samples."""
    index = (step * DP + dp) * SAMPLES + np.arange(SAMPLES)
    zeros = np.zeros(SAMPLES, "<u4").tobytes()
    message = ReportValues(
        feed="train", number=step * 100 + dp * 10 + cp, lineage=0, step=step, attempt=(1, attempt), part=dp * CP + cp,
        parts=DP * CP, names=("loss",), streams_u32=zeros, indices_u64=index.astype("<u8").tobytes(), parts_u32=zeros,
    )  # fmt: skip
    return message, ((index * 1.0 + 1000 * attempt + cp).astype("<f8").tobytes(),)


class ValuesDesk:
    """The log, and a subscriber that asks for the next step once it has one."""

    def __init__(self, keeps: bool) -> None:
        self.keeps, self.log = keeps, list[bytes]()
        self.safe_upto, self.cursor = 0, 0
        self.had: list[tuple[Results, list[float]]] = []
        self.noted: list[int] = []
        self.start()

    def start(self) -> None:
        """Another broker, which knows what is in the log."""
        self.log = self.log[: self.safe_upto] if self.keeps else self.log
        self.journal = Journal(self.keeps, len(self.log) if self.keeps else 0)
        self.values = StepValues(Identity(1, 1), "train", self.journal, where)
        self.values.subscribers.streams = ["rollouts"]
        for lsn, record in enumerate(self.log if self.keeps else []):
            self.values.add(lsn, msgspec.msgpack.decode(record, type=ValuesReported))

    def perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Append):
                self.log.append(msgspec.msgpack.encode(effect.record))
            elif isinstance(effect, Recall):
                record = msgspec.msgpack.decode(self.log[effect.lsn], type=ValuesReported)
                self.perform(self.values.subscribers.recalled(Recalled("train", effect.lsn, record)))
            elif isinstance(effect, SendTrainer):
                self.hear(effect.envelope)

    def report_step(self, step: int) -> None:
        """Report all parts of a step, in the first attempt."""
        for dp in range(DP):
            for cp in range(CP):
                self.perform(self.values.report(b"t", *part_of(step, 1, dp, cp), 0, STEPS))

    def hear(self, envelope: Envelope) -> None:
        if isinstance(envelope.message, Results):
            assert envelope.message.cursor > self.cursor
            self.cursor = envelope.message.cursor
            self.had.append((envelope.message, np.frombuffer(envelope.payload[0], "<f8").tolist()))
        else:
            assert isinstance(envelope.message, Noted)
            assert not envelope.message.refusal
            self.noted.append(envelope.message.number)

    def sync(self) -> None:
        """All that was written is safe."""
        self.safe_upto = len(self.log)
        if self.keeps:
            self.journal.safe(len(self.log))
        self.perform(self.values.safe())

    def ask(self) -> None:
        self.perform(
            self.values.subscribers.ask(b"s", AskResults(feed="train", number=len(self.had), cursor=self.cursor), 0.0)
        )
