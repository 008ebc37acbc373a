"""Records to chunks: what a source gives, held to the lease's terms, with its fields and checksums.

Chunks of up to ``max_chunk_bytes`` are what travels, because a hop of ZeroMQ costs by the message.
A record that the terms do not admit keeps its place, with no tokens and a reason that is counted,
or ends the producer with one line that names it, as the run's policies say. Many records that come
in arrays stay so, but for those of which a policy decides. Knows leases and records; never sockets
or files.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from streampack.core.model.bounded import MAX_CHUNK_SAMPLES
from streampack.core.model.fields import LABELS, LOSS_MASK, POSITION_IDS, Field, to_bfloat16
from streampack.core.model.samples import I64, IGNORE_INDEX
from streampack.core.protocol.producer_messages import OVERLONG, Lease
from streampack.core.sessions.producer_base import Chunk, Key, Session
from streampack.errors import ConfigError, DamagedFile, SampleError
from streampack.sources.arrays import ManySource, Records, Room
from streampack.sources.formats.rows import NO_MASK
from streampack.sources.order import Cursor
from streampack.sources.records import DAMAGED, Record, Source
from streampack.wire.checksums import Column, CrcsOf
from streampack.wire.sample_checksums import plain

CHUNK_SAMPLES = 4096
CHUNK_S = 0.5
"""A chunk is sent with fewer samples and bytes if it took so long to read."""
Values = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Batch:
    """Consecutive samples of a partition: ``tokens`` [sum of lengths], ``lengths`` uint32 [n].

    A length of 0 is a rejected sample, counted in ``rejected`` by reason; ``cursor`` is the place after the last.
    ``fields`` are the lease's, by name, of their ``storage``: [sum of lengths, ...], or [n, ...] by sample.
    ``loss_tokens`` uint32 [n]: labels that count; None: all but each sample's first token.
    """

    tokens: NDArray[np.int32] | NDArray[np.uint16]
    lengths: NDArray[np.uint32]
    cursor: Cursor
    rejected: dict[str, int]
    examples: tuple[tuple[str, str], ...] = ()
    """(reason, place) of the first sample rejected for each reason, and of every file that is damaged."""
    lost_tokens: int = 0
    """Of samples cut or dropped because they were too long even to be sent."""
    fields: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    loss_tokens: NDArray[np.uint32] | None = None
    pass_ended: bool = False
    """The last sample is the last of its pass."""
    unmasked: int = 0
    """Samples that came without the declared loss mask, and are trained on as a whole."""


@runtime_checkable
class BatchSource(Protocol):
    """A source that gives whole batches: for data that needs no work by the sample."""

    digest: str

    def batches(self, lease: Lease) -> Iterator[Batch]:
        """Batches from the lease's cursor on, within its limits."""
        ...


def batches(source: Source, lease: Lease) -> Iterator[Batch]:
    """Records of a source gathered into batches that keep the lease's limits.

    Raises SampleError for what the lease's policies do not admit, naming the sample; ConfigError for a tokenizer that
    gives ids which the run's dtype does not hold.
    """
    holds = int(np.iinfo(lease.dtype).max) + 1
    if source.vocab_size is not None and source.vocab_size > holds:
        raise ConfigError(
            f"streams.{lease.stream}: got a tokenizer of {source.vocab_size} ids, and tokens: {lease.dtype}, expected "
            f"{holds} at most: set tokens: int32 in broker.yaml, or tokens_key here if the samples are ids already"
        )
    start = Cursor(*lease.cursor) if lease.cursor is not None else None
    terms = _Terms(lease)
    room = Room(terms.most, terms.room)
    read = partial(source.read_many, room=room) if isinstance(source, ManySource) else source.read
    records = read(
        lease.partition, lease.partitions, seed=lease.seed, passes=lease.passes, fields=lease.fields, start=start,
        skip=lease.first_seq if start is None else 0,
    )  # fmt: skip
    yield from _batches(records, terms, CHUNK_S, room)


def batches_of(records: Iterable[Record], lease: Lease) -> Iterator[Batch]:
    """Records gathered into batches that keep the lease's limits.

    Raises SampleError for what the lease's policies do not admit, naming the sample.
    """
    terms = _terms_of(lease)
    return _batches(records, terms, math.inf, Room(terms.most, terms.room))


def _batches(records: Iterable[Record | Records], terms: _Terms, chunk_s: float, room: Room) -> Iterator[Batch]:
    """One ends early if it took ``chunk_s`` to gather. ``room``: tells ``records`` what the batch still takes."""
    cursor: Cursor | None = None
    pass_ = math.inf
    gathered = _Gathered()
    for found in records:
        many = isinstance(found, Records)
        for record in terms.apart(found) if isinstance(found, Records) else (found,):
            sample, reason = terms.admitted(record)
            before, pass_ = pass_, _pass_of(record.cursor)
            if cursor is not None and (pass_ > before or terms.full(gathered, sample, chunk_s)):
                yield terms.batch(gathered, cursor, pass_ > before)
                gathered = _Gathered()
            gathered.add(record, sample, reason, terms.lacks_mask(record))
            cursor = record.cursor
        if many:
            terms.leave(room, gathered)
    if cursor is not None:
        yield terms.batch(gathered, cursor, True)


