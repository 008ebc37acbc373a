"""Rows in this process's memory as a source: a list, a dataset or a generator. The rows never leave the process.

A sequence (``__len__`` and ``__getitem__``) can be read from any cursor and shuffled. Its order is that of a file with
the same number of samples. Another iterable is read in its own order, from its start in each pass. An iterator is read
once, so reading can only continue where it stopped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
from msgspec.structs import replace

from streampack.core.model.fields import Field
from streampack.errors import SourceError, StreampackError, UserError
from streampack.sources.formats.python import ItemReader, read_items
from streampack.sources.order import Cursor, sample_order
from streampack.sources.records import RawSample
from streampack.sources.settings import SourceSettings, digest_keys
from streampack.sources.walk import image_fields_of, missing_mask_key, vocab_size_of
from streampack.tokenizers.base import Tokenizer


class InMemory:
    """A ``Source`` with one partition over ``rows``: texts, mappings or sequences of ids, as for source ``python``."""

    num_shards = 1

    def __init__(self, rows: Iterable[Any], settings: SourceSettings, tokenizer: Tokenizer) -> None:
        self._rows, self._settings, self._tokenizer = rows, settings, tokenizer
        self.vocab_size = vocab_size_of(settings, tokenizer)
        self.image_fields = image_fields_of(settings, tokenizer)
        self._once = iter(rows) if isinstance(rows, Iterator) else None
        self._taken = 0
        of_settings = digest_keys(settings) | missing_mask_key(settings, tokenizer)
        words = ("streampack-in-memory-1", type(rows).__qualname__, repr(of_settings), tokenizer.digest)
        self.digest = hashlib.sha256("\0".join(words).encode()).hexdigest()

    @property
    def is_once(self) -> bool:
        """True if the rows are an iterator, which can be read only once."""
        return self._once is not None

    def check_passes(self) -> None:
        """Raise UserError if the rows are an iterator, which can be read only once."""
        if self._once is not None:
            raise UserError(
                "got an iterator with more than one pass, expected rows that can be read again. Pass a list, or set "
                "passes=1"
            )

    def read(
        self, partition: int, partitions: int, *, seed: int, passes: int | None, fields: Sequence[Field] = (),
        start: Cursor | None = None, skip: int = 0,
    ) -> Iterator[RawSample]:  # fmt: skip
        """Yield the rows as samples: see ``Source.read``. Raises SourceError if an iterator would be read again."""
        if (partition, partitions) != (0, 1):
            raise UserError(f"partitions: got {partitions}, expected 1, because rows in memory form one partition")
        reader = ItemReader(self._settings, self._tokenizer, fields)
        return read_items(reader, partial(self._rows_of_pass, seed), passes, start or Cursor(0, 0, 0), skip)

    def peek(
        self, most: int, names: Mapping[str, str] | None = None, fields: Sequence[Field] = ()
    ) -> Iterator[RawSample]:
        """Yield the first ``most`` samples; nothing for an iterator, which can be read only once.

        ``fields``: fields to read. ``names``: their keys, in place of the setting ``fields``.
        """
        if self._once is not None:
            return iter(())
        reader = ItemReader(replace(self._settings, fields=dict(names or {})), self._tokenizer, fields)
        return islice(read_items(reader, partial(self._rows_of_pass, 0), 1, Cursor(0, 0, 0), 0), most)

    def _rows_of_pass(self, seed: int, pass_: int, first: int) -> Iterator[tuple[str, Any]]:
        """Yield (place, row) of one pass, from place ``first`` of its order on."""
        rows: Any = self._rows
        try:
            if self._once is not None:
                yield from self._continue_iterator(self._once, pass_, first)
            elif hasattr(rows, "__len__") and hasattr(rows, "__getitem__"):
                count = len(rows)
                order = (
                    sample_order(count, seed=seed, pass_=pass_, shard=0) if self._settings.shuffle else np.arange(count)
                )
                for number in order[first:].tolist():
                    yield f"row {number}", rows[number]
            else:
                for number, row in enumerate(islice(iter(rows), first, None), first):
                    yield f"row {number}", row
        except StreampackError:
            raise
        except Exception as error:  # the user's own code
            raise SourceError(
                f"the rows cannot be read, because their code raised {error!r}. Correct the code"
            ) from error

    def _continue_iterator(self, rows: Iterator[Any], pass_: int, first: int) -> Iterator[tuple[str, Any]]:
        """Yield (place, row) of an iterator. Raises SourceError unless ``first`` is where reading stopped."""
        if pass_ or first != self._taken:
            raise SourceError(
                f"got an iterator that stands at row {self._taken}, expected to read row {first} of pass {pass_}. An "
                "iterator can be read only once. Pass a list, or an object whose __iter__ starts from the first row"
            )
        for number, row in enumerate(rows, first):
            self._taken = number + 1
            yield f"row {number}", row
