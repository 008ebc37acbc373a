"""Turn a source's records into batches within a lease's limits, and batches into chunks with checksums.

A chunk holds many samples, up to ``max_chunk_bytes``, because ZeroMQ's cost is per message. The module knows leases and
records. It does not know sockets or files.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache, partial
from typing import Any

import numpy as np
from msgspec import UNSET, UnsetType
from numpy.typing import NDArray

from streampack.core.columns.chunk_body import SAMPLE_BYTES
from streampack.core.layout.loss_tokens import loss_tokens
from streampack.core.model.bounded import MAX_CHUNK_SAMPLES
from streampack.core.model.fields import LABELS, LOSS_MASK, Field
from streampack.core.model.samples import I64
from streampack.core.protocol.producer_messages import Lease
from streampack.core.sessions.producer_base import Chunk, Session
from streampack.core.stats.sample_warnings import NO_LOSS_TOKENS
from streampack.errors import ConfigError, SampleError
from streampack.producer.chunk import Gathered, TokenChunk
from streampack.producer.lease_limits import LeaseLimits, is_by_sample
from streampack.sources.arrays import ManySource, Records, Room
from streampack.sources.order import Cursor, is_begin
from streampack.sources.records import RawSample, Source
from streampack.wire.checksums import Column, CrcsOf
from streampack.wire.sample_checksums import plain

CHUNK_S = 0.5
"""Seconds after which a batch ends, even if the lease's limits allow more samples."""


def batches(source: Source, lease: Lease, share: float = 1.0) -> Iterator[TokenChunk]:
    """Yield a source's records from the lease's cursor on, gathered into batches within the lease's limits.

    The first batch has at most this ``share`` of what the limits allow, each further one up to twice as much.

    Raises SampleError for a sample that the lease's policies reject, and ConfigError if the tokenizer's ids do not fit
    the run's dtype.
    """
    holds = int(np.iinfo(lease.dtype).max) + 1
    if source.vocab_size is not None and source.vocab_size > holds:
        raise ConfigError(
            f"streams.{lease.stream}: got a tokenizer with {source.vocab_size} ids and `tokens: {lease.dtype}`, "
            f"expected at most {holds} ids. Set `tokens: int32` in broker.yaml, or set tokens_key in producer.yaml if "
            "the samples are already token ids"
        )
    check_image_fields(f"streams.{lease.stream}", getattr(source, "image_fields", {}), lease.sent_fields)
    start = Cursor(*lease.cursor or (0, 0, 0))
    terms = LeaseLimits(lease)
    room = Room(max(int(terms.most * share), 1), max(int(terms.room * share), 1))
    read = partial(source.read_many, room=room) if isinstance(source, ManySource) else source.read
    records = read(
        lease.partition, lease.partitions, seed=lease.seed, passes=lease.passes,
        fields=lease.sent_fields, start=start,
        skip=lease.first_seq if is_begin(start) else 0,
    )  # fmt: skip
    yield from _batches(records, terms, CHUNK_S, room, share)


def check_image_fields(where: str, needed: Mapping[str, Mapping[str, Any]], fields: Iterable[Field]) -> None:
    """Raise ConfigError if a run lacks a field that the images of a stream need, or declares it for another processor.

    ``where``: the stream, for the message. ``needed``: the fields, as in broker.yaml. ``fields``: those of the run.
    """
    by_name = {field.name: field for field in fields}
    missing = [name for name in needed if name not in by_name and not (name == LOSS_MASK and LABELS in by_name)]
    if missing:
        raise ConfigError(
            f"{where}: got a tokenizer with a processor, but the run does not declare {', '.join(missing)}, which "
            f"images need. Write in broker.yaml: `fields: {_flow(needed)}`"
        )
    for name, keys in needed.items():
        if name in by_name and (unfit := _unfit(by_name[name], keys)):
            raise ConfigError(
                f"{where}: got `{unfit[0]}` for the field {name} of the run, expected `{unfit[1]}`, as the processor "
                f"makes images. Write in broker.yaml: `fields: {_flow(needed)}`. Or give the processor of this run"
            )


def _unfit(field: Field, keys: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return what is declared for a field and what a processor needs, where they differ; None if they fit."""
    declared: dict[str, Any] = {"axis": field.axis, "shape": list(field.shape)}
    needed = {name: keys.get(name, default) for name, default in (("axis", "token"), ("shape", []))}
    if field.placeholder is not None and (placeholder := keys.get("placeholder")):
        tokens = list(field.placeholder.tokens)
        has_all = set(placeholder["tokens"]) <= set(tokens)
        declared["placeholder"] = {"tokens": tokens, "patches": field.placeholder.patches}
        needed["placeholder"] = {**placeholder, "tokens": tokens if has_all else placeholder["tokens"]}
    pairs = ((f"{name}: {_flow(declared[name])}", f"{name}: {_flow(needed[name])}") for name in declared)
    return next((pair for pair in pairs if pair[0] != pair[1]), None)


def _flow(value: Any) -> str:
    """Return a value of a configuration as YAML in one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_flow(item)}" for key, item in value.items()) + "}"
    return "[" + ", ".join(map(_flow, value)) + "]" if isinstance(value, list | tuple) else str(value)