@dataclass(slots=True)
class _Gathered:
    """Samples of a batch to be: values of one or more each; ``tokens`` of them all, ``lost`` by cutting them."""

    parts: list[Values] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    rejected: dict[str, int] = field(default_factory=dict)
    examples: list[tuple[str, str]] = field(default_factory=list)
    tokens: int = 0
    lost: int = 0
    unmasked: int = 0
    began: float = field(default_factory=time.monotonic)

    def add(self, record: Record | Records, sample: Values, reason: str | None, unmasked: bool) -> None:
        """A record, as what is left of it by the policies; or many, all of which is left.

        ``unmasked``: they came without a declared loss mask.
        """
        length = len(sample[_TOKENS])
        self.parts.append(sample)
        self.tokens += length
        if unmasked and not reason:
            self.unmasked += len(record) if isinstance(record, Records) else 1
        if isinstance(record, Records):
            self.lengths += record.samples.lengths.tolist()
            return
        self.lengths.append(length)
        if reason:
            if reason not in self.rejected or reason == DAMAGED:
                self.examples.append((reason, record.place))
            self.rejected[reason] = self.rejected.get(reason, 0) + 1
        if record.reason is None and reason in (None, OVERLONG):
            self.lost += len(record.tokens) - length


def _pass_of(after: Cursor) -> int:
    """The pass of the sample that the cursor comes after: the last of a pass may stand at the next one's beginning."""
    return after.pass_ - (after.shard == after.sample == 0)


_TOKENS = ""
"""Where a sample's values hold its tokens: no field has this name."""


