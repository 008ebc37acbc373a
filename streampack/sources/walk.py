"""Reads the shards of a format: passes, partitions, cursors and skipping, in the same way for every format.

Shard i belongs to partition i mod P. If shards are unshuffled pieces of files, all pieces of file i belong to partition
i mod P. So a partition reads its files in order.

Shuffled shards are read in groups (``order``), and memory holds the indices of one group and one window of its blocks.
The sizes of both follow from the settings, the files and the number of partitions alone, so each producer reads the
same order. ``FILE_BYTES`` bounds the files of a group, because opening them takes time, and memory or disk. A remote
file is cached, and a compressed one is decompressed. ``BLOCK_BYTES`` bounds the blocks of a window.

A damaged shard keeps its place as one rejected sample. The reader stops at it, or counts it and continues.
"""

import contextlib
import hashlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, chain, islice, pairwise
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from streampack.core.model.fields import Field
from streampack.core.model.snapshot import MIXED
from streampack.errors import DamagedFile, SourceError, UserError
from streampack.sources.arrays import Records, Room
from streampack.sources.files.byte_source import File, Head, ShardFile
from streampack.sources.files.compressed import decompressed
from streampack.sources.files.listing import measure, open_file
from streampack.sources.joining import Joined, join
from streampack.sources.order import Cursor, GroupOrder, Part, group_order, shard_groups
from streampack.sources.records import (
    DAMAGED,
    AnyShard,
    ArrayShard,
    BlockShard,
    Format,
    OpenShard,
    RawSample,
    RawSamples,
    Sample,
    Shard,
)
from streampack.sources.settings import KEYS, SourceSettings, digest_keys, rejects_unmasked
from streampack.tokenizers.base import Tokenizer
from streampack.tokenizers.token_ids import NO_TOKENS

_AT_ONCE = 4096
"""Sample numbers converted to Python ints at a time."""
_HEAD_BYTES = 1 << 22
"""Bytes at the start of a file that a preview reads."""
_RECORDS_AT_ONCE, _TOKENS_AT_ONCE = 256, 1 << 16
"""Samples and tokens read at a time for callers that want single RawSamples."""
OPEN_SHARDS = 32
"""Shards or blocks of a source that all partitions together hold open, without the setting ``open_shards``."""
FILE_BYTES, BLOCK_BYTES = 1 << 30, 1 << 27
"""Most bytes of these files, and of these blocks in memory, without the setting ``open_shards``.

Cursors do not hold these numbers, so a change of them needs another mark beside ``order.MIXED``.
"""


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


