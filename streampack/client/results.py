"""``results``: reads the values that trainers report for the samples of steps."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from streampack.connection.telling import Telling
from streampack.core.model.samples import I64
from streampack.core.protocol.message import Envelope
from streampack.core.protocol.result_messages import AskResults, Results
from streampack.errors import DataStall, UserError, WireError
from streampack.transport.keys import find_key
from streampack.transport.rendezvous import endpoint_of


@dataclass(frozen=True, slots=True)
class StepResults:
    """The values that all ranks reported for the n samples of one step.

    Example:
        >>> rewards = dict(zip(step.seqs.tolist(), step.values["reward"]))  # doctest: +SKIP
    """

    step: int
    """Number of the step."""
    lineage: int
    """Number of the lineage; a new one begins if trainers go back and later samples are dropped."""
    cursor: int
    """Cursor of the next step, for ``results(start=...)``."""
    streams: list[str]
    """Name of each sample's stream."""
    partitions: I64
    """Partition of each sample, int64 [n]."""
    seqs: I64
    """Number with which each sample was sent to its partition, as ``Producer.send`` returned it, int64 [n]."""
    sample_ids: I64
    """Stream number, index and part of each sample, as in packs, int64 [n, 3]."""
    values: dict[str, NDArray[np.float64]]
    """Values of the samples by name, float64 [n] each."""

    def __len__(self) -> int:
        return len(self.seqs)


class ResultsReader:
    """Iterator over the steps for which every rank has reported values; ``results`` makes it."""

    def __init__(self, telling: Telling, feed: str, cursor: int | None, timeout_s: float | None) -> None:
        self._telling, self._feed, self._timeout_s = telling, feed, timeout_s
        self._cursor = cursor
        self._reached = False
        """True once the broker has answered. A broker answers a request for a step only when it has the step."""
        self._close = weakref.finalize(self, telling.close)

    @property
    def cursor(self) -> int | None:
        """Cursor of the next step; None before the broker has answered."""
        return self._cursor

    def __iter__(self) -> Iterator[StepResults]:
        return self

    def __next__(self) -> StepResults:
        if not self._reached:
            newest = _message_of(self._telling.ask(AskResults(feed=self._feed, number=0))).cursor
            self._reached, self._cursor = True, newest if self._cursor is None else self._cursor
        assert self._cursor is not None  # it is set at the first call
        wait_s = 1e9 if self._timeout_s is None else self._timeout_s
        ask = AskResults(feed=self._feed, number=0, cursor=self._cursor)
        try:
            answer = self._telling.ask(ask, timeout_s=wait_s, awaited="the next step with reported values")
        except DataStall:
            if self._timeout_s is None:
                raise
            raise StopIteration from None
        step = _step_of(answer)
        self._cursor = step.cursor
        return step

    def close(self) -> None:
        """End the connection."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def results(
    endpoint: str | None = None,
    *,
    feed: str = "train",
    start: int | Literal["oldest", "newest"] = "newest",
    key_file: str | Path | None = None,
    timeout_s: float | None = None,
) -> ResultsReader:
    """Return an iterator over the values that trainers report with ``Step.report``, step by step.

    A step comes once every rank has reported, and its values are durable. Each sample of a step comes at most once in a
    lineage. To go on without a gap after a restart of your program, keep ``cursor`` of the last step. Pass it as
    ``start``.

    Args:
        endpoint: Address of the broker for trainers, as for ``connect``. Default: the environment variable
            STREAMPACK_ENDPOINT.
        feed: Name of the feed in broker.yaml.
        start: ``cursor`` of the last step that was used; or ``"oldest"`` for the oldest step that the broker still has.
            With ``"newest"``, steps come that are reported from now on.
        key_file: Key file made by ``streampack keys new``, if the broker requires a key.
        timeout_s: Seconds to wait for a step; then the iteration ends. Default: no limit.

    Returns:
        An iterator of ``StepResults``, and a context manager.

    Raises:
        UserError: ``start`` is invalid, or there is no address.
        Rejected: The broker has no such feed, or does not accept the key.
        Unreachable: No broker answers.

    Example:
        >>> with results("tcp://node0:7402", start="oldest") as steps:  # doctest: +SKIP
        ...     for step in steps:
        ...         curriculum.update(step.seqs, step.values["reward"])
    """
    cursor = {"oldest": 0, "newest": None}.get(start, start) if isinstance(start, str) else start
    if isinstance(cursor, str) or (cursor is not None and not 0 <= cursor < 2**62):
        raise UserError(f"got start={start!r}, expected 'oldest', 'newest' or the cursor of a step")
    address = endpoint_of(endpoint, "trainers", 60.0)
    return ResultsReader(Telling(address, feed, 60.0, find_key(key_file)), feed, cursor, timeout_s)


def _message_of(answer: Envelope) -> Results:
    """Return the message of an answer."""
    assert isinstance(answer.message, Results)  # the broker answers a request with nothing else
    return answer.message


def _step_of(answer: Envelope) -> StepResults:
    """Return the step in an answer."""
    message = _message_of(answer)

    def column(data: bytes, kind: str) -> I64:
        """Return a column as int64 [n]."""
        return np.frombuffer(data, kind).astype(np.int64)

    numbers = column(message.streams_u32, "<u4")
    if (numbers >= len(message.streams)).any():
        raise WireError(f"got samples of stream number {numbers.max()}, expected a number below {len(message.streams)}")
    ids = np.stack([numbers, column(message.indices_u64, "<u8"), column(message.parts_u32, "<u4")], axis=1)
    values: dict[str, Any] = {
        name: np.frombuffer(frame, "<f8").copy() for name, frame in zip(message.names, answer.payload, strict=True)
    }
    return StepResults(
        message.step, message.lineage, message.cursor, [message.streams[number] for number in numbers.tolist()],
        column(message.partitions_u32, "<u4"), np.frombuffer(message.seqs_u64, "<i8").astype(np.int64), ids, values,
    )  # fmt: skip
