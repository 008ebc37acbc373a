"""Checks an ``Amend`` message, and splits its payload into the values of single samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec import UNSET

from streampack.core.model.bounded import MAX_CHUNK_SAMPLES
from streampack.core.model.fields import Field
from streampack.core.protocol.producer_messages import ANY_PROCESS, Amend
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


def parse_amend(message: Amend, payload: tuple[Any, ...], staged: StagedPartition) -> list[LateValue] | None:
    """Return the values in a message that are new to the broker; None if a sample has not come yet.

    Raises ``Refused`` for a message that contradicts itself, the declared fields, or values that came before.
    """
    seqs = _seqs_of(message)
    fields = _fields_of(message, payload, staged)
    if max(seqs) >= staged.next_seq:
        return None
    crcs = np.frombuffer(message.crcs_u32, "<u4").reshape(len(fields), len(seqs))
    lengths = _lengths_of(message, seqs, staged)
    found: list[LateValue] = []
    for field, frame, column in zip(fields, payload, crcs.tolist(), strict=True):
        sizes = [field.value_bytes * (length if field.axis == "token" else 1) for length in lengths]
        data, at = memoryview(frame).cast("B"), 0
        if len(data) != sum(sizes):
            raise Refused(f"got {len(data)} bytes of {field.name}, expected {sum(sizes)} bytes for the given samples")
        for seq, size, crc in zip(seqs, sizes, column, strict=True):
            value, at = data[at : at + size], at + size
            known = staged.crc(seq, field.name)
            if known is not None and known != crc:
                raise Refused(
                    f"stream {staged.stream!r} partition {staged.partition} sample {seq}: got another value of "
                    f"{field.name} than before, expected the same value. A value cannot be changed once it is stored"
                )
            place = staged.find(seq)
            if place is not None and known is None and place.chunk.lengths[place.at]:
                found.append(LateValue(seq, field.name, crc, bytes(value)))
    return found


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
    """Return the tokens of each sample. Raises ``Refused`` if they, or the process, are not those of the samples."""
    by_token = any(field.name in message.names and field.axis == "token" for field in staged.late)
    columns = b"" if message.lengths_u32 is UNSET else message.lengths_u32
    if len(columns) != 4 * len(seqs) * by_token:
        raise Refused(f"got {len(columns)} bytes of lengths, expected {4 * len(seqs) * by_token}")
    given: list[int] = np.frombuffer(columns, "<u4").tolist() if by_token else [0] * len(seqs)
    for seq, length in zip(seqs, given, strict=True):
        place = staged.find(seq)
        if place is None:
            continue
        where = f"stream {staged.stream!r} partition {staged.partition} sample {seq}"
        if message.incarnation not in (ANY_PROCESS, place.chunk.incarnation):
            raise Refused(
                f"{where}: got a value for a sample of another process, expected the id that `Producer.sample_ids` "
                f"returned. The sample with this id was lost before it was stored"
            )
        if by_token and length != place.chunk.lengths[place.at] and place.chunk.lengths[place.at]:
            raise Refused(f"{where}: got {length} values, expected {int(place.chunk.lengths[place.at])}, one per token")
    return given
