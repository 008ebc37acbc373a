"""Rows of this process as a source: a list, a dataset, a generator. Never leaves the process that holds them.

A sequence (``__len__`` and ``__getitem__``) is read at any place and, if asked to, in the shuffled order that a file
with as many samples has. Another iterable is gone through in its own order, again for each pass; an iterator only
once, so that it can be resumed nowhere but where it is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
from msgspec.structs import replace

from streampack.core.model.fields import Field
from streampack.errors import SourceError, StreampackError, UserError
from streampack.sources.formats.python import ItemReader
from streampack.sources.order import Cursor, sample_order
from streampack.sources.records import RawSample, why_of
from streampack.sources.settings import SourceSettings, as_words
from streampack.sources.walk import mask_words, vocab_size_of
from streampack.tokenizers.base import Tokenizer
from streampack.tokenizers.token_ids import NO_TOKENS


class InMemory:
    """A ``Source`` of one partition over ``rows``: what the source ``python`` takes as items, with its settings."""

    num_shards = 1

    def __init__(self, rows: Iterable[Any], settings: SourceSettings, tokenizer: Tokenizer) -> None:
        self._rows, self._settings, self._tokenizer = rows, settings, tokenizer
        self.vocab_size = vocab_size_of(settings, tokenizer)
        self._once = iter(rows) if isinstance(rows, Iterator) else None
        self._taken = 0
        of_settings = as_words(settings) | mask_words(settings, tokenizer)
        words = ("streampack-in-memory-1", type(rows).__qualname__, repr(of_settings), tokenizer.digest)
        self.digest = hashlib.sha256("\0".join(words).encode()).hexdigest()

    def check_passes(self) -> None:
        """Raises UserError for rows that cannot be gone over again."""
        if self._once is not None:
            raise UserError("got an iterator and more than one pass, expected rows that can be read again: give a list")

    def read(
        self, partition: int, partitions: int, *, seed: int, passes: int | None, fields: Sequence[Field] = (),
        start: Cursor | None = None, skip: int = 0,
    ) -> Iterator[RawSample]:  # fmt: skip
        """See ``Source.read``. Raises SourceError if an iterator is to be read again."""
        if (partition, partitions) != (0, 1):
            raise UserError(f"partitions: got {partitions}, expected 1: rows in memory are one partition")
        return self._walk(ItemReader(self._settings, self._tokenizer, fields), seed, passes, start, skip)

    def peek(self, most: int) -> Iterator[RawSample]:
        """The first ``most`` records without fields; none of an iterator, whose rows come only once."""
        if self._once is not None:
            return iter(())
        reader = ItemReader(replace(self._settings, fields={}), self._tokenizer, ())
        return islice(self._walk(reader, 0, 1, None, 0), most)

    def _walk(
        self, reader: ItemReader, seed: int, passes: int | None, start: Cursor | None, skip: int
    ) -> Iterator[RawSample]:
        pass_, first = (start.pass_, start.sample) if start else (0, 0)
        while passes is None or pass_ < passes:
            done = first
            for done, (number, row) in enumerate(self._from(first, seed, pass_), first + 1):
                if skip:
                    skip -= 1
                    continue
                got, where, cursor = reader(row), f"row {number}", Cursor(pass_, 0, done)
                if isinstance(got, str):
                    yield RawSample(NO_TOKENS, str(got), where, cursor, why=why_of(got))
                else:
                    yield RawSample(got.tokens, None, where, cursor, got.fields)
            if not done:
                return  # no rows: for ever would be a busy loop
            pass_, first = pass_ + 1, 0

    def _from(self, first: int, seed: int, pass_: int) -> Iterator[tuple[int, Any]]:
        """(number, row) of a pass, from place ``first`` of its order on."""
        rows: Any = self._rows
        try:
            if self._once is not None:
                yield from self._further(self._once, pass_, first)
            elif hasattr(rows, "__len__") and hasattr(rows, "__getitem__"):
                count = len(rows)
                order = (
                    sample_order(count, seed=seed, pass_=pass_, shard=0) if self._settings.shuffle else np.arange(count)
                )
                for number in order[first:].tolist():
                    yield number, rows[number]
            else:
                yield from enumerate(islice(iter(rows), first, None), first)
        except StreampackError:
            raise
        except Exception as error:  # the user's own code
            raise SourceError(f"the rows cannot be read: {error!r}") from error

    def _further(self, rows: Iterator[Any], pass_: int, first: int) -> Iterator[tuple[int, Any]]:
        if pass_ or first != self._taken:
            raise SourceError(
                f"an iterator was read up to row {self._taken}, and row {first} of pass {pass_} is wanted: expected "
                f"rows that can be read again: give a list, or an object whose __iter__ begins anew"
            )
        for number, row in enumerate(rows, first):
            self._taken = number + 1
            yield number, row
