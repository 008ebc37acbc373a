"""Many samples in a few arrays: how shards whose samples are arrays of ids return them.

Theory of operation. Where a sample is an array of ids in a file, creating Python objects for it takes longer than
reading it. So such a shard reads some hundreds of samples at a time. It returns their ids in one array, their lengths,
and a reason for each rejected sample. ``Records`` holds them with their cursors. It is split into single ``RawSample``
objects where a caller wants them, or where a policy has to look at one sample.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from streampack.core.model.fields import Field
from streampack.sources.order import Cursor
from streampack.sources.records import NO_FIELDS, NO_REASONS, RawSample, RawSamples, Sample, why_of
from streampack.tokenizers.token_ids import NO_TOKENS


@dataclass(frozen=True, slots=True)
class Records:
    """Consecutive samples of one shard in a few arrays, instead of one ``RawSample`` for each.

    - ``begin``: cursor before the first sample.
    - ``cursor``: cursor after the last sample.
    - ``where(i)``: file and row of sample i, for messages.
    - ``by_sample``: names of the fields that have one value per sample, not per token.
    """

    samples: RawSamples
    begin: Cursor
    cursor: Cursor
    where: Callable[[int], str]
    by_sample: frozenset[str] = frozenset()

    def __len__(self) -> int:
        return len(self.samples.lengths)

    def __iter__(self) -> Iterator[RawSample]:
        """Yield each sample as a RawSample whose arrays share memory with these Records."""
        tokens, lengths, reasons, fields, warnings = self.samples
        tokens = tokens.astype(np.int32, copy=False)
        at = 0
        for i, length in enumerate(lengths.tolist()):
            end = at + length
            own = {name: value[i] if name in self.by_sample else value[at:end] for name, value in fields.items()}
            cursor = self._after(i + 1)
            if reason := reasons.get(i):
                yield RawSample(tokens[at:end], str(reason), self.where(i), cursor, why=why_of(reason))
            else:
                yield RawSample(tokens[at:end], None, self.where(i), cursor, own or NO_FIELDS, warnings=warnings)
            at = end

    def _after(self, count: int) -> Cursor:
        """Return the cursor after the first ``count`` samples."""
        return self.cursor if count == len(self) else self.begin._replace(sample=self.begin.sample + count)

    def apart(self, odd: NDArray[np.bool_]) -> Iterator["RawSample | Records"]:
        """Yield samples marked in ``odd`` (bool [n]) as single RawSamples and the runs between as Records, in order."""
        places = np.flatnonzero(odd).tolist()
        ends = np.concatenate([[0], np.cumsum(self.samples.lengths)])
        at = 0
        for place in [*places, len(self)]:
            if at < place:
                yield self._part(at, place, ends)
            if place < len(self):
                yield from self._part(place, place + 1, ends)
            at = place + 1

    def _part(self, begin: int, end: int, ends: NDArray[np.int64]) -> "Records":
        """Return samples ``begin`` to ``end`` as Records; ``ends`` [n + 1]: where each sample's tokens end."""
        tokens, lengths, reasons, fields, warnings = self.samples
        of_tokens = slice(int(ends[begin]), int(ends[end]))
        part = RawSamples(
            tokens[of_tokens],
            lengths[begin:end],
            {i - begin: reason for i, reason in reasons.items() if begin <= i < end},
            {name: value[begin:end] if name in self.by_sample else value[of_tokens] for name, value in fields.items()},
            warnings,
        )
        return Records(
            part, self._after(begin) if begin else self.begin, self._after(end), lambda i: self.where(begin + i),
            self.by_sample,
        )  # fmt: skip


@dataclass(slots=True)
class Room:
    """Most samples and most tokens of the next Records from ``read_many``; the caller may change them in between."""

    samples: int
    tokens: int


@runtime_checkable
class ManySource(Protocol):
    """A source that can return many samples at once, as Records, where its data are arrays of ids."""

    def read_many(
        self,
        partition: int,
        partitions: int,
        *,
        seed: int,
        passes: int | None,
        fields: Sequence[Field] = (),
        start: Cursor | None = None,
        skip: int = 0,
        room: Room,
    ) -> Iterator[RawSample | Records]:
        """Yield the samples that ``Source.read`` yields, in the same order, many at once where possible.

        Each Records comes from one shard and holds at most ``room.samples`` samples and ``room.tokens`` tokens. A
        single sample may exceed ``room.tokens``.
        """


def fitting(lengths: NDArray[np.int64], tokens: int) -> int:
    """Return how many leading samples have at most ``tokens`` ids in total, at least 1. ``lengths``: ids of each.

    >>> fitting(np.array([3, 4, 5]), 7), fitting(np.array([3, 4, 5]), 2)
    (2, 1)
    """
    return max(1, int(np.searchsorted(np.cumsum(lengths), tokens, "right")))


def one_sample(sample: Sample | str, by_sample: Collection[str]) -> RawSamples:
    """Return one sample, or the reason of a rejected one, as RawSamples of length 1."""
    if isinstance(sample, str):
        return RawSamples(NO_TOKENS, np.zeros(1, np.int64), {0: sample})
    fields = {name: value[np.newaxis] if name in by_sample else value for name, value in sample.fields.items()}
    return RawSamples(sample.tokens, np.array([len(sample.tokens)]), fields=fields, warnings=sample.warnings)


def as_samples(
    ids: NDArray[Any],
    lengths: NDArray[np.int64],
    reasons: Mapping[int, str] = NO_REASONS,
    fields: Mapping[str, NDArray[Any]] = NO_FIELDS,
    by_sample: frozenset[str] = frozenset(),
) -> RawSamples:
    """Check the ids of many samples as ``as_tokens`` does, and return RawSamples; bad samples get length 0.

    ``ids``: integers [sum of lengths]. ``reasons``: by sample number, why a sample of length 0 is rejected; ``empty``
    if not given.

    >>> as_samples(np.array([7, 8, -1, 9]), np.array([2, 1, 0, 1]))[:3]
    (array([7, 8, 9], dtype=int32), array([2, 0, 0, 1]), {2: 'empty', 1: 'range'})
    """
    kind, size = ids.dtype.kind, ids.dtype.itemsize
    all_reasons = {i: reasons.get(i, "empty") for i in np.flatnonzero(lengths == 0).tolist()}
    if ids.size and ((kind == "i" and ids.min() < 0) or (size + (kind == "u") > 4 and ids.max() >= 2**31)):
        owner = np.repeat(np.arange(len(lengths)), lengths)
        wrong = np.zeros(len(lengths), np.bool_)
        wrong[owner[(ids < 0) | (ids > 2**31 - 1)]] = True
        kept = ~wrong[owner]
        ids, lengths = ids[kept], np.where(wrong, 0, lengths)
        fields = {name: value if name in by_sample else value[kept] for name, value in fields.items()}
        all_reasons |= dict.fromkeys(np.flatnonzero(wrong).tolist(), "range")
    dtype: Any = np.uint16 if kind == "u" and size <= 2 else np.int32
    return RawSamples(ids.astype(dtype, order="C", copy=False), lengths, all_reasons, fields)
