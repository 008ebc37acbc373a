"""Warnings about samples that a tokenizer rejects."""

from __future__ import annotations

import logging

_log = logging.getLogger(__name__)


class Rejections:
    """Warnings about rejected samples: each error once, and ``MOST`` at all, since millions may be rejected."""

    MOST = 20

    def __init__(self) -> None:
        self._said: set[str] = set()

    def warn(self, what: str, error: BaseException) -> None:
        text = f"{type(error).__name__}: {error}"
        if len(self._said) < self.MOST and text not in self._said:
            self._said.add(text)
            last = "; more are counted, and not said" if len(self._said) == self.MOST else ""
            _log.warning("%s: %r%s", what, error, last)
