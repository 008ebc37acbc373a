"""A Datasink of Ray Data that writes to a pushed stream, the sample of each key once.

Ray retries tasks, so a task may write its rows more than once, and a task that Ray believes dead may still write. Every
sample therefore goes to the broker with the digest of its key. The broker admits the first sample of a key, and knows
the keys until the write is committed (``core.journal.key_index``). The sink commits when Ray has all results.

Each write task pushes its own rows over ZeroMQ. For this it needs a partition of the stream for itself. The tasks try
partitions in turn, and the broker decides. A task that was killed loses its partition after 3 s.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import ray
import ray.data
from ray.data.block import BlockAccessor

from streampack.core.layout.step_frames import INPUT_IDS
from streampack.core.sessions.producer_base import SILENT
from streampack.core.sessions.pushing.push_session import KEYS_FULL
from streampack.errors import DataStall, PeerError, Rejected, UserError
from streampack.integrations.ray.installed_version import check_ray
from streampack.integrations.ray.ray_service import wait_for_broker
from streampack.integrations.ray.service_actors import BROKER, NAMESPACE, ask
from streampack.producer.push import Producer

log = logging.getLogger("streampack.ray")

TRY_S = 5.0
"""Seconds to wait for one partition before the next is tried; a dead holder loses its partition after 3 s."""
WAIT_S = 10.0
"""Seconds to wait for room or for the log, before a look whether the broker has moved to another address."""
AT_ONCE = 512
"""Rows that are pushed by one call."""
PAUSE_S = 0.2
TAKEN, ENDED = "partition_taken", "ended"
AGAIN_CODES = frozenset({TAKEN, ENDED, "sequence", "too_many"})
"""Rejections after which another partition, or a later attempt, may succeed."""


class Datasink(ray.data.Datasink[dict[str, int]]):
    """Writes the rows of a dataset to a pushed stream of a service; the sample of each key is in one step.

    Rows have ``input_ids`` and the fields that the run declares, as columns of lists or arrays. If tasks are retried,
    actors restarted or nodes lost, no sample is lost and none is there twice. If the whole job fails, run it again:
    samples that the broker has are passed over. One job at a time may write to a stream.

    Args:
        name: Name of the service, as passed to ``start``.
        stream: Name of the stream, which is ``pushed`` in broker.yaml. It needs as many ``partitions`` as tasks write
            at a time, since each task pushes to one; further tasks wait.
        key: Column with the key of each row: text, whole numbers or bytes, different for all rows of the job.
        end: True to end the stream once the job is complete. Trainers then see the end of a finite feed.
        timeout_s: Seconds that a task waits without progress, for the broker, a partition or room.

    Raises:
        UserError: There is no such service, or ``key`` is missing.

    Example:
        >>> dataset.write_datasink(Datasink("sft-8b", stream="web", key="doc_id"))  # doctest: +SKIP
    """

    def __init__(self, name: str, *, stream: str, key: str = "", end: bool = False, timeout_s: float = 300.0) -> None:
        check_ray()
        if not isinstance(key, str) or not key:
            raise UserError(
                f"got key={key!r}, expected the column with the key of each row. Ray retries tasks, and without a key "
                f"the rows of a retried task would be there twice. Pass key='doc_id', for example"
            )
        self.name, self.stream, self.key, self.end, self.timeout_s = name, stream, key, end, timeout_s
        self.num_partitions = self._find_partitions()
        self.write_number = -1
        """Number of the write in the stream; -1 before the write begins."""
        self._lock: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_lock": None}  # the driver alone holds the lock

    # Called by Ray, in the driver

    def on_write_start(self, schema: Any = None) -> None:
        """Make sure that no other job writes, and ask the broker for the number of the write.

        Args:
            schema: Schema of the dataset. It may be that before a map which Ray runs in the same task.
        """
        try:
            kind = ray.remote(num_cpus=0, max_restarts=-1)(WriteLock)
            self._lock = kind.options(name=f"streampack-write/{self.name}/{self.stream}", namespace=NAMESPACE).remote()
        except ValueError:
            raise UserError(
                f"stream {self.stream!r} of service {self.name!r}: got a second job that writes, expected one at a "
                f"time. Wait for the other job, or write to another stream"
            ) from None
        with self._producer(0) as producer:
            self.write_number = producer.write

    def on_write_complete(self, write_result: Any) -> None:
        """Commit the write, since every task has written and no key will come again; or end the stream, if asked to.

        An ended stream takes no more samples, so its keys need not be forgotten.

        Args:
            write_result: The results of all tasks.
        """
        if self.end:
            for partition in range(self.num_partitions):
                self._end_partition(partition)
        elif self.write_number >= 0:  # no rows: the write has not begun
            self._repeat("commit", self._commit)
        self._unlock()

    def _commit(self, attempt: int) -> None:
        """Commit the write."""
        with self._producer(attempt) as producer:
            producer.commit_write(self.write_number)

    def on_write_failed(self, error: Exception) -> None:
        """Let another job write. The keys are kept, so that the job can be run again.

        Args:
            error: The error of the job.
        """
        self._unlock()

    def _unlock(self) -> None:
        """Let other jobs write to the stream."""
        if self._lock is not None:
            ray.kill(self._lock)
            self._lock = None

    # Called by Ray, in each write task

    def write(self, blocks: Iterable[Any], ctx: Any) -> dict[str, int]:
        """Push the rows of a task's blocks; return once the broker has stored them durably.

        Args:
            blocks: The blocks.
            ctx: The context of Ray's task.

        Returns:
            The number of ``rows``.
        """
        counts = {"rows": 0}
        for block in blocks:
            rows = list(BlockAccessor.for_block(block).iter_rows(public_row_format=True))
            if rows:
                self._write_rows(rows, int(getattr(ctx, "task_idx", 0)))
            counts["rows"] += len(rows)
        return counts

    def _write_rows(self, rows: list[dict[str, Any]], task: int) -> None:
        """Push rows, all again after a failure: the broker passes over those that it has."""
        for column in (self.key, INPUT_IDS):
            if column not in rows[0]:
                raise UserError(
                    f"stream {self.stream!r}: got rows without the column {column!r}, expected the columns "
                    f"{self.key!r} and {INPUT_IDS!r}. The rows have: {', '.join(rows[0])}"
                )
        keys = [row.pop(self.key) for row in rows]

        def push(attempt: int) -> None:
            """Push all rows to one partition."""
            with self._producer(task + attempt) as producer:
                self._check_write(producer)
                for at in range(0, len(rows), AT_ONCE):
                    some, their_keys = rows[at : at + AT_ONCE], keys[at : at + AT_ONCE]
                    self._insist(producer, partial(
                        producer.send_many, some, keys=their_keys, write=self.write_number
                    ))  # fmt: skip
                self._insist(producer, producer.flush)
                self._check_write(producer)

        self._repeat(f"task {task}", push)

    def _insist(self, producer: Producer, call: Callable[[], Any]) -> None:
        """Repeat a call that waits too long, as for room, while the broker is at the same address.

        Raises DataStall if the broker has moved, or if no answer or no room for keys came within ``timeout_s``.
        """
        began = time.monotonic()
        while True:
            try:
                call()
                return
            except DataStall as error:
                if error.code not in (KEYS_FULL, SILENT):
                    began = time.monotonic()
                if time.monotonic() - began > self.timeout_s or self._endpoint() != producer.endpoint:
                    raise

    def _check_write(self, producer: Producer) -> None:
        """Raise UserError if the write is committed: samples of it are not admitted any more."""
        if producer.write != self.write_number:
            raise UserError(
                f"stream {self.stream!r}: got rows of write {self.write_number}, expected rows of write "
                f"{producer.write}, because another job has committed its write. Let one job at a time write to a "
                f"stream, and run this job again"
            )

    # The connection to the broker

    def _find_partitions(self) -> int:
        """Return the number of the stream's partitions. Raises UserError if the stream is not one that is pushed."""
        wait_for_broker(self.name, self.timeout_s)
        streams = json.loads(ask(self.name, BROKER, "settings") or "{}").get("streams", {})
        if self.stream not in streams:
            raise UserError(
                f"service {self.name!r}: got stream {self.stream!r}, expected one of: {', '.join(streams)}. Correct "
                f"the name, or add the stream to broker.yaml"
            )
        if not (streams[self.stream] or {}).get("pushed"):
            raise UserError(
                f"stream {self.stream!r} of service {self.name!r}: got a stream that is not pushed, expected a pushed "
                f"one. Set `pushed: true` for the stream in broker.yaml, and `merge: arrival`"
            )
        return int(streams[self.stream].get("partitions", 1))

    def _repeat(self, what: str, action: Callable[[int], None]) -> None:
        """Call ``action`` with the number of the attempt, until it succeeds.

        Raises its errors that another attempt does not get past, and DataStall after ``timeout_s`` without an answer.
        """
        attempt, cause, progress = 0, "", time.monotonic()
        while time.monotonic() - progress < self.timeout_s:
            try:
                action(attempt)
                return
            except PeerError as error:
                if isinstance(error, Rejected) and error.code not in AGAIN_CODES:
                    raise
                if isinstance(error, DataStall):
                    if error.code == KEYS_FULL:
                        raise
                    progress = time.monotonic()  # the broker answers, and waits for its trainers
                cause = str(error)
                log.info("stream %s: trying again: %s", self.stream, error)
            time.sleep(PAUSE_S)
            attempt += 1
        raise DataStall(
            f"stream {self.stream!r} of service {self.name!r}, {what}: gave up after {self.timeout_s:g} s. Last error: "
            f"{cause}"
        )

    def _producer(self, first: int) -> Producer:
        """Return a producer for a free partition. Tries partition ``first``, modulo their number, then the next ones.

        Tasks that run at the same time have consecutive numbers, and so rarely try the same partition.
        """
        at, ended, began = first, set[int](), time.monotonic()
        while True:
            partition = at % self.num_partitions
            at += 1
            try:
                return self._claim(partition)
            except PeerError as error:
                if isinstance(error, Rejected):
                    if error.code not in AGAIN_CODES:
                        raise
                    ended |= {partition} if error.code == ENDED else set()
                if len(ended) == self.num_partitions:
                    raise UserError(
                        f"stream {self.stream!r} of service {self.name!r}: got rows after the stream was ended, "
                        f"expected none. Write to another stream, or start another service"
                    ) from None
                if time.monotonic() - began > self.timeout_s:
                    raise

    def _claim(self, partition: int) -> Producer:
        """Return a producer for a partition. Raises PeerError if another process holds it, or if it has ended."""
        producer = Producer(
            self._endpoint(), stream=self.stream, partition=partition, timeout_s=WAIT_S, claim_timeout_s=TRY_S
        )
        if producer.ended:
            producer.close()
            raise Rejected(ENDED, f"partition {partition} of stream {self.stream!r} has ended")
        return producer

    def _endpoint(self) -> str:
        """Return the broker's address for producers, as of now."""
        return str(wait_for_broker(self.name, self.timeout_s)["producers"])

    def _end_partition(self, partition: int) -> None:
        """End a partition, unless it has ended."""

        def end(_attempt: int) -> None:
            """End the partition."""
            try:
                self._claim(partition).close(end=True)
            except Rejected as error:
                if error.code != ENDED:
                    raise

        self._repeat("end", end)


class WriteLock:
    """An actor whose name says that a job writes to a stream; it ends with its job."""
