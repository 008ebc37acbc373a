"""The complete steps of one feed, and the subscribers that read their values.

The place of a step is the log sequence number of its last record. It grows from step to step, and stays the same after
a restart. A subscriber gets each sample of a step at most once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from msgspec import UNSET
from msgspec.structs import replace

from streampack.core.journal.journal import Journal
from streampack.core.journal.log_effects import Recall, Recalled
from streampack.core.journal.log_records import ValuesReported
from streampack.core.model.samples import I64
from streampack.core.protocol.effects import SendTrainer
from streampack.core.protocol.events import Effect
from streampack.core.protocol.message import Identity, Message
from streampack.core.protocol.result_messages import AskResults, Noted, Results
from streampack.core.results.merge_parts import merge_parts
from streampack.core.results.pending_steps import Key, Parts

MOST_WAITING = 256
"""Most subscribers of a feed that wait for its next step."""
WAIT_S = 5.0
"""Seconds after which a subscriber that does not ask again is forgotten."""
KEPT_STEPS = 64
"""Complete steps that are kept in memory without a log."""
Locate = Callable[[I64], tuple[I64, I64]]
"""Function that returns partition and sent number of samples, int64 [n] each, from their ids."""


class _CompleteStep(NamedTuple):
    """A step with all of its parts: its place, and the log sequence number of each part."""

    cursor: int
    key: Key
    lsns: tuple[int, ...]


class _Waiting(NamedTuple):
    """A subscriber that waits for the first step from ``cursor`` on, and the time of its last request."""

    number: int
    cursor: int
    heard: float


@dataclass(slots=True)
class _Reading:
    """A complete step that is read from the log for some subscribers."""

    step: _CompleteStep
    to: list[tuple[bytes, int]]
    parts: list[ValuesReported] = field(default_factory=list)


class Subscribers:
    """The subscribers of one feed.

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
        self._complete: list[_CompleteStep] = []
        self._kept: dict[int, ValuesReported] = {}
        """Records, by number, if there is no log."""
        self._waiting: dict[bytes, _Waiting] = {}
        self._reading: deque[_Reading] = deque()
        self._read_for: dict[bytes, int] = {}
        """Numbers of the requests for which a step is read from the log, by subscriber."""

    def add(self, lsn: int, key: Key, parts: Parts) -> None:
        """Add a step that the record ``lsn`` has completed."""
        if not self._journal.keeps:
            self._kept |= dict(parts.values())
        self._complete.append(_CompleteStep(lsn, key, tuple(sorted(at for at, _ in parts.values()))))
        if not self._journal.keeps and len(self._complete) > KEPT_STEPS:
            self._forget(1)

    def forget_below(self, lsn: int) -> None:
        """Forget the steps with records below ``lsn``: these records were deleted from the log."""
        self._forget(sum(step.lsns[0] < lsn for step in self._complete))

    def _forget(self, count: int) -> None:
        """Forget the values of the oldest complete steps."""
        for step in self._complete[:count]:
            for lsn in step.lsns:
                self._kept.pop(lsn, None)
        del self._complete[:count]

    def tick(self, now: float) -> None:
        """Forget subscribers that do not ask any more."""
        self._waiting = {peer: wait for peer, wait in self._waiting.items() if now - wait.heard <= WAIT_S}

    def ask(self, peer: bytes, message: AskResults, now: float) -> list[Effect]:
        """Send a subscriber the first step from its cursor on, or let it wait."""
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

    def serve(self) -> list[Effect]:
        """Serve the subscribers that wait: further records may be safe."""
        return self._serve(list(self._waiting)) if self._waiting else []

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
            effects += self._read(self._complete[at], peer, number)
        return effects

    def _read(self, step: _CompleteStep, peer: bytes, number: int) -> list[Effect]:
        """Read a step for request ``number`` of a subscriber; others that ask for it meanwhile share the read."""
        if not self._journal.keeps:
            return self._deliver(_Reading(step, [(peer, number)], [self._kept[lsn] for lsn in step.lsns]))
        self._read_for[peer] = number
        for reading in self._reading:
            if reading.step is step and not reading.parts:
                reading.to.append((peer, number))
                return []
        self._reading.append(_Reading(step, [(peer, number)]))
        return [Recall(self._feed, lsn) for lsn in step.lsns]

    def recalled(self, event: Recalled) -> list[Effect]:
        """Take a part that was read from the log, and send the step once all of its parts have been read."""
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
        return [self._send(peer, replace(answer, number=number), payload) for peer, number in reading.to]

    def _send(self, peer: bytes, message: Message, payload: tuple[Any, ...] = ()) -> Effect:
        """Return the effect that sends a message to the subscriber at ``peer``."""
        return SendTrainer(peer, self._identity.envelope(message, 0, payload))
