"""A step as the ledger keeps it: all that ``StepFormed`` says of it, in about 10 bytes a sample instead of 28.

Columns one after another, each as differences to its least value in as few bytes as the greatest of them needs: no
bytes at all where they are equal, which parts and (as what they are short of lengths) loss tokens mostly are. Indices
are taken within their stream, whose samples in a step lie close together. Checksums stay as they are.

    50 bytes of head: digest, chain, u64 loss tokens, u32 samples, u32 packs, u16 streams
    columns: counts [packs]; numbers and least indices [streams]; then [samples] which stream, index, part, length,
    length less loss tokens; each of them u8 bytes a value, i64 least, values
    u32 checksums [samples]; u8 what each says of the next [samples], where there are groups
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streampack.core.journal.log_records import StepFormed
from streampack.core.model.samples import I64, ROW
from streampack.core.model.steps import chain_digest, pack_digests, step_digest

_HEAD = struct.Struct("<16s16sQIIH")
_COLUMN = struct.Struct("<Bq")
_WIDTHS = ((1 << 8, 1), (1 << 16, 2), (1 << 32, 4))


@dataclass(frozen=True, slots=True, eq=False)
class StepRows:
    """A step: ``rows`` ``samples.ROW`` [n], pack after pack, ``bounds`` int64 [packs + 1] of them."""

    feed: str
    lineage: int
    step: int
    lsn: int
    digest: bytes
    chain: bytes
    num_loss_tokens: int
    num_samples: int
    bounds: I64
    rows: NDArray[np.void]
    keeps: NDArray[np.uint8]
    """What each sample says of the next (``samples.KEEPS``), uint8 [n]."""

    @property
    def num_tokens(self) -> int:
        """Real ones."""
        return int(self.rows["length"].sum())

    def offsets(self, align: int) -> I64:
        """Where in its pack each sample begins, int64 [n], tokens: every sample is padded to ``align``."""
        slots = -(-self.rows["length"].astype(np.int64) // align) * align
        ends = np.concatenate([[0], np.cumsum(slots)])
        found: I64 = ends[:-1] - np.repeat(ends[self.bounds[:-1]], np.diff(self.bounds))
        return found

    @property
    def packs(self) -> I64:
        """The number of the pack that each sample is in, int64 [n]."""
        return np.repeat(np.arange(len(self.bounds) - 1), np.diff(self.bounds))

    def computed(self) -> tuple[bytes, int, int]:
        """Digest, loss tokens and samples that follow from the rows alone (``steps.step_digest``)."""
        loss, count = int(self.rows["loss_tokens"].sum()), len(self.rows)
        return step_digest(self.step, loss, count, pack_digests(self.rows, self.bounds)), loss, count

    def chained(self, before: bytes) -> bytes:
        """The chain digest that follows from that of the steps ``before``."""
        return chain_digest(before, self.digest)


def rows_of(record: StepFormed, lsn: int) -> StepRows:
    """A step as its record says it. Raises ValueError where counts and rows do not agree."""
    rows, bounds = np.frombuffer(record.rows, ROW), _bounds(np.frombuffer(record.counts_u32, "<u4"))
    if int(bounds[-1]) != len(rows):
        raise ValueError(f"got {len(rows)} rows, expected {int(bounds[-1])}, as the counts of the packs say")
    return StepRows(
        record.feed, record.lineage, record.step, lsn, record.digest, record.chain, record.num_loss_tokens,
        record.num_samples, bounds, rows, _keeps(record.keeps or b"", len(rows)),
    )  # fmt: skip


def encode(step: StepRows) -> bytes:
    """``step`` but for its name and number."""
    rows, counts = step.rows, np.diff(step.bounds)
    streams, which = np.unique(rows["stream"], return_inverse=True)
    index, length = rows["index"].astype(np.int64), rows["length"].astype(np.int64)
    least = np.array([index[which == number].min() for number in range(len(streams))], np.int64)
    columns = (
        counts, streams, least, which, index - least[which], rows["part"], length, length - rows["loss_tokens"],
    )  # fmt: skip
    head = _HEAD.pack(
        step.digest, step.chain, step.num_loss_tokens, step.num_samples, len(counts), len(streams)
    )  # fmt: skip
    keeps = step.keeps.tobytes() if step.keeps.any() else b""
    return b"".join([head, *map(_packed, columns), rows["crc"].tobytes(), keeps])


def decode(feed: str, lineage: int, step: int, lsn: int, body: bytes) -> StepRows:
    """What ``encode`` made of a step."""
    digest, chain, num_loss_tokens, num_samples, packs, num_streams = _HEAD.unpack_from(body)
    at, columns = _HEAD.size, []
    for count in (packs, num_streams, num_streams):
        column, at = _unpacked(body, at, count)
        columns.append(column)
    counts, streams, least = columns
    bounds = _bounds(counts)
    rows = np.empty(int(bounds[-1]), ROW)
    which, at = _unpacked(body, at, len(rows))
    index, at = _unpacked(body, at, len(rows))
    rows["stream"], rows["index"] = streams[which], index + least[which]
    rows["part"], at = _unpacked(body, at, len(rows))
    rows["length"], at = _unpacked(body, at, len(rows))
    unlearned, at = _unpacked(body, at, len(rows))
    rows["loss_tokens"] = rows["length"] - unlearned
    rows["crc"] = np.frombuffer(body, "<u4", len(rows), at)
    keeps = _keeps(body[at + 4 * len(rows) :], len(rows))
    return StepRows(feed, lineage, step, lsn, digest, chain, num_loss_tokens, num_samples, bounds, rows, keeps)


def _keeps(said: bytes, count: int) -> NDArray[np.uint8]:
    """Of ``count`` samples; nothing is said where there are no groups. Raises ValueError for another number."""
    if len(said) not in (0, count):
        raise ValueError(f"got {len(said)} bytes of what samples say of the next, expected {count}, or none")
    return np.frombuffer(said, np.uint8) if said else np.zeros(count, np.uint8)


def _bounds(counts: NDArray[Any]) -> I64:
    bounds = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=bounds[1:])
    return bounds


def _packed(values: NDArray[Any]) -> bytes:
    if not len(values):
        return _COLUMN.pack(0, 0)
    least, greatest = int(values.min()), int(values.max())
    if least == greatest:
        return _COLUMN.pack(0, least)
    width = next((width for bound, width in _WIDTHS if greatest - least < bound), 8)
    return _COLUMN.pack(width, least) + (values.astype(np.int64) - least).astype(f"<u{width}").tobytes()


def _unpacked(body: bytes, at: int, count: int) -> tuple[I64, int]:
    """A column of ``count`` values, and where the next one begins."""
    width, least = _COLUMN.unpack_from(body, at)
    at += _COLUMN.size
    if not width:
        return np.full(count, least, np.int64), at
    values = np.frombuffer(body, f"<u{width}", count, at).astype(np.int64)
    return values + least, at + width * count
