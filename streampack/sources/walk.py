"""Walking shards: passes, partitions, cursors and skipping, the same for every format.

Shard i belongs to partition i mod P. Where shards are pieces of files and are not shuffled, it is file i that does, so
that a partition has its files in their own order. Held in memory: one shard's index and one block of samples.

A shard that is damaged keeps its place: it is one sample that is rejected, for whoever reads to stop at, or to count
and go on with the others.
"""

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, chain, islice, pairwise
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from streampack.core.model.fields import Field
from streampack.errors import DamagedFile, SourceError, UserError
from streampack.sources.arrays import Records, Room
from streampack.sources.files.byte_source import File, Head, ShardFile
from streampack.sources.files.compressed import plain
from streampack.sources.files.listing import open_file
from streampack.sources.order import Cursor, sample_order, shard_order
from streampack.sources.records import (
    DAMAGED,
    AnyShard,
    ArrayShard,
    Format,
    OpenShard,
    RawSample,
    RawSamples,
    Sample,
    Shard,
    why_of,
)
from streampack.sources.settings import SourceSettings, as_words, rejects_unmasked
from streampack.tokenizers.base import Tokenizer
from streampack.tokenizers.token_ids import NO_TOKENS

_AT_ONCE = 4096
"""Places of an order turned to Python's ints at a time."""
_HEAD_BYTES = 1 << 22
"""What of a file is looked at before a run."""
_RECORDS_AT_ONCE, _TOKENS_AT_ONCE = 256, 1 << 16
"""What is gathered at a time for who wants a record of each."""


def one_shard_a_file(
    files: list[File],
    index: Callable[[Sequence[Field]], Callable[[ShardFile], AnyShard]],
    *,
    from_start: bool = False,
) -> Format:
    """The format whose shards are whole files, perhaps compressed.

    ``index`` makes a Shard of an open file, for the fields of a run. ``from_start``: it reads the file from its start
    to its end, so the first bytes are enough for a look at the first samples.
    """

    def reader(fields: Sequence[Field]) -> OpenShard:
        index_file = index(fields)

        @contextlib.contextmanager
        def open_shard(number: int) -> Iterator[AnyShard]:
            with open_file(files[number]) as file, plain(file) as opened:
                yield index_file(opened)

        return open_shard

    @contextlib.contextmanager
    def open_head(number: int) -> Iterator[AnyShard]:
        with open_file(files[number], range(_HEAD_BYTES)) as file, plain(file) as opened:
            yield index(())(Head(opened, _HEAD_BYTES))

    return Format(files, len(files), reader, peek=open_head if from_start else None)


