"""Reads the shards of a format: passes, partitions, cursors and skipping, in the same way for every format.

Shard i belongs to partition i mod P. If shards are unshuffled pieces of files, all pieces of file i belong to partition
i mod P. So a partition reads its files in order. Memory holds one shard's index and one block of samples.

A damaged shard keeps its place as one rejected sample. The reader stops at it, or counts it and continues.
"""

import contextlib
import hashlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, chain, islice, pairwise
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from streampack.core.model.fields import Field
from streampack.errors import DamagedFile, SourceError, UserError
from streampack.sources.arrays import Records, Room
from streampack.sources.files.byte_source import File, Head, ShardFile
from streampack.sources.files.compressed import decompressed
from streampack.sources.files.listing import measure, open_file
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
)
from streampack.sources.settings import SourceSettings, digest_keys, rejects_unmasked
from streampack.tokenizers.base import Tokenizer
from streampack.tokenizers.token_ids import NO_TOKENS

_AT_ONCE = 4096
"""Sample numbers converted to Python ints at a time."""
_HEAD_BYTES = 1 << 22
"""Bytes at the start of a file that a preview reads."""
_RECORDS_AT_ONCE, _TOKENS_AT_ONCE = 256, 1 << 16
"""Samples and tokens read at a time for callers that want single RawSamples."""


def one_shard_a_file(
    paths: Sequence[str],
    index: Callable[[Sequence[Field]], Callable[[ShardFile], AnyShard]],
    *,
    from_start: bool = False,
) -> Format:
    """Return a Format whose shards are whole files, perhaps compressed.

    Args:
        paths: Paths and URLs of the files.
        index: Function from the fields of a run to a function that indexes an open file.
        from_start: Indexing reads the file from start to end, so its first bytes suffice to preview the first samples.
    """
    files = measure(paths)

    def reader(fields: Sequence[Field], most: int | None = None) -> OpenShard:
        """Return a function that opens a shard for the ``fields`` of a run; with ``most``, only its first bytes."""
        index_file = index(fields)

        @contextlib.contextmanager
        def open_shard(number: int) -> Iterator[AnyShard]:
            """Open file ``number``, decompress it if needed, and index it."""
            need = None if most is None else range(most)
            with open_file(files[number], need) as file, decompressed(file) as opened:
                yield index_file(opened if most is None else Head(opened, most))

        return open_shard

    return Format(files, len(files), reader, peek=partial(reader, most=_HEAD_BYTES) if from_start else None)


