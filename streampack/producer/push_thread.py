"""The thread of a pushing producer: sends chunks, and sends those again that a broker lost."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence

import numpy as np

from streampack.connection.session_thread import SessionThread
from streampack.core.protocol.events import Event
from streampack.core.protocol.producer_messages import Lease
from streampack.core.sessions.producer_base import Chunk, Failed
from streampack.core.sessions.pushing.push_buffer import PushBuffer, size_of
from streampack.core.sessions.pushing.push_session import (
    BeginSamples,
    EndBatch,
    EndPartition,
    GiveBack,
    Push,
    PushSession,
    WantTickets,
)
from streampack.errors import Rejected
from streampack.transport.keys import Key

LEAVE_S = 5.0
"""Seconds to wait for samples to be durable when a producer is dropped or left by an exception."""


class Pushing(SessionThread):
    """The sending thread and its session.

    The constructor claims the partition. Raises Unreachable, Rejected, or DataStall after ``claim_timeout_s`` seconds.
    """

    def __init__(
        self, endpoint: str, stream: str, partition: int, buffer_bytes: int, timeout_s: float, key: Key | None = None,
        claim_timeout_s: float = 60.0,
    ) -> None:  # fmt: skip
        name = uuid.uuid4()
        self._session = PushSession(
            run=0, producer=name.hex, process=name.int >> 68, host=socket.gethostname(), pid=os.getpid(),
            stream=stream, partition=partition, buffer=PushBuffer(buffer_bytes),
        )  # fmt: skip
        self._beginning = threading.Lock()
        self._counts = {"samples": 0, "tokens": 0, "rejected": 0, "batches": 0, "wait_s": 0.0}
        super().__init__(endpoint, self._session, f"stream {stream!r} partition {partition}", timeout_s, key)
        try:
            self._wait_for(lambda: self._session.begun and self._error is None, claim_timeout_s, "the partition")
        except BaseException:  # also Ctrl-C
            self._leave()
            raise

    # Called by the program's threads

    @property
    def next_seq(self) -> int:
        """Sequence number of the next sample in the partition."""
        return self._session.buffer.next_seq

    @property
    def ended(self) -> bool:
        """True if the broker takes no more samples of the partition."""
        return self._session.ended

    @property
    def partition(self) -> int:
        """Number of the partition."""
        return self._session.partition

    @property
    def first_seq(self) -> int:
        """Number of this process's first sample."""
        assert self._session.first_seq is not None  # __init__ has waited for it
        return self._session.first_seq

    @property
    def process(self) -> int:
        """Number of this process among all that push to the partition."""
        return self._session.process

    @property
    def write(self) -> int:
        """Number of the stream's current write, as far as the broker has said."""
        return self._session.write

    @property
    def policy_version(self) -> int | None:
        """Version of the newest published policy; None if there is none."""
        self._check_usable()
        return self._session.policy_version

    def wait_for_policy(self, version: int, timeout_s: float | None) -> int:
        """Wait until policy ``version`` or a newer one is published, and return the newest version."""
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        self._wait_until_end(
            lambda: self._session.policy_version is not None and self._session.policy_version >= version, timeout_s,
            f"policy version {version}, which the trainers have not published", logging.INFO,
        )  # fmt: skip
        newest = self._session.policy_version
        assert newest is not None  # just waited for
        return newest

    def begin_samples(self, count: int, timeout_s: float | None) -> int | None:
        """Wait until ``count`` samples may be generated, and begin them; return the version of their policy."""
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        if not self.lease().paced:
            return self._session.policy_version
        with self._beginning:
            policy = "a policy, which the trainers have not published"
            self._wait_until_end(lambda: self._session.policy_version is not None, timeout_s, policy, logging.INFO)
            wanted = self._session.tickets.begun + count
            self.tell(WantTickets(wanted))
            awaited = f"permission to generate {count} samples, because earlier samples are not trained"
            self._wait_until_end(lambda: self._session.tickets.granted >= wanted, timeout_s, awaited, logging.INFO)
            version = self._session.policy_version
            self.tell(BeginSamples(count))
            return version

    def give_back(self, count: int, version: int | None) -> None:
        """Take back samples that were begun and will not be sent."""
        self.tell(GiveBack(count, version))

    def lease(self) -> Lease:
        """Return the current lease, with the limits and fields of samples. Raises the session's error."""
        self._check_usable()
        lease = self._session.lease
        assert lease is not None  # __init__ has waited for it
        return lease

    def push(self, chunks: Sequence[Chunk]) -> int:
        """Put chunks into the buffer, waiting for room, and return the sequence number of the first sample."""
        first = self._session.buffer.next_seq
        for chunk in chunks:
            began = time.perf_counter()
            self._wait_for_room(size_of(chunk), self._session.buffer.next_seq - first)
            self.tell(Push(chunk))
            self._counts["wait_s"] += time.perf_counter() - began
            self._counts["samples"] += chunk.num_samples
            self._counts["tokens"] += int(np.frombuffer(chunk.lengths_u32, "<u4").sum())
            self._counts["rejected"] += sum(chunk.rejected.values())
        return first

    def tell(self, event: Event) -> None:
        """Let the session handle an event of the program, and wake the thread. Raises the session's error."""
        if isinstance(event, Push | EndBatch):
            self._check_open()
        super().tell(event)
        self._counts["batches"] += isinstance(event, EndBatch)

    def flush(self, timeout_s: float | None) -> None:
        """Wait until all samples are durable. Raises DataStall after ``timeout_s`` seconds."""
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        self._wait_for(lambda: self._session.flushed, timeout_s, "its samples to be durable")

    def finish(self, end: bool, flush: bool) -> None:
        """End the thread, with ``flush`` once all samples are durable; see ``Producer.close``."""
        if os.getpid() != self._pid or self._closed:
            return
        try:
            if end and self._error is None:
                self.tell(EndPartition())
            if flush:
                self.flush(None)
        finally:
            self._leave()

    def abandon(self, why: str = "") -> None:
        """End the thread after at most ``LEAVE_S`` seconds, and log a warning if samples are not durable.

        ``why``: error of the program, sent to the broker for those who wait for the samples.
        """
        if os.getpid() != self._pid or self._closed:
            return
        if self._thread is not threading.current_thread():
            with self._changed:
                self._changed.wait_for(lambda: self._session.flushed or self._error is not None, LEAVE_S)
        if not self._session.flushed:
            self._log.warning(
                "%s: closed before all samples were durable, while waiting for %s",
                self._name,
                self._waiting_for(),
            )
        if why:
            self._handle(Failed(why))
        self._leave()

    def stats(self) -> dict[str, float]:
        """Return counts by name; see ``Producer.stats``."""
        buffer = self._session.buffer
        now = {
            "next_seq": buffer.next_seq,
            "durable_seq": buffer.durable_seq,
            "buffered_bytes": buffer.num_bytes,
        }
        return {**self._counts, **now}

    def _wait_for_room(self, size: int, taken: int) -> None:
        """Wait for ``size`` bytes of room in the buffer; ``taken``: samples of this call that are in the buffer."""
        awaited = f"room for {size} bytes in its buffer of {self._session.buffer.capacity} bytes"
        awaited += f" ({taken} samples of this call are already in the buffer)" if taken else ""
        self._wait_until_end(lambda: self._session.room(size), self._timeout_s, awaited)

    def _wait_until_end(
        self, condition: Callable[[], bool], timeout_s: float, awaited: str, level: int = logging.WARNING
    ) -> None:  # fmt: skip
        """Wait as ``_wait_for`` does; raise Rejected if the partition ends."""
        self._wait_for(lambda: self.ended or condition(), timeout_s, awaited, level)
        self._check_open()

    def _check_open(self) -> None:
        """Raise Rejected if the broker takes no more samples of the partition."""
        self._check_usable()
        if self.ended:
            raise Rejected("ended", self._session.end_text)
