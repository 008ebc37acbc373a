"""Logging of the daemons: one line an event, on standard error, for people or, as JSON, for machines.

Daemons log what a person would want to know a day later: who came and went, long waits, what was
refused. Nothing at INFO is said once a pack, a chunk or a step; figures are what the metrics are for.
A warning is for somebody to look at; an error says that something is lost, or stops.

A line's text says it all to a person. What it is about (feed, stream, partition, step, attempt, rank, producer, host,
as far as they are known) comes as ``extra={"about": {...}}`` and is part of the JSON, beside the ``run``. The last
events are kept in a ``Ring``, whatever is shown, for those who ask over HTTP.
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
"""Events of a ring."""
_LONGEST = 4000
"""Characters of a text or of a traceback's end in a ring: what peers say is theirs to choose."""


def set_up(level: Level = "info", *, as_json: bool = False, run: str = "", ring: Ring | None = None) -> None:
    """Send every logger's lines of ``level`` and above to standard error; those of INFO and above to ``ring``, too."""
    handler = _ToStderr()
    handler.setFormatter(_JsonLine(run) if as_json else _Line())
    handler.setLevel(level.upper())
    root = logging.getLogger()
    root.handlers[:] = [handler] if ring is None else [handler, ring]
    root.setLevel(min(each.level for each in root.handlers))
    logging.captureWarnings(True)


def as_event(record: logging.LogRecord, run: str = "") -> Event:
    """What a line says, as plain values: ``time`` (seconds since 1970), ``level``, ``logger``, ``text``, ``run`` and
    what it is about; ``figures``, ``traceback``.
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
    """The last events, numbered from 1 (``seq``); any thread may log and read."""

    def __init__(self, run: str = "", keep: int = KEPT) -> None:
        super().__init__(logging.INFO)
        self._run = run
        self._seq = 0
        self._events: deque[Event] = deque(maxlen=keep)

    def emit(self, record: logging.LogRecord) -> None:
        """As all handlers: called with the lock held."""
        try:
            event = as_event(record, self._run)
        except Exception:  # as logging's own handlers: a line that cannot be kept ends no daemon
            self.handleError(record)
            return
        event["text"] = str(event["text"])[:_LONGEST]
        if "traceback" in event:
            event["traceback"] = str(event["traceback"])[-_LONGEST:]
        self._seq += 1
        self._events.append({"seq": self._seq} | event)

    def since(self, seq: int) -> list[Event]:
        """The events after number ``seq``, as far as they are kept, oldest first; all of them where so many never
        were: who asks has seen another process's.
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
    """Looks standard error up each time: a progress line may have replaced it."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except Exception:  # as logging's own handlers: a line that cannot be written ends no daemon
            self.handleError(record)


class _Line(logging.Formatter):
    """``12:00:01 INFO broker: text``; a traceback follows on lines of its own."""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        text = printable(" ".join(record.getMessage().splitlines()))
        line = f"{clock} {record.levelname} {_name(record)}: {text}"
        if not record.exc_info:
            return line
        return "\n".join([line, *map(printable, self.formatException(record.exc_info).splitlines())])


class _JsonLine(logging.Formatter):
    """An event a line."""

    def __init__(self, run: str) -> None:
        super().__init__()
        self._run = run

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(as_event(record, self._run), ensure_ascii=False)


def printable(text: str) -> str:
    """The same without what would move a terminal's cursor, or worse: peers' words are shown."""
    return text if text.isprintable() else "".join(each if each.isprintable() else "?" for each in text)


def _name(record: logging.LogRecord) -> str:
    return record.name.removeprefix("streampack_services.").removeprefix("streampack.")
