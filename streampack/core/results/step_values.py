"""The values that ranks report for a feed's steps: recorded, answered once they are safe, and read by subscribers.

A step is complete once every part has come (``pending_steps``); then subscribers get it (``subscribers``).

A new attempt may begin while some ranks are done with a step and others are not, for example if the broker restarts.
Ranks that are done do not train the step again. So their parts count in the new attempt, too, and are recorded again.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from streampack.core.journal.journal import Journal
from streampack.core.journal.log_records import ValuesReported
from streampack.core.model.samples import I64
from streampack.core.protocol.effects import SendTrainer
from streampack.core.protocol.events import Effect, Report
from streampack.core.protocol.message import Identity
from streampack.core.protocol.result_messages import Noted, ReportValues
from streampack.core.results.merge_parts import ids_of
from streampack.core.results.pending_steps import MOST_NAMES, PendingSteps, Returned
from streampack.core.results.subscribers import Locate, Subscribers


class StepValues:
    """The values of one feed's steps.

    Args:
        identity: The run and the epoch of the broker.
        feed: Name of the feed.
        journal: The journal of the broker.
        locate: Finds where samples came from.

    Attributes:
        pending: Steps of which not every part has come.
        subscribers: The complete steps, and those who read them.
    """

    def __init__(self, identity: Identity, feed: str, journal: Journal, locate: Locate) -> None:
        self._identity, self._feed, self._journal = identity, feed, journal
        self.pending = PendingSteps()
        self.subscribers = Subscribers(identity, feed, journal, locate)
        self._answers: deque[tuple[int, bytes, Noted]] = deque()
        """The answers that wait: (number of records that must be safe first, the trainer's connection, the answer)."""
        self._unanswered: set[bytes] = set()
        """Connections of the trainers that an answer waits for."""

    def report(
        self, peer: bytes, message: ReportValues, payload: tuple[Any, ...], lineage: int, upto: int,
        samples: I64 | None = None,
    ) -> list[Effect]:  # fmt: skip
        """Record a part, and answer once it is safe.

        Args:
            peer: The rank's connection.
            message: The message.
            payload: Its frames.
            lineage: The feed's lineage.
            upto: Steps before this one were served.
            samples: Ids of the rank's samples in the step, int64 [n, 3]; None if the step is not kept any more.
        """
        if message.attempt[0] > self._identity.epoch:
            return []  # a standby has taken over, and has served the step. The rank repeats its message until it knows
        key = message.lineage, message.step, message.names
        refusal = _fault(message, payload, len(self.subscribers.streams))
        if not refusal and samples is not None and (others := _num_others(ids_of(message), samples)):
            refusal = (
                f"got values for {others} samples that this rank does not have in step {message.step}, expected its "
                f"own samples, Step.sample_ids"
            )
        if not refusal and (message.step >= upto or message.lineage > lineage):
            refusal = f"got values for step {message.step}, expected a step that was served: one before step {upto}"
        if not refusal and message.lineage == lineage and not self.pending.may_add(key):
            refusal = (
                f"got a {MOST_NAMES + 1}th set of names for step {message.step}, expected at most {MOST_NAMES} sets"
            )
        if refusal:
            return self.refuse(peer, message.number, refusal)
        effects = self._take(message, payload) if message.lineage == lineage else []
        self.note(peer, message.number)
        return effects + self.safe()

    def _take(self, message: ReportValues, payload: tuple[Any, ...]) -> list[Effect]:
        """Record a part, unless this part or a newer one is recorded already."""
        if self.pending.knows((message.lineage, message.step, message.names), message.part, message.attempt):
            return []
        effects = self._record(ValuesReported(
            feed=self._feed, lineage=message.lineage, step=message.step, attempt=message.attempt, part=message.part,
            parts=message.parts, names=message.names, streams_u32=message.streams_u32,
            indices_u64=message.indices_u64, parts_u32=message.parts_u32, values=[bytes(frame) for frame in payload],
        ))  # fmt: skip
        return effects + self._warn_of_forgotten()

    def _record(self, record: ValuesReported) -> list[Effect]:
        """Append a part to the log, and add it."""
        effects = self._journal.append(record)
        self.add(self._journal.next_lsn - 1, record)
        return effects

    def add(self, lsn: int, record: ValuesReported) -> None:
        """Add a recorded part, also one of an earlier broker."""
        if (parts := self.pending.add(lsn, record)) is not None:
            self.subscribers.add(lsn, (record.lineage, record.step, record.names), parts)

    def _warn_of_forgotten(self) -> list[Effect]:
        """Return a warning about steps that were forgotten before every rank has reported."""
        forgotten, self.pending.forgotten = self.pending.forgotten, []
        return [
            Report("warning", (
                f"feed {self._feed!r}: forgot the values of step {step} ({', '.join(names)[:100]}), because not every "
                f"rank reported them. Call Step.report on every rank"
            ), feed=self._feed, step=step)
            for _, step, names in forgotten[:1]
        ]  # fmt: skip

    def carry(self, returned: Returned) -> list[Effect]:
        """Record parts of earlier attempts again, if their ranks have returned the step and so report it no more."""
        records = self.pending.to_carry(returned)
        effects = [effect for record in records for effect in self._record(record)]
        return effects + self.safe() if effects else []

    def forget_below(self, lsn: int) -> None:
        """Forget the steps with records below ``lsn``: these records were deleted from the log."""
        self.subscribers.forget_below(lsn)
        self.pending.forget_below(lsn)

    # Answers

    def note(self, peer: bytes, number: int) -> None:
        """Answer message ``number`` of a trainer once the newest record is safe."""
        self._unanswered.add(peer)
        self._answers.append((self._journal.next_lsn, peer, Noted(number=number)))

    def is_unanswered(self, peer: bytes) -> bool:
        """Return whether a trainer waits until a record is safe. A trainer sends one message at a time."""
        return peer in self._unanswered

    def refuse(self, peer: bytes, number: int, why: str) -> list[Effect]:
        """Refuse message ``number`` of a trainer."""
        return [self._answer(peer, Noted(number=number, refusal=why))]

    def safe(self) -> list[Effect]:
        """Answer the messages that are safe now, and serve the subscribers that waited for them."""
        effects: list[Effect] = []
        while self._answers and self._answers[0][0] <= self._journal.safe_upto:
            _, peer, answer = self._answers.popleft()
            self._unanswered.discard(peer)
            effects.append(self._answer(peer, answer))
        return effects + self.subscribers.serve()

    def _answer(self, peer: bytes, answer: Noted) -> Effect:
        """Return the effect that answers the trainer at ``peer``."""
        return SendTrainer(peer, self._identity.envelope(answer))


def _num_others(ids: I64, samples: I64) -> int:
    """Return the number of ``ids`` that are not among ``samples``; int64 [n, 3] each, the ids once each."""
    return len(np.unique(np.concatenate([ids, samples]), axis=0)) - len(np.unique(samples, axis=0))


def _fault(message: ReportValues, payload: tuple[Any, ...], num_streams: int) -> str:
    """Return an error text if a message contradicts itself or names other streams; empty if not."""
    count = len(message.streams_u32) // 4
    columns = (message.streams_u32, 4), (message.indices_u64, 8), (message.parts_u32, 4)
    if any(len(column) != width * count for column, width in columns):
        return f"got ids of {[len(column) for column, _ in columns]} bytes, expected ids of {count} samples"
    if not message.names or len(set(message.names)) != len(message.names) or len(payload) != len(message.names):
        return f"got {len(payload)} columns for the names {list(message.names)}, expected one for each name"
    wrong = [size for frame in payload if (size := memoryview(frame).nbytes) != 8 * count]
    if wrong:
        return f"got a column of {wrong[0]} bytes, expected {8 * count} bytes for {count} samples"
    if message.part >= message.parts:
        return f"got part {message.part} of {message.parts}, expected a smaller number"
    ids = ids_of(message)
    if count and int(ids[:, 0].max()) >= num_streams:
        return f"got samples of stream number {ids[:, 0].max()}, expected a number below {num_streams}"
    if len(np.unique(ids, axis=0)) != count:
        return "got a sample more than once, expected each sample once"
    return ""
