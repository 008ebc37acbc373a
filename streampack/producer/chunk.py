"""The parts of a chunk: a batch of samples, samples gathered for a batch, and sources that yield whole batches."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from streampack.core.model.fields import MEDIA
from streampack.core.protocol.producer_messages import OVERLONG, Lease
from streampack.producer.media_values import ITEMS
from streampack.sources.arrays import Records
from streampack.sources.order import Cursor
from streampack.sources.records import DAMAGED, RawSample

CHUNK_SAMPLES = 4096
Values = dict[str, NDArray[Any]]


class MediaChunk(NamedTuple):
    """The media of n samples: ``items`` uint32 [n] and ``sizes`` uint32 [n] (bytes) of each, and all bytes."""

    items: NDArray[np.uint32]
    sizes: NDArray[np.uint32]
    data: bytes


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """A batch of n consecutive samples of a partition, for one chunk."""

    tokens: NDArray[np.int32] | NDArray[np.uint16]
    """[sum of lengths] the samples' tokens, end to end."""
    lengths: NDArray[np.uint32]
    """[n] tokens of each sample; 0 for a rejected sample."""
    cursor: Cursor
    """Position in the source after the last sample."""
    rejected: dict[str, int]
    """Number of rejected samples by reason."""
    examples: tuple[tuple[str, str], ...] = ()
    """(reason, place) of the first sample rejected for each reason, and of every damaged file."""
    lost_tokens: int = 0
    """Tokens of samples that were cut or dropped because they exceed the broker's limit."""
    fields: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """The lease's fields by name, in the dtype of their storage: [sum of lengths, ...], or [n, ...] of axis sample."""
    loss_tokens: NDArray[np.integer[Any]] | None = None
    """[n] loss tokens of each sample; None if all tokens but each sample's first are."""
    pass_ended: bool = False
    """True if the last sample is the last of its pass."""
    warnings: Mapping[str, int] = field(default_factory=dict)
    """Number of samples by warning, a word of ``core.stats.sample_warnings``."""
    warned: Mapping[str, str] = field(default_factory=dict)
    """Place of the first sample by warning."""
    media: MediaChunk | None = None
    """The media of the samples; None if the run has no fields of axis item or patch."""
    columns: Mapping[str, NDArray[np.integer[Any]]] = field(default_factory=dict)
    """[n] each, columns of ``chunk_body.OF_TABLE`` that the chunk has, by their names in messages."""


@runtime_checkable
class BatchSource(Protocol):
    """A source that yields whole batches, for data that needs no work on single samples."""

    digest: str

    def batches(self, lease: Lease) -> Iterator[TokenChunk]:
        """Yield batches within the lease's limits, from the lease's cursor on."""
        ...


@dataclass(slots=True)
class Gathered:
    """Samples gathered for a batch, and their counts.

    Each of ``parts`` holds the values of one sample or of several. ``media`` has the position, the items and the media
    bytes of each sample that has some. ``tokens`` counts their tokens; ``lost`` counts the tokens lost by cutting or
    dropping samples. ``warnings`` and ``warned`` are those of TokenChunk. ``records`` has each record, and the position
    of its first sample. ``began``: time of the first sample, in seconds of the monotonic clock.
    """

    parts: list[Values] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    rejected: dict[str, int] = field(default_factory=dict)
    examples: list[tuple[str, str]] = field(default_factory=list)
    media: list[tuple[int, int, NDArray[np.uint8]]] = field(default_factory=list)
    tokens: int = 0
    extra_bytes: int = 0
    lost: int = 0
    warnings: dict[str, int] = field(default_factory=dict)
    warned: dict[str, str] = field(default_factory=dict)
    records: list[tuple[int, RawSample | Records]] = field(default_factory=list)
    began: float = 0.0

    def add(self, record: RawSample | Records, sample: Values, reason: str | None, warnings: tuple[str, ...]) -> None:
        """Add a record that the policies turned into ``sample``, or several records that they left unchanged.

        ``reason``: why the policies rejected the record, or None. ``warnings``: words about each of its samples.
        """
        if not self.records:
            self.began = time.monotonic()
        length = len(sample[TOKENS])
        self.parts.append(sample)
        self.tokens += length
        if MEDIA in sample and len(sample[MEDIA]):
            self.media.append((len(self.lengths), int(sample[ITEMS][0]), sample[MEDIA]))
            self.extra_bytes += len(sample[MEDIA])
        for word in warnings if not reason else ():
            self._warn(word, len(record) if isinstance(record, Records) else 1, record, 0)
        self.records.append((len(self.lengths), record))
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

    def warn_of(self, word: str, samples: NDArray[np.bool_]) -> None:
        """Count the marked ``samples`` (bool [n]) of the n gathered samples under a warning."""
        if samples.any():
            first = int(samples.argmax())
            begin, record = self.records[bisect_right(self.records, first, key=lambda entry: entry[0]) - 1]
            self._warn(word, int(samples.sum()), record, first - begin)

    def _warn(self, word: str, count: int, record: RawSample | Records, sample: int) -> None:
        """Count ``count`` samples under a warning; sample number ``sample`` of ``record`` is the first of them."""
        if word not in self.warnings:
            self.warned[word] = record.where(sample) if isinstance(record, Records) else record.place
        self.warnings[word] = self.warnings.get(word, 0) + count


TOKENS = ""
"""Key of the tokens among a sample's values; no field has this name."""
