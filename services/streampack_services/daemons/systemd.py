"""Tell systemd (``Type=notify``) that a daemon is ready, its status, that it stops, and that it is not stuck.

A message is a datagram of ``KEY=value`` lines to the socket that NOTIFY_SOCKET names, as in sd_notify(3). Without this
variable nothing is sent. Call ``tell`` from a daemon's main loop a few times a second, never from another thread. With
a watchdog (WATCHDOG_USEC), systemd ends a daemon whose main loop no longer calls it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Mapping

from streampack_services.amounts import count_text
from streampack_services.broker.status import BrokerStatus, FeedStatus

STATUS_EVERY_S = 5.0
"""Least seconds between two status lines."""


class Systemd:
    """The connection to the service manager that started this process, if there is one."""

    def __init__(self, env: Mapping[str, str] = os.environ) -> None:
        address = env.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        is_own = env.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        limit = env.get("WATCHDOG_USEC", "")
        self._watched = self._address != "" and is_own and limit.isdigit()
        self._beat_every_s = int(limit) / 2e6 if self._watched else 0.0  # half, as sd_watchdog_enabled(3) advises
        self._beat_at = self._status_at = 0.0
        self._status = ""
        self._sent: set[str] = set()

    def tell(self, *, ready: bool = False, stopping: bool = False, status: str = "") -> None:
        """Send the state if the state has changed, and the watchdog's message when one is due; ignore errors."""
        if not self._address:
            return
        now = time.monotonic()
        states = [word for word, is_so in (("READY=1", ready), ("STOPPING=1", stopping)) if is_so]
        lines = [word for word in states if word not in self._sent]
        self._sent.update(lines)
        if status != self._status and (lines or now >= self._status_at):
            self._status, self._status_at = status, now + STATUS_EVERY_S
            lines.append("STATUS=" + " ".join(status.split()))
        if self._watched and now >= self._beat_at:
            self._beat_at = now + self._beat_every_s
            lines.append("WATCHDOG=1")
        if lines:
            self._send("\n".join(lines))

    def tell_of_broker(self, broker: BrokerStatus) -> None:
        """Tell systemd the state of a broker. The thread that takes the broker's snapshots calls this method."""
        stopping = broker.state == "draining"
        self.tell(ready=broker.ready or stopping, stopping=stopping, status=in_a_line(broker))

    def _send(self, text: str) -> None:
        """Send ``text`` to systemd's socket; ignore errors."""
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender,
        ):
            sender.sendto(text.encode(), self._address)


def in_a_line(broker: BrokerStatus) -> str:
    """Return a broker's state as a line: ``serving: train step 120, 3.2M tokens/s``."""
    return f"{broker.state}: " + "; ".join(_feed(name, feed) for name, feed in broker.feeds.items())


def _feed(name: str, feed: FeedStatus) -> str:
    """Return a feed's state as text: ``train step 120, 3.2M tokens/s``."""
    why = f"; {feed.headline.text}" if feed.headline.cause or not feed.tokens_per_s else ""
    return f"{name} step {feed.steps.formed}, {count_text(feed.tokens_per_s)} tokens/s{why}"
