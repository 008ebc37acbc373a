"""Checks an ``Amend`` message, and splits its payload into the values of single samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from msgspec import UNSET

from streampack.core.model.bounded import MAX_CHUNK_SAMPLES
from streampack.core.model.fields import Field
from streampack.core.protocol.producer_messages import ANY_PROCESS, Amend
from streampack.core.staging.dropped_samples import DEFAULT_USED, ENDED, LOST, OTHER_VALUE
from streampack.core.staging.staged_partition import StagedPartition


class Refused(Exception):
    """The message cannot be accepted; the text says why."""


@dataclass(frozen=True, slots=True)
class LateValue:
    """The value of one late field of one sample, with its checksum."""

    seq: int
    name: str
    crc: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Amendments:
    """The values in a message.

    Attributes:
        values: Values that are new to the broker.
        seqs: All samples of the message.
        refused: Samples whose values cannot be stored, with the reason. Samples that were dropped are not among them.
        other: Name of a field that has another value already, for the error text.
    """

    values: list[LateValue]
    seqs: list[int]
    refused: dict[int, str] = field(default_factory=dict)
    other: str = ""


def parse_amend(
    message: Amend, payload: tuple[Any, ...], staged: StagedPartition, ended: bool = False
) -> Amendments | None:  # fmt: skip
    """Return the values in a message; None if a sample has not come yet, and may come because nothing has ``ended``.

    Raises ``Refused`` for a message that contradicts itself, or the declared fields.
    """
    seqs = _seqs_of(message)
    fields = _fields_of(message, payload, staged)
    if max(seqs) >= staged.next_seq and not ended:
        return None
    received = list(_values_of(message, payload, fields, _lengths_of(message, seqs, staged)))
    refused, other = {seq: ENDED for seq in seqs if seq >= staged.next_seq}, ""
    if message.process != ANY_PROCESS:
        refused |= {seq: LOST for seq in seqs if staged.sender(seq) not in (None, message.process)}
    for value in received:
        crc = staged.crc(value.seq, value.name)
        if crc not in (None, value.crc):
            refused.setdefault(value.seq, OTHER_VALUE if crc else DEFAULT_USED)
            other = other or value.name
    waiting = {seq for seq in seqs if seq not in refused and staged.waits(seq)}
    values = [value for value in received if value.seq in waiting and staged.crc(value.seq, value.name) is None]
    return Amendments(values, seqs, refused, other)


def _values_of(
    message: Amend, payload: tuple[Any, ...], fields: list[Field], lengths: list[int]
) -> Iterator[LateValue]:  # fmt: skip
    """Yield the values in a message. Raises ``Refused`` for a frame that has not the bytes of its samples' values."""
    seqs = _seqs_of(message)
    crcs = np.frombuffer(message.crcs_u32, "<u4").reshape(len(fields), len(seqs))
    for late_field, frame, column in zip(fields, payload, crcs.tolist(), strict=True):
        sizes = [late_field.value_bytes * (length if late_field.axis == "token" else 1) for length in lengths]
        data, at = memoryview(frame).cast("B"), 0
        if len(data) != sum(sizes):
            raise Refused(
                f"got {len(data)} bytes of {late_field.name}, expected {sum(sizes)} bytes for the given samples"
            )
        for seq, size, crc in zip(seqs, sizes, column, strict=True):
            yield LateValue(seq, late_field.name, crc, bytes(data[at : at + size]))
            at += size


def _seqs_of(message: Amend) -> list[int]:
    """Return the numbers of the samples. Raises ``Refused`` unless there are some, each once."""
    count = len(message.seqs_u64) // 8
    if not 0 < count <= MAX_CHUNK_SAMPLES or len(message.seqs_u64) != 8 * count:
        raise Refused(f"got values for {count} samples, expected 1 to {MAX_CHUNK_SAMPLES}")
    seqs: list[int] = np.frombuffer(message.seqs_u64, "<u8").tolist()
    if len(set(seqs)) != count:
        twice = next(seq for seq in seqs if seqs.count(seq) > 1)
        raise Refused(f"got sample {twice} more than once in a call, expected each sample once")
    return seqs


def _fields_of(message: Amend, payload: tuple[Any, ...], staged: StagedPartition) -> list[Field]:
    """Return the fields of a message. Raises ``Refused`` for names that are not late fields, or wrong columns."""
    late = {field.name: field for field in staged.late}
    for name in message.names:
        if name not in late:
            raise Refused(f"got a value of {name}, expected one of the late fields: {', '.join(late)}")
    names, count = len(message.names), len(message.seqs_u64) // 8
    if not names or len(set(message.names)) != names or len(payload) != names:
        raise Refused(f"got {len(payload)} columns for the fields {list(message.names)}, expected one for each field")
    if len(message.crcs_u32) != 4 * names * count:
        raise Refused(f"got {len(message.crcs_u32)} bytes of checksums, expected {4 * names * count}")
    return [late[name] for name in message.names]


def _lengths_of(message: Amend, seqs: list[int], staged: StagedPartition) -> list[int]:
    """Return the tokens of each sample. Raises ``Refused`` if they are not those of the samples."""
    by_token = any(field.name in message.names and field.axis == "token" for field in staged.late)
    columns = b"" if message.lengths_u32 is UNSET else message.lengths_u32
    if len(columns) != 4 * len(seqs) * by_token:
        raise Refused(f"got {len(columns)} bytes of lengths, expected {4 * len(seqs) * by_token}")
    lengths: list[int] = np.frombuffer(columns, "<u4").tolist() if by_token else [0] * len(seqs)
    for seq, length in zip(seqs, lengths, strict=True):
        place = staged.find(seq)
        if place is None or message.process not in (ANY_PROCESS, place.chunk.process):
            continue
        expected = int(place.chunk.lengths[place.at])
        if by_token and length != expected and expected:
            where = f"stream {staged.stream!r} partition {staged.partition} sample {seq}"
            raise Refused(f"{where}: got {length} values, expected {expected}, one per token")
    return lengths
