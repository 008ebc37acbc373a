"""The values that ranks report for a feed's steps, and the subscribers that read them.

A step is complete once every part has come; then subscribers get it. Its place is the log sequence number of its last
record, which grows from step to step and stays the same after a restart. If the trainers train a step again before it
is complete, the parts of the newest attempt count. A complete step is not reported again in its lineage: a subscriber
gets each sample of a step at most once. This holds for steps whose values are forgotten, too, except after a restart.

A new attempt may begin while some ranks are done with a step and others are not, for example if the broker restarts.
Ranks that are done do not train the step again. So their parts count in the new attempt, too, and are recorded again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec import UNSET

from streampack.core.journal.journal import Journal
from streampack.core.journal.log_effects import Recall, Recalled
from streampack.core.journal.log_records import ValuesReported
from streampack.core.model.samples import I64
from streampack.core.protocol.effects import SendTrainer
from streampack.core.protocol.events import Effect, Report
from streampack.core.protocol.message import Identity, Message
from streampack.core.protocol.trainer_messages import AskResults, Noted, ReportValues, Results
from streampack.core.results.merge_parts import ids_of, merge_parts
from streampack.core.results.step_ranges import StepRanges

MOST_WAITING = 256
"""Most subscribers of a feed that wait for its next step."""
WAIT_S = 5.0
"""Seconds after which a subscriber that does not ask again is forgotten."""
PENDING_BYTES, LEAST_PENDING = 8 << 20, 16
"""Most bytes of the parts of steps that are not complete; the oldest step is forgotten beyond it, unless only so many
are left."""
MOST_PENDING = 2048
"""Most steps that are not complete, each counted for every set of names; the oldest is forgotten beyond it."""
MOST_NAMES = 8
"""Most different sets of names that are reported for a step."""
KEPT_STEPS = 64
"""Complete steps that are kept in memory without a log."""
Key = tuple[int, int, tuple[str, ...]]
"""(lineage, step, names)."""
Returned = Callable[[int, int], int]
"""Function that returns how many steps a rank has returned, from the number of its part, and the number of parts."""
Locate = Callable[[I64], tuple[I64, I64]]
"""Function that returns partition and sent number of samples, int64 [n] each, from their ids."""


class CompleteStep(NamedTuple):
    """A step of which every part has come: its place, and the log sequence number of each part."""

    cursor: int
    key: Key
    lsns: tuple[int, ...]


@dataclass(slots=True)
class _Parts:
    """Parts of a step: log sequence number and newest record of each, by number.

    ``attempt`` is the newest attempt. Parts of earlier attempts do not count yet.
    """

    attempt: tuple[int, int]
    found: dict[int, tuple[int, ValuesReported]] = field(default_factory=dict)

    def has(self, part: int, attempt: tuple[int, int]) -> bool:
        """Return whether a part of this attempt, or of a newer one, is known."""
        return part in self.found and self.found[part][1].attempt >= attempt

    @property
    def num_bytes(self) -> int:
        """Bytes of the parts' values and ids."""
        return sum(sum(map(len, record.values)) + 4 * len(record.streams_u32) for _, record in self.found.values())

    def put(self, lsn: int, record: ValuesReported) -> None:
        """Add a part. Parts that belong to another mesh than the newest attempt are dropped."""
        if record.attempt >= self.attempt:
            self.attempt = record.attempt
            self.found = {part: each for part, each in self.found.items() if each[1].parts == record.parts}
        elif any(each.parts != record.parts for _, each in self.found.values()):
            return
        self.found[record.part] = lsn, record

    @property
    def earlier(self) -> list[ValuesReported]:
        """The parts of earlier attempts."""
        return [record for _, record in self.found.values() if record.attempt < self.attempt]

    @property
    def complete(self) -> bool:
        """True if every part of the newest attempt is there."""
        return not self.earlier and all(len(self.found) == record.parts for _, record in self.found.values())


class _Waiting(NamedTuple):
    """A subscriber that waits for the first step from ``cursor`` on, and the time of its last request."""

    number: int
    cursor: int
    heard: float


