"""The thread that gives values to the late fields of samples, and repeats them until the broker has stored them."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from streampack.connection.session_thread import SessionThread
from streampack.core.protocol.producer_messages import LateFields
from streampack.core.sessions.pushing.amend_session import AmendSession, GiveValues
from streampack.errors import Rejected
from streampack.producer.late_values import SampleId, values_of
from streampack.transport.keys import Key


class Amending(SessionThread):
    """The thread and its session.

    The constructor greets the broker. Raises Unreachable, or Rejected if the stream has no late fields.
    """

    def __init__(self, endpoint: str, stream: str, timeout_s: float, key: Key | None) -> None:
        self._session = AmendSession(
            run=0, producer=uuid.uuid4().hex, host=socket.gethostname(), pid=os.getpid(), stream=stream
        )  # fmt: skip
        super().__init__(endpoint, self._session, f"stream {stream!r}", timeout_s, key)
        try:
            self._wait_for(lambda: self._session.terms is not None and self._error is None, timeout_s, "an answer")
        except BaseException:  # also Ctrl-C
            self._leave()
            raise

    @property
    def terms(self) -> LateFields:
        """The late fields of the stream."""
        assert self._session.terms is not None  # __init__ has waited for them
        return self._session.terms

    def amend(self, ids: Sequence[SampleId], values: Mapping[str, Sequence[Any]], timeout_s: float | None) -> None:
        """Give values to samples, and wait until they are safe; see ``Producer.amend``."""
        self._check_usable()
        messages = list(values_of(ids, values, self.terms))
        numbers: list[int] = []
        try:
            for message, payload in messages:
                with self._changed:
                    numbers.append(self._session.open.take_number())
                self.tell(GiveValues(replace(message, number=numbers[-1]), payload))
            wait_s = self._timeout_s if timeout_s is None else timeout_s
            self._wait_for(lambda: self._session.open.keys().isdisjoint(numbers), wait_s, "its values to be durable")
        finally:
            with self._changed:
                refusals = [self._session.refusals.pop(number, "") for number in numbers]
                for number in numbers:
                    self._session.open.pop(number, None)
        for refusal in filter(None, refusals):
            raise Rejected("amend", refusal)
