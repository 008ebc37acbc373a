"""The columns and facts of a chunk: n consecutive samples of one partition.

On its way to the log, a chunk is an event of the producer, a message, and records of the log. Each of these is a
``ChunkBody`` with what it needs besides. ``chunk_as`` makes one of another, and raises if a column would be lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from msgspec import UNSET, Meta, Struct, UnsetType
from numpy.typing import NDArray

from streampack.core.model.bounded import Name, Small
from streampack.core.model.samples import I64, Keep
from streampack.core.model.snapshot import Count, Cursor

Reasons = Annotated[dict[Name, Count], Meta(max_length=64)]
"""Number of samples by reason."""


class OfPartition(Struct, frozen=True, kw_only=True):
    """A message or record about one partition of a stream."""

    stream: Name
    partition: Small


class ChunkBody(OfPartition, frozen=True, kw_only=True):
    """A chunk of n consecutive samples of one partition.

    Attributes:
        base_seq: Number of the first sample in its partition.
        lengths_u32: [n], tokens of each sample; 0 if the producer rejected it.
        crcs_u32: [n], CRC32C of each sample's bytes in all frames.
        loss_tokens_u32: [n], labels of each sample that count in the loss.
        cursor: Place in the source after the last sample.
        rejected: Number of rejected samples by reason.
        lost_tokens: Tokens of overlong samples that the producer cut or dropped.
        pass_ended: True if the last sample is the last of its pass over the partition.
        keep: The chunk is a group that no pack, or no step, may split; for pushed samples only.
        policy_version: Version of the policy that made all samples; for pushed samples only.
        shared_u32: [n], tokens that each sample shares with the sample before it; absent without trees.
    """

    base_seq: Count
    lengths_u32: bytes
    crcs_u32: bytes
    loss_tokens_u32: bytes
    cursor: Cursor
    rejected: Reasons = msgspec.field(default_factory=dict)
    lost_tokens: Count = 0
    pass_ended: bool | UnsetType = False
    keep: Keep | UnsetType = UNSET
    policy_version: Count | UnsetType = UNSET
    shared_u32: bytes | UnsetType = UNSET

    @property
    def num_samples(self) -> int:
        """Number of samples."""
        return len(self.lengths_u32) // 4

    @property
    def stop_seq(self) -> int:
        """Number of the first sample after the chunk."""
        return self.base_seq + self.num_samples


class SentChunk(ChunkBody, frozen=True, kw_only=True):
    """A chunk on its way to the broker.

    Attributes:
        keys: [n], key of each sample, 16 bytes; the broker admits one sample of a key. For pushed samples only.
        write: Number of the write to which the keys belong.
        warnings: Number of samples by warning, a word of ``stats.sample_warnings``; absent if there are none.
    """

    keys: bytes | UnsetType = UNSET
    write: Count | UnsetType = UNSET
    warnings: Reasons | UnsetType = UNSET


SAMPLE_BYTES: Mapping[str, int] = {"lengths_u32": 4, "crcs_u32": 4, "loss_tokens_u32": 4, "keys": 16, "shared_u32": 4}
"""Bytes of a sample in each column that has a value for each sample."""
OF_TABLE: Mapping[str, str] = {"shared_u32": "shared"}
"""Columns that not every chunk has, unsigned numbers, and the column of the ``SampleTable`` that admission sets."""
OF_GROUPS = ("keep", "shared_u32")
"""Facts and columns that hold only for all samples of a chunk together."""

Body = TypeVar("Body", bound=ChunkBody)


def optional_columns(chunk: ChunkBody) -> dict[str, NDArray[Any]]:
    """Return the columns of ``OF_TABLE`` that a chunk has, [n], by their names in the table.

    Raises ValueError for a column of another size.
    """
    columns: dict[str, NDArray[Any]] = {}
    for name, column in OF_TABLE.items():
        if (data := getattr(chunk, name)) is UNSET:
            continue
        width = SAMPLE_BYTES[name]
        if len(data) != width * chunk.num_samples:
            raise ValueError(f"got {len(data)} bytes of {name}, expected {width} bytes per sample")
        columns[column] = np.frombuffer(data, f"<u{width}")
    return columns


def taken(chunk: ChunkBody, rows: I64) -> dict[str, bytes]:
    """Return the columns of some samples of a chunk, by name; without those of ``OF_GROUPS``.

    ``rows``: numbers of the samples in the chunk, int64 [k].
    """
    columns = {}
    for name in (SAMPLE_BYTES.keys() - set(OF_GROUPS)) & set(ChunkBody.__struct_fields__):
        if (data := getattr(chunk, name)) is not UNSET:
            columns[name] = np.frombuffer(data, f"V{SAMPLE_BYTES[name]}")[rows].tobytes()
    return columns


def chunk_as(kind: type[Body], chunk: ChunkBody, skip: int = 0, without: Iterable[str] = (), **changes: Any) -> Body:
    """Return a chunk as another kind of message or record.

    Args:
        kind: The kind to make.
        chunk: The chunk.
        skip: Samples to leave out at its beginning. Counts of rejected samples and lost tokens belong to the first one.
        without: Columns of the chunk that ``kind`` leaves out on purpose.
        changes: Values of ``kind`` that the chunk does not have, or has otherwise.

    Raises:
        TypeError: ``kind`` has no place for a column of the chunk.
    """
    names = SentChunk.__struct_fields__ if isinstance(chunk, SentChunk) else ChunkBody.__struct_fields__
    body = {name: getattr(chunk, name) for name in names if name not in without}
    if skip:
        for name in SAMPLE_BYTES.keys() & body.keys():
            if body[name] is not UNSET:
                body[name] = body[name][SAMPLE_BYTES[name] * skip :]
        body |= {"base_seq": chunk.base_seq + skip, "rejected": {}, "lost_tokens": 0}
    return kind(**(body | changes))
