"""``streampack.Producer``: a program's own samples to a broker, as in RL where each rollout exists once.

What a sample must be is ``pushed_samples``'s; how it gets there is ``push_thread``'s, whose thread knows no
``Producer``: so one that is dropped, or left by an exception, is closed, after a short wait for what it holds to be
safe.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, SupportsIndex

from streampack.config.typed_yaml import parse_size
from streampack.core.sessions.push_session import EndBatch
from streampack.errors import UserError
from streampack.producer.push_thread import Pushing
from streampack.producer.pushed_samples import Given, as_mapping, check_declared, chunk_of_group, chunks_of
from streampack.transport.keys import find_key
from streampack.transport.rendezvous import read_rendezvous


class Producer:
    """Pushes samples to one partition of a stream that broker.yaml declares ``pushed``; a context manager.

    ``endpoint``: the broker's producers' address, ``tcp://host:port`` or ``ipc:///path``, or ``file://`` and its
    rendezvous file; by default the environment's STREAMPACK_PRODUCERS. ``partition``: one process pushes to each.
    ``buffer``: how much is kept here, at most, of what the broker has not made safe yet. ``timeout_s``: how long any
    call may wait. ``key_file``: of 'streampack keys new', where the broker asks for a key; by default the environment's
    STREAMPACK_KEY_FILE.

    A sample is a mapping with ``input_ids`` and the fields that the run declares, or the ids alone: arrays, lists, or
    torch tensors on any device; nothing is shifted. It is checked when it is given. Any thread may use it.

    Raises UserError for arguments that cannot be, Unreachable if nobody answers, Rejected if the broker refuses,
    DataStall if it takes too long.

    >>> with Producer(stream="rollouts", partition=worker) as rollouts:  # doctest: +SKIP
    ...     rollouts.send_group(samples, policy_version=v)
    ...     rollouts.end_of_batch(v)
    """

    def __init__(
        self, endpoint: str | None = None, *, stream: str, partition: int = 0, buffer: str | int = "64MiB",
        timeout_s: float = 60.0, key_file: str | Path | None = None,
    ) -> None:  # fmt: skip
        if not isinstance(partition, int) or not 0 <= partition < 2**20:
            raise UserError(f"got partition={partition!r}, expected a number from 0 on, below the stream's partitions")
        size = parse_size(buffer, "buffer")
        key = find_key(key_file)
        self._pushing = Pushing(_endpoint(endpoint, timeout_s), stream, partition, size, timeout_s, key)
        self._close = weakref.finalize(self, self._pushing.abandon)
        self._given = threading.Lock()
        """Held while samples get their numbers, which chunks and groups are made with."""

    def send(self, sample: Given, *, policy_version: SupportsIndex | None = None, **fields: Any) -> int:
        """Hand one sample over, with more ``fields`` than it holds; its sequence number in the partition.

        ``policy_version`` is that of the policy that made it: what is older than the run's ``max_policy_lag`` allows is
        dropped and counted by the broker. It is a field, too, where the run declares one of this name. Versions only
        grow; a value of the field alone, in ``sample``, says nothing to the broker.

        Waits for room in the buffer. Raises SampleError for one that the run's policies do not admit; with ``poison:
        drop`` it is counted instead, and keeps its number.
        """
        with self._given:
            lease = self._pushing.lease()
            check_declared(list(fields), lease)
            given = as_mapping(sample) | fields
            (chunk,) = chunks_of([given], lease, self._pushing.next_seq, policy_version)
            return self._pushing.push([chunk])

    def send_many(self, samples: Iterable[Given], *, policy_version: SupportsIndex | None = None) -> range:
        """Hand samples over, in as few messages as hold them; their sequence numbers. None of them, if one is bad.
        ``policy_version`` as in ``send``, of all.
        """
        with self._given:
            first = self._pushing.next_seq
            chunks = chunks_of(list(samples), self._pushing.lease(), first, policy_version)
            self._pushing.push(chunks)
            return range(first, first + sum(chunk.num_samples for chunk in chunks))

    def send_group(
        self,
        samples: Iterable[Given],
        keep: Literal["pack", "step"] | None = None,
        policy_version: SupportsIndex | None = None,
    ) -> range:
        """Hand a group over as one: the samples of one prompt; their sequence numbers. None of them, if one is bad.

        It is admitted whole or not at all, in this order. ``keep`` says what it is not split over: a ``pack``, in which
        its samples follow each other, so that together they must fit the budget (DPO's pairs); or a ``step``, where
        steps are batches (``rules.step``: ``samples`` or ``end_of_batch``; elsewhere that is an error). By default it
        is ``step`` where steps are batches, and nothing elsewhere: there a group may lie in several steps.
        ``policy_version`` as in ``send``, of all of it. It and ``group`` are filled in where the run declares fields of
        these names.
        """
        if keep not in ("pack", "step", None):
            raise UserError(f"got keep={keep!r}, expected 'pack', 'step' or None")
        given = list(samples)
        if not given:
            raise UserError("got a group of no samples, expected at least one")
        with self._given:
            first = self._pushing.next_seq
            self._pushing.push([chunk_of_group(given, self._pushing.lease(), first, keep, policy_version)])
            return range(first, first + len(given))

    def end_of_batch(self, batch: int) -> None:
        """No later sample shares a step with those so far; every partition of the stream must say so. Does not wait."""
        with self._given:
            self._pushing.tell(EndBatch(batch))

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until all that was handed over is safe in the broker's log. Raises DataStall, naming what is not."""
        self._pushing.flush(timeout_s)

    def close(self, end: bool = False, flush: bool = True) -> None:
        """Flush, and leave; idempotent. With ``end`` the partition is over: no process will push to it again."""
        self._close.detach()
        self._pushing.close(end, flush)

    def stats(self) -> dict[str, float]:
        """Since it was made: ``samples``, ``tokens`` and ``rejected`` of them, ``batches``, ``wait_s`` for room; now:
        ``next_seq``, ``durable_seq`` (samples below are safe), ``buffered_bytes``.
        """
        return self._pushing.stats()

    def __enter__(self) -> Producer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._close.detach()
            self._pushing.abandon(repr(error))

    def __reduce__(self) -> str:
        raise UserError("got a producer to pickle, expected one of each process: make it there, with its own partition")


def _endpoint(endpoint: str | None, timeout_s: float) -> str:
    found = endpoint or os.environ.get("STREAMPACK_PRODUCERS")
    if not found:
        raise UserError("got no endpoint, expected tcp://host:port, or STREAMPACK_PRODUCERS in the environment")
    if found.startswith("file://"):
        return read_rendezvous(Path(found.removeprefix("file://")), "producers", timeout_s)
    return found
