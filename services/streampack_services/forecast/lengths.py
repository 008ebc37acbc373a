"""Sample lengths of the streams of a run, and how to read them from a file of numbers.

A ``Workload`` is the input of a forecast. It holds the streams' sample lengths in tokens, by partition in the broker's
order, and how much of one pass they are. Packing depends on lengths alone, and on the sizes of media if there are any.
"""

from __future__ import annotations

import codecs
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streampack.core.model.samples import I64
from streampack.errors import SampleError, UserError
from streampack_services.forecast.media_sizes import BYTES, ITEMS, PATCHES

MAX_LENGTH = 2**31 - 1
"""Tokens of the longest possible sample."""
STRETCHES = 16
"""Number of stretches of consecutive samples that stand for a long list of lengths."""
_SHOWN = 40
"""Characters of a wrong word to show in an error."""


@dataclass(frozen=True, slots=True, eq=False)
class StreamLengths:
    """Sample lengths of one stream.

    ``partitions``: for each partition the tokens of its samples in order, int64 [n]; 0 for a rejected sample.
    ``ended``: for each partition, whether these are all of its samples in a pass. ``total``: samples in one pass; None
    if not known. ``shard_samples``: samples of each counted shard, int64 [k], if ``total`` is estimated from them.
    ``every``: the distinct lengths of a pass, and the number of samples with each length, int64 [2, k]; None if not
    known. ``media``: for each partition the sizes of its samples' media, int64 [n, 4] (see ``media_sizes``); None if
    they are not known.
    """

    name: str
    partitions: tuple[I64, ...]
    ended: tuple[bool, ...]
    total: float | None = None
    shard_samples: I64 | None = None
    every: I64 | None = None
    media: tuple[I64, ...] | None = None

    @property
    def whole(self) -> bool:
        """True if these are the lengths of a whole pass."""
        return all(self.ended)

    @property
    def num_samples(self) -> int:
        """Number of samples here, with rejected ones."""
        return sum(map(len, self.partitions))

    @property
    def share(self) -> float | None:
        """Share of a pass whose lengths are known, 0 to 1; None if the size of a pass is not known."""
        if self.whole or self.every is not None:
            return 1.0
        return min(self.num_samples / self.total, 1.0) if self.total else None


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """Sample lengths of all streams of a run.

    ``what``: name of the data, for people. ``notes``: sentences on how the lengths were read. ``rejected``: number of
    samples that are not valid.
    """

    what: str
    streams: tuple[StreamLengths, ...]
    notes: list[str] = field(default_factory=list)
    rejected: int = 0

    @property
    def whole(self) -> bool:
        """True if these are the lengths of a whole pass of every stream."""
        return all(stream.whole for stream in self.streams)

    @property
    def lengths(self) -> I64:
        """Lengths of all samples but rejected ones, stream by stream, int64 [n]."""
        return np.concatenate([lengths[lengths > 0] for stream in self.streams for lengths in stream.partitions])

    @property
    def media(self) -> I64 | None:
        """Sizes of the media of these samples, int64 [n, 4]; None if they are not known."""
        media = []
        for stream in self.streams:
            if stream.media is None:
                return None
            media += [sizes[lengths > 0] for lengths, sizes in zip(stream.partitions, stream.media, strict=True)]
        return np.concatenate(media)

    def about(self) -> dict[str, Any]:
        """Return counts and percentiles of the lengths and media, as a tree for JSON.

        ``media``: those of the samples with media; None if the sizes of media are not known.
        """
        media = self.media
        some = None if media is None else media[media[:, ITEMS] > 0]
        return {
            "what": self.what,
            "lengths": {"samples": len(self.lengths), **_spread("tokens", self.lengths)},
            "media": None if some is None else {
                "samples": len(some), "items": int(some[:, ITEMS].sum()), "bytes": int(some[:, BYTES].sum()),
                "patches": _spread("total", some[:, PATCHES] if len(some) else np.zeros(1, np.int64)),
            },
            "whole": self.whole,
            "rejected": self.rejected,
            "streams": [
                {
                    "stream": stream.name, "samples": stream.num_samples, "share": stream.share,
                    "pass_samples": stream.total,
                }
                for stream in self.streams
            ],
            "notes": self.notes,
        }  # fmt: skip


def _spread(name: str, sizes: I64) -> dict[str, Any]:
    """Return the sum of ``sizes``, int64 [n], under ``name``, their mean, two percentiles and the largest."""
    p50, p99 = np.percentile(sizes, (50, 99)).astype(int).tolist()
    return {name: int(sizes.sum()), "mean": float(sizes.mean()), "p50": p50, "p99": p99, "max": int(sizes.max())}


