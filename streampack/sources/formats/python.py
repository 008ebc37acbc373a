"""Any Python iterable as a source, by its import path ``package.module:thing``.

Theory of operation. There are three kinds, tried in this order:

1. A function that takes ``(partition, partitions)``. Each call returns that partition's items from the first on.
2. An object with ``__len__`` and ``__getitem__``, or a function without arguments that returns one. Any item can be
   read, so the object is divided into shards, shuffled and resumed like files.
3. An object that can be iterated repeatedly, or a function without arguments that returns an iterator. Partition p
   takes the items i with i mod partitions = p.

Kinds 1 and 3 keep their own order and must return the same items each time. Resuming reads the pass from its start and
discards the items before the cursor, which takes time. With kind 3, every partition reads all items. A generator object
can be read only once, so it is an error: name the function that makes it.

An item is a text, a row (a mapping, see ``rows``), or a sequence of token ids; other items are rejected. An exception
in the user's code stops the reader. The source's digest covers the import path, the length, and the object's attribute
``digest`` (str) if it has one. Give it a digest that changes with the data.
"""

import contextlib
import inspect
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, TypeGuard

import msgspec
import numpy as np
from numpy.typing import NDArray

from streampack.core.model.fields import Field
from streampack.errors import ConfigError, SourceError
from streampack.sources.arrays import as_samples, one_sample
from streampack.sources.formats.rows import MISSING, RowReader, ids_of, keys_of, missing_from, no_ids, no_text
from streampack.sources.order import Cursor
from streampack.sources.records import (
    AnyShard,
    Format,
    OpenedSource,
    OpenShard,
    RawSample,
    RawSamples,
    Sample,
)
from streampack.sources.settings import SourceSettings
from streampack.sources.walk import ShardedSource, check_read, digest_of, image_fields_of, pieces, vocab_size_of
from streampack.tokenizers.base import Tokenizer
from streampack.tokenizers.callable_tokenizer import import_path
from streampack.tokenizers.token_ids import Because, Encoded

Items = Callable[[int, int], Iterable[object]]
"""A function ``(partition, partitions)`` that returns a partition's items from the first on."""


def open_python(settings: SourceSettings, tokenizer: Tokenizer) -> OpenedSource:
    """Open the object that ``settings.path`` names. Raises ConfigError if it cannot be imported or read repeatedly."""
    path = settings.path or ""
    thing = _import(path)
    digest = getattr(thing, "digest", "")
    words = (path, digest if isinstance(digest, str) else "")
    if callable(thing) and not _is_indexable(thing) and not isinstance(thing, Iterable):
        if _takes_partitions(path, thing):
            return ReplayedSource(settings, tokenizer, words, thing, divided=True)
        try:
            made = thing()
        except Exception as error:
            raise _user_code_error(path, error) from error
        if not _is_indexable(made):
            _check_is_iterable(path, made)
            return ReplayedSource(settings, tokenizer, words, lambda _partition, _partitions: thing(), divided=False)
        thing = made
    if _is_indexable(thing):
        return ShardedSource(settings, _open_indexed(settings, tokenizer, thing, words), tokenizer)
    _check_is_iterable(path, thing)
    if isinstance(thing, Iterator):
        raise ConfigError(
            f"path: {path!r} is a {type(thing).__name__}, which can be read only once. Name a list, or the function "
            "that makes the iterator"
        )
    return ReplayedSource(settings, tokenizer, words, lambda _partition, _partitions: thing, divided=False)


class ItemReader:
    """Converts an item (a text, a row or ids): ``reader(item)`` is a Sample, or the reason why it is rejected."""

    def __init__(self, settings: SourceSettings, tokenizer: Tokenizer, fields: Sequence[Field]) -> None:
        self._tokenizer = tokenizer
        self._row = RowReader(settings, tokenizer, fields)

    def __call__(self, item: object) -> Sample | str:
        if isinstance(item, Mapping):
            sample = self._row(item)
            return missing_from(keys_of(item)) if sample == MISSING else sample
        encoded: Encoded | str
        if isinstance(item, str):
            encoded = self._row_in_json(item) or self._tokenizer.encode(item)
        elif item is None or isinstance(item, bytes | int | float):
            encoded = no_text("the row", item)
        else:
            ids = ids_of(item)
            encoded = no_ids("the row", item, ids) if isinstance(ids, str) else Encoded(ids, given=True)
        return encoded if isinstance(encoded, str) else self._row.fields.add(encoded, {})

    def _row_in_json(self, item: str) -> Because | None:
        """Return the reason ``dtype`` for a text that holds a row as JSON, as a line of a file does; else None."""
        if not item.startswith("{"):
            return None
        try:
            row = msgspec.json.decode(item, type=dict[str, msgspec.Raw])
        except (ValueError, RecursionError):
            return None
        keys = [key for key in self._row.sample_keys if key in row]
        why = "the row is a text that holds JSON with the key {}. Parse it with json.loads, or put it into a dict: {}"
        return Because("dtype", why.format(keys[0], "{'text': row}")) if keys else None


