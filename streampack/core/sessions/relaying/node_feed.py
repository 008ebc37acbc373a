"""The steps of one feed that a relay has for its readers, and the relay's requests for more.

The relay requests steps as a client does (``client_session``), but for all its readers at once. It splits each part
into the parts that the readers would get directly, and keeps those until every reader has received them. Parts belong
to one attempt of one broker; a new attempt drops them all.

Parts are numbered for the ranks that were there when the relay last raised ``request``. So the relay raises it, and
begins with whole steps again, when a part was lost or a further rank needs parts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from streampack.core.deal.node_parts import split
from streampack.core.deal.part_flow import Place
from streampack.core.model.rules import Rules
from streampack.core.protocol.message import Envelope
from streampack.core.protocol.relay_messages import NodePart
from streampack.core.protocol.step_part import StepPart
from streampack.core.protocol.trainer_messages import Attached, End, Wait
from streampack.core.sessions.backoff import Backoff, PingTimes

RETRY_S = 2.0
"""Seconds after which a request without an answer is repeated; each further delay is longer."""
MOST_RETRY_S = 8.0
"""Longest of these delays, in seconds."""

Pair = tuple[int, int]
"""(dp rank, cp rank)."""
RankPart = tuple[StepPart, tuple[memoryview, ...]]


class Share(NamedTuple):
    """A rank's part of a step: the packs and shards of its ``pair``, with the payload ``frames``."""

    pair: Pair
    frames: tuple[str, ...]

    def fits(self, part: StepPart) -> bool:
        """Return whether a part for the ranks of this pair has every frame that this rank gets."""
        return not part.micro_batches or {*part.frames} >= {*self.frames}


NOTHING = Share((0, 0), ())
"""The share of a rank that takes no part yet."""


@dataclass(slots=True)
class _Step:
    """The parts of one step that have come, and their bytes: by (dp rank, cp rank), then by the number of the part."""

    parts: dict[Pair, dict[int, RankPart]] = field(default_factory=dict)
    num_bytes: int = 0

    def has_all(self, share: Share) -> bool:
        """Return whether every part of a rank's share has come."""
        numbered = self.parts.get(share.pair, {})
        whole = any(len(numbered) == part.parts for part, _ in numbered.values())
        return whole and all(share.fits(part) for part, _ in numbered.values())


class NodeFeed:
    """The steps of one feed for the readers of one relay, in one attempt.

    Attributes:
        fence: The attempt.
        lineage: Lineage of the steps.
        pings: The times of the relay's pings.
        ack_bytes: Bytes after which received parts are confirmed.
        wait: Cause of the wait for the next step, as the broker reports it.
        end: The end of the feed, once the broker has told it.
        request: Number of the last request to send parts again. It never falls, so that no part answers two requests.
        next: (step, part) that is expected next.
        stop: The steps before this one are requested.
        num_bytes: Bytes of the kept parts.
        largest_step: Most bytes of the parts of one step so far.
        told_done: Least number of returned steps that a request has reported.
        unconfirmed_bytes: Bytes that came since the last request.
    """

    def __init__(self, name: str, relay: str) -> None:
        self.name = name
        self.fence = self.lineage = 0
        self.pings, self.ack_bytes = PingTimes(relay), 1 << 20
        self.rules: Rules | None = None
        self.layout = ""
        self.again = Backoff(f"{relay} get", RETRY_S, MOST_RETRY_S)
        self.request = 0
        self._drop()

    def _drop(self) -> None:
        """Forget all parts and requests."""
        self.wait: Wait | None = None
        self.end: End | None = None
        self.next: Place = (0, 0)
        self.stop = 0
        self.num_bytes = self.largest_step = 0
        self.told_done = 0
        self.unconfirmed_bytes = 0
        self._steps: dict[int, _Step] = {}
        self._requested: dict[str, Share] = {}
        """The readers whose parts the broker was asked for, by name."""

    def begin(self, fence: int, attached: Attached) -> None:
        """Take the broker's answer to a reader that takes part in the attempt ``fence``."""
        if (fence, attached.lineage) != (self.fence, self.lineage):
            self.leave()
            self.fence, self.lineage = fence, attached.lineage
        self.rules, self.layout = attached.rules, attached.layout
        self.pings.every_s, self.ack_bytes = attached.ping_s, attached.ack_bytes

    def leave(self) -> None:
        """Drop everything of the attempt: it is over, or another broker has taken over."""
        self.fence = 0
        self._drop()

    # Parts

    def joins(self, reader: str) -> None:
        """Record that a reader takes part from now on: the broker did not know it when it was asked last."""
        self._requested.pop(reader, None)

    def covers(self, share: Share) -> bool:
        """Return whether the broker was asked for the parts of a rank, for this rank or for another."""
        return any(share.pair == ask.pair and {*ask.frames} >= {*share.frames} for ask in self._requested.values())

    def has_all(self, step: int, share: Share) -> bool:
        """Return whether every part of ``step`` for a rank has come."""
        kept = self._steps.get(step)
        return kept is not None and kept.has_all(share)

    def first_missing(self, step: int, share: Share) -> int:
        """Return the first step from ``step`` on that lacks a part for a rank."""
        while self.has_all(step, share):
            step += 1
        return step

    def ask_again(self, step: int, shares: dict[str, Share]) -> None:
        """Prepare a request for all parts from ``step`` on, for the readers of these names."""
        self.request += 1
        self.next = (step, 0)
        self.unconfirmed_bytes = 0
        self._requested = shares

    def take(self, envelope: Envelope, part: NodePart) -> bool:
        """Take a part; return False if parts before it were lost.

        Raises ValueError for a part whose sizes do not fit, or that is not of the rules.
        """
        if part.request != self.request or (part.step, part.part) < self.next or self.rules is None:
            return True
        if part.step >= self.stop:
            return True  # no broker sends this
        if (part.step, part.part) > self.next:
            return False
        self.wait = None
        step = self._steps.setdefault(part.step, _Step())
        for pair, message, payload in split(part, envelope.payload, part.rules_of(self.rules), self.layout):
            step.parts.setdefault(pair, {})[message.part] = message, payload
        size = sum(len(frame) for frame in envelope.payload)
        step.num_bytes += size
        self.largest_step = max(self.largest_step, step.num_bytes)
        self.num_bytes += size
        self.unconfirmed_bytes += size
        self.next = (part.step + 1, 0) if part.part + 1 >= part.parts else (part.step, part.part + 1)
        return True

    def part(self, step: int, number: int, share: Share) -> RankPart | None:
        """Return part ``number`` of ``step`` for a rank; None if it has not come."""
        kept = self._steps.get(step)
        rank_part = None if kept is None else kept.parts.get(share.pair, {}).get(number)
        return rank_part if rank_part is not None and share.fits(rank_part[0]) else None

    def bytes_of(self, step: int) -> int:
        """Return the bytes of the parts of ``step`` that have come."""
        kept = self._steps.get(step)
        return 0 if kept is None else kept.num_bytes

    def forget_below(self, step: int) -> None:
        """Drop the parts of the steps before ``step``, which every reader has received."""
        for number in [number for number in self._steps if number < step]:
            self.num_bytes -= self._steps.pop(number).num_bytes
