"""Sources: files of samples, read in a recorded order from any place on.

Theory of operation. A source is a list of shard files. Shard i belongs to partition i mod P; a pass over a
partition walks its shards, and the samples of each, in the order that ``order`` gives for (seed, pass). A
format (``webdataset``, ``jsonl``) only has to index one shard and to load its sample number i; everything else,
passes, cursors, skipping, resuming, is here and is the same for all. A cursor is a place in that order, so going
on from one costs the index of one shard, not a second reading of what came before.

Two kinds of bad data. A *file* that is missing, cut or changed stops the reader with a SourceError, since
nothing after it can be numbered. A *sample* that is bad is a Record with a reason and no tokens: it keeps its
place, so that the numbers of all others stay what they are whatever the policy does with it.

Held in memory: one shard's index (about 100 bytes a sample) and one sample. Samples are read with ``pread`` at
their offsets, in files that must keep the size they had when the source was opened.

    settings, tokenizer -> open_source -> Source.read(partition, partitions, ...) -> Record, Record, ...

This package does not know streams, chunks, sockets or policies, and imports neither torch, numba nor webdataset.
"""

import contextlib
import glob
import hashlib
import importlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from streampack.core.fields import Field
from streampack.errors import ConfigError, SourceError, UserError
from streampack.sources.order import Cursor, sample_order, shard_order
from streampack.sources.tokenizers import (
    BytesTokenizer,
    Tokenizer,
    TokenizerSettings,
    Tokens,
    as_tokens,
    open_tokenizer,
)

__all__ = [
    "Cursor",
    "Record",
    "Source",
    "SourceSettings",
    "Tokenizer",
    "TokenizerSettings",
    "as_tokens",
    "open_source",
    "open_tokenizer",
]


class SourceSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which files, and what in them is a sample.

    ``source``: the format. ``shards``: a path, a brace pattern (``web-{000..511}.tar``), a glob, or a list of
    these; their order is that of the expansion, a glob's matches sorted.
    ``text_key`` or ``tokens_key`` (not both) say where the text or the ids are: a field of the line (jsonl); the
    extension of the member, ``json/field`` for a field of a .json member (webdataset). With neither, the first
    there is: ``text``, ``tokens``, ``input_ids`` (jsonl); .txt, .text, .npy, .json (webdataset).
    ``shuffle``: false reads shards and samples as they lie, in every pass.
    """

    source: Literal["webdataset", "jsonl"]
    shards: str | list[str]
    text_key: str | None = None
    tokens_key: str | None = None
    shuffle: bool = True


NO_FIELDS: Mapping[str, NDArray[Any]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Record:
    """One sample as it was found.

    ``tokens``: [T] int32, T > 0, perhaps read-only; empty when rejected. ``reason``: None when good, else a word:
    ``empty``, ``dtype``, ``ragged``, ``range``, ``encoding``, ``json``, ``npy``, ``missing``, ``duplicate``,
    ``tokenizer``. ``where``: for messages. ``cursor``: the place AFTER this record. ``fields``: what it has beside
    the tokens, by name: [T, ...] or, one a sample, [...].
    """

    tokens: NDArray[np.int32]
    reason: str | None
    where: str
    cursor: Cursor
    fields: Mapping[str, NDArray[Any]] = field(default_factory=lambda: NO_FIELDS)


class Source(Protocol):
    """Files that can be read again from any cursor.

    ``digest`` (hex) covers the files' names under their common folder and sizes, the keys, ``shuffle`` and the
    tokenizer: equal on all hosts that see the same data. ``num_shards``: files, all partitions together.
    """

    @property
    def digest(self) -> str: ...
    @property
    def num_shards(self) -> int: ...

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
    ) -> Iterator[Record]:
        """The records of one partition from ``start`` (None: the beginning) on, ``skip`` of them left out unread.

        ``passes``: how many in all, None for ever. ``fields``: those that the run declares.
        A partition without samples yields nothing. Raises UserError
        for arguments that cannot be, SourceError for files that are gone, broken or changed, or that ``start``
        was not made with.
        """


class Shard(Protocol):
    """One indexed file: what a format provides."""

    def __len__(self) -> int: ...
    def load(self, sample: int) -> Tokens | str:
        """The token ids of sample number ``sample`` in the file's own order, or why there are none."""

    def where(self, sample: int) -> str: ...