class ItemShard:
    """A shard of items of an indexable object. ``run``: their indices."""

    blocks = ()

    def __init__(self, path: str, items: Any, run: Sequence[int], reader: ItemReader) -> None:
        self._path, self._items, self._run, self._reader = path, items, run, reader

    @classmethod
    def join(cls, shards: Sequence["ItemShard"]) -> "ItemShard":
        """Return the items of several shards as one shard."""
        first, run = shards[0], array("q", chain.from_iterable(shard._run for shard in shards))
        return cls(first._path, first._items, run, first._reader)

    def __len__(self) -> int:
        return len(self._run)

    def as_arrays(self) -> AnyShard:
        """Return an ArrayItemShard over this shard if its items are in memory and the first is an array of ids."""
        in_memory = isinstance(self._items, list | tuple | np.ndarray)
        return ArrayItemShard(self) if in_memory and len(self) and _is_vector(self.item(0)) else self

    def item(self, sample: int) -> Any:
        """Return the item of sample number ``sample``. Raises SourceError if the user's code fails."""
        try:
            return self._items[self._run[sample]]
        except Exception as error:
            raise _user_code_error(self.where(sample), error) from error

    def items_of(self, samples: NDArray[np.int64]) -> list[Any]:
        """Return the items of these samples, which must be in memory."""
        items, run = self._items, self._run
        return [items[run[sample]] for sample in samples.tolist()]

    def load(self, sample: int) -> Sample | str:
        """Convert one item to a sample, or return the reason why it is rejected."""
        return self._reader(self.item(sample))

    def where(self, sample: int) -> str:
        """Return the import path and index of a sample's item, for messages."""
        return f"{self._path}[{self._run[sample]}]"


class ArrayItemShard:
    """An ArrayShard of items: reads many at a time where consecutive items are arrays of ids of one dtype."""

    blocks = ()

    def __init__(self, one: ItemShard) -> None:
        self._one, self.where = one, one.where

    @classmethod
    def join(cls, shards: Sequence["ArrayItemShard"]) -> "ArrayItemShard":
        """Return the items of several shards as one shard."""
        return cls(ItemShard.join([shard._one for shard in shards]))

    def __len__(self) -> int:
        return len(self._one)

    def gather(self, samples: NDArray[np.int64], tokens: int) -> RawSamples:
        """Read the leading items of ``samples`` that are alike and fit into ``tokens`` ids, at least one."""
        arrays: list[NDArray[Any]] = []
        left = tokens
        for item in self._one.items_of(samples):
            if not _is_vector(item) or (arrays and (item.dtype != arrays[0].dtype or len(item) > left)):
                break
            arrays.append(item)
            left -= len(item)
        if not arrays:
            return one_sample(self._one.load(int(samples[0])), ())
        return as_samples(np.concatenate(arrays), np.array([len(item) for item in arrays]))


def _is_vector(item: object) -> TypeGuard[NDArray[Any]]:
    """Return whether an item is a one-dimensional numpy array of integers."""
    return isinstance(item, np.ndarray) and item.ndim == 1 and item.dtype.kind in "iu"


def _open_indexed(settings: SourceSettings, tokenizer: Tokenizer, items: Any, words: tuple[str, ...]) -> Format:
    """Return the Format of an indexable object: shards are ranges of its items. ``words``: for the digest."""
    path = settings.path or ""
    length = len(items)
    runs = pieces(length)

    def reader(fields: Sequence[Field]) -> OpenShard:
        """Return a function that opens a shard by its number, for the ``fields`` of a run."""
        read = ItemReader(settings, tokenizer, fields)

        @contextlib.contextmanager
        def open_shard(number: int) -> Iterator[AnyShard]:
            """Open range ``number`` of the items. Raises SourceError if the object's length changed."""
            if len(items) != length:
                raise SourceError(
                    f"{path}: got {len(items)} items, expected {length} items as at the start. Keep the length fixed "
                    "during a run"
                )
            yield ItemShard(path, items, runs[number], read).as_arrays()

        return open_shard

    return Format([], len(runs), reader, (*words, str(length)), (len(runs),))


