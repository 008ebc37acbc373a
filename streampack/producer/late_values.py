"""Turn a program's values of late fields into ``Amend`` messages, and the answers into ids of samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from msgspec import UNSET

from streampack.core.model.bounded import MAX_CHUNK_SAMPLES
from streampack.core.model.fields import Field, to_bfloat16
from streampack.core.protocol.producer_messages import Amend, Amended, LateFields
from streampack.errors import SampleError, UserError
from streampack.producer.pushed_samples import plain
from streampack.sources.formats.rows import as_field
from streampack.wire.checksums import crc32c


class SampleId(NamedTuple):
    """Id of a pushed sample, for ``Producer.amend`` in any process; a tuple of three integers.

    Example:
        >>> SampleId(0, 17, 4711)[:2]
        (0, 17)
    """

    partition: int
    """Number of the partition."""
    seq: int
    """Sequence number of the sample in the partition, as ``Producer.send`` returns it."""
    process: int
    """Number of the process that sent the sample; 0 if that was an earlier process."""


def as_id(value: Any) -> SampleId:
    """Return an id that the program passes. Raises UserError for another value."""
    try:
        partition, seq, process = value
        sample_id = SampleId(int(partition), int(seq), int(process))
    except (TypeError, ValueError):
        raise UserError(f"got the id {value!r:.80}, expected an id from Producer.sample_ids: three integers") from None
    if not (0 <= sample_id.partition < 2**20 and 0 <= sample_id.seq < 2**62 and 0 <= sample_id.process < 2**62):
        raise UserError(f"got the id {value!r:.80}, expected an id from Producer.sample_ids")
    return sample_id


def seqs_of(message: Amend) -> list[int]:
    """Return the numbers of the samples of a message."""
    seqs: list[int] = np.frombuffer(message.seqs_u64, "<u8").tolist()
    return seqs


def refused_of(message: Amend, answer: Amended) -> dict[SampleId, str]:
    """Return the samples of a message whose values were not stored, with the reason of each."""
    return {
        SampleId(message.partition, seq, message.process): reason
        for reason, seqs in (answer.refused or {}).items() for seq in np.frombuffer(seqs, "<u8").tolist()
    }  # fmt: skip


def values_of(
    ids: Sequence[SampleId], values_of: Mapping[str, Sequence[Any]], terms: LateFields
) -> Iterator[tuple[Amend, tuple[Any, ...]]]:
    """Yield messages with their payload that give values to samples; ``number`` is 0 in each.

    Args:
        ids: The samples, each once.
        values_of: A value for each sample, by late field.
        terms: The late fields of the stream.

    Raises SampleError for a value that does not fit its field, and UserError for other mistakes.
    """
    fields = _fields_of(values_of, terms)
    if len(set(ids)) != len(ids):
        raise UserError("got a sample more than once, expected each sample once in a call")
    for name, values in values_of.items():
        if len(values) != len(ids):
            raise UserError(f"got {len(values)} values of {name} for {len(ids)} samples, expected one for each sample")
    rows = [[_stored(values_of[field.name][at], field, one) for field in fields] for at, one in enumerate(ids)]
    order = sorted(range(len(ids)), key=lambda at: (ids[at].partition, ids[at].process, ids[at].seq))
    for _, batch in groupby(order, key=lambda at: (ids[at].partition, ids[at].process)):
        for part in _parts(list(batch), rows, terms.max_chunk_bytes):
            yield _message([ids[at] for at in part], fields, [rows[at] for at in part], terms.stream)


def _fields_of(values: Mapping[str, Any], terms: LateFields) -> list[Field]:
    """Return the fields of the given values. Raises UserError for a name that is no late field."""
    late = {field.name: field for field in terms.fields}
    for name in values:
        if name not in late:
            raise UserError(
                f"stream {terms.stream!r}: got values of {name!r}, expected one of the late fields: {', '.join(late)}"
            )
    if not values:
        raise UserError(f"got no values, expected values of at least one late field: {', '.join(late)}")
    return [late[name] for name in values]


def _stored(value: Any, field: Field, one: SampleId) -> np.ndarray[Any, Any]:
    """Return a value in the form in which it is stored. Raises SampleError if it does not fit the field."""
    array = np.asarray(plain(value))
    tokens = len(array) if field.axis == "token" and array.ndim else 0
    converted = as_field(array, field, tokens)
    if isinstance(converted, str):
        expected = f"dtype {field.dtype} and shape {list(field.shape)}" + " for each token" * (field.axis == "token")
        raise SampleError(
            f"sample {one.seq} of partition {one.partition}: got a value of {field.name} that cannot be used "
            f"({converted}), expected {expected}"
        )
    stored = to_bfloat16(converted) if field.dtype == "bfloat16" else converted.astype(field.storage, copy=False)
    return np.ascontiguousarray(stored)


def _parts(order: list[int], rows: list[list[np.ndarray[Any, Any]]], most_bytes: int) -> Iterator[list[int]]:
    """Yield places of samples, in order, whose values fit one message."""
    part, size = list[int](), 0
    for at in order:
        more = sum(value.nbytes for value in rows[at])
        if part and (size + more > most_bytes or len(part) >= MAX_CHUNK_SAMPLES):
            yield part
            part, size = [], 0
        part.append(at)
        size += more
    yield part


def _message(
    ids: list[SampleId], fields: list[Field], rows: list[list[np.ndarray[Any, Any]]], stream: str
) -> tuple[Amend, tuple[Any, ...]]:
    """Return the message for samples of one partition and process, with its payload."""
    columns = [[row[k].tobytes() for row in rows] for k in range(len(fields))]
    crcs = np.array([[crc32c(value) for value in column] for column in columns], "<u4")
    by_token = [k for k, field in enumerate(fields) if field.axis == "token"]
    lengths = np.array([len(row[by_token[0]]) for row in rows], "<u4").tobytes() if by_token else UNSET
    for k in by_token:
        for one, row in zip(ids, rows, strict=True):
            if len(row[k]) != len(row[by_token[0]]):
                raise SampleError(
                    f"sample {one.seq} of partition {one.partition}: got {len(row[k])} values of {fields[k].name} and "
                    f"{len(row[by_token[0]])} of {fields[by_token[0]].name}, expected one for each token"
                )
    message = Amend(
        stream=stream, partition=ids[0].partition, number=0, process=ids[0].process,
        seqs_u64=np.array([one.seq for one in ids], "<u8").tobytes(), names=tuple(field.name for field in fields),
        crcs_u32=crcs.tobytes(), lengths_u32=lengths,
    )  # fmt: skip
    return message, tuple(b"".join(column) for column in columns)
