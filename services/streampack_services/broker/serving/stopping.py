"""The end of a broker: it hands over to its standby, waits until that has copied the log, or drains."""

from __future__ import annotations

import logging
import threading
import time

from streampack_services.standby.shipping import Shipping

log = logging.getLogger("streampack.broker")


class Stopping:
    """Decides how a broker that was asked to stop ends, and when.

    Args:
        drain_timeout_s: Most seconds until the end, unless the broker is asked again.
        shipping: Ships the log to a standby; None without one.
    """

    def __init__(self, drain_timeout_s: float, shipping: Shipping | None) -> None:
        self._drain_timeout_s, self._shipping = drain_timeout_s, shipping
        self._requested = threading.Event()
        self.at_once = False
        """True after the second request to stop."""
        self.hands_over = False
        """True once this broker ends and leaves its producers and trainers to the standby, without a goodbye."""
        self._copied_until: float | None = None
        """Time until which the broker waits for the standby to copy the log."""
        self._drain_until: float | None = None

    @property
    def is_asked(self) -> bool:
        """True once the broker was asked to stop."""
        return self._requested.is_set()

    def ask(self) -> None:
        """Ask the broker to stop; the second time, at once. Safe in any thread and in signal handlers."""
        self.at_once |= self.is_asked
        self._requested.set()

    def is_over(self, num_readers: int) -> bool:
        """Return True if the broker is to end now."""
        if self.at_once or self.hands_over or self._drain_until is None:
            return self.at_once or self.hands_over
        return not num_readers or time.monotonic() > self._drain_until

    def begins_to_drain(self, now: float) -> bool:
        """Return True once, when the broker is to drain: not while the standby takes over, or copies the log."""
        if not self.is_asked or self._drain_until is not None:
            return False
        if self._shipping is not None and self._shipping.may_hand_over:
            self.hands_over = True
            log.info("stopping: the standby takes over, and producers and trainers move to it")
            return False
        half_s = self._drain_timeout_s / 2
        if self._shipping is not None and self._shipping.lets_in:
            if self._copied_until is None:
                self._copied_until = now + half_s
                log.info("stopping: waiting at most %.0f s until the standby has copied the log", half_s)
            if now < self._copied_until:
                return False
        drain_s = self._drain_timeout_s if self._copied_until is None else half_s
        self._drain_until = now + drain_s
        log.info("draining: serving the steps that are formed, for at most %.0f s", drain_s)
        return True
