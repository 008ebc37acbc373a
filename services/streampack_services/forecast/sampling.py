"""Tokenize some samples of each source, spread over its shards, and estimate how many samples a pass has.

If samples have media, their sizes are read, too. References are not followed.

Shards are read in the order of a producer, which seed and pass give. So a source that is read to its end has its
samples in the order of a run. A larger source is read as if it had ``SPREAD`` partitions, because a few samples of many
shards represent it better. Its size is estimated from the shards that were opened.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from streampack.core.model.fields import Field
from streampack.core.model.samples import I64
from streampack.errors import SourceError
from streampack.sources import RawSample, Source
from streampack.sources.walk import ShardedSource
from streampack_services.forecast.lengths import StreamLengths, Workload
from streampack_services.forecast.media_sizes import NO_MEDIA, sizes_of

SPREAD = 16
"""Partitions to read a large source in."""
SAY_EVERY = 100
"""Samples between two updates of the progress bar."""


def sample(
    title: str, sources: Mapping[str, Source], partitions: Mapping[str, int], most: int, seed: int,
    fields: Sequence[Field] = (),
) -> Workload:  # fmt: skip
    """Tokenize at most ``most`` samples of each source, and return their lengths.

    ``title``: name of the data, for people. ``sources``, ``partitions``: each stream's source and partitions in a run.
    ``fields``: the run's fields of axis item and patch.
    Raises SourceError for sources that cannot be read or hold no valid sample.
    """
    streams, notes, all_rejected = [], list[str](), 0
    with _progress() as progress:
        for name, source in sources.items():
            task = progress.add_task(name, total=most)
            stream, rejected = _stream(name, source, partitions[name], most, seed, fields, _updater(progress, task))
            progress.update(task, total=stream.num_samples, completed=stream.num_samples)
            streams.append(stream)
            all_rejected += sum(rejected.values())
            notes += [f"{name}: rejected {count:,} samples: {reason}" for reason, count in rejected.items()]
    return Workload(title, tuple(streams), notes, all_rejected)


def _stream(
    name: str,
    source: Source,
    partitions: int,
    most: int,
    seed: int,
    fields: Sequence[Field],
    say: Callable[[int], None],
) -> tuple[StreamLengths, Counter[str]]:
    """Read up to ``most`` samples of a source, one of each partition in turn.

    ``say`` is called with the number of samples that are read so far. Returns the lengths of the samples, and the
    number of rejected ones by reason.
    """
    count = _partitions(source, partitions, most, seed, fields)
    lengths: list[list[int]] = [[] for _ in range(count)]
    media: list[list[tuple[int, int, int, int]]] = [[] for _ in range(count)]
    rejected: Counter[str] = Counter()
    live: dict[int, Iterator[RawSample]] = {
        p: source.read(p, count, seed=seed, passes=1, fields=fields) for p in range(count)
    }
    num_read = 0
    while live and num_read < most:
        for p in list(live):
            record = next(live[p], None)
            if record is None:
                del live[p]
                continue
            reason, sizes = record.reason, NO_MEDIA
            if fields and reason is None:
                checked = sizes_of(record.fields, fields, record.tokens)
                reason, sizes = (checked, NO_MEDIA) if isinstance(checked, str) else (None, checked)
            lengths[p].append(len(record.tokens) if reason is None else 0)
            media[p].append(sizes)
            if reason is not None:
                rejected[reason] += 1
            num_read += 1
            if num_read % SAY_EVERY == 0:
                say(num_read)
    if sum(rejected.values()) == num_read:
        raise SourceError(
            f"{name}: all {num_read} samples were rejected ({dict(rejected)}). Correct the files or the stream's "
            f"settings."
        )
    total, shard_samples = _total(source, num_read, whole=not live)
    ended = tuple(p not in live for p in range(count))
    sizes_read = tuple(np.array(rows, np.int64).reshape(-1, len(NO_MEDIA)) for rows in media) if fields else None
    return StreamLengths(
        name, tuple(np.array(column, np.int64) for column in lengths), ended, total, shard_samples, media=sizes_read
    ), rejected


def _partitions(source: Source, partitions: int, most: int, seed: int, fields: Sequence[Field]) -> int:
    """Return the number of partitions to read a source in: the run's for a whole source, else up to ``SPREAD``."""
    spread = min(source.num_shards, max(partitions, SPREAD))
    if spread <= partitions:
        return partitions
    for p in range(spread):  # opens a shard of each
        next(source.read(p, spread, seed=seed, passes=1, fields=fields), None)
    total, _ = _total(source, 0, whole=False)
    return partitions if total is not None and total <= most else spread


def _total(source: Source, num: int, *, whole: bool) -> tuple[float | None, I64 | None]:
    """Return the samples of one pass, None if not known, after ``num`` samples were read.

    If they are estimated, also return the samples of each shard that was opened, int64 [shards].
    """
    if whole:
        return float(num), None
    if not isinstance(source, ShardedSource) or not source.shard_samples:
        return None, None
    counts = np.array(list(source.shard_samples.values()), np.int64)
    if len(counts) == source.num_shards:
        return float(counts.sum()), None
    return max(float(counts.mean()) * source.num_shards, float(num)), counts


def _updater(progress: Progress, task: object) -> Callable[[int], None]:
    """Return a function that sets how many samples of ``task`` are done."""
    return lambda num: progress.update(task, completed=num)  # type: ignore[arg-type]


def _progress() -> Progress:
    """Return a progress bar on standard error, which shows nothing if that is not a terminal."""
    columns = (
        TextColumn("tokenizing {task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(file=sys.stderr), transient=True, disable=not sys.stderr.isatty())
