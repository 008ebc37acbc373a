"""The thread that gives values to the late fields of samples, and repeats them until the broker has stored them."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from streampack.connection.session_thread import SessionThread
from streampack.core.protocol.producer_messages import Amend, Amended, LateFields
from streampack.core.sessions.pushing.amend_session import AmendSession, GiveValues
from streampack.core.staging.dropped_samples import CONTRADICTIONS, REASONS
from streampack.errors import ValuesRejected
from streampack.producer.late_values import SampleId, refused_of, seqs_of, values_of
from streampack.transport.keys import Key


class Amending(SessionThread):
    """The thread and its session.

    The constructor greets the broker. Raises Unreachable, or Rejected if the stream has no late fields.
    """

    def __init__(self, endpoint: str, stream: str, timeout_s: float, key: Key | None) -> None:
        self._session = AmendSession(
            run=0, producer=uuid.uuid4().hex, host=socket.gethostname(), pid=os.getpid(), stream=stream
        )  # fmt: skip
        self.counts = {"amended": 0.0, "not_amended": 0.0}
        self._logged: set[str] = set()
        """Reasons that were logged."""
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

    def amend(
        self, ids: Sequence[SampleId], values: Mapping[str, Sequence[Any]], timeout_s: float | None
    ) -> dict[SampleId, str]:  # fmt: skip
        """Give values to samples, wait until they are safe, return the values not stored; see ``Producer.amend``."""
        self._check_usable()
        sent: dict[int, Amend] = {}
        try:
            for message, payload in list(values_of(ids, values, self.terms)):
                with self._changed:
                    number = self._session.open.take_number()
                sent[number] = replace(message, number=number)
                self.tell(GiveValues(sent[number], payload))
            wait_s = self._timeout_s if timeout_s is None else timeout_s
            self._wait_for(lambda: self._session.open.keys().isdisjoint(sent), wait_s, "its values to be durable")
        finally:
            answered = self._forget(sent)
        refused = {one: reason for message, answer in answered for one, reason in refused_of(message, answer).items()}
        num_rejected = sum(
            len(seqs_of(message)) for message, answer in answered if answer.refusal and not answer.refused
        )
        self._count(sum(len(seqs_of(message)) for message, _ in answered), num_rejected, refused)
        for _, answer in answered:
            if answer.refusal:
                raise ValuesRejected(answer.refusal, dict(refused.items()))
        return refused

    def _count(self, num_answered: int, num_rejected: int, refused: Mapping[SampleId, str]) -> None:
        """Count samples; log the first sample of each reason that is not an error, and what the reason means."""
        not_amended = num_rejected + len(refused)
        with self._changed:
            self.counts["amended"] += num_answered - not_amended
            self.counts["not_amended"] += not_amended
        for one, reason in refused.items():
            if reason not in self._logged and reason not in CONTRADICTIONS:
                self._logged.add(reason)
                text = REASONS.get(reason, "the sample was rejected when it came")
                self._log.warning(
                    "%s: values of sample %d of partition %d are not trained (%s): %s. Further samples are counted, "
                    "and not logged", self._name, one.seq, one.partition, reason, text,
                )  # fmt: skip

    def _forget(self, sent: Mapping[int, Amend]) -> list[tuple[Amend, Amended]]:
        """Forget messages; return those that were answered, with their answers."""
        with self._changed:
            open_ = {number for number in sent if self._session.open.pop(number, None) is not None}
            answers = {number: self._session.refused.pop(number, Amended(number=number)) for number in sent}
        return [(message, answers[number]) for number, message in sent.items() if number not in open_]
