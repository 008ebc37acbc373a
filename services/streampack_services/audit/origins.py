"""Find the file and row of a sample, and the samples that were read from a row of a file.

A sample's index counts over the partitions and passes of its stream. The row follows from the sources, the seed and the
order of a pass. Shards are opened only to count their samples; no sample is decoded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

from streampack.errors import UserError
from streampack.sources import Cursor, OpenedSource
from streampack.sources.walk import Located, ShardedSource
from streampack_services.ledger.ledger import Ledger
from streampack_services.ledger.run_history import LATEST, FeedHistory

NO_SOURCES: Mapping[str, OpenedSource] = MappingProxyType({})


def places_of(
    feed: FeedHistory, stream: str, indices: Iterable[int], sources: Mapping[str, OpenedSource], *, reads: bool = False
) -> Iterator[tuple[int, Located]]:  # fmt: skip
    """Yield the place of each sample of a stream that its source has, with its index.

    Args:
        feed: The feed.
        stream: Name of the stream.
        indices: Indices of the samples.
        sources: The sources by stream. A stream without files has no places.
        reads: Also read the samples.
    """
    rules, source, run = feed.streams[stream], sources.get(stream), feed.rules_at(LATEST)
    by_partition: dict[int, list[int]] = {}
    for index in indices if isinstance(source, ShardedSource) else ():
        by_partition.setdefault(index % rules.partitions, []).append(index // rules.partitions)
    for partition, seqs in by_partition.items():
        assert isinstance(source, ShardedSource)
        places = source.locate(
            partition, rules.partitions, seed=run.seed, passes=rules.passes, seqs=seqs, fields=run.all_fields,
            reads=reads, begin=Cursor(*feed.begin_of(stream)),
        )  # fmt: skip
        yield from ((place.seq * rules.partitions + partition, place) for place in places)


def origin_of(feed: FeedHistory, stream: str, index: int, sources: Mapping[str, OpenedSource]) -> str | None:
    """Return the file and row of sample ``index`` of a stream, ``train.jsonl:line 101``; None if not known."""
    return next((place.where for _, place in places_of(feed, stream, [index], sources)), None)


def samples_of(ledger: Ledger, name: str, sources: Mapping[str, OpenedSource]) -> list[str]:
    """Return the samples that were read from row ``FILE:ROW``, as ``STREAM:INDEX``: one per pass of the run so far.

    FILE is the end of a path. Raises UserError if no source has the row.
    """
    file, _, row = name.rpartition(":")

    def wanted(where: str) -> bool:
        """Return whether a place such as ``data/train.jsonl:line 101`` is the row that the user named."""
        its_file, _, its_row = where.rpartition(":")
        path, named = f"/{its_file}", f"/{file.lstrip('/')}"
        return row in (its_row, its_row.rpartition(" ")[2]) and (path.endswith(named) or named.endswith(path))

    names = []
    for stream, source in sources.items():
        feed = ledger.history.feed_of(stream)
        if feed is None or not isinstance(source, ShardedSource):
            continue
        rules, run = feed.streams[stream], feed.rules_at(LATEST)
        upto = ledger.furthest(stream) // rules.partitions
        places = source.find(
            wanted, rules.partitions, seed=run.seed, passes=rules.passes, upto=upto, fields=run.all_fields,
            begin=Cursor(*feed.begin_of(stream)),
        )  # fmt: skip
        indices = sorted(seq * rules.partitions + partition for partition, seq in places)
        names += [f"{stream}:{index}" for index in indices]
    if not names:
        raise UserError(
            f"The sources of the streams {', '.join(sources)} have no row {name!r}. Pass FILE:ROW. Lines are numbered "
            f"from 1, and rows of Parquet and Hugging Face files are numbered from 0."
        )
    return names
