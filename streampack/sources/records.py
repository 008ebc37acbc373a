"""Types of sources: samples as they are read, one or many; shards; formats; and sources."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from streampack.core.model.fields import Field
from streampack.sources.files.byte_source import File
from streampack.sources.order import Cursor
from streampack.tokenizers.token_ids import NO_TOKENS, Because, Tokens

NO_FIELDS: Mapping[str, NDArray[Any]] = MappingProxyType({})
NO_REASONS: Mapping[int, str] = MappingProxyType({})


DAMAGED = "damaged"
"""Reason of the rejected sample that stands for a damaged or truncated file, or the rest of one.

Its ``where`` holds the error's text.
"""


def why_of(reason: str) -> str:
    """Return the detail of a reason, such as a parser's message; empty if the reason is a plain string."""
    return reason.why if isinstance(reason, Because) else ""


class Sample(NamedTuple):
    """A valid sample: ``tokens`` [T] int32, T > 0, and its fields by name, [T, ...] or [...] for axis ``sample``.

    ``warnings`` are words of ``core.stats.sample_warnings``.
    """

    tokens: Tokens
    fields: Mapping[str, NDArray[Any]] = NO_FIELDS
    warnings: tuple[str, ...] = ()


class RawSample(NamedTuple):
    """One sample as a source read it, valid or rejected.

    - ``tokens``: [T] int32, T > 0, perhaps read-only; empty if the sample is rejected.
    - ``reason``: None for a valid sample. Else one word: ``empty``, ``dtype``, ``ragged``, ``range``, ``encoding``,
      ``json``, ``npy``, ``missing``, ``duplicate``, ``damaged`` or a tokenizer's. For a bad field it is ``NAME:
      length`` (or ``dtype``, ``shape``, ``range``, ``ragged``, ``npy``).
    - ``where``: file and row, for messages.
    - ``cursor``: the place after this sample.
    - ``fields``: values by field name, [T, ...] or [...] for axis ``sample``. Their dtype is the declared one, but
      float32 for bfloat16. A field that the sample lacks is absent. ``loss_mask`` is present if the tokenizer made one.
    - ``why``: detail of the reason, such as a parser's message; may be empty.
    - ``warnings``: words of ``core.stats.sample_warnings`` for a valid sample.
    """

    tokens: Tokens
    reason: str | None
    where: str
    cursor: Cursor
    fields: Mapping[str, NDArray[Any]] = NO_FIELDS
    why: str = ""
    warnings: tuple[str, ...] = ()

    @classmethod
    def of(cls, sample: Sample | str, where: str, cursor: Cursor) -> "RawSample":
        """Return the sample ``sample``, or a rejected sample for the reason ``sample``."""
        if isinstance(sample, str):
            return cls(NO_TOKENS, str(sample), where, cursor, why=why_of(sample))
        return cls(sample.tokens, None, where, cursor, sample.fields, warnings=sample.warnings)

    @property
    def place(self) -> str:
        """File and row for messages, followed by ``why`` in parentheses if there is one."""
        return f"{self.where} ({self.why})" if self.why else self.where


class RawSamples(NamedTuple):
    """Many samples of one shard in a few arrays.

    - ``tokens``: [sum of lengths] int32 or uint16, perhaps read-only.
    - ``lengths``: tokens of each sample, int64 [n]; 0 for a rejected one.
    - ``reasons``: sample number (0..n-1) to reason, for each rejected sample.
    - ``fields``: values by field name, [sum of lengths, ...] or [n, ...] for axis ``sample``. Their dtype is the
      declared one, but float32 for bfloat16. All n samples have a field, or the field is absent.
    - ``warnings``: words of ``core.stats.sample_warnings`` for all n samples.
    """

    tokens: NDArray[np.int32] | NDArray[np.uint16]
    lengths: NDArray[np.int64]
    reasons: Mapping[int, str] = NO_REASONS
    fields: Mapping[str, NDArray[Any]] = NO_FIELDS
    warnings: tuple[str, ...] = ()