def image_fields_of(settings: SourceSettings, tokenizer: Tokenizer) -> Mapping[str, Mapping[str, Any]]:
    """Return the fields that a run declares for the images of a source's chats; empty if it can have none."""
    reads_chats = "messages_key" in KEYS[settings.source] and settings.tokens_key is settings.text_key is None
    return tokenizer.image_fields if reads_chats else {}


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
        self.image_fields = image_fields_of(settings, tokenizer)
        self.num_files, self.num_shards = len(format_.files), format_.num_shards
        self.shard_samples: dict[int, int] = {}
        """Shard number to number of samples, for the shards opened so far."""
        self._reader, self._peek = format_.reader, format_.peek
        self._shuffle, self._open_shards = settings.shuffle, settings.open_shards
        self._bytes = [file.size for file in format_.files]
        """Bytes of each shard."""
        if format_.pieces:
            self._bytes = [sum(self._bytes) // max(self.num_shards, 1)] * self.num_shards
        mixes = settings.shuffle and settings.open_shards != 1
        self.begin = Cursor(MIXED if mixes else 0, 0, 0)
        """Cursor of the first sample. A run records it, and so the order of its samples."""
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
        start = start or self.begin
        walk = self._walk(partition, partitions, seed, start)
        at = start._replace(pass_=start.pass_ - walk.mark)
        if min(at) < 0 or at.shard > len(walk.groups(at.pass_)) or (walk.mark and not self.begin.pass_):
            raise SourceError(
                f"{start}: got a cursor that does not exist in {len(walk.shards)} shards. The cursor was made with "
                "other files, other settings or another number of partitions. Resume with those"
            )
        return self._read_walk(walk, self._reader(fields), passes, at, skip, _options(room, fields))

    def peek(self, most: int, fields: Sequence[Field] = ()) -> Iterator[RawSample]:
        """Yield the first ``most`` samples in the files' order: see ``OpenedSource.peek``."""
        return islice(self._in_file_order((self._peek or self._reader)(fields)), most)

    def places(self, most: int, rows: int, fields: Sequence[Field] = ()) -> "Places":
        """Read the first ``rows`` samples at about ``most`` places: of shards, or of blocks of few shards."""
        walk, open_shard = self._walk(0, 1, 0, self.begin), (self._peek or self._reader)(fields)
        samples, counts, together = list[list[RawSample]](), list[int](), self.num_shards / max(len(walk.groups(0)), 1)
        shards = _spaced(self.num_shards, most)
        for number in shards:
            with _open_or_damaged(open_shard, number) as shard:
                ends = list(accumulate(shard.blocks or [len(shard)]))
                counts.append(len(ends))
                if shard.blocks:
                    together = min(len(ends) * together, walk.most_blocks([shard]))
                for block in _spaced(len(ends), -(-most // len(shards))):
                    begin = ends[block - 1] if block else 0
                    taken = np.arange(begin, min(begin + rows, ends[block]))
                    order, wanted = GroupOrder(taken, [(len(taken), [])]), _options(_ONE, fields)
                    samples.append(list(_one_by_one(_read(shard, order, Cursor(0, 0, 0), Cursor(0, 1, 0), wanted))))
        total = round(sum(counts) / max(len(counts), 1) * self.num_shards)
        return Places([place for place in samples if place], max(1, int(together)), total)

    def _in_file_order(self, open_shard: OpenShard) -> Iterator[RawSample]:
        """Yield the samples of all shards, unshuffled, one by one."""
        wanted = _ReadOptions(Room(_RECORDS_AT_ONCE, _TOKENS_AT_ONCE), frozenset())
        for number in range(self.num_shards):
            with _open_or_damaged(open_shard, number) as shard:
                if not len(shard):
                    continue
                at, after = Cursor(0, number, 0), Cursor(0, number + 1, 0)
                yield from _one_by_one(_read(shard, _in_order(len(shard)), at, after, wanted))

    def locate(
        self, partition: int, partitions: int, *, seed: int, passes: int | None, seqs: Iterable[int],
        fields: Sequence[Field] = (), reads: bool = False, begin: Cursor | None = None,
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
            begin: Cursor of the run's first sample; None for ``self.begin``.
        """
        walk, wanted = self._walk(partition, partitions, seed, begin or self.begin), _options(_ONE, fields)
        left, first, pass_ = sorted(set(seqs)), 0, 0
        while left and (passes is None or pass_ < passes):
            before = first
            for group in walk.groups(pass_):
                stop = first + sum(self._count_samples(number, fields) for number in group)
                if here := left[: bisect_left(left, stop)]:
                    with self._open_group(group, self._reader(fields)) as shards:
                        shard, order = join(shards, wanted.by_sample), walk.order(group, shards, pass_).samples
                        for seq in here:
                            row = int(order[seq - first])
                            read = _read_one(shard, row, wanted) if reads else None
                            yield Located(seq, shard.where(row), pass_, read)
                left, first = left[len(here) :], stop
            if first == before:
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
        begin: Cursor | None = None,
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
            begin: Cursor of the run's first sample; None for ``self.begin``.
        """
        rows: dict[int, list[int]] = {}
        for number in range(self.num_shards):
            with _open_or_damaged(self._reader(fields), number) as shard:
                self.shard_samples[number] = len(shard)
                rows[number] = [row for row in range(len(shard)) if wanted(shard.where(row))]
        places: list[tuple[int, int]] = []
        for partition in range(partitions):
            walk = self._walk(partition, partitions, seed, begin or self.begin)
            pass_, first = 0, 0
            if not any(rows[number] for number in walk.shards):
                continue
            while (passes is None or pass_ < passes) and (first <= upto or not pass_):
                for group in walk.groups(pass_):
                    counts = [self.shard_samples[number] for number in group]
                    starts = accumulate(counts, initial=0)
                    own = [start + row for start, block in zip(starts, group, strict=False) for row in rows[block]]
                    if own:
                        with self._open_group(group, self._reader(fields)) as shards:
                            order = walk.order(group, shards, pass_).samples
                        places += [(partition, first + int(np.flatnonzero(order == row)[0])) for row in own]
                    first += sum(counts)
                pass_ += 1
        return places

    def _count_samples(self, number: int, fields: Sequence[Field]) -> int:
        """Return the number of samples of shard ``number``; open the shard the first time."""
        if number not in self.shard_samples:
            with _open_or_damaged(self._reader(fields), number) as shard:
                self.shard_samples[number] = len(shard)
        return self.shard_samples[number]

    def _walk(self, partition: int, partitions: int, seed: int, begin: Cursor) -> "_Walk":
        """Return the order of a partition in runs whose cursors are like ``begin``."""
        shards, mark = self.shards_of(partition, partitions), MIXED if begin.pass_ >= MIXED else 0
        holders = max(1, min(partitions, self.num_shards))
        most = max(1, (self._open_shards or OPEN_SHARDS) // holders) if mark else 1
        limits = (FILE_BYTES // holders, BLOCK_BYTES // holders) if self._open_shards is None else None
        return _Walk(shards, self._bytes, self._shuffle, seed, mark, most, limits)

    @contextlib.contextmanager
    def _open_group(self, group: Sequence[int], open_shard: OpenShard) -> Iterator[list[AnyShard]]:
        """Open the shards of a group, and count their samples."""
        with contextlib.ExitStack() as stack:
            shards = [stack.enter_context(_open_or_damaged(open_shard, number)) for number in group]
            self.shard_samples |= zip(group, map(len, shards), strict=True)
            yield shards

    def _read_walk(
        self, walk: "_Walk", open_shard: OpenShard, passes: int | None, start: Cursor, skip: int,
        wanted: "_ReadOptions",
    ) -> Iterator[RawSample | Records]:  # fmt: skip
        """Yield the samples of a partition, pass after pass, from ``start`` on, without the first ``skip``.

        ``start`` counts passes from 0.
        """
        pass_, first_group, first = start
        while passes is None or pass_ < passes:
            from_the_beginning, seen = (first_group, first) == (0, 0), 0
            groups, mark = walk.groups(pass_), walk.mark + pass_
            for place in range(first_group, len(groups)):
                after = Cursor(mark, place + 1, 0) if place + 1 < len(groups) else Cursor(mark + 1, 0, 0)
                with self._open_group(groups[place], open_shard) as shards:
                    shard = join(shards, wanted.by_sample)
                    if first > (count := len(shard)):
                        raise SourceError(
                            f"{start}: got a cursor beyond the {count} samples of its shards. The cursor was made with "
                            "other files. Restore those files, or start a new run"
                        )
                    seen += count
                    skipped = min(skip, count - first)
                    skip -= skipped
                    if first + skipped < count:
                        order = walk.order(groups[place], shards, pass_)
                        yield from _read(shard, order, Cursor(mark, place, first + skipped), after, wanted)
                first = 0
            if from_the_beginning and not seen:
                return  # no samples in any shard: endless passes would be a busy loop
            pass_, first_group, first = pass_ + 1, 0, 0


class Places(NamedTuple):
    """Samples of several places of a source, in the order of the files.

    - ``samples``: the samples of each place.
    - ``together``: number of shards, or of blocks, that are read at a time over all partitions; ``total``: of all.
    """

    samples: list[list[RawSample]]
    together: int
    total: int


def _spaced(count: int, most: int) -> list[int]:
    """Return up to ``most`` of the numbers below ``count``, evenly spaced.

    >>> _spaced(10, 4), _spaced(2, 4)
    ([0, 2, 5, 7], [0, 1])
    """
    return [at * count // min(count, most) for at in range(min(count, most))]


class _Walk(NamedTuple):
    """The order in which one partition is read.

    - ``shards``: numbers of its shards. ``num_bytes``: bytes of every shard of the source.
    - ``mark``: ``order.MIXED`` if groups have several shards; else 0.
    - ``most``: most shards of a group, and most blocks of a window.
    - ``limits``: most bytes of the files of a group, and of the blocks of a window; None for no limits.
    """

    shards: Sequence[int]
    num_bytes: Sequence[int]
    shuffle: bool
    seed: int
    mark: int
    most: int
    limits: tuple[int, int] | None

    def groups(self, pass_: int) -> list[list[int]]:
        """Return the numbers of the shards in the order of a pass, in groups that are read together."""
        if not self.shuffle:
            return [[number] for number in self.shards]
        groups = shard_groups(self.shards, most=self.most, seed=self.seed, pass_=pass_)
        return groups if self.limits is None else [part for group in groups for part in self._parts(group)]

    def _parts(self, group: list[int]) -> Iterator[list[int]]:
        """Yield a group in parts whose files are within the limit, or are single files."""
        part, size = list[int](), 0
        for number in group:
            num_bytes = self.num_bytes[number] if self.num_bytes else 0
            if part and self.limits is not None and size + num_bytes > self.limits[0]:
                yield part
                part, size = [], 0
            part.append(number)
            size += num_bytes
        yield part

    def order(self, group: Sequence[int], shards: Sequence[AnyShard], pass_: int) -> GroupOrder:
        """Return the order of the samples of open ``shards``, a group of a pass."""
        if not self.shuffle:
            return _in_order(sum(map(len, shards)))
        parts = [Part(number, len(shard), shard.blocks) for number, shard in zip(group, shards, strict=True)]
        return group_order(parts, most=self.most_blocks(shards), seed=self.seed, pass_=pass_)

    def most_blocks(self, shards: Sequence[AnyShard]) -> int:
        """Return the number of blocks of open ``shards`` that a window may have."""
        largest = max(getattr(shard, "block_bytes", 0) for shard in shards)
        return self.most if self.limits is None or not largest else max(1, min(self.most, self.limits[1] // largest))


def _in_order(count: int) -> GroupOrder:
    """Return the order of ``count`` samples that are not shuffled."""
    return GroupOrder(np.arange(count), [(count, [])])


def _one_by_one(samples: Iterator[RawSample | Records]) -> Iterator[RawSample]:
    """Yield the samples of ``samples``, each as a RawSample."""
    return chain.from_iterable(part if isinstance(part, Records) else (part,) for part in samples)


class _ReadOptions(NamedTuple):
    """Options of reading many samples: ``room`` as for ``read_many``, ``by_sample`` as for ``Records``."""

    room: Room
    by_sample: frozenset[str]


def _options(room: Room, fields: Sequence[Field]) -> _ReadOptions:
    """Return the options of reading samples with these ``fields``."""
    return _ReadOptions(room, frozenset(field.name for field in fields if field.axis == "sample"))


def _read(
    shard: AnyShard, order: GroupOrder, at: Cursor, after: Cursor, wanted: _ReadOptions
) -> Iterator[RawSample | Records]:
    """Yield the samples of one shard from place ``at`` of ``order`` to cursor ``after``."""
    read = _read_many if isinstance(shard, ArrayShard) else _read_each
    for stop, blocks in order.windows:
        if at.sample < stop:
            if isinstance(shard, BlockShard):
                shard.hold(blocks)
            end = at._replace(sample=stop) if stop < len(order.samples) else after
            yield from read(shard, order.samples[:stop], at, end, wanted)  # type: ignore[arg-type]
            at = end
            if at == after:
                return


def _read_one(shard: AnyShard, row: int, wanted: _ReadOptions) -> RawSample:
    """Return sample number ``row`` in the shard's own order."""
    order = GroupOrder(np.array([row]), [(1, [])])
    return next(_one_by_one(_read(shard, order, Cursor(0, 0, 0), Cursor(0, 1, 0), wanted)))


def _read_each(
    shard: Shard, order: NDArray[np.int64], at: Cursor, after: Cursor, wanted: _ReadOptions
) -> Iterator[RawSample]:
    """Yield the samples of one shard, one by one, from place ``at`` of ``order`` on.

    ``after``: the cursor of the last sample.
    """
    (pass_, place, first), count = at, len(order)
    for begin in range(first, count, _AT_ONCE):
        numbers = order[begin : begin + _AT_ONCE]
        located = (
            shard.apart(numbers) if isinstance(shard, Joined) else ((shard, number) for number in numbers.tolist())
        )
        for done, (one, sample) in enumerate(located, begin + 1):
            place_of = one.where
            try:
                got = one.load(sample)
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


_ONE = Room(1, _TOKENS_AT_ONCE)
"""Reads one sample."""
_ONE_DAMAGED = RawSamples(NO_TOKENS, np.zeros(1, np.int64), {0: DAMAGED})
