"""Encode a step for the ledger: all facts of its ``StepFormed`` record, in about 10 bytes per sample instead of 28.

The columns (``columns``) follow one another. In two of them all values are usually the same, so that they need no
bytes: the parts, and the lengths minus the loss tokens. Indices are stored relative to the least index of their stream
in the step. Checksums are stored unchanged.

    50 bytes of head: digest, chain, u64 loss tokens, u32 samples, u32 packs, u16 streams
    columns: counts [packs]; numbers and least indices [streams]
    columns [samples]: stream, index, part, length, length minus loss tokens
    each column: see ``columns``
    u32 checksums [samples]
    columns of ``samples.EXTRAS`` [samples], up to the last of them that a sample of the step needs

The column of groups is u8 [samples], the others are encoded as above.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from streampack.core.journal.log_records import StepFormed
from streampack.core.model.samples import EXTRA_ROW, EXTRAS, I64, ROW
from streampack.core.model.steps import chain_digest, pack_digests, step_digest
from streampack.core.trees.table_trees import own_lengths
from streampack_services.ledger.columns import pack_column, unpack_column

_HEAD = struct.Struct("<16s16sQIIH")
_EXTRA_COLUMNS = [dtype.names or () for dtype in EXTRAS.values()]


@dataclass(frozen=True, slots=True, eq=False)
class StepRows:
    """A recorded step: the ``rows`` of its samples, dtype ``samples.ROW`` [n], pack after pack.

    ``bounds``: indices of the packs' first rows, int64 [packs + 1]. ``lsn``: number of the step's record.
    """

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
    extras: NDArray[np.void]
    """The other columns of the samples, dtype ``samples.EXTRA_ROW`` [n]."""

    @property
    def own_lengths(self) -> I64:
        """Tokens that each sample adds to its pack, int64 [n]: all but those that it shares."""
        return own_lengths(self.rows, self.extras)

    def column(self, name: str) -> I64:
        """Return a column of ``samples.EXTRAS``, int64 [n]."""
        column: I64 = self.extras[name].astype(np.int64)
        return column

    def extra_columns(self) -> dict[str, bytes]:
        """Return the columns of ``samples.EXTRAS`` as ``SampleTable.enter`` takes them."""
        return {name: self.extras[list(dtype.names or ())].astype(dtype).tobytes() for name, dtype in EXTRAS.items()}

    @property
    def num_tokens(self) -> int:
        """Tokens without padding; each shared one counts once."""
        return int(self.own_lengths.sum())

    def offsets(self, align: int) -> I64:
        """Return the index of each sample's first own token in its pack, int64 [n].

        ``align``: samples are padded to a multiple of this number of tokens.
        """
        slots = -(-self.own_lengths // align) * align
        ends = np.concatenate([[0], np.cumsum(slots)])
        offsets: I64 = ends[:-1] - np.repeat(ends[self.bounds[:-1]], np.diff(self.bounds))
        return offsets

    @property
    def packs(self) -> I64:
        """Number of the pack of each sample, int64 [n]."""
        return np.repeat(np.arange(len(self.bounds) - 1), np.diff(self.bounds))

    def computed(self) -> tuple[bytes, int, int]:
        """Compute digest, loss tokens and number of samples from the rows alone (``steps.step_digest``)."""
        loss, count = int(self.rows["loss_tokens"].sum()), len(self.rows)
        depths = self.extras["shared"]
        shares = depths.tobytes() if depths.any() else UNSET
        return step_digest(self.step, loss, count, pack_digests(self.rows, self.bounds, shares)), loss, count

    def chained(self, before: bytes) -> bytes:
        """Return the chain digest of this step after the chain digest ``before`` of the previous step."""
        return chain_digest(before, self.digest)


def rows_of(record: StepFormed, lsn: int) -> StepRows:
    """Return the rows of a ``StepFormed`` record with number ``lsn``. Raises ValueError if counts and rows differ."""
    rows, bounds = np.frombuffer(record.rows, ROW), _bounds(np.frombuffer(record.counts_u32, "<u4"))
    if int(bounds[-1]) != len(rows):
        raise ValueError(f"got {len(rows)} rows, expected {int(bounds[-1])}, the sum of the samples per pack")
    return StepRows(
        record.feed, record.lineage, record.step, lsn, record.digest, record.chain, record.num_loss_tokens,
        record.num_samples, bounds, rows, record.extra_rows(len(rows)),
    )  # fmt: skip


def encode(step: StepRows) -> bytes:
    """Encode a step without its feed, lineage, number and lsn."""
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
    needed = [number for number, names in enumerate(_EXTRA_COLUMNS, 1) if step.extras[names[0]].any()]
    extras = [
        step.extras[name].tobytes() if EXTRA_ROW[name] == np.uint8 else pack_column(step.extras[name])
        for names in _EXTRA_COLUMNS[: max(needed, default=0)] for name in names
    ]  # fmt: skip
    return b"".join([head, *map(pack_column, columns), rows["crc"].tobytes(), *extras])


def decode(feed: str, lineage: int, step: int, lsn: int, body: bytes) -> StepRows:
    """Decode the ``body`` that ``encode`` made of a step; the other arguments are the facts that the body lacks."""
    digest, chain, num_loss_tokens, num_samples, packs, num_streams = _HEAD.unpack_from(body)
    (counts, streams, least), at = _unpacked(body, _HEAD.size, packs, num_streams, num_streams)
    bounds = _bounds(counts)
    rows = np.empty(int(bounds[-1]), ROW)
    (which, index, part, length, unlearned), at = _unpacked(body, at, *[len(rows)] * 5)
    rows["stream"], rows["index"], rows["part"] = streams[which], index + least[which], part
    rows["length"], rows["loss_tokens"] = length, length - unlearned
    rows["crc"] = np.frombuffer(body, "<u4", len(rows), at)
    at += 4 * len(rows)
    extras = np.zeros(len(rows), EXTRA_ROW)
    for name in EXTRA_ROW.names or ():
        if at == len(body):
            break
        if EXTRA_ROW[name] == np.uint8:
            extras[name] = np.frombuffer(body, np.uint8, len(rows), at)
            at += len(rows)
        else:
            extras[name], at = unpack_column(body, at, len(rows))
    return StepRows(feed, lineage, step, lsn, digest, chain, num_loss_tokens, num_samples, bounds, rows, extras)


def _unpacked(body: bytes, at: int, *counts: int) -> tuple[list[I64], int]:
    """Decode columns of ``counts`` values from byte ``at``; return them and the byte where the next one begins."""
    columns = []
    for count in counts:
        column, at = unpack_column(body, at, count)
        columns.append(column)
    return columns, at


def _bounds(counts: NDArray[Any]) -> I64:
    """Return 0 and the running sums of ``counts``, int64 [n + 1]."""
    bounds = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=bounds[1:])
    return bounds
