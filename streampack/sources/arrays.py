"""Many samples at once, side by side: what shards of arrays of ids give, instead of a record of each.

Theory of operation. Where a sample is an array of ids in a file, reading it costs less than the Python objects that
would speak of it. So such a shard gathers some hundreds at a time: their ids end to end, their lengths, and a reason
for each that is none. ``Records`` says of them all that Records would, and is taken apart into these where somebody
wants them, or a policy has to look at one.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from streampack.core.model.fields import Field
from streampack.sources.order import Cursor
from streampack.sources.records import NO_FIELDS, NO_REASONS, RawSample, RawSamples, Sample
from streampack.tokenizers.token_ids import NO_TOKENS


@dataclass(frozen=True, slots=True)
class Records:
    """Consecutive samples of one shard as they were found: what as many Records would say, in a few arrays.

    ``begin``: the place before the first; ``cursor``: after the last. ``where(i)``: of the i-th, for messages.
    ``by_sample``: the names of the fields that have one value a sample.
    """

    samples: RawSamples
    begin: Cursor
    cursor: Cursor
    where: Callable[[int], str]
    by_sample: frozenset[str] = frozenset()

    def __len__(self) -> int:
        return len(self.samples.lengths)

    def __iter__(self) -> Iterator[RawSample]:
        """Each as a Record; their arrays share memory with these."""
        tokens, lengths, reasons, fields = self.samples
        tokens = tokens.astype(np.int32, copy=False)
        at = 0
        for i, length in enumerate(lengths.tolist()):
            end = at + length
            own = {name: value[i] if name in self.by_sample else value[at:end] for name, value in fields.items()}
            reason = reasons.get(i)
            cursor = self._after(i + 1)
            yield RawSample(tokens[at:end], reason, self.where(i), cursor, own if own and not reason else NO_FIELDS)
            at = end

    def _after(self, count: int) -> Cursor:
        """The place after the first ``count``."""
        return self.cursor if count == len(self) else self.begin._replace(sample=self.begin.sample + count)

    def apart(self, odd: NDArray[np.bool_]) -> Iterator["RawSample | Records"]:
        """In their order: those that are ``odd``, bool [n], as a Record each, and what lies between as Records."""
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
        tokens, lengths, reasons, fields = self.samples
        of_tokens = slice(int(ends[begin]), int(ends[end]))
        part = RawSamples(
            tokens[of_tokens],
            lengths[begin:end],
            {i - begin: reason for i, reason in reasons.items() if begin <= i < end},
            {name: value[begin:end] if name in self.by_sample else value[of_tokens] for name, value in fields.items()},
        )
        return Records(
            part, self._after(begin) if begin else self.begin, self._after(end), lambda i: self.where(begin + i),
            self.by_sample,
        )  # fmt: skip


@dataclass(slots=True)
class Room:
    """How much a reader of ``read_many`` takes next; it may change this after each thing it was given."""

    samples: int
    tokens: int


@runtime_checkable
class ManySource(Protocol):
    """A source that gives many samples at once where its data are arrays of ids."""

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
        """See Source.read: the same samples in the same order, of one shard at most in each Records.

        A Records has no more samples than ``room`` has, and no more tokens, except where its first alone has more.
        """


def fitting(lengths: NDArray[np.int64], tokens: int) -> int:
    """How many of the first samples have ``tokens`` ids together; one at least.

    >>> fitting(np.array([3, 4, 5]), 7), fitting(np.array([3, 4, 5]), 2)
    (2, 1)
    """
    return max(1, int(np.searchsorted(np.cumsum(lengths), tokens, "right")))


def one_sample(found: Sample | str, by_sample: Collection[str]) -> RawSamples:
    """What was read by itself, or why it was not, as the first of many."""
    if isinstance(found, str):
        return RawSamples(NO_TOKENS, np.zeros(1, np.int64), {0: found})
    fields = {name: value[np.newaxis] if name in by_sample else value for name, value in found.fields.items()}
    return RawSamples(found.tokens, np.array([len(found.tokens)]), fields=fields)


def as_samples(
    ids: NDArray[Any],
    lengths: NDArray[np.int64],
    reasons: Mapping[int, str] = NO_REASONS,
    fields: Mapping[str, NDArray[Any]] = NO_FIELDS,
    by_sample: frozenset[str] = frozenset(),
) -> RawSamples:
    """What ``as_tokens`` does, of many: integers [sum of lengths] as Samples. ``reasons``: of a length of 0 that is not
    just ``empty``.

    >>> as_samples(np.array([7, 8, -1, 9]), np.array([2, 1, 0, 1]))[:3]
    (array([7, 8, 9], dtype=int32), array([2, 0, 0, 1]), {2: 'empty', 1: 'range'})
    """
    kind, size = ids.dtype.kind, ids.dtype.itemsize
    found = {i: reasons.get(i, "empty") for i in np.flatnonzero(lengths == 0).tolist()}
    if ids.size and ((kind == "i" and ids.min() < 0) or (size + (kind == "u") > 4 and ids.max() >= 2**31)):
        owner = np.repeat(np.arange(len(lengths)), lengths)
        wrong = np.zeros(len(lengths), np.bool_)
        wrong[owner[(ids < 0) | (ids > 2**31 - 1)]] = True
        kept = ~wrong[owner]
        ids, lengths = ids[kept], np.where(wrong, 0, lengths)
        fields = {name: value if name in by_sample else value[kept] for name, value in fields.items()}
        found |= dict.fromkeys(np.flatnonzero(wrong).tolist(), "range")
    dtype: Any = np.uint16 if kind == "u" and size <= 2 else np.int32
    return RawSamples(ids.astype(dtype, order="C", copy=False), lengths, found, fields)