class _Terms:
    """What a lease asks of each sample."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self._dtype = np.dtype(lease.dtype)
        self._largest = int(np.iinfo(self._dtype).max)
        self._masked = any(each.name == LOSS_MASK for each in lease.fields)
        self._needs_mask = any(each.name == LOSS_MASK and each.default is None for each in lease.fields)
        self._rejected = {
            each.name: np.zeros((int(_by_sample(each)), *each.shape), each.storage) for each in lease.fields
        }
        self._rejected[_TOKENS] = np.zeros(0, self._dtype)
        token_bytes = self._dtype.itemsize + sum(each.value_bytes for each in lease.fields if not _by_sample(each))
        self.room = lease.max_chunk_bytes // token_bytes
        """Tokens that a chunk may hold."""
        sample_bytes = sum(each.value_bytes for each in lease.fields if _by_sample(each))
        self.most = min(CHUNK_SAMPLES, max(lease.max_chunk_bytes // max(sample_bytes, 1), 1))
        """Samples that it may hold: the frames of their own values are no larger than the tokens'."""

    def lacks_mask(self, record: Record | Records) -> bool:
        """Whether the run declares a loss mask and no default, and these come without one."""
        fields = record.samples.fields if isinstance(record, Records) else record.fields
        return self._needs_mask and LOSS_MASK not in fields

    def apart(self, records: Records) -> Iterator[Record | Records]:
        """The same samples; each of which a policy or the lack of a field decides comes alone."""
        tokens, lengths, _, fields = records.samples
        odd = (lengths == 0) | (lengths > self._lease.max_sample_tokens)
        if tokens.dtype != np.uint16 and self._largest < 2**31 - 1:
            outside = tokens > self._largest
            if outside.any():
                odd[np.repeat(np.arange(len(lengths)), lengths)[outside]] = True
        if (LOSS_MASK in fields and not self._masked) or isinstance(self._columns(tokens, fields, lengths), str):
            odd[:] = True
        return records.apart(odd) if odd.any() else iter((records,))

    def admitted(self, record: Record | Records) -> tuple[Values, str | None]:
        """The record's tokens and fields, empty with a reason where the policies drop it; many as they are."""
        if isinstance(record, Records):
            tokens, lengths, _, fields = record.samples
            columns = self._columns(tokens, fields, lengths)
            assert not isinstance(columns, str), "records that came apart have all their fields"
            return columns, None
        lease, tokens = self._lease, record.tokens
        reason = record.reason
        if reason is None and self._largest < 2**31 - 1 and int(tokens.max()) > self._largest:
            reason = "range"
        if reason is None and not self._masked and LOSS_MASK in record.fields:
            self._refuse_mask(record)
        sample: Values | str = reason or self._values(record)
        if isinstance(sample, str):
            if lease.poison == "error" and sample == DAMAGED:
                raise DamagedFile(f"{record.where}; or set poison: drop to count it and go on with the rest")
            if lease.poison == "error" and sample == NO_MASK:
                raise SampleError(
                    f"{record.where}: got a sample without a loss_mask, but the run declares one: add it, or set "
                    f"missing_mask: train in producer.yaml to train on the whole of such samples, or poison: drop "
                    f"(rules.poison, or the stream's) to count it and go on"
                )
            if lease.poison == "error":
                raise SampleError(
                    f"{record.place}: got a sample that cannot be used ({sample}), expected a 1-D array of ids within "
                    f"{lease.dtype}, and every declared field: mend it, or set poison: drop "
                    f"(rules.poison, or the stream's) to count it and go on"
                )
            return self._rejected, sample
        if len(tokens) <= lease.max_sample_tokens:
            return sample, None
        if lease.overlong == "truncate":
            for each in lease.fields:
                if not _by_sample(each):
                    sample[each.name] = sample[each.name][: lease.max_sample_tokens]
            sample[_TOKENS] = tokens[: lease.max_sample_tokens]
            return sample, None
        if lease.overlong == "drop":
            return self._rejected, OVERLONG
        advice = (
            "set rules.overlong, or the stream's, to truncate, split or drop, or raise rules.budget"
            if lease.overlong == "error"
            else "raise limits.sample_tokens"
        )
        raise SampleError(
            f"{record.where}: got a sample of {len(tokens)} tokens, expected at most {lease.max_sample_tokens}: "
            f"{advice}"
        )

    def _values(self, record: Record) -> Values | str:
        """Every field as its bytes hold it, and the tokens; or the reason why not."""
        if not self._lease.fields:
            return {_TOKENS: record.tokens}
        by_sample = {each.name for each in self._lease.fields if _by_sample(each)}
        fields = {name: np.asarray(value) for name, value in record.fields.items()}
        fields |= {name: value[np.newaxis] for name, value in fields.items() if name in by_sample}
        return self._columns(record.tokens, fields, np.array([len(record.tokens)]))

    def _columns(
        self, tokens: NDArray[Any], fields: Mapping[str, NDArray[Any]], lengths: NDArray[np.int64]
    ) -> Values | str:
        """The same of one sample or more, of ``lengths`` int64 [n], end to end."""
        found: Values = {_TOKENS: tokens}
        for each in self._lease.fields:
            shape = (len(lengths) if _by_sample(each) else len(tokens), *each.shape)
            value = fields.get(each.name)
            if value is None:
                default = _default(each, tokens, lengths, shape)
                if default is None:
                    return f"{each.name}: missing"
                found[each.name] = default
                continue
            if value.shape != shape:
                return f"{each.name}: length" if value.ndim == len(shape) else f"{each.name}: shape"
            stored = _stored(each, value)
            if stored is None:
                return f"{each.name}: dtype"
            found[each.name] = stored
        return found

    def _refuse_mask(self, record: Record) -> None:
        """A loss mask that would be lost is an error of the configuration, unless it masks nothing."""
        if np.asarray(record.fields[LOSS_MASK]).all():
            return
        raise SampleError(
            f"{record.where}: got a loss mask, which the run does not declare: prompts would be trained on; add "
            f"'fields: {{loss_mask: {{}}}}' to broker.yaml"
        )

    def full(self, gathered: _Gathered, sample: Values, chunk_s: float) -> bool:
        """One more would be too many, or those there have taken long enough."""
        tokens, count = gathered.tokens + len(sample[_TOKENS]), len(gathered.lengths)
        return tokens > self.room or count >= self.most or time.monotonic() - gathered.began > chunk_s

    def leave(self, room: Room, gathered: _Gathered) -> None:
        """What is left in the batch; a whole one's where that is little, since each part costs a copy of the whole."""
        room.samples, room.tokens = self.most - len(gathered.lengths), self.room - gathered.tokens
        if room.samples <= self.most // 8 or room.tokens <= self.room // 8:
            room.samples, room.tokens = self.most, self.room

    def batch(self, gathered: _Gathered, cursor: Cursor, pass_ended: bool) -> Batch:
        """Samples put together."""

        def whole(name: str) -> NDArray[Any]:
            parts = [part[name] for part in gathered.parts]
            return np.concatenate(parts) if len(parts) > 1 else parts[0]

        lengths = np.array(gathered.lengths, np.uint32)
        fields = {each.name: whole(each.name) for each in self._lease.fields}
        return Batch(
            whole(_TOKENS).astype(self._dtype, copy=False), lengths, cursor, gathered.rejected,
            tuple(gathered.examples), gathered.lost, fields, _loss_tokens(lengths, fields), pass_ended,
            gathered.unmasked,
        )  # fmt: skip


