"""Warnings about samples that a tokenizer rejects."""

from __future__ import annotations

import logging

_log = logging.getLogger(__name__)


class Rejections:
    """Logs warnings about rejected samples: each error text once, and ``MOST`` in all."""

    MOST = 20

    def __init__(self) -> None:
        self._said: set[str] = set()

    def warn(self, subject: str, error: BaseException) -> None:
        """Log ``subject`` happened with its error, unless the same error was logged before or ``MOST`` is reached."""
        text = f"{type(error).__name__}: {error}"
        if len(self._said) < self.MOST and text not in self._said:
            self._said.add(text)
            last = "; further errors are counted but not logged" if len(self._said) == self.MOST else ""
            _log.warning("%s: %r%s", subject, error, last)
