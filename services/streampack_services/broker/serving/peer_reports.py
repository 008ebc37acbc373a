"""Log lines that peers cause: reports of the core, refused messages of a key, and connections that were cut."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque

from streampack.core.protocol.events import Report
from streampack.core.protocol.rights import key_of
from streampack.transport.unread import CutConnection
from streampack_services.broker.report_limit import KEY_BURST, KEY_PER_SECOND, ReportLimit
from streampack_services.broker.reporter import Counters
from streampack_services.broker.serving.allowed_keys import Allowed

log = logging.getLogger("streampack.broker")

MANY_WARNINGS, TELL_MANY_S = 100, 600.0
"""Refused messages of a key after which the log has their number and the command that revokes the key. The log has them
again after so many seconds."""
TELL_CUT_S = 3.0
"""Seconds until the cut of a connection is logged, unless its key is blocked until then."""


class PeerReports:
    """Logs what peers cause, and leaves lines out if they cause too many."""

    def __init__(self, allowed: Allowed | None, counters: Counters) -> None:
        self._allowed, self._counters = allowed, counters
        self.speaking = b""
        """Connection of the message that is handled; empty outside."""
        self._lines = ReportLimit()
        self._key_lines: dict[str, ReportLimit] = {}
        """Limits on the log lines about messages of a key, by the text that names the key."""
        self._warnings = Counter[str]()
        """Number of warnings about messages, by name of the key."""
        self._tell_many_at: dict[str, float] = {}
        """When their number may be logged again, by name of the key."""
        self._cut_lines: deque[tuple[float, bytes, str]] = deque()
        """Log lines about cut connections of keys: when they are due, the peer, and the text."""

    def report(self, report: Report) -> None:
        """Log a report of the core; leave it out if peers cause too many lines, unless it is an error.

        With keys, a warning about a message names its key.
        """
        suffix = self._note_warning() if report.level == "warning" else ""
        now = time.monotonic()
        if suffix and not self._key_lines.setdefault(suffix, ReportLimit(KEY_BURST, KEY_PER_SECOND)).allows(now):
            return
        if report.level != "error" and not self._lines.allows(now):
            return
        limits = (self._lines, *self._key_lines.values())
        if held_back := sum(limit.take_held_back() for limit in limits):
            log.warning("suppressed %d log lines that peers caused", held_back)
        log.log(logging.getLevelName(report.level.upper()), report.text + suffix, extra={"about": report.about})

    def _note_warning(self) -> str:
        """Count a warning against the key of the message that is handled; return a text that names the key.

        After many, log their number and the command that ends the key's connections.
        """
        if self._allowed is None or not self.speaking:
            return ""
        name = self._allowed.name(self.speaking)
        self._warnings[name] += 1
        count, now = self._warnings[name], time.monotonic()
        if count >= MANY_WARNINGS and now >= self._tell_many_at.get(name, 0.0):
            self._tell_many_at[name] = now + TELL_MANY_S
            log.warning(
                "key %r: %d of its messages were refused so far. To end its connections, run 'streampack keys revoke "
                "%s %s'", name, count, self._allowed.folder, name,
            )  # fmt: skip
        return f" (key {name!r})"

    def on_cut(self, cut: CutConnection) -> None:
        """Count and log a connection that the router has cut, and count the cut against the key of the peer."""
        self._counters.cut += 1
        if self._allowed is None or not cut.peer:
            self.report(Report("warning", f"cut the connection of {cut.address}: {cut.why}"))
            return
        text = f"cut the connection of {cut.address} (key {self._allowed.name(cut.peer)!r}): {cut.why}"
        if self._allowed.rights(cut.peer).role == "none":  # its key was revoked
            self.report(Report("warning", text))
            return
        self._allowed.note_cut(cut.peer, cut.why)
        self._cut_lines.append((time.monotonic() + TELL_CUT_S, cut.peer, text))

    def tell_cuts(self, now: float) -> None:
        """Log the cuts of keys, unless the key was blocked since: then the log has its name and the reason already."""
        while self._allowed is not None and self._cut_lines and self._cut_lines[0][0] <= now:
            _, peer, text = self._cut_lines.popleft()
            if not self._allowed.is_shut_out(key_of(peer).decode("ascii", "replace")):
                self.report(Report("warning", text))
