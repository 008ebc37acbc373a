"""The flow of parts to one receiver: which parts were sent, and how many bytes are on their way.

The bytes that are sent and not confirmed are bounded, for each receiver and for all together. So a slow link does not
fill the memory. A part is sent again only if the receiver proves that it was lost: its request has a higher number
than before.

The broker has a flow for each relay, and for each reader that has none. A relay has a flow for each of its readers. The
module knows places and sizes of parts, and no steps.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

RESEND_S = 1.0
"""Least seconds between two times that parts are sent again to a receiver that confirms nothing in between."""
MAX_AHEAD = 64
"""Most steps that one request may ask for."""
ACKS = 2
"""Confirmations that a receiver sends while it receives as many bytes as may be on their way to it."""

Place = tuple[int, int]
"""(step, part)."""


@dataclass(slots=True, eq=False)
class PartFlow:
    """The parts that were sent to one receiver.

    Attributes:
        sent_upto, sent_part: All steps before ``sent_upto`` are sent, and the parts before ``sent_part`` of that step.
        ever_sent: Highest (step, part) that ``sent_upto`` and ``sent_part`` had since ``begin``.
        queued: (step, part, bytes) of parts that are sent and not confirmed, in order.
        queued_bytes: Bytes of these parts.
        unreached: True if a part could not be sent; no more is sent until the receiver's next message.
        want_stop: The receiver wants the steps before this one.
        request: Number of its last request to send parts again.
        resent_at: Time at which parts were last sent again.
    """

    sent_upto: int = 0
    sent_part: int = 0
    ever_sent: Place = (0, 0)
    queued: deque[tuple[int, int, int]] = field(default_factory=deque)
    queued_bytes: int = 0
    unreached: bool = False
    want_stop: int = 0
    request: int = 0
    resent_at: float = -RESEND_S

    @property
    def place(self) -> Place:
        """(step, part) of the next part to send."""
        return self.sent_upto, self.sent_part

    @place.setter
    def place(self, place: Place) -> None:
        self.sent_upto, self.sent_part = place

    def may_resend(self, request: int, now: float) -> bool:
        """Return whether a request of this number makes the sender go back, at time ``now``."""
        return request > self.request and now >= self.resent_at + RESEND_S


class PartFlows:
    """The limits of the bytes on their way to all receivers of one sender.

    Attributes:
        leaving_bytes: Most bytes that may be on their way to all receivers together.
        queued_bytes: Bytes that are on their way to all receivers together.
        resent_bytes: Bytes that were sent again because they were lost.
    """

    def __init__(self, leaving_bytes: int) -> None:
        self.leaving_bytes = leaving_bytes
        self.queued_bytes = 0
        self.resent_bytes = 0

    def begin(self, flow: PartFlow, step: int) -> None:
        """Begin to send at ``step``: a new attempt, or another connection."""
        self.forget_queue(flow)
        flow.place, flow.ever_sent = (step, 0), (step, 0)
        flow.want_stop, flow.request, flow.resent_at = 0, 0, -RESEND_S

    def request(self, flow: PartFlow, start: int, stop: int, part: int) -> None:
        """Take a request for the steps before ``stop``, which confirms every part before ``part`` of ``start``."""
        flow.want_stop = max(flow.want_stop, min(stop, start + MAX_AHEAD))
        self.confirm(flow, start, part)

    def send_again(self, flow: PartFlow, place: Place, request: int, now: float) -> None:
        """Go back to ``place``, in answer to the request of this number."""
        flow.request, flow.resent_at = request, now
        self.forget_queue(flow)
        flow.place = place
        flow.ever_sent = max(flow.ever_sent, place)

    def confirm(self, flow: PartFlow, step: int, part: int) -> None:
        """Record a message of the receiver, which has every part before part ``part`` of ``step``."""
        flow.unreached = False
        while flow.queued and flow.queued[0][:2] < (step, part):
            self._count_out(flow, flow.queued.popleft()[2])
            flow.resent_at = -RESEND_S

    def sent(self, flow: PartFlow, place: Place, is_last: bool, num_bytes: int) -> None:
        """Record that the part at ``place`` is sent; ``is_last`` if it is the last part of its step."""
        if place < flow.ever_sent:
            self.resent_bytes += num_bytes
        step, part = place
        flow.place = (step + 1, 0) if is_last else (step, part + 1)
        flow.ever_sent = max(flow.ever_sent, flow.place)
        flow.queued.append((*place, num_bytes))
        self._count_out(flow, -num_bytes)

    def not_sent(self, flow: PartFlow, place: Place, request: int) -> None:
        """Record that a part was dropped before it left; it is sent again after the receiver's next message."""
        flow.unreached = True
        if request == flow.request and place < flow.place:
            while flow.queued and flow.queued[-1][:2] >= place:
                self._count_out(flow, flow.queued.pop()[2])
            flow.place = place

    def forget_queue(self, flow: PartFlow) -> None:
        """Forget the parts that are on their way to a receiver, and do not count their bytes any more."""
        self._count_out(flow, flow.queued_bytes)
        flow.queued.clear()
        flow.unreached = False

    @property
    def is_full(self) -> bool:
        """True if no more bytes may be on their way to all receivers together."""
        return self.queued_bytes >= self.leaving_bytes

    def may_send(self, flow: PartFlow, most_queued: int) -> bool:
        """Return whether ``most_queued``, the limit of bytes on their way to this receiver, allows another part.

        ``is_full`` is checked separately.
        """
        return not flow.unreached and (not flow.queued or flow.queued_bytes < most_queued)

    def _count_out(self, flow: PartFlow, num_bytes: int) -> None:
        """Subtract bytes from those that are on their way to a receiver."""
        flow.queued_bytes -= num_bytes
        self.queued_bytes -= num_bytes
