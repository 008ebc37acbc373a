"""The nouns of sources: a sample, a record, many of either, a shard, a format, a source."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from streampack.core.model.fields import Field
from streampack.sources.files.byte_source import File
from streampack.sources.order import Cursor
from streampack.tokenizers.token_ids import Tokens

NO_FIELDS: Mapping[str, NDArray[Any]] = MappingProxyType({})
NO_REASONS: Mapping[int, str] = MappingProxyType({})


DAMAGED = "damaged"
"""The reason of what stands for a file, or the rest of one, that is cut short or damaged; ``where`` is its error."""


class Because(str):
    """A sample's reason with ``why``, a parser's own words, which messages show."""

    __slots__ = ("why",)

    def __new__(cls, reason: str, why: str) -> "Because":
        """``reason`` as a word that is counted, ``why`` for people."""
        made = super().__new__(cls, reason)
        made.why = why
        return made

    why: str


def why_of(reason: str) -> str:
    """A parser's words on a reason; none where it has none."""
    return reason.why if isinstance(reason, Because) else ""


class Sample(NamedTuple):
    """A good one: ``tokens`` [T] int32, T > 0, and its fields by name, [T, ...] or, one a sample, [...]."""

    tokens: Tokens
    fields: Mapping[str, NDArray[Any]] = NO_FIELDS


class RawSample(NamedTuple):
    """One sample as it was found.

    ``tokens``: [T] int32, T > 0, perhaps read-only; empty when rejected. ``reason``: None when good, else a word:
    ``empty``, ``dtype``, ``ragged``, ``range``, ``encoding``, ``json``, ``npy``, ``missing``, ``duplicate``,
    ``damaged``, the tokenizer's own, or ``NAME: length`` (``dtype``, ``shape``, ``range``, ``ragged``, ``npy``) of a
    field. ``where``: for messages. ``cursor``: the place AFTER this record. ``fields``: what it has beside the tokens,
    by name: [T, ...] or, one a sample, [...]; of the declared dtype, but float32 for bfloat16. A declared field that
    the sample does not have is not there. ``loss_mask`` is there whenever the tokenizer gave one. ``why``: of a
    rejected one, what a parser says of it, if anything.
    """

    tokens: Tokens
    reason: str | None
    where: str
    cursor: Cursor
    fields: Mapping[str, NDArray[Any]] = NO_FIELDS
    why: str = ""

    @property
    def place(self) -> str:
        """``where``, and ``why`` where there is one: for messages."""
        return f"{self.where} ({self.why})" if self.why else self.where


class RawSamples(NamedTuple):
    """Many side by side, as shards of arrays give them.

    ``tokens``: [sum of lengths] int32 or uint16, perhaps read-only. ``lengths``: int64 [n], 0 for those without tokens,
    which are in ``reasons`` by their place among these. ``fields``: by name, [sum of lengths, ...] or, one a sample,
    [n, ...]; of the declared dtype, but float32 for bfloat16; each of them is there for all or for none.
    """

    tokens: NDArray[np.int32] | NDArray[np.uint16]
    lengths: NDArray[np.int64]
    reasons: Mapping[int, str] = NO_REASONS
    fields: Mapping[str, NDArray[Any]] = NO_FIELDS


class Source(Protocol):
    """Data that can be read again from any cursor.

    ``digest`` (hex) covers the files' names under their common folder and sizes, the keys, ``shuffle`` and the
    tokenizer: equal on all hosts that see the same data. ``num_shards``: what the partitions divide between them:
    files, or pieces of them. ``vocab_size``: of the tokenizer that texts go through; None where that is not known, or
    there are no texts.
    """

    @property
    def digest(self) -> str: ...
    @property
    def num_shards(self) -> int: ...
    @property
    def vocab_size(self) -> int | None: ...

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
        """The records of one partition from ``start`` (None: the beginning) on, ``skip`` of them left out unread.

        ``passes``: how many in all, None for ever. ``fields``: those that the run declares.
        A partition without samples yields nothing. Raises UserError
        for arguments that cannot be, SourceError for files that are gone, broken or changed, or that ``start``
        was not made with.
        """


class OpenedSource(Source, Protocol):
    """What open_source gives: a Source that knows its files."""

    @property
    def num_files(self) -> int: ...
    def peek(self, most: int) -> Iterator[RawSample]:
        """The first ``most`` records as they lie, without fields, for a look before a run.

        Of large files that are indexed by reading them, it takes those in the first bytes.
        """


class Shard(Protocol):
    """One indexed file, or a piece of one: what a format provides.

    ``blocks``: how many samples each run of them has that is read as a whole (Parquet's row groups), [] where
    any order costs the same; the order keeps a run together.
    """

    @property
    def blocks(self) -> Sequence[int]: ...
    def __len__(self) -> int: ...
    def load(self, sample: int) -> Sample | str:
        """Sample number ``sample`` in the file's own order, or why there is none."""

    def where(self, sample: int) -> str: ...


@runtime_checkable
class ArrayShard(Protocol):
    """A shard whose samples are arrays of ids: they are read many at a time. See Shard."""

    @property
    def blocks(self) -> Sequence[int]: ...
    def __len__(self) -> int: ...
    def gather(self, samples: NDArray[np.int64], tokens: int) -> RawSamples:
        """The first of the samples of these numbers, in this order: as many as have ``tokens`` ids, one at least."""

    def where(self, sample: int) -> str: ...


AnyShard: TypeAlias = Shard | ArrayShard
OpenShard: TypeAlias = Callable[[int], AbstractContextManager[AnyShard]]
"""Shard number i of a source, open."""


class Format(NamedTuple):
    """What a format makes of the settings: the files it looked at, and a function from fields to what opens shards.

    ``words``: what the digest must hold beside files and settings. ``pieces``: where shards are pieces of files, how
    many each file has, in the order of the shards; () where each shard is a file. ``peek``: what opens the beginning of
    a shard, where that is not ``reader(())``.
    """

    files: list[File]
    num_shards: int
    reader: Callable[[Sequence[Field]], OpenShard]
    words: tuple[str, ...] = ()
    pieces: tuple[int, ...] = ()
    peek: OpenShard | None = None