def batches_of(records: Iterable[RawSample], lease: Lease) -> Iterator[TokenChunk]:
    """Yield ``records`` gathered into batches within the lease's limits, without a limit of time.

    Raises SampleError for a sample that the lease's policies reject.
    """
    terms = _limits_of(lease)
    return _batches(records, terms, math.inf, Room(terms.most, terms.room))


def _batches(
    records: Iterable[RawSample | Records], terms: LeaseLimits, chunk_s: float, room: Room, share: float = 1.0
) -> Iterator[TokenChunk]:
    """Yield records gathered into batches; a batch also ends after ``chunk_s`` seconds and at the end of a pass.

    The first batch has at most a ``share`` of these seconds and of the lease's limits, each further one twice as much.
    ``room`` is kept up to date with the samples and tokens that the batch can still take; ``records`` reads it.
    """
    cursor: Cursor | None = None
    pass_ = math.inf
    gathered = Gathered()
    for received in records:
        many = isinstance(received, Records)
        for record in terms.split(received) if isinstance(received, Records) else (received,):
            sample, reason = terms.apply_policies(record)
            before, pass_ = pass_, _pass_of(record.cursor)
            if cursor is not None and (pass_ > before or terms.full(gathered, sample, chunk_s, share)):
                yield terms.batch(gathered, cursor, pass_ > before)
                gathered, share = Gathered(), min(2 * share, 1.0)
            gathered.add(record, sample, reason, terms.warnings_of(record))
            cursor = record.cursor
        if many:
            terms.update_room(room, gathered, share)
    if cursor is not None:
        yield terms.batch(gathered, cursor, True)


def _pass_of(after: Cursor) -> int:
    """Return the pass of the sample before the cursor, which may stand at the beginning of the next pass."""
    return after.pass_ - (after.shard == after.sample == 0)


_limits_of = lru_cache(maxsize=64)(LeaseLimits)
"""``LeaseLimits``, cached: for a single pushed sample, the construction would take most of the time."""


def chunk_of(batch: TokenChunk, lease: Lease, session: Session, crcs_of: CrcsOf = plain) -> Chunk:
    """Return a batch as a chunk with a checksum of each sample's bytes, computed by ``crcs_of``.

    Raises SampleError for a batch larger than the largest chunk, which no credit would ever allow.
    """
    ends = np.zeros(len(batch.lengths) + 1, np.int64)
    np.cumsum(batch.lengths, out=ends[1:])
    columns, num_bytes = [_column(batch.tokens, ends)], batch.tokens.nbytes
    for field in lease.fields:
        values, by_sample = batch.fields[field.name], is_by_sample(field)
        columns.append(_column(values, np.arange(len(ends)) if by_sample else ends))
        num_bytes += 0 if by_sample else values.nbytes
    if batch.media is not None:
        counts = np.stack(batch.media[:2], axis=1).astype("<u4")
        bounds = np.concatenate([[0], np.cumsum(batch.media.sizes, dtype=np.int64)])
        columns += [_column(counts, np.arange(len(ends)))]
        columns += [_column(np.frombuffer(batch.media.data, np.uint8), bounds)]
        num_bytes += len(batch.media.data)
    late = sum(field.value_bytes for field in lease.late_fields or () if not is_by_sample(field))
    num_bytes += late * len(batch.tokens)
    if len(batch.lengths) > MAX_CHUNK_SAMPLES or num_bytes > lease.max_chunk_bytes:
        raise SampleError(
            f"stream {lease.stream!r} partition {lease.partition}: got a batch of {len(batch.lengths)} samples and "
            f"{num_bytes} bytes, expected at most {MAX_CHUNK_SAMPLES} samples and {lease.max_chunk_bytes} bytes. Make "
            "the source yield smaller batches, or, if the batch has too many bytes, raise limits.chunk in broker.yaml, "
            "or `chunk` of streampack.local"
        )
    crcs, payload_crc = crcs_of(columns)
    loss = loss_tokens(None, batch.lengths.astype(np.int64)) if batch.loss_tokens is None else batch.loss_tokens
    further: dict[str, Any] = {
        name: values.astype(f"<u{SAMPLE_BYTES[name]}").tobytes() for name, values in batch.columns.items()
    }
    return Chunk(
        stream=lease.stream, partition=lease.partition, session=session,
        lengths_u32=batch.lengths.astype("<u4").tobytes(), crcs_u32=crcs.astype("<u4").tobytes(),
        loss_tokens_u32=loss.astype("<u4").tobytes(), num_bytes=num_bytes, cursor=batch.cursor, rejected=batch.rejected,
        lost_tokens=batch.lost_tokens, pass_ended=batch.pass_ended, payload=tuple(data.data for data, _ in columns),
        payload_crc=payload_crc, warnings=_sent(batch.warnings),
        **further,
    )  # fmt: skip


def _sent(warnings: Mapping[str, int]) -> dict[str, int] | UnsetType:
    """Return the warnings that travel with a chunk; the broker counts samples without loss tokens on admission."""
    return {word: count for word, count in warnings.items() if word != NO_LOSS_TOKENS} or UNSET


def _column(values: NDArray[Any], bounds: I64) -> Column:
    """Return the bytes of ``values``, and the byte at which each sample begins; ``bounds`` int64 [n + 1] are rows."""
    width = values.itemsize * math.prod(values.shape[1:])
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8), bounds * width