def pieces(num_samples: int) -> list[range]:
    """Divide ``num_samples`` numbered samples into about 64 ranges, each a shard of at most 65,536 samples.

    >>> [len(piece) for piece in pieces(130)][:3], len(pieces(130)), len(pieces(10**7))
    ([3, 3, 3], 44, 153)
    """
    size = max(1, min(1 << 16, -(-num_samples // 64)))
    return [range(begin, min(begin + size, num_samples)) for begin in range(0, num_samples, size)]


def digest_of(
    settings: SourceSettings, tokenizer: Tokenizer, words: tuple[str, ...], files: Sequence[File] = ()
) -> str:
    """Return a source's digest in hex. ``words``: further texts that the digest covers."""
    return hashlib.sha256(
        msgspec.json.encode(
            [
                "streampack-source-2",
                settings.source,
                [(file.name, file.size) for file in files],
                digest_keys(settings) | missing_mask_key(settings, tokenizer),
                words,
                tokenizer.digest,
            ],
            order="deterministic",
        )
    ).hexdigest()


def missing_mask_key(settings: SourceSettings, tokenizer: Tokenizer) -> dict[str, str]:
    """Return the digest's entry for samples without a loss mask; empty if they are trained on.

    Only rejecting has an entry, so digests from before the key existed stay valid.
    """
    return {"missing_mask": "reject"} if rejects_unmasked(settings, tokenizer) else {}


def vocab_size_of(settings: SourceSettings, tokenizer: Tokenizer) -> int | None:
    """Return the tokenizer's vocabulary size; None if it is unknown, or the source holds ids instead of texts."""
    return None if settings.source == "megatron" or settings.tokens_key is not None else tokenizer.vocab_size


def check_read(partition: int, partitions: int, passes: int | None, skip: int) -> None:
    """Raise UserError for arguments of ``Source.read`` that are out of range."""
    if not 0 <= partition < partitions:
        raise UserError(
            f"partition: got {partition} with {partitions} partitions, expected a number from 0 to {partitions - 1}"
        )
    if skip < 0 or (passes is not None and passes < 0):
        raise UserError(f"got skip={skip} and passes={passes}, expected numbers of at least 0")


class _DamagedShard:
    """A shard that cannot be indexed: it has one sample, which is rejected with the error's text."""

    blocks = ()

    def __init__(self, error: DamagedFile) -> None:
        self._error = error

    def __len__(self) -> int:
        return 1

    def load(self, sample: int) -> Sample | str:
        """Return the reason ``damaged``."""
        return DAMAGED

    def where(self, sample: int) -> str:
        """Return the text of the error that damaged the shard."""
        return str(self._error)


@contextlib.contextmanager
def _open_or_damaged(open_shard: OpenShard, number: int) -> Iterator[AnyShard]:
    """Open shard ``number``; yield a ``_DamagedShard`` in its place if it cannot be indexed."""
    with contextlib.ExitStack() as stack:
        try:
            shard: AnyShard = stack.enter_context(open_shard(number))
        except DamagedFile as error:
            shard = _DamagedShard(error)
        yield shard


class Located(NamedTuple):
    """The place of sample ``seq`` in a partition: file and row, and pass, from 0; its values if it was read."""

    seq: int
    where: str
    pass_: int
    sample: RawSample | None


class ShardedSource:
    """A source that reads the shards of a format, and the samples of each shard, in their order."""

    def __init__(self, settings: SourceSettings, format_: Format, tokenizer: Tokenizer) -> None:
        in_order = not settings.shuffle and bool(format_.pieces)
        words = (*format_.words, "whole files") if in_order else format_.words
        self.digest = digest_of(settings, tokenizer, words, format_.files)
        self.vocab_size = vocab_size_of(settings, tokenizer)
        self.num_files, self.num_shards = len(format_.files), format_.num_shards
        self.shard_samples: dict[int, int] = {}
        """Shard number to number of samples, for the shards opened so far."""
        self._reader, self._peek = format_.reader, format_.peek
        self._shuffle = settings.shuffle
        self._files: list[range] = []
        """Shard numbers of each file, if files must be read in order; else empty."""
        if in_order:
            ends = [0, *accumulate(format_.pieces)]
            self._files = [range(begin, end) for begin, end in pairwise(ends)]

    def shards_of(self, partition: int, partitions: int) -> Sequence[int]:
        """Return the numbers of the shards that belong to ``partition``."""
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
        """Yield the samples of one partition, one by one: see ``Source.read``."""
        room = Room(_RECORDS_AT_ONCE, _TOKENS_AT_ONCE)
        many = self.read_many(
            partition, partitions, seed=seed, passes=passes, fields=fields, start=start, skip=skip, room=room
        )
        return _one_by_one(many)

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
        """Yield the samples of one partition, many at once where possible: see ``ManySource.read_many``."""
        check_read(partition, partitions, passes, skip)
        start = start or Cursor(0, 0, 0)
        shards = self.shards_of(partition, partitions)
        if min(start.pass_, start.shard, start.sample) < 0 or start.shard > len(shards):
            raise SourceError(
                f"{start}: got a cursor that does not exist in {len(shards)} shards. The cursor was made with other "
                "files or another number of partitions. Resume with those files and partitions"
            )
        return self._walk(self._reader(fields), shards, seed, passes, start, skip, _options(room, fields))

    def peek(self, most: int, fields: Sequence[Field] = ()) -> Iterator[RawSample]:
        """Yield the first ``most`` samples in the files' order: see ``OpenedSource.peek``."""
        return islice(self._in_file_order((self._peek or self._reader)(fields)), most)

    def _in_file_order(self, open_shard: OpenShard) -> Iterator[RawSample]:
        """Yield the samples of all shards, unshuffled, one by one."""
        wanted = _ReadOptions(Room(_RECORDS_AT_ONCE, _TOKENS_AT_ONCE), frozenset())
        for number in range(self.num_shards):
            with _open_or_damaged(open_shard, number) as shard:
                if not len(shard):
                    continue
                at, after = Cursor(0, number, 0), Cursor(0, number + 1, 0)
                yield from _one_by_one(_read(shard, np.arange(len(shard)), at, after, wanted))

    def locate(
        self, partition: int, partitions: int, *, seed: int, passes: int | None, seqs: Iterable[int],
        fields: Sequence[Field] = (), reads: bool = False,
    ) -> Iterator[Located]:  # fmt: skip
        """Find samples of a partition by their numbers, which count from 0 over all passes; yield them in order.

        Samples that do not exist are left out. Shards before the last sample are opened once each, to count their
        samples.

        Args:
            partition: Number of the partition.
            partitions: Number of partitions.
            seed: Seed of the order.
            passes: Number of passes in all; None for endless passes.
            seqs: Numbers of the samples.
            fields: Fields that the run declares.
            reads: Also read the samples.
        """
        shards, left, begin, pass_ = self.shards_of(partition, partitions), sorted(set(seqs)), 0, 0
        while left and (passes is None or pass_ < passes):
            before = begin
            for number in self._shard_order(shards, seed, pass_):
                stop = begin + self._count_samples(number, fields)
                if here := left[: bisect_left(left, stop)]:
                    with _open_or_damaged(self._reader(fields), number) as shard:
                        order = self._sample_order(shard, number, seed, pass_)
                        for seq in here:
                            row = int(order[seq - begin])
                            read = _read_one(shard, row, fields) if reads else None
                            yield Located(seq, shard.where(row), pass_, read)
                left, begin = left[len(here) :], stop
            if begin == before:
                break  # all shards are empty
            pass_ += 1

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
        """Find samples by file and row: return (partition, sample number) of each one that is ``wanted``.

        Samples of a partition are numbered from 0 over all passes. Every shard is opened; no sample is decoded.

        Args:
            wanted: Predicate on the text that ``Shard.where`` returns.
            partitions: Number of partitions.
            seed: Seed of the order.
            passes: Number of passes in all; None for endless passes.
            upto: Search the first pass, and each pass that begins at or before this sample of a partition.
            fields: Fields that the run declares.
        """
        places = []
        for number in range(self.num_shards):
            with _open_or_damaged(self._reader(fields), number) as shard:
                self.shard_samples[number] = len(shard)
                rows = [row for row in range(len(shard)) if wanted(shard.where(row))]
                if not rows:
                    continue
                file = next((i for i, pieces in enumerate(self._files) if number in pieces), number)
                shards, pass_, begin = self.shards_of(partition := file % partitions, partitions), 0, 0
                while (passes is None or pass_ < passes) and (begin <= upto or not pass_):
                    walked = self._shard_order(shards, seed, pass_)
                    order = self._sample_order(shard, number, seed, pass_)
                    before = begin + sum(self._count_samples(each, fields) for each in walked[: walked.index(number)])
                    places += [(partition, before + int(np.flatnonzero(order == row)[0])) for row in rows]
                    pass_, begin = pass_ + 1, begin + sum(self._count_samples(each, fields) for each in shards)
        return places

    def _count_samples(self, number: int, fields: Sequence[Field]) -> int:
        """Return the number of samples of shard ``number``; open the shard the first time."""
        if number not in self.shard_samples:
            with _open_or_damaged(self._reader(fields), number) as shard:
                self.shard_samples[number] = len(shard)
        return self.shard_samples[number]

    def _shard_order(self, shards: Sequence[int], seed: int, pass_: int) -> list[int]:
        """Return the shard numbers ``shards`` in the order of a pass, shuffled or not."""
        return shard_order(shards, seed=seed, pass_=pass_) if self._shuffle else list(shards)

    def _walk(
        self, open_shard: OpenShard, shards: Sequence[int], seed: int, passes: int | None, start: Cursor, skip: int,
        wanted: "_ReadOptions",
    ) -> Iterator[RawSample | Records]:  # fmt: skip
        """Yield the samples of ``shards``, pass after pass, from ``start`` on, without the first ``skip``."""
        pass_, first_shard, first = start.pass_, start.shard, start.sample
        while passes is None or pass_ < passes:
            from_the_beginning, seen = (first_shard, first) == (0, 0), 0
            order = self._shard_order(shards, seed, pass_)
            for place in range(first_shard, len(order)):
                after = Cursor(pass_, place + 1, 0) if place + 1 < len(order) else Cursor(pass_ + 1, 0, 0)
                with _open_or_damaged(open_shard, order[place]) as shard:
                    count = self.shard_samples[order[place]] = len(shard)
                    if first > count:
                        raise SourceError(
                            f"{start}: got a cursor beyond the {count} samples of its shard. The cursor was made with "
                            "other files. Restore those files, or start a new run"
                        )
                    seen += count
                    skipped = min(skip, count - first)
                    skip -= skipped
                    if first + skipped < count:
                        numbers = self._sample_order(shard, order[place], seed, pass_)
                        at = Cursor(pass_, place, first + skipped)
                        yield from _read(shard, numbers, at, after, wanted)
                first = 0
            if from_the_beginning and not seen:
                return  # no samples in any shard: endless passes would be a busy loop
            pass_, first_shard, first = pass_ + 1, 0, 0

    def _sample_order(self, shard: AnyShard, number: int, seed: int, pass_: int) -> NDArray[np.int64]:
        """Return the sample numbers of shard ``number`` in the order of a pass, shuffled or not."""
        count = len(shard)
        if not self._shuffle:
            return np.arange(count)
        return sample_order(count, seed=seed, pass_=pass_, shard=number, blocks=shard.blocks)


def _one_by_one(samples: Iterator[RawSample | Records]) -> Iterator[RawSample]:
    """Yield the samples of ``samples``, each as a RawSample."""
    return chain.from_iterable(part if isinstance(part, Records) else (part,) for part in samples)


class _ReadOptions(NamedTuple):
    """Options of reading many samples: ``room`` as for ``read_many``, ``by_sample`` as for ``Records``."""

    room: Room
    by_sample: frozenset[str]


def _options(room: Room, fields: Sequence[Field]) -> _ReadOptions:
    """Return the options of reading samples with these ``fields``."""
    return _ReadOptions(room, frozenset(each.name for each in fields if each.axis == "sample"))


def _read(
    shard: AnyShard, order: NDArray[np.int64], at: Cursor, after: Cursor, wanted: _ReadOptions
) -> Iterator[RawSample | Records]:
    """Yield the samples of one shard from place ``at`` of ``order`` to cursor ``after``."""
    if isinstance(shard, ArrayShard):
        return _read_many(shard, order, at, after, wanted)
    return _read_each(shard, order, at, after)


def _read_one(shard: AnyShard, row: int, fields: Sequence[Field]) -> RawSample:
    """Return sample number ``row`` in the shard's own order."""
    wanted = _options(Room(1, _TOKENS_AT_ONCE), fields)
    return next(_one_by_one(_read(shard, np.array([row]), Cursor(0, 0, 0), Cursor(0, 1, 0), wanted)))


def _read_each(shard: Shard, order: NDArray[np.int64], at: Cursor, after: Cursor) -> Iterator[RawSample]:
    """Yield the samples of one shard, one by one, from place ``at`` of ``order`` on.

    ``after``: the cursor of the last sample.
    """
    (pass_, place, first), count = at, len(order)
    for begin in range(first, count, _AT_ONCE):
        for done, sample in enumerate(order[begin : begin + _AT_ONCE].tolist(), begin + 1):
            place_of = shard.where
            try:
                got = shard.load(sample)
            except DamagedFile as error:
                got, place_of = DAMAGED, _DamagedShard(error).where
            yield RawSample.of(got, place_of(sample), Cursor(pass_, place, done) if done < count else after)


def _read_many(
    shard: ArrayShard, order: NDArray[np.int64], at: Cursor, after: Cursor, wanted: _ReadOptions
) -> Iterator[RawSample | Records]:
    """Yield the samples of one shard, many at once, from place ``at`` of ``order`` to cursor ``after``."""
    count = len(order)
    while at != after:
        numbers = order[at.sample : at.sample + max(1, wanted.room.samples)]
        place_of = shard.where
        try:
            samples = shard.gather(numbers, wanted.room.tokens)
        except DamagedFile as error:
            samples, place_of = _ONE_DAMAGED, _DamagedShard(error).where
        done = at.sample + len(samples.lengths)
        cursor = at._replace(sample=done) if done < count else after
        yield Records(samples, at, cursor, _where_of(place_of, numbers), wanted.by_sample)
        at = cursor


def _where_of(place_of: Callable[[int], str], numbers: NDArray[np.int64]) -> Callable[[int], str]:
    """Return a function from an index into ``numbers`` to the file and row of that sample."""
    return lambda i: place_of(int(numbers[i]))


_ONE_DAMAGED = RawSamples(NO_TOKENS, np.zeros(1, np.int64), {0: DAMAGED})
