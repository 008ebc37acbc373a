"""Any iterable of Python's, by its import path ``package.module:thing``.

Theory of operation. There are three kinds, found in this order:

1. A function that takes ``(partition, partitions)``: it returns that partition's items, anew each time.
2. An object with ``__len__`` and ``__getitem__``, or a function without arguments that returns one: any item can be
   read, so it is cut into shards, shuffled and resumed like files.
3. An object that can be iterated again and again, or a function without arguments that returns an iterator: every
   partition P takes the items i with i mod partitions = P.

The first and third keep their own order, and can only go on from a cursor by being read from the start of the pass
and thrown away up to it: a restart in the middle of a pass costs the time of the items before, and with the third
every partition reads everything. Both must give the same items each time. A generator itself, which can be read
once, is refused: name the function that makes it.

An item is a text, a row (a mapping, see ``rows``), or a sequence of token ids; any other is rejected. An exception
that the code raises stops the reader. The digest holds the import path, the length, and the attribute ``digest``
(str) where there is one: give it one that changes with the data.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from streampack.core.model.fields import Field
from streampack.errors import ConfigError, SourceError
from streampack.sources.arrays import as_samples, one_sample
from streampack.sources.formats.rows import MISSING, RowReader, ids_of, keys_of, missing_from
from streampack.sources.order import Cursor
from streampack.sources.records import (
    AnyShard,
    Format,
    OpenedSource,
    OpenShard,
    RawSample,
    RawSamples,
    Sample,
    why_of,
)
from streampack.sources.settings import SourceSettings
from streampack.sources.walk import ShardedSource, check_read, digest_of, pieces, vocab_size_of
from streampack.tokenizers.base import Tokenizer
from streampack.tokenizers.callable_tokenizer import import_path
from streampack.tokenizers.token_ids import NO_TOKENS, Encoded

Items = Callable[[int, int], Iterable[object]]
"""(partition, partitions) -> its items, from the first on."""


def open_python(settings: SourceSettings, tokenizer: Tokenizer) -> OpenedSource:
    """What open_source calls. Raises ConfigError for what cannot be imported, or read more than once."""
    path = settings.path or ""
    thing = _import(path)
    digest = getattr(thing, "digest", "")
    words = (path, digest if isinstance(digest, str) else "")
    if callable(thing) and not _is_indexable(thing) and not isinstance(thing, Iterable):
        if _takes_partitions(path, thing):
            return _replayed(settings, tokenizer, words, thing, divided=True)
        made = _call(path, thing)
        if not _is_indexable(made):
            _check_iterable(path, made)
            return _replayed(settings, tokenizer, words, lambda _partition, _partitions: thing(), divided=False)
        thing = made
    if _is_indexable(thing):
        return ShardedSource(settings, _indexed(settings, tokenizer, thing, words), tokenizer)
    _check_iterable(path, thing)
    if isinstance(thing, Iterator):
        raise ConfigError(
            f"path: {path!r} is a {type(thing).__name__}, which can be read once; expected what can be read again: "
            "name the function that makes it, or a list"
        )
    return _replayed(settings, tokenizer, words, lambda _partition, _partitions: thing, divided=False)


class ItemReader:
    """``reader(item)`` is a Sample, or the word that says why there is none."""

    def __init__(self, settings: SourceSettings, tokenizer: Tokenizer, fields: Sequence[Field]) -> None:
        self._tokenizer = tokenizer
        self._row = RowReader(settings, tokenizer, fields)

    def __call__(self, item: object) -> Sample | str:
        if isinstance(item, Mapping):
            got = self._row(item)
            return missing_from(keys_of(item)) if got == MISSING else got
        encoded: Encoded | str
        if isinstance(item, str):
            encoded = self._tokenizer.encode(item)
        else:
            ids = ids_of(item)
            encoded = ids if isinstance(ids, str) else Encoded(ids)
        return encoded if isinstance(encoded, str) else self._row.fields.add(encoded, {})


class ItemShard:
    """A run of the items of what has a length."""

    blocks = ()

    def __init__(self, path: str, items: Any, run: range, reader: ItemReader) -> None:
        self._path, self._items, self._run, self._reader = path, items, run, reader

    def __len__(self) -> int:
        return len(self._run)

    def as_arrays(self) -> AnyShard:
        """This shard, or one of arrays where its first item is one, and items cost nothing to make."""
        held = isinstance(self._items, list | tuple | np.ndarray)
        return ArrayItemShard(self) if held and len(self) and _is_vector(self.item(0)) else self

    def item(self, sample: int) -> Any:
        try:
            return self._items[self._run[sample]]
        except Exception as error:
            raise _raised(self.where(sample), error) from error

    def load(self, sample: int) -> Sample | str:
        return self._reader(self.item(sample))

    def where(self, sample: int) -> str:
        return f"{self._path}[{self._run[sample]}]"


class ArrayItemShard:
    """A run of items of which the first is an array of ids: those like it are read many at a time."""

    blocks = ()

    def __init__(self, one: ItemShard) -> None:
        self._one, self.where = one, one.where

    def __len__(self) -> int:
        return len(self._one)

    def gather(self, samples: NDArray[np.int64], tokens: int) -> RawSamples:
        found: list[NDArray[Any]] = []
        left = tokens
        for sample in samples.tolist():
            item = self._one.item(sample)
            if not _is_vector(item) or (found and (item.dtype != found[0].dtype or len(item) > left)):
                break
            found.append(item)
            left -= len(item)
        if not found:
            return one_sample(self._one.load(int(samples[0])), ())
        return as_samples(np.concatenate(found), np.array([len(item) for item in found]))


def _is_vector(item: object) -> TypeGuard[NDArray[Any]]:
    return isinstance(item, np.ndarray) and item.ndim == 1 and item.dtype.kind in "iu"


def _indexed(settings: SourceSettings, tokenizer: Tokenizer, items: Any, words: tuple[str, ...]) -> Format:
    path = settings.path or ""
    length = len(items)
    runs = pieces(length)

    def reader(fields: Sequence[Field]) -> OpenShard:
        read = ItemReader(settings, tokenizer, fields)

        @contextlib.contextmanager
        def open_shard(number: int) -> Iterator[AnyShard]:
            if len(items) != length:
                raise SourceError(f"{path}: got {len(items)} items, expected the {length} it had when opened")
            yield ItemShard(path, items, runs[number], read).as_arrays()

        return open_shard

    return Format([], len(runs), reader, (*words, str(length)), (len(runs),))


def _replayed(
    settings: SourceSettings, tokenizer: Tokenizer, words: tuple[str, ...], items: Items, *, divided: bool
) -> OpenedSource:
    digest = digest_of(settings, tokenizer, (*words, "divided" if divided else "replayed"))
    return ReplayedSource(settings, tokenizer, items, digest, divided)


class ReplayedSource:
    """Items that can only be read from the first on. A cursor is (pass, 0, items read of this partition)."""

    num_files, num_shards = 0, 1

    def __init__(
        self, settings: SourceSettings, tokenizer: Tokenizer, items: Items, digest: str, divided: bool
    ) -> None:
        self.digest, self.vocab_size = digest, vocab_size_of(settings, tokenizer)
        self._settings, self._tokenizer, self._items, self._divided = settings, tokenizer, items, divided
        self._path = settings.path or ""

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
        """See Source.read; ``seed`` changes nothing, the order is the items' own."""
        check_read(partition, partitions, passes, skip)
        start = start or Cursor(0, 0, 0)
        if min(start.pass_, start.sample) < 0 or start.shard != 0:
            raise SourceError(f"{start}: no such place in {self._path}; it was made with another source")
        reader = ItemReader(self._settings, self._tokenizer, fields)
        return self._walk(partition, partitions, passes, reader, start, skip)

    def _walk(
        self, partition: int, partitions: int, passes: int | None, reader: ItemReader, start: Cursor, skip: int
    ) -> Iterator[RawSample]:
        pass_, first = start.pass_, start.sample
        while passes is None or pass_ < passes:
            count = 0
            for number, item in self._pass(partition, partitions, first):
                count = number + 1
                if skip > 0:
                    skip -= 1
                    continue
                got = reader(item)
                where = f"{self._path} item {number if self._divided else partition + number * partitions}"
                cursor = Cursor(pass_, 0, count)
                if isinstance(got, str):
                    yield RawSample(NO_TOKENS, str(got), where, cursor, why=why_of(got))
                else:
                    yield RawSample(got.tokens, None, where, cursor, got.fields)
            if first == 0 and count == 0:
                return  # for ever would be a busy loop
            pass_, first = pass_ + 1, 0

    def peek(self, most: int) -> Iterator[RawSample]:
        """See OpenedSource.peek."""
        return islice(self.read(0, 1, seed=0, passes=1), most)

    def _pass(self, partition: int, partitions: int, first: int) -> Iterator[tuple[int, object]]:
        """(number, item) of one pass over a partition from number ``first`` on."""
        number = 0
        try:
            items = iter(self._items(partition, partitions))
            for item in items if self._divided else islice(items, partition, None, partitions):
                if number >= first:
                    yield number, item
                number += 1
        except Exception as error:
            raise _raised(f"{self._path} item {number} of partition {partition}", error) from error
        if number < first:
            raise SourceError(
                f"{self._path}: got {number} items in partition {partition}, expected the {first} that were read "
                "before: it must give the same ones each time"
            )


