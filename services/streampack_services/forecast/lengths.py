"""Lengths of samples: all that packing depends on, whatever they are the lengths of.

A ``Workload`` is what ``streampack plan`` and ``report`` work on: the streams of a run as lengths in tokens, of each
partition in the order in which the broker would have it, and how much of one pass they are. Here they come from a file
of integers; ``sampling`` tokenizes some of a source, ``run_lengths`` asks a broker or reads its log.
"""

from __future__ import annotations

import codecs
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from streampack.core.model.samples import I64
from streampack.errors import SampleError, UserError

MAX_LENGTH = 2**31 - 1
STRETCHES = 16
"""Places of a long file that are packed, each a run of samples as they follow each other."""
_SHOWN = 40
"""Characters of what is no length, in a message."""


@dataclass(frozen=True, slots=True, eq=False)
class StreamLengths:
    """A stream: ``partitions`` int64 [n] each, tokens by sample in order, 0 in the place of a rejected one.

    ``ended``: for each partition whether these are all that it has in a pass. ``total`` samples are in one pass, None
    where nobody knows; ``shard_samples`` int64 [k] are those of the shards that were counted, where ``total`` is an
    estimate from them. ``every`` int64 [2, k]: all lengths that a pass has and how many samples each, where those in
    ``partitions`` are some of them.
    """

    name: str
    partitions: tuple[I64, ...]
    ended: tuple[bool, ...]
    total: float | None = None
    shard_samples: I64 | None = None
    every: I64 | None = None

    @property
    def whole(self) -> bool:
        """One pass is all here."""
        return all(self.ended)

    @property
    def num_samples(self) -> int:
        """How many are here, rejected ones among them."""
        return sum(map(len, self.partitions))

    @property
    def share(self) -> float | None:
        """Of one pass whose lengths are known, 0..1; None where its size is not."""
        if self.whole or self.every is not None:
            return 1.0
        return min(self.num_samples / self.total, 1.0) if self.total else None


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """Streams, and for people ``what`` they are and ``notes`` on how they were got; ``rejected`` samples had no use."""

    what: str
    streams: tuple[StreamLengths, ...]
    notes: list[str] = field(default_factory=list)
    rejected: int = 0

    @property
    def whole(self) -> bool:
        """Every stream is all here."""
        return all(stream.whole for stream in self.streams)

    @property
    def lengths(self) -> I64:
        """Of all samples that are here, in no order, int64 [n]."""
        return np.concatenate([each[each > 0] for stream in self.streams for each in stream.partitions])


def samples_said(count: int) -> str:
    """``1 sample``, ``2 samples``."""
    return f"{count:,} sample{'s' * (count != 1)}"


def of_lengths(what: str, lengths: I64, most: int | None, total: float | None = None) -> Workload:
    """A workload of one stream; of more than ``most`` lengths some stretches are packed. ``total`` samples are in a
    pass, if these are a sample of it.
    """
    if total is not None and total < len(lengths):
        raise UserError(f"got a total of {total:,.0f} samples, expected at least the {len(lengths):,} lengths given")
    whole = total is None or total == len(lengths)
    if most is None or len(lengths) <= most:
        return Workload(what, (StreamLengths("data", (lengths,), (whole,), total or len(lengths)),))
    some = stretches(lengths, most)
    note = f"packed and shown are {len(some):,} of the {len(lengths):,} lengths, in {STRETCHES} stretches (--samples)"
    stream = StreamLengths("data", (some,), (False,), total or len(lengths), every=counted(lengths) if whole else None)
    return Workload(what, (stream,), [note])


def counted(lengths: I64) -> I64:
    """Each length that there is, and how many samples have it, int64 [2, k]."""
    return np.stack(np.unique(lengths, return_counts=True)).astype(np.int64)


def stretches(lengths: I64, most: int) -> I64:
    """About ``most`` of them: evenly spaced runs, each as its samples follow each other."""
    return np.concatenate(stretches_of(lengths, most))


def stretches_of(values: I64, most: int) -> list[I64]:
    """About ``most`` of ``values`` in runs that are evenly spaced; all of them in one if they are no more."""
    if len(values) <= most:
        return [values]
    size = max(most // STRETCHES, 1)
    starts = np.linspace(0, len(values) - size, min(STRETCHES, most)).astype(np.int64).tolist()
    return [values[start : start + size] for start in starts]


def is_lengths(path: Path) -> bool:
    """Whether a file holds lengths: a .npy, or a text that begins with a number."""
    if path.suffix == ".npy":
        return True
    if path.suffix not in (".txt", ".json", ".jsonl", ".ndjson", ".csv", "") or not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            first = file.read(4096).removeprefix(codecs.BOM_UTF8).split(maxsplit=1)[:1]
        float(first[0] if first else "0")
    except ValueError:
        return False
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    return True


def read_lengths(path: Path) -> I64:
    """Lengths of a file, int64 [n]: a .npy of integers, or a text (JSON lines, too) of whole numbers.

    Raises UserError for a file that cannot be read or holds none, SampleError naming the first that is no length.
    """
    try:
        values = _of_array(path) if path.suffix == ".npy" else _of_text(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    if not len(values):
        raise UserError(f"{path}: got no lengths, expected a whole number for each sample")
    wrong = np.flatnonzero((values < 1) | (values > MAX_LENGTH))
    if len(wrong):
        at = int(wrong[0])
        raise SampleError(f"{path}: sample {at}: got {int(values[at])} tokens, expected 1 to {MAX_LENGTH}")
    return values.astype(np.int64)


def _of_array(path: Path) -> NDArray[np.integer]:
    try:
        values = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise UserError(f"{path}: is no array of numpy's: {error}") from None
    if not isinstance(values, np.ndarray) or values.ndim != 1 or values.dtype.kind not in "iu":
        kind = f"shape {values.shape} and dtype {values.dtype}" if isinstance(values, np.ndarray) else "several arrays"
        raise SampleError(f"{path}: got {kind}, expected one array of integers of shape [samples]")
    return values


def _of_text(path: Path) -> I64:
    try:
        words = path.read_text(encoding="utf-8-sig").split()
    except UnicodeDecodeError:
        raise UserError(f"{path}: got bytes that are no text, expected a whole number for each sample") from None
    try:
        return np.array(words, np.str_).astype(np.int64) if words else np.zeros(0, np.int64)
    except (ValueError, OverflowError):
        at, word = next((at, word) for at, word in enumerate(words) if not _is_length(word))
        raise SampleError(
            f"{path}: sample {at}: got {word[:_SHOWN]!r}, expected a whole number of tokens; texts that begin with a "
            f"number are read by -c producer.yaml"
        ) from None


def _is_length(word: str) -> bool:
    try:
        return abs(int(word)) <= MAX_LENGTH
    except ValueError:
        return False
