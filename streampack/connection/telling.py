"""The connection by which a process tells a feed something, or asks it: see ``core.sessions.telling_session``."""

from __future__ import annotations

import logging
from typing import Any

from msgspec.structs import replace

from streampack.connection.session_thread import SessionThread
from streampack.core.protocol.message import Envelope
from streampack.core.protocol.result_messages import AskResults, Noted, Publish, ReportValues
from streampack.core.sessions.telling_session import Tell, TellingSession
from streampack.errors import Rejected
from streampack.transport.keys import Key

MAX_FRAME_BYTES = 64 << 20
"""Most bytes of a column of results: values of 8 million samples."""


class Telling(SessionThread):
    """The thread and its session."""

    role, side = "client", "trainers"

    def __init__(self, endpoint: str, feed: str, timeout_s: float, key: Key | None = None) -> None:
        self._session = TellingSession()
        super().__init__(endpoint, self._session, f"feed {feed!r}", timeout_s, key, MAX_FRAME_BYTES)

    def ask(
        self,
        message: Publish | ReportValues | AskResults,
        payload: tuple[Any, ...] = (),
        timeout_s: float | None = None,
        awaited: str = "an answer",
    ) -> Envelope:
        """Send a message, wait for its answer, and return the answer.

        Raises Rejected if the broker refuses the message, Unreachable if no broker ever answered, and DataStall after
        ``timeout_s`` seconds in which it waited for ``awaited``.
        """
        self._check_usable()
        with self._changed:
            number = self._session.open.take_number()
        self.tell(Tell(replace(message, number=number), payload))
        wait_s = self._timeout_s if timeout_s is None else timeout_s
        try:
            level = logging.INFO if isinstance(message, AskResults) else logging.WARNING
            self._wait_for(lambda: number not in self._session.open, wait_s, awaited, level)
        finally:
            with self._changed:
                answer = self._session.answers.pop(number, None)
                self._session.open.pop(number, None)
        assert answer is not None  # it came, else ``_wait_for`` has raised
        if isinstance(answer.message, Noted) and answer.message.refusal:
            raise Rejected("results", answer.message.refusal)
        return answer