def _import(path: str) -> Any:
    if not all(path.partition(":")):
        raise ConfigError(f"path: got {path!r}, expected 'package.module:thing'")
    return import_path("path", path)


def _is_indexable(thing: object) -> bool:
    """A mapping has both too, but its keys are no numbers."""
    if isinstance(thing, type | str | bytes | Mapping):
        return False
    return hasattr(thing, "__len__") and hasattr(thing, "__getitem__")


def _takes_partitions(path: str, function: Callable[..., Any]) -> bool:
    """Whether it wants (partition, partitions). Raises ConfigError for one that wants anything else."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return False
    with contextlib.suppress(TypeError):
        signature.bind()
        return False
    with contextlib.suppress(TypeError):
        signature.bind(0, 1)
        return True
    raise ConfigError(f"path: {path!r} takes {signature}, expected () or (partition, partitions)")


def _call(path: str, function: Callable[[], Any]) -> Any:
    try:
        return function()
    except Exception as error:
        raise _raised(path, error) from error


def _check_iterable(path: str, thing: object) -> None:
    if isinstance(thing, str | bytes | Mapping) or not hasattr(thing, "__iter__"):
        kind = type(thing).__name__
        raise ConfigError(f"path: {path!r} gives a {kind}, expected a list, a dataset or what can be iterated")


def _raised(where: str, error: Exception) -> SourceError:
    text = " ".join(str(error).split())[:200]
    return SourceError(f"{where}: raised {type(error).__name__}: {text}; mend the code, or have it skip that item")