class Source(Protocol):
    """Data that can be read again from any cursor."""

    @property
    def digest(self) -> str:
        """Hex digest of the data's identity; hosts that see the same data compute the same digest.

        It covers the files' names (relative to their common folder) and sizes, the keys, ``shuffle`` and the tokenizer.
        """

    @property
    def num_shards(self) -> int:
        """Number of files, or pieces of files, that the partitions divide between them."""

    @property
    def vocab_size(self) -> int | None:
        """Vocabulary size of the tokenizer; None if it is unknown, or the source holds ids instead of texts."""

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
        """Yield the samples of one partition, pass after pass.

        A partition without samples yields nothing.

        Args:
            partition: Number of the partition, 0 to ``partitions`` - 1.
            partitions: Number of partitions that divide the shards.
            seed: Seed of the order.
            passes: Number of passes in all; None for endless passes.
            fields: Fields that the run declares.
            start: Cursor to continue from; None for ``begin``.
            skip: Number of samples to leave out from there, without reading them.

        Raises:
            UserError: An argument is out of range.
            SourceError: A file is missing, damaged or changed, or ``start`` belongs to other files.
        """


class OpenedSource(Source, Protocol):
    """The source that ``open_source`` returns: a Source that also knows its files and can be previewed."""

    @property
    def image_fields(self) -> Mapping[str, Mapping[str, Any]]:
        """Fields that a run declares for the images of the source's chats, as in broker.yaml; empty without images."""

    @property
    def num_files(self) -> int:
        """Number of files that the source listed; 0 if it reads no files."""

    def peek(self, most: int, fields: Sequence[Field] = ()) -> Iterator[RawSample]:
        """Yield the first ``most`` samples in the files' order, with these ``fields``, for a preview before a run.

        If a format has to read a whole file to index it, only samples in the file's first 4 MiB are yielded.
        """


class IndexedShard(Protocol):
    """One indexed file, or a piece of a file, as a format provides it. Its length is its number of samples."""

    @property
    def blocks(self) -> Sequence[int]:
        """Sizes, in samples, of the runs that are read as a whole, such as row groups; empty if there are none.

        The shuffled order keeps the samples of a window of runs together.
        """

    def __len__(self) -> int: ...
    def where(self, sample: int) -> str:
        """Return the file and row of a sample, for messages."""


@runtime_checkable
class BlockShard(IndexedShard, Protocol):
    """A shard whose samples are read a block at a time."""

    block_bytes: int
    """Bytes that the largest block takes in memory, from the file's own metadata."""

    def hold(self, blocks: Sequence[int]) -> None:
        """Keep the ``blocks`` with these numbers in memory once they are read, and free all others."""


class Shard(IndexedShard, Protocol):
    """A shard whose samples are read one by one."""

    def load(self, sample: int) -> Sample | str:
        """Return sample number ``sample`` in the shard's own order, or the reason why it is rejected."""


@runtime_checkable
class ArrayShard(IndexedShard, Protocol):
    """A shard whose samples are arrays of ids, which are read many at a time."""

    def gather(self, samples: NDArray[np.int64], tokens: int) -> RawSamples:
        """Read the leading samples of the numbers ``samples`` that fit into ``tokens`` ids, at least one."""


AnyShard: TypeAlias = Shard | ArrayShard
OpenShard: TypeAlias = Callable[[int], AbstractContextManager[AnyShard]]
"""A function from a shard's number to a context manager that opens it."""


class Format(NamedTuple):
    """The files of a source, and how a format opens their shards.

    - ``files``: the files, listed. ``num_shards``: number of shards that they make up.
    - ``reader``: function that takes the declared fields and returns a function to open a shard by its number.
    - ``words``: texts that the source's digest covers, beside files and settings.
    - ``pieces``: number of shards in each file, if shards are pieces of files; empty if each shard is a file.
    - ``peek``: as ``reader``, but the shard is only the beginning of one, for a preview; None if previews use
      ``reader``.
    """

    files: list[File]
    num_shards: int
    reader: Callable[[Sequence[Field]], OpenShard]
    words: tuple[str, ...] = ()
    pieces: tuple[int, ...] = ()
    peek: Callable[[Sequence[Field]], OpenShard] | None = None