def of_lengths(title: str, lengths: I64, most: int | None, total: float | None = None) -> Workload:
    """Return a workload with one stream of these ``lengths``, int64 [n], named ``title``.

    If there are more than ``most`` lengths, only some stretches of them are packed. ``total``: samples in a pass, if
    ``lengths`` are only some of them. Raises UserError if ``total`` is less than the lengths.
    """
    if total is not None and total < len(lengths):
        raise UserError(
            f"--total is {total:,.0f} samples, but the file has {len(lengths):,} lengths. Pass at least {len(lengths)}."
        )
    whole = total is None or total == len(lengths)
    if most is None or len(lengths) <= most:
        return Workload(title, (StreamLengths("data", (lengths,), (whole,), total or len(lengths)),))
    some = stretches(lengths, most)
    note = f"the forecast uses {len(some):,} of the {len(lengths):,} lengths (set --samples for more)"
    stream = StreamLengths(
        "data", (some,), (False,), total or len(lengths), every=by_length(lengths) if whole else None
    )
    return Workload(title, (stream,), [note])


def by_length(lengths: I64) -> I64:
    """Return the different lengths and how many samples have each, int64 [2, k]."""
    return np.stack(np.unique(lengths, return_counts=True)).astype(np.int64)


def stretches(lengths: I64, most: int) -> I64:
    """Return about ``most`` of ``lengths``: STRETCHES evenly spaced runs of consecutive samples, one after another.

    The lengths, or other values of the samples, are int64 [n, ...].
    """
    return np.concatenate(stretches_of(lengths, most))


def stretches_of(values: I64, most: int) -> list[I64]:
    """Return about ``most`` of ``values`` as evenly spaced runs of consecutive values; one run for at most ``most``."""
    if len(values) <= most:
        return [values]
    size = max(most // STRETCHES, 1)
    starts = np.linspace(0, len(values) - size, min(STRETCHES, most)).astype(np.int64).tolist()
    return [values[start : start + size] for start in starts]


def is_lengths(path: Path) -> bool:
    """Return whether a file holds lengths: a .npy, or a text that begins with a number."""
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
    """Read lengths from a file, int64 [n]: a .npy of integers, or a text (also JSON lines) of whole numbers.

    Raises UserError for a file that cannot be read or has no lengths, SampleError for the first wrong length.
    """
    try:
        values = _read_array(path) if path.suffix == ".npy" else _read_text(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    if not len(values):
        raise UserError(f"{path}: got no lengths, expected the number of tokens of each sample")
    wrong = np.flatnonzero((values < 1) | (values > MAX_LENGTH))
    if len(wrong):
        at = int(wrong[0])
        raise SampleError(f"{path}: got {int(values[at])} tokens for sample {at}, expected 1 to {MAX_LENGTH}")
    return values.astype(np.int64)


def _read_array(path: Path) -> NDArray[np.integer]:
    """Read lengths from a .npy file. Raises UserError or SampleError if it is not one array of integers."""
    try:
        values = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise UserError(f"{path} is not a numpy array: {error}. Write one with numpy.save.") from None
    if not isinstance(values, np.ndarray) or values.ndim != 1 or values.dtype.kind not in "iu":
        kind = f"shape {values.shape} and dtype {values.dtype}" if isinstance(values, np.ndarray) else "several arrays"
        raise SampleError(f"{path}: got {kind}, expected one array of integers of shape [samples]")
    return values


def _read_text(path: Path) -> I64:
    """Read lengths from a text of whole numbers. Raises UserError or SampleError for other words."""
    try:
        words = path.read_text(encoding="utf-8-sig").split()
    except UnicodeDecodeError:
        raise UserError(
            f"{path}: got bytes that are not text, expected the number of tokens of each sample as text"
        ) from None
    try:
        return np.array(words, np.str_).astype(np.int64) if words else np.zeros(0, np.int64)
    except (ValueError, OverflowError):
        at, word = next((at, word) for at, word in enumerate(words) if not _is_length(word))
        raise SampleError(
            f"{path}: got {word[:_SHOWN]!r} for sample {at}, expected a whole number of tokens. If the file holds "
            f"texts, name the file in a producer.yaml and pass -c producer.yaml."
        ) from None


def _is_length(word: str) -> bool:
    """Return whether a word is a whole number of at most MAX_LENGTH."""
    try:
        return abs(int(word)) <= MAX_LENGTH
    except ValueError:
        return False