def pieces(num_samples: int) -> list[range]:
    """Samples that are found by number cut into shards: 64 or so, of at most 65,536, so that partitions can share.

    >>> [len(piece) for piece in pieces(130)][:3], len(pieces(130)), len(pieces(10**7))
    ([3, 3, 3], 44, 153)
    """
    size = max(1, min(1 << 16, -(-num_samples // 64)))
    return [range(begin, min(begin + size, num_samples)) for begin in range(0, num_samples, size)]


def digest_of(
    settings: SourceSettings, tokenizer: Tokenizer, words: tuple[str, ...], files: Sequence[File] = ()
) -> str:
    """See Source.digest; ``words``: what it must hold beside settings, tokenizer and files."""
    return hashlib.sha256(
        msgspec.json.encode(
            [
                "streampack-source-2",
                settings.source,
                [(file.name, file.size) for file in files],
                as_words(settings) | mask_words(settings, tokenizer),
                words,
                tokenizer.digest,
            ],
            order="deterministic",
        )
    ).hexdigest()


def mask_words(settings: SourceSettings, tokenizer: Tokenizer) -> dict[str, str]:
    """The digest's word on samples without a loss mask; none where they are trained on, as they always were."""
    return {"missing_mask": "reject"} if rejects_unmasked(settings, tokenizer) else {}


def vocab_size_of(settings: SourceSettings, tokenizer: Tokenizer) -> int | None:
    """See Source.vocab_size."""
    return None if settings.source == "megatron" or settings.tokens_key is not None else tokenizer.vocab_size


def check_read(partition: int, partitions: int, passes: int | None, skip: int) -> None:
    """Raises UserError for arguments of Source.read that cannot be."""
    if not 0 <= partition < partitions:
        raise UserError(f"partition: got {partition} of {partitions}, expected one of 0..{partitions - 1}")
    if skip < 0 or (passes is not None and passes < 0):
        raise UserError(f"skip, passes: got {skip}, {passes}, expected none below 0")


class _Damaged:
    """What is left of a shard that cannot be indexed: one sample that is rejected."""

    blocks = ()

    def __init__(self, error: DamagedFile) -> None:
        self._error = error

    def __len__(self) -> int:
        return 1

    def load(self, sample: int) -> Sample | str:
        return DAMAGED

    def where(self, sample: int) -> str:
        return str(self._error)


@contextlib.contextmanager
def _opened(open_shard: OpenShard, number: int) -> Iterator[AnyShard]:
    """Shard ``number``, or what is left of it."""
    with contextlib.ExitStack() as stack:
        try:
            shard: AnyShard = stack.enter_context(open_shard(number))
        except DamagedFile as error:
            shard = _Damaged(error)
        yield shard


class ShardedSource:
    """Walks the shards of a format, and the samples of each, in their order."""

    def __init__(self, settings: SourceSettings, format_: Format, tokenizer: Tokenizer) -> None:
        in_order = not settings.shuffle and bool(format_.pieces)
        words = (*format_.words, "whole files") if in_order else format_.words
        self.digest = digest_of(settings, tokenizer, words, format_.files)
        self.vocab_size = vocab_size_of(settings, tokenizer)
        self.num_files, self.num_shards = len(format_.files), format_.num_shards
        self.shard_samples: dict[int, int] = {}
        """How many samples those shards have that were opened so far, by number."""
        self._reader, self._peek = format_.reader, format_.peek
        self._shuffle = settings.shuffle
        self._files: list[range] = []
        """The shards of each file, where they must stay in its order."""
        if in_order:
            ends = [0, *accumulate(format_.pieces)]
            self._files = [range(begin, end) for begin, end in pairwise(ends)]

    def shards_of(self, partition: int, partitions: int) -> Sequence[int]:
        """The shards that belong to one of ``partitions``, by number."""
        if self._files:
            return list(chain.from_iterable(self._files[partition::partitions]))
        return range(partition, self.num_shards, partitions)

    def read(
        self,
        partition: int,
        partitions: int,
        *,
        seed: int,
        passes: int | None,
        fields: Sequence[Field] = (),
        start: Cursor | None = None,
        skip: int = 0,
    ) -> Iterator[RawSample]:
        """See Source.read."""
        room = Room(_RECORDS_AT_ONCE, _TOKENS_AT_ONCE)
        many = self.read_many(
            partition, partitions, seed=seed, passes=passes, fields=fields, start=start, skip=skip, room=room
        )
        return chain.from_iterable(found if isinstance(found, Records) else (found,) for found in many)

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
        """See ManySource.read_many."""
        check_read(partition, partitions, passes, skip)
        start = start or Cursor(0, 0, 0)
        shards = self.shards_of(partition, partitions)
        if min(start.pass_, start.shard, start.sample) < 0 or start.shard > len(shards):
            raise SourceError(f"{start}: no such place in {len(shards)} shards; it was made with other files or P")
        by_sample = frozenset(each.name for each in fields if each.axis == "sample")
        return self._walk(self._reader(fields), shards, seed, passes, start, skip, _Wanted(room, by_sample))

    def peek(self, most: int) -> Iterator[RawSample]:
        """See OpenedSource.peek."""
        return islice(self._peeked(self._peek or self._reader(())), most)

    def _peeked(self, open_shard: OpenShard) -> Iterator[RawSample]:
        wanted = _Wanted(Room(_RECORDS_AT_ONCE, _TOKENS_AT_ONCE), frozenset())
        for number in range(self.num_shards):
            with _opened(open_shard, number) as shard:
                if not len(shard):
                    continue
                order, at, after = np.arange(len(shard)), Cursor(0, number, 0), Cursor(0, number + 1, 0)
                if isinstance(shard, ArrayShard):
                    yield from chain.from_iterable(
                        found if isinstance(found, Records) else (found,)
                        for found in _gathered(shard, order, at, after, wanted)
                    )
                else:
                    yield from _loaded(shard, order, at, after)

    def where(
        self, partition: int, partitions: int, *, seed: int, passes: int | None, seq: int, fields: Sequence[Field] = ()
    ) -> str | None:
        """File and row of sample ``seq`` of a partition, counted over its passes; None if there is no such sample.

        Opens the shards before it for their number of samples, once each, and decodes no sample.
        """
        shards, pass_, left = self.shards_of(partition, partitions), 0, seq
        while passes is None or pass_ < passes:
            before = left
            for number in self._shards(shards, seed, pass_):
                if left < (count := self._count(number, fields)):
                    with _opened(self._reader(fields), number) as shard:
                        return shard.where(int(self._order(shard, number, seed, pass_)[left]))
                left -= count
            if left == before:
                return None  # no shard has any
            pass_ += 1
        return None

    def find(
        self,
        wanted: Callable[[str], bool],
        partitions: int,
        *,
        seed: int,
        passes: int | None,
        upto: int,
        fields: Sequence[Field] = (),
    ) -> list[tuple[int, int]]:
        """(partition, number in it, counted over its passes) of each sample whose file and row are ``wanted``.

        Of the first pass, and of passes that begin at or before sample ``upto`` of the partition. Opens every shard,
        and decodes no sample.
        """
        found = []
        for number in range(self.num_shards):
            with _opened(self._reader(fields), number) as shard:
                self.shard_samples[number] = len(shard)
                rows = [row for row in range(len(shard)) if wanted(shard.where(row))]
                if not rows:
                    continue
                file = next((i for i, pieces in enumerate(self._files) if number in pieces), number)
                shards, pass_, begin = self.shards_of(partition := file % partitions, partitions), 0, 0
                while (passes is None or pass_ < passes) and (begin <= upto or not pass_):
                    walked, order = self._shards(shards, seed, pass_), self._order(shard, number, seed, pass_)
                    before = begin + sum(self._count(each, fields) for each in walked[: walked.index(number)])
                    found += [(partition, before + int(np.flatnonzero(order == row)[0])) for row in rows]
                    pass_, begin = pass_ + 1, begin + sum(self._count(each, fields) for each in shards)
        return found

    def _count(self, number: int, fields: Sequence[Field]) -> int:
        if number not in self.shard_samples:
            with _opened(self._reader(fields), number) as shard:
                self.shard_samples[number] = len(shard)
        return self.shard_samples[number]

    def _shards(self, shards: Sequence[int], seed: int, pass_: int) -> list[int]:
        return shard_order(shards, seed=seed, pass_=pass_) if self._shuffle else list(shards)

    def _walk(
        self, open_shard: OpenShard, shards: Sequence[int], seed: int, passes: int | None, start: Cursor, skip: int,
        wanted: "_Wanted",
    ) -> Iterator[RawSample | Records]:  # fmt: skip
        pass_, first_shard, first = start.pass_, start.shard, start.sample
        while passes is None or pass_ < passes:
            from_the_beginning, seen = (first_shard, first) == (0, 0), 0
            order = self._shards(shards, seed, pass_)
            for place in range(first_shard, len(order)):
                after = Cursor(pass_, place + 1, 0) if place + 1 < len(order) else Cursor(pass_ + 1, 0, 0)
                with _opened(open_shard, order[place]) as shard:
                    count = self.shard_samples[order[place]] = len(shard)
                    if first > count:
                        raise SourceError(
                            f"{start}: the shard has {count} samples; the cursor was made with other files"
                        )
                    seen += count
                    skipped = min(skip, count - first)
                    skip -= skipped
                    if first + skipped < count:
                        numbers = self._order(shard, order[place], seed, pass_)
                        at = Cursor(pass_, place, first + skipped)
                        if isinstance(shard, ArrayShard):
                            yield from _gathered(shard, numbers, at, after, wanted)
                        else:
                            yield from _loaded(shard, numbers, at, after)
                first = 0
            if from_the_beginning and not seen:
                return  # no samples in any shard: for ever would be a busy loop
            pass_, first_shard, first = pass_ + 1, 0, 0

    def _order(self, shard: AnyShard, number: int, seed: int, pass_: int) -> NDArray[np.int64]:
        count = len(shard)
        if not self._shuffle:
            return np.arange(count)
        return sample_order(count, seed=seed, pass_=pass_, shard=number, blocks=shard.blocks)


class _Wanted(NamedTuple):
    """See ``read_many`` and ``Records``."""

    room: Room
    by_sample: frozenset[str]


def _loaded(shard: Shard, order: NDArray[np.int64], at: Cursor, after: Cursor) -> Iterator[RawSample]:
    """The records of one shard from the place ``at`` on, one by one; the last one's cursor is ``after``."""
    (pass_, place, first), count = at, len(order)
    load, where = shard.load, shard.where
    for begin in range(first, count, _AT_ONCE):
        for done, sample in enumerate(order[begin : begin + _AT_ONCE].tolist(), begin + 1):
            place_of = where
            try:
                got = load(sample)
            except DamagedFile as error:
                got, place_of = DAMAGED, _Damaged(error).where
            cursor = Cursor(pass_, place, done) if done < count else after
            if isinstance(got, str):
                yield RawSample(NO_TOKENS, str(got), place_of(sample), cursor, why=why_of(got))
            else:
                yield RawSample(got.tokens, None, where(sample), cursor, got.fields)


def _gathered(
    shard: ArrayShard, order: NDArray[np.int64], at: Cursor, after: Cursor, wanted: _Wanted
) -> Iterator[RawSample | Records]:
    """The same, as many at once as are wanted."""
    count = len(order)
    while at != after:
        numbers = order[at.sample : at.sample + max(1, wanted.room.samples)]
        place_of = shard.where
        try:
            samples = shard.gather(numbers, wanted.room.tokens)
        except DamagedFile as error:
            samples, place_of = _ONE_DAMAGED, _Damaged(error).where
        done = at.sample + len(samples.lengths)
        cursor = at._replace(sample=done) if done < count else after
        yield Records(samples, at, cursor, _places(place_of, numbers), wanted.by_sample)
        at = cursor


_ONE_DAMAGED = RawSamples(NO_TOKENS, np.zeros(1, np.int64), {0: DAMAGED})


def _places(place_of: Callable[[int], str], numbers: NDArray[np.int64]) -> Callable[[int], str]:
    return lambda i: place_of(int(numbers[i]))
