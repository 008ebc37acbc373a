"""Lengths out of sources: tokenizes some samples of each stream, spread over its shards, and says of how many.

Reads as producers do, the shards of each partition in the order that (seed, pass) give: a source that is read to its
end has its samples in the order of a run. One that is too large is read as if it had ``SPREAD`` partitions: a few
samples of more shards say more about the whole. How many samples it has follows from the shards that were opened.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from streampack.core.model.samples import I64
from streampack.errors import SourceError
from streampack.sources import RawSample, Source
from streampack.sources.walk import ShardedSource
from streampack_services.forecast.lengths import StreamLengths, Workload

SPREAD = 16
SAY_EVERY = 100


def sample(what: str, sources: Mapping[str, Source], partitions: Mapping[str, int], most: int, seed: int) -> Workload:
    """At most ``most`` samples of each source, tokenized; ``partitions`` are those of a run.

    Raises SourceError for sources that cannot be read or hold no sample.
    """
    streams, notes, all_rejected = [], list[str](), 0
    with _progress() as progress:
        for name, source in sources.items():
            task = progress.add_task(name, total=most)
            stream, rejected = _stream(name, source, partitions[name], most, seed, _to(progress, task))
            progress.update(task, total=stream.num_samples, completed=stream.num_samples)
            streams.append(stream)
            all_rejected += sum(rejected.values())
            notes += [f"{name}: rejected {count:,} samples: {reason}" for reason, count in rejected.items()]
    return Workload(what, tuple(streams), notes, all_rejected)


def _stream(
    name: str, source: Source, partitions: int, most: int, seed: int, say: Callable[[int], None]
) -> tuple[StreamLengths, Counter[str]]:
    """The first samples of each partition, in turn, and how many were rejected for which reason."""
    count = _partitions(source, partitions, most, seed)
    lengths: list[list[int]] = [[] for _ in range(count)]
    rejected: Counter[str] = Counter()
    live: dict[int, Iterator[RawSample]] = {p: source.read(p, count, seed=seed, passes=1) for p in range(count)}
    num = 0
    while live and num < most:
        for p in list(live):
            record = next(live[p], None)
            if record is None:
                del live[p]
                continue
            lengths[p].append(len(record.tokens))
            if record.reason is not None:
                rejected[record.reason] += 1
            num += 1
            if num % SAY_EVERY == 0:
                say(num)
    if sum(rejected.values()) == num:
        raise SourceError(f"{name}: got {num} samples, all rejected ({dict(rejected)}), expected some that are good")
    total, counted = _total(source, num, whole=not live)
    ended = tuple(p not in live for p in range(count))
    return StreamLengths(name, tuple(np.array(each, np.int64) for each in lengths), ended, total, counted), rejected


def _partitions(source: Source, partitions: int, most: int, seed: int) -> int:
    """As many as the run has, where all of the source will be read; else more, up to ``SPREAD``."""
    spread = min(source.num_shards, max(partitions, SPREAD))
    if spread <= partitions:
        return partitions
    for p in range(spread):  # opens a shard of each
        next(source.read(p, spread, seed=seed, passes=1), None)
    total, _ = _total(source, 0, whole=False)
    return partitions if total is not None and total <= most else spread


def _total(source: Source, num: int, *, whole: bool) -> tuple[float | None, I64 | None]:
    """Samples of one pass, and those of the shards that were opened if it is an estimate from them."""
    if whole:
        return float(num), None
    if not isinstance(source, ShardedSource) or not source.shard_samples:
        return None, None
    counts = np.array(list(source.shard_samples.values()), np.int64)
    if len(counts) == source.num_shards:
        return float(counts.sum()), None
    return max(float(counts.mean()) * source.num_shards, float(num)), counts


def _to(progress: Progress, task: object) -> Callable[[int], None]:
    return lambda num: progress.update(task, completed=num)  # type: ignore[arg-type]


def _progress() -> Progress:
    """On a terminal's standard error; elsewhere nothing is shown."""
    columns = (
        TextColumn("tokenizing {task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(file=sys.stderr), transient=True, disable=not sys.stderr.isatty())
