"""What a chunk is made of: a batch of samples, gathered one after another; and a source that gives whole batches."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from streampack.core.protocol.producer_messages import OVERLONG, Lease
from streampack.sources.arrays import Records
from streampack.sources.order import Cursor
from streampack.sources.records import DAMAGED, RawSample

CHUNK_SAMPLES = 4096
Values = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class TokenChunk:
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

    def batches(self, lease: Lease) -> Iterator[TokenChunk]:
        """Batches from the lease's cursor on, within its limits."""
        ...


@dataclass(slots=True)
class Gathered:
    """Samples of a batch to be: values of one or more each; ``tokens`` of them all, ``lost`` by cutting them."""

    parts: list[Values] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    rejected: dict[str, int] = field(default_factory=dict)
    examples: list[tuple[str, str]] = field(default_factory=list)
    tokens: int = 0
    lost: int = 0
    unmasked: int = 0
    began: float = field(default_factory=time.monotonic)

    def add(self, record: RawSample | Records, sample: Values, reason: str | None, unmasked: bool) -> None:
        """A record, as what is left of it by the policies; or many, all of which is left.

        ``unmasked``: they came without a declared loss mask.
        """
        length = len(sample[TOKENS])
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


TOKENS = ""
"""Where a sample's values hold its tokens: no field has this name."""
