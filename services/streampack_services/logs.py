"""Logging of the daemons: one line per event on standard error, as text or as JSON.

Daemons log the events that a person wants to know a day later: connections, long waits, rejections. At INFO, no line is
logged per pack, chunk or step; metrics have the figures. A warning is for a person to look at. An error means that data
is lost or that something stops.

The text of a line is complete for a person. Its subject comes as ``extra={"about": {...}}`` and is part of the JSON,
as is the ``run``. It names feed, stream, partition, step, attempt, rank, producer and host. A ``Ring`` holds the
last events for requests over HTTP.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections import deque
from itertools import islice
from typing import Literal

Level = Literal["debug", "info", "warning", "error"]
Event = dict[str, object]

KEPT = 500
"""Number of events that a ring holds."""
_LONGEST = 4000
"""Characters of a text or of the end of a traceback in a ring, because peers choose some of the text."""


def set_up(level: Level = "info", *, as_json: bool = False, run: str = "", ring: Ring | None = None) -> None:
    """Log to standard error from ``level`` up, and to ``ring`` from INFO up; JSON lines name the ``run``."""
    handler = _ToStderr()
    handler.setFormatter(_JsonLine(run) if as_json else _Line())
    handler.setLevel(level.upper())
    root = logging.getLogger()
    root.handlers[:] = [handler] if ring is None else [handler, ring]
    root.setLevel(min(handler.level for handler in root.handlers))
    logging.captureWarnings(True)


def as_event(record: logging.LogRecord, run: str = "") -> Event:
    """Return a log record as plain values: ``time`` (seconds since 1970), ``level``, ``logger``, ``text``, ``run``.

    The keys of its subject, ``figures`` and ``traceback`` are added if there are any.
    """
    event: Event = {
        "time": round(record.created, 3),
        "level": record.levelname.lower(),
        "logger": _name(record),
        "text": record.getMessage(),
    }
    if run:
        event["run"] = run
    event |= getattr(record, "about", {})
    if (figures := getattr(record, "figures", None)) is not None:
        event["figures"] = figures
    if record.exc_info:
        event["traceback"] = logging.Formatter().formatException(record.exc_info)
    return event


class Ring(logging.Handler):
    """A handler that holds the last ``keep`` events, numbered from 1 (``seq``); any thread may log and read."""

    def __init__(self, run: str = "", keep: int = KEPT) -> None:
        super().__init__(logging.INFO)
        self._run = run
        self._seq = 0
        self._events: deque[Event] = deque(maxlen=keep)

    def emit(self, record: logging.LogRecord) -> None:
        """Add a record as an event; ``logging`` calls this with the handler's lock."""
        try:
            event = as_event(record, self._run)
        except Exception:  # as in logging's own handlers: a faulty line does not end the daemon
            self.handleError(record)
            return
        event["text"] = str(event["text"])[:_LONGEST]
        if "traceback" in event:
            event["traceback"] = str(event["traceback"])[-_LONGEST:]
        self._seq += 1
        self._events.append({"seq": self._seq} | event)

    def since(self, seq: int) -> list[Event]:
        """Return the events after number ``seq``, oldest first; all events if ``seq`` is of another process.

        A number above that of the last event is of another process.
        """
        self.acquire()
        try:
            if seq > self._seq:
                seq = 0
            first = self._seq - len(self._events)
            return list(islice(self._events, max(0, seq - first), None))
        finally:
            self.release()


class _ToStderr(logging.Handler):
    """Writes to the current ``sys.stderr``, which a progress line may have replaced."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except Exception:  # as in logging's own handlers: a faulty line does not end the daemon
            self.handleError(record)


class _Line(logging.Formatter):
    """Formats a record as ``12:00:01 INFO broker: text``; a traceback follows on lines of its own."""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        text = printable(" ".join(record.getMessage().splitlines()))
        line = f"{clock} {record.levelname} {_name(record)}: {text}"
        if not record.exc_info:
            return line
        return "\n".join([line, *map(printable, self.formatException(record.exc_info).splitlines())])


class _JsonLine(logging.Formatter):
    """Formats a record as one JSON object on one line."""

    def __init__(self, run: str) -> None:
        super().__init__()
        self._run = run

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(as_event(record, self._run), ensure_ascii=False)


def printable(text: str) -> str:
    """Return ``text`` with ``?`` for every character that could control a terminal, since peers choose some text."""
    return text if text.isprintable() else "".join(char if char.isprintable() else "?" for char in text)


def _name(record: logging.LogRecord) -> str:
    """Return the logger's name without the package's name."""
    return record.name.removeprefix("streampack_services.").removeprefix("streampack.")