_terms_of = lru_cache(maxsize=64)(_Terms)
"""Of one sample that is pushed they would take longer than all else."""


def _by_sample(each: Field) -> bool:
    return each.axis == "sample"


def _stored(each: Field, value: NDArray[Any]) -> NDArray[Any] | None:
    """``value`` as the field's bytes hold it; None if they cannot: no number, or one out of range."""
    if value.dtype == each.storage and each.dtype != "bfloat16":
        return value
    if value.dtype.kind not in "buif":
        return None
    if each.dtype == "bfloat16":
        return to_bfloat16(value.astype(np.float32))
    if each.storage.kind == "f":
        return value.astype(each.storage)
    with np.errstate(invalid="ignore"):
        stored = value.astype(each.storage)
    return stored if np.array_equal(stored, value) else None


def _default(
    each: Field, tokens: NDArray[Any], lengths: NDArray[np.int64], shape: tuple[int, ...]
) -> NDArray[Any] | None:
    """The values of a field that samples come without; None where they must not."""
    if each.default is not None:
        return np.broadcast_to(each.fill(each.default), shape)
    if each.name == LOSS_MASK:  # all of it is trained on
        return np.ones(shape, each.storage)
    if each.name == LABELS:
        return tokens.astype(each.storage)
    if each.name == POSITION_IDS:  # of a text: the same along each axis
        begins = np.repeat(np.cumsum(lengths) - lengths, lengths)
        positions = (np.arange(len(tokens)) - begins).astype(each.storage)
        return np.broadcast_to(positions.reshape(-1, *(1 for _ in each.shape)), shape)
    return None


def _loss_tokens(lengths: NDArray[np.uint32], fields: Values) -> NDArray[np.uint32] | None:
    """Labels that count, uint32 [n]; None where no field says less than all."""
    counts: NDArray[np.bool_] | None = None
    if LOSS_MASK in fields:
        counts = fields[LOSS_MASK] != 0
    if LABELS in fields:
        given = fields[LABELS] != IGNORE_INDEX
        counts = given if counts is None else counts & given
    if counts is None:
        return None
    upto = np.concatenate([[0], np.cumsum(counts)])
    ends = np.cumsum(lengths.astype(np.int64))
    begins = np.minimum(ends - lengths + 1, ends)  # a first token is nobody's target
    found: NDArray[np.uint32] = (upto[ends] - upto[begins]).astype(np.uint32)
    return found


def chunk_of(batch: Batch, lease: Lease, session: Session, crcs_of: CrcsOf = plain) -> Chunk:
    """A batch with the checksum of every sample over all its bytes, ready to be sent; ``crcs_of`` computes them.

    Raises SampleError for a batch that is larger than one chunk may be: no credit would ever allow it.
    """
    key: Key = (lease.stream, lease.partition)
    ends = np.zeros(len(batch.lengths) + 1, np.int64)
    np.cumsum(batch.lengths, out=ends[1:])
    columns, num_bytes = [_column(batch.tokens, ends)], batch.tokens.nbytes
    for each in lease.fields:
        values, by_sample = batch.fields[each.name], _by_sample(each)
        columns.append(_column(values, np.arange(len(ends)) if by_sample else ends))
        num_bytes += 0 if by_sample else values.nbytes
    if len(batch.lengths) > MAX_CHUNK_SAMPLES or num_bytes > lease.max_chunk_bytes:
        raise SampleError(
            f"stream {lease.stream!r} partition {lease.partition}: its source gave a batch of {len(batch.lengths)} "
            f"samples and {num_bytes} bytes, expected at most {MAX_CHUNK_SAMPLES} samples and {lease.max_chunk_bytes} "
            f"bytes: have the source give smaller batches, or, for the bytes, raise limits.chunk in broker.yaml"
        )
    crcs, payload_crc = crcs_of(columns)
    loss = np.maximum(batch.lengths, 1) - 1 if batch.loss_tokens is None else batch.loss_tokens
    return Chunk(
        key=key, session=session, lengths_u32=batch.lengths.astype("<u4").tobytes(),
        crcs_u32=crcs.astype("<u4").tobytes(), loss_tokens_u32=loss.astype("<u4").tobytes(),
        num_samples=len(batch.lengths), num_bytes=num_bytes, cursor=batch.cursor, rejected=batch.rejected,
        lost_tokens=batch.lost_tokens, pass_ended=batch.pass_ended, payload=tuple(data.data for data, _ in columns),
        payload_crc=payload_crc,
    )  # fmt: skip


def _column(values: NDArray[Any], bounds: I64) -> Column:
    """The bytes of ``values`` [n, ...], of which sample i has those from ``bounds[i]`` on."""
    width = values.itemsize * math.prod(values.shape[1:])
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8), bounds * width