@dataclass(slots=True)
class _Reading:
    """A complete step that is read from the log for some subscribers."""

    step: CompleteStep
    to: list[tuple[bytes, int]]
    parts: list[ValuesReported] = field(default_factory=list)


class StepValues:
    """The values of one feed's steps.

    Args:
        identity: The run and the epoch of the broker.
        feed: Name of the feed.
        journal: The journal of the broker.
        locate: Finds where samples came from.
    """

    def __init__(self, identity: Identity, feed: str, journal: Journal, locate: Locate) -> None:
        self._identity, self._feed, self._journal, self._locate = identity, feed, journal, locate
        self.streams: Sequence[str] = ()
        """Names of the feed's streams."""
        self._pending: dict[Key, _Parts] = {}
        self._pending_bytes = 0
        self._forgotten: list[Key] = []
        """Steps that were forgotten before they were complete, and not reported yet."""
        self._complete: list[CompleteStep] = []
        self._done: dict[tuple[int, tuple[str, ...]], StepRanges] = {}
        """Steps that are complete, also forgotten ones, by (lineage, names)."""
        self._kept: dict[int, ValuesReported] = {}
        """Records, by number, if there is no log."""
        self._waiting: dict[bytes, _Waiting] = {}
        self._reading: deque[_Reading] = deque()
        self._read_for: dict[bytes, int] = {}
        """Numbers of the requests for which a step is read from the log, by subscriber."""
        self._answers: deque[tuple[int, bytes, Noted]] = deque()
        self._unanswered: set[bytes] = set()
        """Connections of trainers with an answer in ``_answers``."""
        self._now = 0.0

    @property
    def num_complete(self) -> int:
        """Number of complete steps that the broker still has."""
        return len(self._complete)

    # Reports

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
        refusal = _fault(message, payload, len(self.streams))
        if not refusal and samples is not None and (others := _num_others(ids_of(message), samples)):
            refusal = (
                f"got values for {others} samples that this rank does not have in step {message.step}, expected its "
                f"own samples, Step.sample_ids"
            )
        if not refusal and (message.step >= upto or message.lineage > lineage):
            refusal = f"got values for step {message.step}, expected a step that was served: one before step {upto}"
        if not refusal and message.lineage == lineage and self._has_other_names(message):
            refusal = (
                f"got a {MOST_NAMES + 1}th set of names for step {message.step}, expected at most {MOST_NAMES} sets"
            )
        if refusal:
            return self.refuse(peer, message.number, refusal)
        effects = self._take(message, payload) if message.lineage == lineage else []
        self.note(peer, message.number)
        return effects + self.safe()

    def _take(self, message: ReportValues, payload: tuple[Any, ...]) -> list[Effect]:
        """Record a part, unless it is known or older than what is known."""
        key = message.lineage, message.step, message.names
        known = self._pending.get(key)
        if self._is_done(key) or (known is not None and known.has(message.part, message.attempt)):
            return []
        record = ValuesReported(
            feed=self._feed, lineage=message.lineage, step=message.step, attempt=message.attempt, part=message.part,
            parts=message.parts, names=message.names, streams_u32=message.streams_u32,
            indices_u64=message.indices_u64, parts_u32=message.parts_u32, values=[bytes(frame) for frame in payload],
        )  # fmt: skip
        effects = self._journal.append(record)
        self.add(self._journal.next_lsn - 1, record)
        return effects + self._warn_of_forgotten()

    def _has_other_names(self, message: ReportValues) -> bool:
        """Return whether as many sets of names as there may be are reported for a step, and this set is another."""
        place = message.lineage, message.step
        known = {key[2] for key in self._pending if key[:2] == place}
        known |= {names for lineage, names in self._done if self._is_done((*place, names)) and lineage == place[0]}
        return len(known) >= MOST_NAMES and message.names not in known

    def _warn_of_forgotten(self) -> list[Effect]:
        """Return a warning about steps that were forgotten before every rank has reported."""
        forgotten, self._forgotten = self._forgotten, []
        return [
            Report("warning", (
                f"feed {self._feed!r}: forgot the values of step {step} ({', '.join(names)[:100]}), because not every "
                f"rank reported them. Call Step.report on every rank"
            ), feed=self._feed, step=step)
            for _, step, names in forgotten[:1]
        ]  # fmt: skip

    def _bound_pending(self) -> None:
        """Forget the oldest steps that are not complete while all of them are too many, or have too many bytes."""
        while len(self._pending) > (LEAST_PENDING if self._pending_bytes > PENDING_BYTES else MOST_PENDING):
            oldest = min(self._pending, key=lambda key: key[:2])
            self._pending_bytes -= self._pending.pop(oldest).num_bytes
            self._forgotten.append(oldest)

    def add(self, lsn: int, record: ValuesReported) -> None:
        """Add a recorded part, also one of an earlier broker."""
        key = record.lineage, record.step, record.names
        if self._is_done(key):
            return
        known = self._pending.setdefault(key, _Parts(record.attempt))
        if known.has(record.part, record.attempt):
            return
        self._pending_bytes -= known.num_bytes
        known.put(lsn, record)
        self._pending_bytes += known.num_bytes
        if not known.complete:
            self._bound_pending()
            return
        if not self._journal.keeps:
            self._kept |= dict(known.found.values())
        self._pending_bytes -= self._pending.pop(key).num_bytes
        self._done.setdefault((record.lineage, record.names), StepRanges()).add(record.step)
        self._complete.append(CompleteStep(lsn, key, tuple(sorted(at for at, _ in known.found.values()))))
        if not self._journal.keeps and len(self._complete) > KEPT_STEPS:
            self._forget(1)

    def _is_done(self, key: Key) -> bool:
        """Return whether a step is complete."""
        lineage, step, names = key
        return (lineage, names) in self._done and step in self._done[lineage, names]

    def carry(self, returned: Returned) -> list[Effect]:
        """Record parts of earlier attempts again, if their ranks have returned the step and so report it no more."""
        effects: list[Effect] = []
        for (_, step, _), parts in list(self._pending.items()):
            for record in parts.earlier:
                if returned(record.part, record.parts) > step:
                    again = msgspec.structs.replace(record, attempt=parts.attempt)
                    effects += self._journal.append(again)
                    self.add(self._journal.next_lsn - 1, again)
        return effects + self.safe() if effects else []

    def branch(self, lineage: int) -> None:
        """Forget which steps of earlier lineages are complete or not: no part of them is recorded any more."""
        self._pending = {key: parts for key, parts in self._pending.items() if key[0] >= lineage}
        self._pending_bytes = sum(parts.num_bytes for parts in self._pending.values())
        self._done = {key: steps for key, steps in self._done.items() if key[0] >= lineage}

    def forget_below(self, lsn: int) -> None:
        """Forget the steps with records below ``lsn``: these records were deleted from the log."""
        self._forget(sum(step.lsns[0] < lsn for step in self._complete))
        for key, parts in list(self._pending.items()):
            parts.found = {part: each for part, each in parts.found.items() if each[0] >= lsn}
            if not parts.found:
                del self._pending[key]
        self._pending_bytes = sum(parts.num_bytes for parts in self._pending.values())

    def _forget(self, count: int) -> None:
        """Forget the values of the oldest complete steps."""
        for step in self._complete[:count]:
            for lsn in step.lsns:
                self._kept.pop(lsn, None)
        del self._complete[:count]

    # Subscribers

    def ask(self, peer: bytes, message: AskResults, now: float) -> list[Effect]:
        """Send a subscriber the first step from its cursor on, or let it wait."""
        self._now = now
        if message.cursor is UNSET:
            end = self._complete[-1].cursor + 1 if self._complete else 0
            return [self._send(peer, Results(feed=self._feed, number=message.number, cursor=end))]
        if self._read_for.get(peer) == message.number:
            return []  # it repeats its request
        if peer not in self._waiting and len(self._waiting) + len(self._read_for) >= MOST_WAITING:
            text = f"got more than {MOST_WAITING} subscribers of feed {self._feed!r}, expected fewer"
            return [self._send(peer, Noted(number=message.number, refusal=text))]
        self._waiting[peer] = _Waiting(message.number, message.cursor, now)
        return self._serve([peer])

    def _serve(self, peers: Sequence[bytes]) -> list[Effect]:
        """Read the next step of each subscriber that waits and for which there is one, from the log.

        One step at a time is read for a subscriber, or its requests would take the memory of many steps.
        """
        effects: list[Effect] = []
        for peer in peers:
            number, cursor, _ = self._waiting[peer]
            if peer in self._read_for:
                continue
            at = bisect_left(self._complete, cursor, key=lambda step: step.cursor)
            if at == len(self._complete) or self._complete[at].cursor >= self._journal.safe_upto:
                continue
            del self._waiting[peer]
            step = self._complete[at]
            if self._journal.keeps:
                self._read_for[peer] = number
            reading = next((each for each in self._reading if each.step is step and not each.parts), None)
            if reading is not None:
                reading.to.append((peer, number))
                continue
            reading = _Reading(step, [(peer, number)])
            if self._journal.keeps:
                self._reading.append(reading)
                effects += [Recall(self._feed, lsn) for lsn in step.lsns]
            else:
                reading.parts = [self._kept[lsn] for lsn in step.lsns]
                effects += self._deliver(reading)
        return effects

    def recalled(self, event: Recalled) -> list[Effect]:
        """Take a part that was read from the log, and send the step once all parts are there."""
        assert isinstance(event.record, ValuesReported)
        if not self._reading:
            return []
        reading = self._reading[0]
        reading.parts.append(event.record)
        if len(reading.parts) < len(reading.step.lsns):
            return []
        self._reading.popleft()
        peers = [peer for peer, _ in reading.to]
        for peer in peers:
            del self._read_for[peer]
        return self._deliver(reading) + self._serve([peer for peer in peers if peer in self._waiting])

    def _deliver(self, reading: _Reading) -> list[Effect]:
        """Send a step to its subscribers."""
        merged = merge_parts(reading.parts)
        partitions, seqs = self._locate(merged.ids)
        lineage, step, names = reading.step.key
        payload = tuple(column.astype("<f8").tobytes() for column in merged.values)
        answer = Results(
            feed=self._feed, number=0, cursor=reading.step.cursor + 1, lineage=lineage, step=step, names=names,
            streams=list(self.streams), streams_u32=merged.ids[:, 0].astype("<u4").tobytes(),
            indices_u64=merged.ids[:, 1].astype("<u8").tobytes(), parts_u32=merged.ids[:, 2].astype("<u4").tobytes(),
            partitions_u32=partitions.astype("<u4").tobytes(), seqs_u64=seqs.astype("<u8").tobytes(),
        )  # fmt: skip
        return [
            self._send(peer, msgspec.structs.replace(answer, number=number), payload) for peer, number in reading.to
        ]

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
        return [self._send(peer, Noted(number=number, refusal=why))]

    def safe(self) -> list[Effect]:
        """Answer what is safe now, and serve the subscribers that waited for it."""
        effects: list[Effect] = []
        while self._answers and self._answers[0][0] <= self._journal.safe_upto:
            _, peer, answer = self._answers.popleft()
            self._unanswered.discard(peer)
            effects.append(self._send(peer, answer))
        return effects + (self._serve(list(self._waiting)) if self._waiting else [])

    def tick(self, now: float) -> None:
        """Forget subscribers that do not ask any more."""
        self._now = now
        gone = [peer for peer, waiting in self._waiting.items() if now - waiting.heard > WAIT_S]
        for peer in gone:
            del self._waiting[peer]

    def _send(self, peer: bytes, message: Message, payload: tuple[Any, ...] = ()) -> Effect:
        """Return the effect that sends a message to the trainer or subscriber at ``peer``."""
        return SendTrainer(peer, self._identity.envelope(message, 0, payload))


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