class ReplayedSource:
    """A source of items that can only be read from the first on.

    A cursor is (pass, 0, number of the partition's items already read). If ``divided``, ``items`` returns only the
    partition's own items. Else it returns all items, and partition p uses each item i with i mod partitions = p.
    The digest covers ``words``.
    """

    num_files, num_shards = 0, 1

    def __init__(
        self, settings: SourceSettings, tokenizer: Tokenizer, words: tuple[str, ...], items: Items, *, divided: bool
    ) -> None:
        self.digest = digest_of(settings, tokenizer, (*words, "divided" if divided else "replayed"))
        self.vocab_size = vocab_size_of(settings, tokenizer)
        self.image_fields = image_fields_of(settings, tokenizer)
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
        """Yield the samples of one partition: see ``Source.read``. The order is the items' own; ``seed`` is unused."""
        check_read(partition, partitions, passes, skip)
        start = start or Cursor(0, 0, 0)
        if min(start.pass_, start.sample) < 0 or start.shard != 0:
            raise SourceError(
                f"{start}: got a cursor that does not exist in {self._path}. The cursor belongs to another source. "
                "Resume with that source"
            )
        reader = ItemReader(self._settings, self._tokenizer, fields)

        def items_of_pass(_pass: int, first: int) -> Iterator[tuple[str, object]]:
            """Yield (place, item) of one pass over the partition, from number ``first`` on."""
            for number, item in self._items_of_pass(partition, partitions, first):
                yield f"{self._path} item {number if self._divided else partition + number * partitions}", item

        return read_items(reader, items_of_pass, passes, start, skip)

    def peek(self, most: int, fields: Sequence[Field] = ()) -> Iterator[RawSample]:
        """Yield the first ``most`` samples in their own order: see ``OpenedSource.peek``."""
        return islice(self.read(0, 1, seed=0, passes=1, fields=fields), most)

    def _items_of_pass(self, partition: int, partitions: int, first: int) -> Iterator[tuple[int, object]]:
        """Yield (number in the partition, item) of one pass over a partition, from number ``first`` on."""
        number = 0
        try:
            items = iter(self._items(partition, partitions))
            for item in items if self._divided else islice(items, partition, None, partitions):
                if number >= first:
                    yield number, item
                number += 1
        except Exception as error:
            raise _user_code_error(f"{self._path} item {number} of partition {partition}", error) from error
        if number < first:
            raise SourceError(
                f"{self._path}: got {number} items in partition {partition}, expected at least the {first} items that "
                "were read before. Change the code so that it returns the same items each time"
            )


def read_items(
    reader: ItemReader, items_of_pass: Callable[[int, int], Iterator[tuple[str, object]]], passes: int | None,
    start: Cursor, skip: int,
) -> Iterator[RawSample]:  # fmt: skip
    """Yield the samples of items that form one shard, pass after pass, from ``start`` on, without the first ``skip``.

    ``items_of_pass``: function from a pass and a place in its order to (place for messages, item), from there on.
    """
    pass_, first = start.pass_, start.sample
    while passes is None or pass_ < passes:
        done = first
        for done, (where, item) in enumerate(items_of_pass(pass_, first), first + 1):
            if skip > 0:
                skip -= 1
                continue
            yield RawSample.of(reader(item), where, Cursor(pass_, 0, done))
        if not done:
            return  # no items: endless passes would be a busy loop
        pass_, first = pass_ + 1, 0


def _import(path: str) -> Any:
    """Import the object at ``package.module:thing``. Raises ConfigError."""
    if not all(path.partition(":")):
        raise ConfigError(f"path: got {path!r}, expected 'package.module:thing'")
    return import_path("path", path)


def _is_indexable(thing: object) -> bool:
    """Return whether items can be read by number: ``thing`` has a length and ``__getitem__``, and is not a mapping."""
    if isinstance(thing, type | str | bytes | Mapping):
        return False
    return hasattr(thing, "__len__") and hasattr(thing, "__getitem__")


def _takes_partitions(path: str, function: Callable[..., Any]) -> bool:
    """Return whether a function takes (partition, partitions). Raises ConfigError unless it takes those or nothing."""
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


def _check_is_iterable(path: str, thing: object) -> None:
    """Raise ConfigError unless ``thing`` is iterable and neither a text nor a mapping."""
    if isinstance(thing, str | bytes | Mapping) or not hasattr(thing, "__iter__"):
        kind = type(thing).__name__
        raise ConfigError(f"path: {path!r} is a {kind}, expected a list, a dataset or another iterable")


def _user_code_error(where: str, error: Exception) -> SourceError:
    """Return the error for an exception in the user's code; ``where`` names the item."""
    text = " ".join(str(error).split())[:200]
    return SourceError(
        f"{where}: the code raised {type(error).__name__}: {text}. Correct the code, or let the code skip that item"
    )
