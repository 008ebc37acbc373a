"""A pushed chunk that waits for its late fields, and the values that have come for it.

A group that must stay together, or that shares tokens, is complete as a whole. Other samples are complete one by one.
Then ``take`` returns them as an ordinary chunk, with all fields in the declared order. The checksum of a complete
sample covers the checksum that it came with and those of its late values.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from streampack.core.columns.chunk_body import OF_GROUPS, chunk_as, taken
from streampack.core.journal.log_records import ChunkStaged
from streampack.core.media.media_counts import MEDIA_COUNT_BYTES, media_sizes
from streampack.core.model.fields import Field
from streampack.core.model.samples import I64
from streampack.core.protocol.producer_messages import Samples

LATE_TIMEOUT = "late_timeout"
"""Reason of samples that are dropped because a late field did not come in time."""
DISCARDED = "discarded"
"""Reason of pushed samples that are dropped because trainers went back to an earlier step."""


class SampleState(IntEnum):
    """The state of a staged sample."""

    WAITING = 0
    COMPLETE = 1
    TIMED_OUT = 2
    DISCARDED = 3
    ADMITTED = 4


DROP_REASONS: dict[SampleState, str] = {SampleState.TIMED_OUT: LATE_TIMEOUT, SampleState.DISCARDED: DISCARDED}


class Complete(NamedTuple):
    """Samples that may be admitted: an ordinary chunk, and the numbers with which they were sent, int64 [n]."""

    message: Samples
    payload: tuple[Any, ...]
    sent: I64


@dataclass(slots=True, eq=False)
class StagedChunk:
    """A chunk of n samples that waits.

    Attributes:
        record: The record of the chunk.
        lsn: Log sequence number of the record.
        since: Time at which the chunk came, in seconds of this broker's clock.
        batch: Number of the partition's marks that came before the chunk.
        by_sample: For each field that is not late, whether it has one value for each sample.
        has_extra: True if the samples have fields of axis item or patch: two frames more, as in a chunk.
        lengths: int64 [n], tokens of each sample.
        payload: Frames of the tokens and of the fields that are not late; None until they are read from the log.
            They may lack samples that were admitted.
        state: uint8 [n], ``SampleState`` of each sample.
        values: Bytes of each sample's value by late field; None where a value has not come.
        crcs: Checksum of each value, as for ``values``.
        unread: Records whose payload must be read from the log again.
        num_left, tokens_left: Number of the samples that were not admitted, and their tokens.
        extra_left: Bytes of their media; 0 until ``payload`` is there.
    """

    record: ChunkStaged
    lsn: int
    since: float
    batch: int
    by_sample: tuple[bool, ...] = ()
    has_extra: bool = False
    payload: tuple[Any, ...] | None = None
    lengths: I64 = field(init=False)
    state: NDArray[np.uint8] = field(init=False)
    values: dict[str, list[bytes | None]] = field(default_factory=dict)
    crcs: dict[str, list[int | None]] = field(default_factory=dict)
    unread: set[int] = field(default_factory=set)
    num_left: int = field(init=False)
    tokens_left: int = field(init=False)
    extra_left: int = 0
    _rows: I64 | None = None
    """Places of the samples in ``payload``; None for all samples."""
    _extra_sizes: I64 | None = None
    """int64 [n], bytes of the media of each sample; None without media, or until they are read."""

    def __post_init__(self) -> None:
        self.lengths = np.frombuffer(self.record.lengths_u32, "<u4").astype(np.int64)
        self.state = np.zeros(len(self.lengths), np.uint8)
        self.num_left, self.tokens_left = len(self.lengths), int(self.lengths.sum())

    @property
    def base_seq(self) -> int:
        """Number with which the chunk's first sample was sent."""
        return self.record.base_seq

    @property
    def stop_seq(self) -> int:
        """Number of the first sample after the chunk."""
        return self.base_seq + len(self.lengths)

    @property
    def process(self) -> int:
        """The process that sent the chunk."""
        return self.record.cursor[0]

    @property
    def version(self) -> int:
        """Version of the policy that made the samples; 0 if it is unknown."""
        return 0 if self.record.policy_version is UNSET else self.record.policy_version

    @property
    def is_group(self) -> bool:
        """True if the samples are complete together."""
        return any(getattr(self.record, name) is not UNSET for name in OF_GROUPS)

    @property
    def num_complete(self) -> int:
        """Number of the samples that may be admitted."""
        return int((self.state == SampleState.COMPLETE).sum())

    @property
    def empty(self) -> bool:
        """True if every sample was admitted."""
        return not self.num_left

    @property
    def is_dropped(self) -> bool:
        """True if samples were dropped, and none is complete."""
        dropped = (self.state == SampleState.TIMED_OUT) | (self.state == SampleState.DISCARDED)
        return bool(dropped.any()) and not bool((self.state == SampleState.COMPLETE).any())

    @property
    def waiting(self) -> I64:
        """Places of the samples that wait for values, int64 [k]."""
        return np.flatnonzero(self.state == SampleState.WAITING)

    def lacking(self, late: Sequence[Field], at: int) -> list[str]:
        """Return the names of the late fields of sample ``at`` that have not come. A rejected sample lacks none."""
        if not self.lengths[at]:
            return []
        return [field.name for field in late if field.name not in self.crcs or self.crcs[field.name][at] is None]

    def put(self, name: str, at: int, value: bytes | None, crc: int) -> None:
        """Set the value of a late field of sample ``at``; None for bytes that are still in the log."""
        count = len(self.lengths)
        self.values.setdefault(name, [None] * count)[at] = value
        self.crcs.setdefault(name, [None] * count)[at] = crc

    def update(self, late: Sequence[Field]) -> bool:
        """Mark the samples that are complete now; return whether there are any, or any that were dropped."""
        if self.unread:
            return False
        whole = [at for at in self.waiting.tolist() if not self.lacking(late, at)]
        if not self.is_group or len(whole) == len(self.lengths):
            self.state[whole] = SampleState.COMPLETE
        return bool(((self.state != SampleState.WAITING) & (self.state != SampleState.ADMITTED)).any())

    def read(self, payload: tuple[Any, ...]) -> None:
        """Take the payload of all samples, which was read from the log."""
        self.payload, self._rows = tuple(map(bytes, payload)), None
        if self.has_extra:
            self._extra_sizes = media_sizes(self.payload[-2])
            self.extra_left = int(self._extra_sizes[self.state != SampleState.ADMITTED].sum())
        self._shrink()

    def admit(self, rows: I64) -> None:
        """Count samples as admitted, which were not before. The memory of their values is freed."""
        self.state[rows] = SampleState.ADMITTED
        self.num_left -= len(rows)
        self.tokens_left -= int(self.lengths[rows].sum())
        if self._extra_sizes is not None:
            self.extra_left -= int(self._extra_sizes[rows].sum())
        for column in self.values.values():
            for at in rows.tolist():
                column[at] = None
        self._shrink()

    def _shrink(self) -> None:
        """Free the payload of admitted samples, if it is more than half of the payload, or of the media."""
        if not self.num_left:
            self.payload, self.values = None, {}
        if self.payload is None or self.is_group:
            return
        stored = slice(None) if self._rows is None else self._rows
        media = 0 if self._extra_sizes is None else int(self._extra_sizes[stored].sum())
        if 2 * self.tokens_left < int(self.lengths[stored].sum()) or 2 * self.extra_left < media:
            rows = np.flatnonzero(self.state != SampleState.ADMITTED)
            self.payload, self._rows = tuple(self._sent_frames(rows)), rows

    def take(self, fields: Sequence[Field], base_seq: int) -> Complete:
        """Return the next samples to admit, numbered from ``base_seq`` on, and count them as admitted.

        Samples that are dropped come as empty ones, with their reason.
        """
        kind = next(state for state in (SampleState.COMPLETE, *DROP_REASONS) if (self.state == state).any())
        rows = np.flatnonzero(self.state == kind)
        if kind is SampleState.COMPLETE:
            samples = self._complete(fields, rows, base_seq)
        else:
            samples = self._dropped(fields, rows, base_seq, DROP_REASONS[kind])
        self.admit(rows)
        return samples

    def _complete(self, fields: Sequence[Field], rows: I64, base_seq: int) -> Complete:
        """Return the complete samples ``rows`` as an ordinary chunk.

        A whole chunk keeps its group. Samples that the producer rejected lack no field, so all come at once.
        """
        record, whole = self.record, len(rows) == len(self.lengths)
        crcs = np.array([self._crc(fields, at) for at in rows.tolist()], "<u4")
        message = self._message(
            base_seq, rows, crcs_u32=crcs.tobytes(),
            rejected={} if self.lengths[rows].all() else record.rejected,
            lost_tokens=record.lost_tokens if rows[0] == 0 else 0,
            **{name: getattr(record, name) if whole else UNSET for name in OF_GROUPS},
        )  # fmt: skip
        return Complete(message, self._payload(fields, None if whole else rows), rows + self.base_seq)

    def _dropped(self, fields: Sequence[Field], rows: I64, base_seq: int, reason: str) -> Complete:
        """Return the samples ``rows``, which are dropped, as empty ones; those that had tokens count as rejected."""
        count = len(rows)
        none = bytes(4 * count)
        rejected = {reason: int((self.lengths[rows] > 0).sum())}
        message = self._message(
            base_seq, rows, lengths_u32=none, crcs_u32=none, loss_tokens_u32=none, rejected=rejected
        )  # fmt: skip
        frames = (bytes(field.value_bytes * count) if field.axis == "sample" else b"" for field in fields)
        media = (bytes(MEDIA_COUNT_BYTES * count), b"") if self.has_extra else ()
        return Complete(message, (b"", *frames, *media), rows + self.base_seq)

    def _message(self, base_seq: int, rows: I64, **changes: Any) -> Samples:
        """Return a message with samples of this chunk, numbered from ``base_seq`` on; ``changes`` are values of it."""
        values: dict[str, Any] = {"rejected": {}, "lost_tokens": 0, "pass_ended": False}
        values |= taken(self.record, rows) | dict.fromkeys(OF_GROUPS, UNSET) | changes
        return chunk_as(Samples, self.record, base_seq=base_seq, **values)

    def _crc(self, fields: Sequence[Field], at: int) -> int:
        """Return the checksum of a complete sample."""
        columns = [self.crcs[field.name] for field in fields if field.late and field.name in self.crcs]
        late = np.array([column[at] or 0 for column in columns], "<u4")
        return zlib.crc32(late.tobytes(), int(np.frombuffer(self.record.crcs_u32, "<u4")[at]))

    def _payload(self, fields: Sequence[Field], rows: I64 | None) -> tuple[Any, ...]:
        """Return the frames of the tokens and of all fields for the samples ``rows``; for all samples with None."""
        tokens, *sent = self._sent_frames(rows)
        frames, sent_frames = [tokens], iter(sent)
        all_rows = range(len(self.lengths)) if rows is None else rows.tolist()
        for late_field in fields:
            by_sample = late_field.axis == "sample"
            if not late_field.late:
                frames.append(next(sent_frames))
                continue
            values = self.values.get(late_field.name, [None] * len(self.lengths))
            none = bytes(late_field.value_bytes) if by_sample else b""  # of a rejected sample
            frames.append(b"".join(none if (value := values[at]) is None else value for at in all_rows))
        return (*frames, *sent_frames)

    def _sent_frames(self, rows: I64 | None) -> list[Any]:
        """Return the payload of the samples ``rows``; of all samples with None."""
        assert self.payload is not None  # nothing is complete while ``unread``
        if rows is None:
            return list(self.payload)
        stored = np.arange(len(self.lengths)) if self._rows is None else self._rows
        lengths, places = self.lengths[stored], np.searchsorted(stored, rows)
        ones, kinds = np.ones_like(lengths), (False, *self.by_sample)
        sizes = [ones if by_sample else lengths for by_sample in kinds]
        if self._extra_sizes is not None:
            sizes += [ones, self._extra_sizes[stored]]
        return [_rows_of(frame, rows, places) for frame, rows in zip(self.payload, sizes, strict=True)]


def _rows_of(frame: Any, sizes: I64, rows: I64) -> bytes:
    """Return the part of a frame that belongs to ``rows``; sample i has ``sizes[i]`` of the frame's equal values."""
    data, ends = memoryview(frame).cast("B"), np.concatenate([[0], np.cumsum(sizes)])
    width = len(data) // max(int(ends[-1]), 1)
    return b"".join(data[int(ends[at]) * width : int(ends[at + 1]) * width] for at in rows.tolist())