class ShardFile:
    """An open file that must keep its size. ``name`` is its path under the source's folder, for people."""

    def __init__(self, path: str, name: str, size: int) -> None:
        self.path, self.name, self.size = path, name, size
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise SourceError(f"{path}: cannot be opened ({error.strerror}); was there when the run began") from error
        if hasattr(os, "posix_fadvise"):  # samples come in any order: have the kernel fetch the file as a whole
            with contextlib.suppress(OSError):
                os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        os.close(self._fd)

    def check_size(self) -> None:
        size = os.lseek(self._fd, 0, os.SEEK_END)  # a third of fstat's cost; pread does not use the position
        if size != self.size:
            raise SourceError(
                f"{self.path}: got {size} bytes, expected the {self.size} it had when opened; "
                "files must not change under a run: restore it, or start the stream's next revision"
            )

    def pread(self, size: int, offset: int) -> bytes:
        """Exactly ``size`` bytes from ``offset``. Raises SourceError when the file has changed or cannot be read."""
        try:
            data = os.pread(self._fd, size, offset)
            self.check_size()
            while len(data) < size:  # one call reads 2 GiB at most, some network file systems less
                more = os.pread(self._fd, size - len(data), offset + len(data))
                if not more:
                    raise SourceError(f"{self.path}: ends at byte {offset + len(data)}, expected {offset + size}")
                data += more
        except OSError as error:
            raise SourceError(f"{self.path}: cannot be read at byte {offset} ({error.strerror})") from error
        return data


_MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"\xfd7zXZ\x00": "xz", b"BZh": "bzip2"}


def refuse_compressed(file: ShardFile, first: bytes) -> None:
    """SourceError when a file's first bytes say that it is compressed: such a file has no offsets to seek to."""
    for magic, kind in _MAGIC.items():
        if first.startswith(magic):
            raise SourceError(f"{file.path}: is {kind}-compressed, expected a plain file: decompress it first")


_NO_TOKENS: Tokens = np.empty(0, np.int32)
_NO_TOKENS.flags.writeable = False


class ShardedSource:
    """Walks shards and samples in their order; ``index`` is the format: it makes a Shard of an open file."""

    def __init__(
        self, files: list[tuple[str, str, int]], index: Callable[[ShardFile], Shard], digest: str, shuffle: bool
    ) -> None:
        self.digest = digest
        self.num_shards = len(files)
        self._files = files
        self._index = index
        self._shuffle = shuffle

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
    ) -> Iterator[Record]:
        """See Source.read."""
        if not 0 <= partition < partitions:
            raise UserError(f"partition: got {partition} of {partitions}, expected one of 0..{partitions - 1}")
        if skip < 0 or (passes is not None and passes < 0):
            raise UserError(f"skip, passes: got {skip}, {passes}, expected none below 0")
        start = start or Cursor(0, 0, 0)
        shards = range(partition, self.num_shards, partitions)
        if min(start.pass_, start.shard, start.sample) < 0 or start.shard > len(shards):
            raise SourceError(f"{start}: no such place in {len(shards)} shards; it was made with other files or P")
        return self._walk(shards, seed, passes, start, skip)

    def _walk(self, shards: range, seed: int, passes: int | None, start: Cursor, skip: int) -> Iterator[Record]:
        pass_, first_shard, first = start.pass_, start.shard, start.sample
        while passes is None or pass_ < passes:
            from_the_beginning, seen = (first_shard, first) == (0, 0), 0
            order = shard_order(shards, seed=seed, pass_=pass_) if self._shuffle else list(shards)
            for place in range(first_shard, len(order)):
                after = Cursor(pass_, place + 1, 0) if place + 1 < len(order) else Cursor(pass_ + 1, 0, 0)
                with self._open(order[place]) as shard:
                    count = len(shard)
                    if first > count:
                        raise SourceError(
                            f"{start}: the shard has {count} samples; the cursor was made with other files"
                        )
                    seen += count
                    skipped = min(skip, count - first)
                    skip -= skipped
                    if first + skipped < count:
                        yield from self._samples(
                            shard, order[place], seed, first + skipped, Cursor(pass_, place, 0), after
                        )
                first = 0
            if from_the_beginning and not seen:
                return  # no samples in any shard: for ever would be a busy loop
            pass_, first_shard, first = pass_ + 1, 0, 0

    def _samples(self, shard: Shard, number: int, seed: int, first: int, at: Cursor, after: Cursor) -> Iterator[Record]:
        """The records of one shard from place ``first`` on; the last one's cursor is ``after``."""
        count, pass_, place = len(shard), at.pass_, at.shard
        order = sample_order(count, seed=seed, pass_=pass_, shard=number) if self._shuffle else np.arange(count)
        load, where = shard.load, shard.where
        for done, sample in enumerate(order[first:].tolist(), first + 1):
            got = load(sample)
            cursor = Cursor(pass_, place, done) if done < count else after
            if isinstance(got, str):
                yield Record(_NO_TOKENS, got, where(sample), cursor)
            else:
                yield Record(got, None, where(sample), cursor)

    @contextlib.contextmanager
    def _open(self, number: int) -> Iterator[Shard]:
        file = ShardFile(*self._files[number])
        try:
            file.check_size()
            yield self._index(file)
        finally:
            file.close()


