"""``streampack.Producer``: pushes a program's own samples to a broker, such as RL rollouts that exist once.

The module ``pushed_samples`` checks and converts samples, and ``push_thread`` sends them. The sending thread holds no
reference to ``Producer``. A producer without references, or left by an exception, therefore closes itself after a
short wait for its samples to be durable.
"""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, SupportsIndex

from streampack.config.typed_yaml import parse_size
from streampack.connection.policy_versions import checked_version
from streampack.core.protocol.producer_messages import ANY_PROCESS
from streampack.core.sessions.pushing.push_session import EndBatch, EndWrite
from streampack.errors import UserError
from streampack.producer.amend_thread import Amending
from streampack.producer.late_values import SampleId, as_id
from streampack.producer.push_thread import Pushing
from streampack.producer.pushed_samples import (
    Given,
    SampleKey,
    as_list,
    as_mapping,
    check_declared,
    chunk_of_group,
    chunks_of,
    with_keys,
)
from streampack.transport.keys import find_key
from streampack.transport.rendezvous import endpoint_of


class Producer:
    """Client that pushes a program's own samples to one partition of a stream.

    The stream is declared ``pushed`` in broker.yaml. A sample is a mapping with ``input_ids`` and the fields that the
    run declares, or the token ids alone. Values are arrays, lists, or torch tensors on any device. Nothing is shifted.
    Each call checks its samples. Any thread may use a producer.

    A producer is a context manager. After the block it waits until the broker has stored all samples.

    Args:
        endpoint: Address of the broker for producers: ``tcp://host:port``, ``ipc:///path``, or ``file:///path`` of the
            broker's rendezvous file. Addresses of a broker and of another one that may take over are separated by
            commas. Default: the environment variable STREAMPACK_PRODUCERS.
        stream: Name of the stream in broker.yaml.
        partition: Number of the partition, from 0. Only one process may push to each partition. None for a process that
            sends no samples, and only gives values to late fields (``amend``).
        buffer: Size of the buffer for samples that the broker has not stored durably yet, such as ``"64MiB"`` or a
            number of bytes.
        timeout_s: Seconds that any call may wait.
        claim_timeout_s: Seconds to wait for the partition, if another process holds it. Default: ``timeout_s``.
        key_file: Key file made by ``streampack keys new``, if the broker requires a key. Default: the environment
            variable STREAMPACK_KEY_FILE.

    Raises:
        UserError: An argument is invalid.
        Unreachable: No broker answered within ``timeout_s``.
        Rejected: The broker does not accept this producer, for example its key.
        DataStall: The broker did not grant the partition within ``claim_timeout_s``.

    A partition that has ended is no error here: see ``ended``.

    Example:
        >>> with Producer(stream="rollouts", partition=worker) as rollouts:  # doctest: +SKIP
        ...     rollouts.send_group(samples, policy_version=v)
        ...     rollouts.end_of_batch(v)

        Single samples, with the policy that made them:

        >>> v = rollouts.policy_version()  # doctest: +SKIP
        >>> seqs = [rollouts.send({"input_ids": tokens}, policy_version=v)]  # doctest: +SKIP
        >>> seqs += rollouts.send_many(samples, policy_version=v)  # doctest: +SKIP
        >>> ids = rollouts.sample_ids(seqs)  # for another process, which amends them  # doctest: +SKIP
        >>> rollouts.give_back(2)  # begun with ``wait_to_start``, and filtered out  # doctest: +SKIP
        >>> rollouts.flush()  # all are durable  # doctest: +SKIP
        >>> rollouts.stats()["samples"]  # doctest: +SKIP
        65
        >>> rollouts.close(end=True)  # nothing more comes  # doctest: +SKIP

        Samples with keys, which a job may send again after a failure:

        >>> write = rollouts.write  # doctest: +SKIP
        >>> rollouts.send_many(samples, keys=names, write=write)  # doctest: +SKIP
        >>> rollouts.commit_write(write)  # doctest: +SKIP
    """

    def __init__(
        self, endpoint: str | None = None, *, stream: str, partition: int | None = 0, buffer: str | int = "64MiB",
        timeout_s: float = 60.0, claim_timeout_s: float | None = None, key_file: str | Path | None = None,
    ) -> None:  # fmt: skip
        if partition is not None and (not isinstance(partition, int) or not 0 <= partition < 2**20):
            raise UserError(
                f"got partition={partition!r}, expected a whole number of at least 0 and less than the stream's "
                "number of partitions"
            )
        size = parse_size(buffer, "buffer")
        self._stream, self._timeout_s, self._key = stream, timeout_s, find_key(key_file)
        self._endpoint = endpoint_of(endpoint, "producers", timeout_s)
        self._threads = _Threads()
        if partition is None:
            self._threads.amending = self._new_amending()
        else:
            self._threads.pushing = Pushing(
                self._endpoint, stream, partition, size, timeout_s, self._key, claim_timeout_s or timeout_s
            )
        self._close = weakref.finalize(self, self._threads.abandon)
        self._given = threading.Lock()
        """Lock around numbering samples and making their chunks."""

    def send(self, sample: Given, *, policy_version: SupportsIndex | None = None, **fields: Any) -> int:
        """Send one sample; wait for room in the buffer if it is full.

        Args:
            sample: Mapping with ``input_ids`` [n] and declared fields, or the token ids [n] alone.
            policy_version: Version of the policy that made the sample; versions only grow. The broker drops and counts
                samples older than the run's ``max_policy_lag`` allows. If the run declares a field of this name, the
                version becomes its value; a value in ``sample`` alone does not reach the broker's check.
            fields: Further declared fields of the sample, by name.

        Returns:
            The sample's sequence number in the partition.

        Raises:
            SampleError: The sample is invalid, or a field is not declared. With ``poison: drop``, the broker counts an
                invalid sample instead, and the sample keeps its number.
            UserError: ``policy_version`` is not an integer from 0, or the producer is closed.
            DataStall: The buffer had no room within ``timeout_s``.
        """
        with self._given:
            lease = self._pushing.lease()
            check_declared(list(fields), lease)
            values = as_mapping(sample) | fields
            (chunk,) = chunks_of([values], lease, self._pushing.next_seq, policy_version)
            return self._pushing.push([chunk])

    def send_many(
        self,
        samples: Iterable[Given],
        *,
        policy_version: SupportsIndex | None = None,
        keys: Iterable[SampleKey] | None = None,
        write: int | None = None,
    ) -> range:
        """Send many samples in as few messages as possible. If one sample is invalid, none is sent.

        With keys, a job of many processes may send samples again after a failure. The broker admits the first sample of
        each key, and drops and counts the others, until the job calls ``commit_write``.

        Args:
            samples: Samples as for ``send``.
            policy_version: Version of the policy that made all of them, as for ``send``.
            keys: Key of each sample in the stream: text, a whole number or bytes.
            write: Number of the write to which the keys belong. Default: the current one.

        Returns:
            The samples' sequence numbers in the partition.

        Raises:
            SampleError: A sample is invalid; see ``send``.
            UserError: ``policy_version`` is not an integer from 0, or the producer is closed.
            DataStall: The buffer had no room within ``timeout_s``.
        """
        with self._given:
            first, rows = self._pushing.next_seq, as_list(samples)
            chunks = chunks_of(rows, self._pushing.lease(), first, policy_version)
            if keys is not None:
                chunks = with_keys(chunks, list(keys), len(rows), self.write if write is None else write)
            self._pushing.push(chunks)
            return range(first, first + sum(chunk.num_samples for chunk in chunks))

    def send_group(
        self,
        samples: Iterable[Given],
        keep: Literal["pack", "step"] | None = None,
        policy_version: SupportsIndex | None = None,
        share: Literal["prefix"] | None = None,
    ) -> Sequence[int]:
        """Send a group of samples, such as the completions of one prompt, to be admitted whole and in this order.

        If one sample is invalid, none is sent. If the run declares the field ``group``, its value is the sequence
        number of the group's first sample.

        Args:
            samples: Samples as for ``send``, at least one.
            keep: Unit that must hold the whole group. With ``"pack"``, the samples follow each other in one pack and
                must fit the budget together (DPO pairs). With ``"step"``, they share a step; this requires
                ``rules.step`` to be ``samples`` or ``end_of_batch``. Default: ``"step"`` if the run's steps are such
                batches. Otherwise, a group may be spread over steps.
            policy_version: Version of the policy that made all of them, as for ``send``.
            share: With ``"prefix"``, tokens with which several samples begin, such as their prompt, are sent and
                computed once. Samples are put in an order in which they share the most. Tokens are the same if their
                ids and all fields with ``align: token`` are. The run needs ``share: prefix`` under ``rules``.

        Returns:
            The sequence number of each sample in the partition.

        Raises:
            SampleError: A sample is invalid, or the group does not fit one message (``limits.chunk``).
            UserError: The group is empty, ``keep`` or ``share`` is invalid for the run, or the producer is closed.
            DataStall: The buffer had no room within ``timeout_s``.
        """
        if keep not in ("pack", "step", None):
            raise UserError(f"got keep={keep!r}, expected 'pack', 'step' or None")
        rows = as_list(samples)
        if not rows:
            raise UserError("got a group without samples, expected at least one sample")
        with self._given:
            first = self._pushing.next_seq
            chunk, places = chunk_of_group(rows, self._pushing.lease(), first, keep, policy_version, share)
            self._pushing.push([chunk])
            return [first + place for place in places] if share else range(first, first + len(rows))

    @property
    def endpoint(self) -> str:
        """Address of the broker for producers, as the producer was made with it."""
        return self._endpoint

    @property
    def ended(self) -> bool:
        """True if the broker takes no more samples of the partition.

        Some process has ended it with ``close(end=True)``, or its feed has ended. Samples are rejected then. A program
        that a supervisor starts again may exit with code 0.
        """
        return self._pushing.ended

    @property
    def next_seq(self) -> int:
        """Sequence number of the next sample in the partition: the samples that all processes have sent to it.

        A program that is started again goes on with this sample, also after the end, and also if the program before was
        killed. It may be read at any time.
        """
        return self._pushing.next_seq

    @property
    def write(self) -> int:
        """Number of the stream's current write: the number of writes that were committed, as far as is known here."""
        return self._pushing.write

    def commit_write(self, write: int) -> None:
        """Commit a write: the broker forgets the keys of its samples. Wait until that is durable.

        Call it in one process, once every process of the job has flushed its samples.

        Args:
            write: Number of the write, which ``write`` returned when the job began. If it is already committed, the
                call has no effect.

        Raises:
            DataStall: The commit was not durable within ``timeout_s``.
            UserError: The producer is closed.
        """
        self._pushing.tell(EndWrite(write))
        self.flush()

    def policy_version(self) -> int | None:
        """Return the version of the newest policy that trainers have published; None if they have published none.

        Raises:
            UserError: The producer is closed.
        """
        return self._pushing.policy_version

    def wait_to_start(self, samples: int = 1, timeout_s: float | None = None) -> int | None:
        """Wait until this program may generate more samples, if the run has ``staleness.on_exceed: wait``.

        The broker lets programs generate only samples that will not be too old when they are trained. In other runs,
        the call returns at once.

        Args:
            samples: Number of samples, such as the size of a group.
            timeout_s: Seconds to wait. Default: the ``timeout_s`` of the producer.

        Returns:
            The version of the newest published policy, to generate the samples with; None if there is none. With
            ``on_exceed: wait``, the call waits until there is one.

        Raises:
            DataStall: The samples may not be generated yet.
            UserError: The producer is closed.

        Example:
            >>> version = rollouts.wait_to_start(len(prompts))  # doctest: +SKIP
            >>> rollouts.send_group(generate(prompts, version), policy_version=version)  # doctest: +SKIP
        """
        if not isinstance(samples, int) or not 1 <= samples <= 2**24:
            raise UserError(f"got samples={samples!r}, expected a whole number of at least 1")
        return self._pushing.begin_samples(samples, timeout_s)

    def give_back(self, samples: int, policy_version: SupportsIndex | None = None) -> None:
        """Tell the broker that samples for which ``wait_to_start`` was called will not be sent, such as filtered ones.

        Args:
            samples: Number of samples.
            policy_version: Version of the policy with which they were begun. Default: the oldest.

        Raises:
            UserError: ``samples`` or ``policy_version`` is not an integer of at least 0, or the producer is closed.
        """
        if not isinstance(samples, int) or not 0 <= samples <= 2**24:
            raise UserError(f"got samples={samples!r}, expected a whole number of at least 0")
        version = None if policy_version is None else checked_version(policy_version, "policy_version")
        self._pushing.give_back(samples, version)

    def wait_for(self, version: SupportsIndex, timeout_s: float | None = None) -> int:
        """Wait until the trainers have published policy ``version`` or a newer one (``Client.publish``).

        Args:
            version: Version of the policy.
            timeout_s: Seconds to wait. Default: the ``timeout_s`` of the producer.

        Returns:
            The newest version.

        Raises:
            DataStall: The version was not published in time.
            UserError: ``version`` is not an integer of at least 0, or the producer is closed.

        Example:
            >>> version = rollouts.wait_for(version + 1)  # doctest: +SKIP
        """
        return self._pushing.wait_for_policy(checked_version(version, "version"), timeout_s)

    def sample_ids(self, seqs: SupportsIndex | Iterable[SupportsIndex]) -> list[SampleId]:
        """Return the ids of samples that this producer sent, for ``amend`` in any process.

        Args:
            seqs: Sequence numbers that ``send``, ``send_many`` or ``send_group`` returned. Lower numbers name samples
                that earlier processes sent to the partition.

        Returns:
            An id for each sample: tuples of three integers, which may be sent to another process.
        """
        partition, own, first = self._pushing.partition, self._pushing.process, self._pushing.first_seq
        return [SampleId(partition, seq, own if seq >= first else ANY_PROCESS) for seq in _seqs_of(seqs)]

    def amend(
        self,
        ids: SupportsIndex | Iterable[SupportsIndex | Sequence[int]],
        *,
        timeout_s: float | None = None,
        **fields: Any,
    ) -> dict[SampleId, str]:
        """Give values to late fields of samples, and wait until the values are durable in the broker's log.

        A sample is packed once it has all its late fields. A call that is repeated with the same values has no effect.
        Values may come too late: the broker has dropped the sample, or uses the default. The call returns such samples,
        and stores the values of the others.

        Args:
            ids: Samples: ids from ``sample_ids`` of any process, or sequence numbers of this producer's own samples.
            timeout_s: Seconds to wait. Default: the ``timeout_s`` of the producer.
            fields: By late field, a sequence with a value for each sample: arrays [tokens, ...] for ``axis: token``,
                else scalars or arrays of the field's shape.

        Returns:
            The samples that do not train with these values, with the reason of each; empty if there are none:

            - ``late_timeout``: the sample was dropped after ``late_timeout_s``.
            - ``default_used``: the sample got the field's default after ``late_timeout_s``.
            - ``discarded``: trainers went back to an earlier step.
            - ``policy_lag``: the policy of the sample was too old.
            - ``overlong``: the sample or its media exceed the limits of a pack.
            - ``ended``: the partition, the feed or the stream ended before.
            - Any other: the sample was rejected for this reason when it was sent.

            The first sample of each reason is logged.

        Raises:
            SampleError: A value does not fit its field.
            ValuesRejected: A sample already has another value, or was lost before it was durable. The error names all
                samples of the call whose values were not stored; the other values are stored.
            DataStall: The values were not durable in time, for example because the broker does not have a sample yet.
            UserError: An id or a field is unknown, or the producer is closed.

        Example:
            >>> seqs = rollouts.send_group(completions, policy_version=v)  # doctest: +SKIP
            >>> rollouts.amend(seqs, advantages=advantages)  # doctest: +SKIP
            {SampleId(partition=0, seq=17, process=4711): 'late_timeout'}
        """
        one = _index(ids)
        listed: list[Any] = list(ids) if one is None else [one]  # type: ignore[arg-type]
        if not listed:
            return {}
        sample_ids = [as_id(item) if _index(item) is None else self.sample_ids(item)[0] for item in listed]
        with self._given:
            if self._threads.amending is None:
                self._pushing.lease()  # raises if the producer is closed or has failed
                self._threads.amending = self._new_amending()
        return self._threads.amending.amend(sample_ids, fields, timeout_s)

    def _new_amending(self) -> Amending:
        """Return a connection that gives values to late fields."""
        return Amending(self._endpoint, self._stream, self._timeout_s, self._key)

    @property
    def _pushing(self) -> Pushing:
        """The connection that sends samples. Raises UserError if the producer has no partition."""
        if self._threads.pushing is None:
            raise UserError(
                "got samples for a producer without a partition, expected only calls of `amend`. Make a producer with "
                "a partition to send samples"
            )
        return self._threads.pushing

    def end_of_batch(self, batch: int) -> None:
        """End a batch: no later sample of this partition shares a step with an earlier one. Does not wait.

        Every partition of the stream must end the batch.

        Args:
            batch: Number of the batch for the run's record, at least 0, such as the policy version.

        Raises:
            UserError: The producer is closed.
        """
        with self._given:
            self._pushing.tell(EndBatch(batch))

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until all samples sent so far are durable in the broker's log.

        Args:
            timeout_s: Seconds to wait. Default: the ``timeout_s`` of the producer.

        Raises:
            DataStall: Samples were not durable in time; the message says what the producer waits for.
        """
        self._pushing.flush(timeout_s)

    def close(self, end: bool = False, flush: bool = True) -> None:
        """Wait until all samples are durable, and leave the partition; further calls have no effect.

        Args:
            end: True to end the partition: no process can push to it again. No effect if it has ended.
            flush: False to leave without waiting; samples that are not durable yet may be lost.

        Raises:
            DataStall: Samples were not durable within ``timeout_s``.
        """
        self._close.detach()
        self._threads.close(end, flush)

    def stats(self) -> dict[str, float]:
        """Return counts since the producer was made, and the state of its buffer.

        Returns:
            A dict of numbers by name:

            - ``samples``, ``tokens``: sent so far.
            - ``rejected``: samples that were invalid and counted.
            - ``batches``: batches ended.
            - ``wait_s``: seconds that calls waited for room in the buffer.
            - ``next_seq``: sequence number of the next sample.
            - ``durable_seq``: samples with lower sequence numbers are durable.
            - ``buffered_bytes``: bytes in the buffer.
            - ``amended``: samples that got values of late fields (``amend``); a repeated call counts again.
            - ``not_amended``: samples whose values were not stored, or came too late.

            A producer without a partition has only the last two.
        """
        pushed = {} if self._threads.pushing is None else self._threads.pushing.stats()
        amending = self._threads.amending
        return pushed | ({"amended": 0.0, "not_amended": 0.0} if amending is None else dict(amending.counts))

    def __enter__(self) -> Producer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._close.detach()
            self._threads.abandon(repr(error))

    def __reduce__(self) -> str:
        raise UserError(
            "got a producer to pickle, expected a separate producer in each process. Create a producer in the other "
            "process, with another partition"
        )


class _Threads:
    """The connections of a producer; they do not refer to it, so that it can be dropped."""

    def __init__(self) -> None:
        self.pushing: Pushing | None = None
        self.amending: Amending | None = None

    def close(self, end: bool, flush: bool) -> None:
        """End both connections; see ``Producer.close``."""
        try:
            if self.pushing is not None:
                self.pushing.finish(end, flush)
        finally:
            if self.amending is not None:
                self.amending.close()

    def abandon(self, why: str = "") -> None:
        """End both connections after a short wait for samples to be durable."""
        if self.pushing is not None:
            self.pushing.abandon(why)
        if self.amending is not None:
            self.amending.close()


def _index(value: Any) -> int | None:
    """Return a sequence number as an int; None for any other value."""
    try:
        return operator.index(value)
    except TypeError:
        return None


def _seqs_of(value: SupportsIndex | Iterable[SupportsIndex]) -> list[int]:
    """Return one or several sequence numbers as ints. Raises UserError for other values."""
    one = _index(value)
    seqs = [_index(item) for item in value] if one is None and isinstance(value, Iterable) else [one]
    numbers = [seq for seq in seqs if seq is not None and 0 <= seq < 2**62]
    if len(numbers) != len(seqs):
        raise UserError(f"got the sequence numbers {value!r:.80}, expected whole numbers of at least 0, from send")
    return numbers
