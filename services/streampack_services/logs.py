"""Logging of the daemons: one line an event, on standard error, for people or, as JSON, for machines.

Daemons log what a person would want to know a day later: who came and went, long waits, what was
refused. Nothing at INFO is said once a pack, a chunk or a step; figures are what the metrics are for.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Literal

Level = Literal["debug", "info", "warning", "error"]


def set_up(level: Level = "info", *, as_json: bool = False) -> None:
    """Send every logger's lines of ``level`` and above to standard error."""
    handler = _ToStderr()
    handler.setFormatter(_JsonLine() if as_json else _Line())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.captureWarnings(True)


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
        text = " ".join(record.getMessage().splitlines())
        line = f"{clock} {record.levelname} {_name(record)}: {text}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class _JsonLine(logging.Formatter):
    """One object a line: ``time`` (seconds since 1970), ``level``, ``logger``, ``text``; ``figures``, ``traceback``."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": _name(record),
            "text": record.getMessage(),
        }
        if (figures := getattr(record, "figures", None)) is not None:
            line["figures"] = figures
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def _name(record: logging.LogRecord) -> str:
    return record.name.removeprefix("streampack_services.").removeprefix("streampack.")