def open_source(settings: SourceSettings, tokenizer: Tokenizer | None = None) -> Source:
    """The source that ``settings`` name; texts go through ``tokenizer`` (None: bytes, with an end-of-text id).

    Looks at names and sizes only; a file is indexed when its turn comes. Raises ConfigError for settings that
    cannot be, SourceError for files that are not there.

    >>> source = open_source(SourceSettings("jsonl", "data/*.jsonl"))                        # doctest: +SKIP
    >>> for record in source.read(partition=0, partitions=4, seed=17, passes=1): ...         # doctest: +SKIP
    """
    # Here, not above: the formats are written in this module's words.
    from streampack.sources import jsonl, webdataset

    if settings.text_key is not None and settings.tokens_key is not None:
        raise ConfigError("text_key, tokens_key: got both, expected one of them or neither")
    tokenizer = tokenizer or BytesTokenizer()
    formats = {"webdataset": webdataset.format_, "jsonl": jsonl.format_}
    index = formats[settings.source](settings.text_key, settings.tokens_key, tokenizer)
    files = _name_and_measure(expand(settings.shards))
    digest = hashlib.sha256(
        msgspec.json.encode(
            [
                "streampack-source-1",
                settings.source,
                [(name, size) for _, name, size in files],
                [settings.text_key, settings.tokens_key, settings.shuffle],
                tokenizer.digest,
            ]
        )
    ).hexdigest()
    return ShardedSource(files, index, digest, settings.shuffle)


def expand(shards: str | list[str]) -> list[str]:
    """Paths, brace patterns and globs as paths, in the order given, each glob's matches sorted by code point.

    Raises SourceError for a glob that matches nothing or a path that comes twice, ConfigError for a pattern that
    is none.

    >>> expand("web-{00..02}.tar")
    ['web-00.tar', 'web-01.tar', 'web-02.tar']
    """
    patterns = [shards] if isinstance(shards, str) else list(shards)
    if not patterns:
        raise ConfigError("shards: got an empty list, expected at least one path or pattern")
    paths: list[str] = []
    for pattern in patterns:
        for path in _expand_braces(pattern):
            paths.extend(_expand_glob(path))
    seen: set[str] = set()
    for path in map(os.path.abspath, paths):
        if path in seen:
            raise SourceError(f"shards: {path} comes more than once: make the patterns disjoint")
        seen.add(path)
    return paths


def _expand_braces(pattern: str) -> list[str]:
    if "://" in pattern or pattern.startswith("pipe:"):
        raise ConfigError(f"shards: got {pattern!r}, expected local files: mount or copy remote ones")
    if "{" not in pattern or os.path.exists(pattern):
        return [pattern]
    try:
        braces = importlib.import_module("braceexpand")
    except ImportError as error:
        raise ConfigError(
            f"shards: braces as in {pattern!r} need `pip install 'streampack[service]'`; a glob or a list does not"
        ) from error
    try:
        return list(braces.braceexpand(pattern))
    except ValueError as error:
        raise ConfigError(
            f"shards: the braces of {pattern!r} do not match; expected e.g. web-{{000..511}}.tar"
        ) from error


def _expand_glob(path: str) -> list[str]:
    if not glob.has_magic(path) or os.path.exists(path):
        return [path]
    found = sorted(glob.glob(path, recursive=True))
    if not found:
        raise SourceError(f"{os.path.abspath(path)}: got no file, expected at least one to match: fix `shards`")
    return found


def _name_and_measure(paths: list[str]) -> list[tuple[str, str, int]]:
    """(path, name under the common folder, size in bytes) of each file; paths are made absolute, names portable."""
    absolute = [os.path.abspath(path) for path in paths]
    folder = os.path.commonpath([os.path.dirname(path) for path in absolute])
    files = []
    for given, path in zip(paths, absolute, strict=True):
        try:
            size = os.stat(path).st_size
        except OSError as error:
            raise SourceError(
                f"{given}: cannot be read ({error.strerror}); expected a file: make it or fix `shards`"
            ) from error
        if not os.path.isfile(path):
            raise SourceError(f"{given}: is no regular file; expected one: a folder is written as {given}/*")
        name = os.fsencode(os.path.relpath(path, folder)).decode("utf-8", "backslashreplace")
        files.append((path, name, size))
    return files
