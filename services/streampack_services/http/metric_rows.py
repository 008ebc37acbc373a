"""Functions that read the series of a metric from a broker's status; ``metrics`` names one for each metric."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable

import msgspec

from streampack.core.stats.media_figures import MEDIA_DROPPED
from streampack_services.broker.status import (
    BrokerStatus,
    DynamicBatching,
    FeedStatus,
    Histogram,
    Histograms,
    LateStatus,
    LogStatus,
    MediaStatus,
    NodeStatus,
    RankStatus,
    RelayStatus,
    StandbyStatus,
    StreamStatus,
)

Labels = tuple[str, ...]
Rows = Iterable[tuple[Labels, float]]
"""(label values, value) of each series."""
HistogramRows = Iterable[tuple[Labels, Histogram]]
"""(label values, histogram) of each series."""
RANKS = ("dp_rank", "cp_rank", "tp_rank", "pp_rank", "host")
"""Labels that name a rank."""


def of_broker(value: Callable[[BrokerStatus], float]) -> Callable[[BrokerStatus], Rows]:
    """Return a function that yields one row without labels: a figure of the broker."""
    return lambda status: [((), float(value(status)))]


def of_feeds(value: Callable[[FeedStatus], float | None]) -> Callable[[BrokerStatus], Rows]:
    """Return a function that yields a row for each feed; a feed whose ``value`` is None has none."""

    def rows(status: BrokerStatus) -> Rows:
        """Yield a row for each feed that has a value."""
        for name, feed in status.feeds.items():
            if (found := value(feed)) is not None:
                yield (name,), float(found)

    return rows


def of_media(value: Callable[[MediaStatus], float]) -> Callable[[BrokerStatus], Rows]:
    """Return a function that yields a row for each feed with media."""
    return of_feeds(lambda feed: None if feed.media is None else value(feed.media))


def of_streams(value: Callable[[StreamStatus], float]) -> Callable[[BrokerStatus], Rows]:
    """Return a function that yields a row for each stream."""
    return lambda status: [((row.stream,), float(value(row))) for row in status.streams]


def of_late(value: Callable[[LateStatus], float]) -> Callable[[BrokerStatus], Rows]:
    """Return a function that yields a row for each stream with late fields."""
    return lambda status: [((row.stream,), float(value(row.late))) for row in status.streams if row.late is not None]


def of_log(value: Callable[[LogStatus], float]) -> Callable[[BrokerStatus], Rows]:
    """Return a function that yields one row without labels: a figure of the log, if the broker has a log."""
    return lambda status: [] if status.log is None else [((), float(value(status.log)))]


def of_standby(value: Callable[[StandbyStatus], float]) -> Callable[[BrokerStatus], Rows]:
    """Return a function that yields one row without labels: a figure of the standby, if the run has one."""
    return lambda status: [] if status.standby is None else [((), float(value(status.standby)))]


def of_readers(value: Callable[[RankStatus], float | None]) -> Callable[[BrokerStatus], Rows]:
    """Return a function that yields a row for each rank; a rank whose ``value`` is None has none.

    A feed with more ranks than ``/status`` lists has no rows: ``of_nodes`` has rows for its worst nodes.
    """

    def rows(status: BrokerStatus) -> Rows:
        """Yield a row for each rank that has a value."""
        for name, feed in status.feeds.items():
            for row in _listed(feed):
                if (found := value(row)) is not None:
                    yield rank_labels(name, row), float(found)

    return rows


def of_nodes(value: Callable[[NodeStatus], float | None]) -> Callable[[BrokerStatus], Rows]:
    """Return a function that yields a row for each of the worst nodes, of feeds with too many ranks for ``of_readers``.

    A node whose ``value`` is None has no row.
    """

    def rows(status: BrokerStatus) -> Rows:
        """Yield a row for each listed node that has a value."""
        for name, feed in status.feeds.items():
            for node in feed.ranks.nodes if feed.ranks.left_out else ():
                if (found := value(node)) is not None:
                    yield (name, node.host), float(found)

    return rows


def of_relays(value: Callable[[RelayStatus], float]) -> Callable[[BrokerStatus], Rows]:
    """Return a function that yields a row for each listed relay."""
    return lambda status: [((relay.host,), float(value(relay))) for relay in status.relays.hosts]


def _listed(feed: FeedStatus) -> list[RankStatus]:
    """Return the ranks of a feed that have series of their own: all, or none of too many."""
    return [] if feed.ranks.left_out else feed.readers


def node_waits(status: BrokerStatus) -> Rows:
    """Return the longest data wait of each of the worst nodes, labeled with its main cause."""
    for name, feed in status.feeds.items():
        for node in feed.ranks.nodes if feed.ranks.left_out else ():
            if node.data_wait is not None:
                yield (name, node.host, node.cause), node.data_wait


def longest_waits(status: BrokerStatus) -> Rows:
    """Return the longest data wait of a rank, a row for each feed and cause."""
    for name, feed in status.feeds.items():
        for cause, share in feed.ranks.longest_waits.items():
            yield (name, cause), share


def bound_packs(status: BrokerStatus) -> Rows:
    """Return the number of packs by the axis that filled them, a row for each axis with a limit of feeds with media."""
    for name, feed in status.feeds.items():
        for axis, packs in feed.media.bound_by.items() if feed.media is not None else ():
            yield (name, axis), float(packs)


def media_held(status: BrokerStatus) -> Rows:
    """Return one row without labels, the bytes of media held, if a feed has media."""
    if any(feed.media is not None for feed in status.feeds.values()):
        yield (), float(status.memory.media_bytes)


def starved(status: BrokerStatus) -> Rows:
    """Return the data wait of all ranks in seconds, a row for each feed and cause."""
    for name, feed in status.feeds.items():
        for cause, seconds in feed.ranks.starved_s.items():
            yield (name, cause), seconds


def client_figure(key: str, scale: float = 1.0) -> Callable[[BrokerStatus], Rows]:
    """Return a function that yields a row for each rank whose client sends the figure ``key``, times ``scale``."""
    return of_readers(lambda row: row.stats[key] * scale if key in row.stats else None)


def histograms(value: Callable[[Histograms], Histogram]) -> Callable[[BrokerStatus], HistogramRows]:
    """Return a function that yields a histogram for each feed."""
    return lambda status: [((name,), value(feed.histograms)) for name, feed in status.feeds.items()]


def rank_labels(feed: str, row: RankStatus) -> Labels:
    """Return the values of the labels ``feed`` and ``RANKS`` for a rank."""
    return feed, str(row.dp_rank), str(row.cp_rank), str(row.tp_rank), str(row.pp_rank), row.host


def ended(feed: FeedStatus) -> bool:
    """Return True if all ranks have returned the last step of the iteration."""
    return feed.steps.end is not None and feed.steps.returned >= feed.steps.end


def removed_ratio(feed: FeedStatus) -> float | None:
    """Return the share of padding that dynamic batching removes; None without dynamic batching."""
    return None if feed.dynamic_batching is None else feed.dynamic_batching.removed_padding_ratio


def trainer_seconds(row: RankStatus) -> float | None:
    """Return the seconds that the rank's trainer has worked on steps; None until its client has reported figures."""
    return row.trainer_s if row.has_reported else None


def media_dropped(row: RankStatus) -> float | None:
    """Return the media items that a rank has dropped, of all reasons; None if its trainer does not drop any."""
    found = [count for name, count in row.stats.items() if name.startswith(MEDIA_DROPPED)]
    return sum(found) if found else None


def bad_messages(status: BrokerStatus) -> Rows:
    """Return the number of bad messages, a row for each reason."""
    return [((reason,), float(count)) for reason, count in msgspec.structs.asdict(status.messages).items()]


def padding(status: BrokerStatus) -> Rows:
    """Return the padding of delivered packs in tokens, a row for each feed and cause."""
    for name, feed in status.feeds.items():
        for cause, tokens in feed.waste_tokens.items():
            yield (name, cause), float(tokens)


def untrained(status: BrokerStatus) -> Rows:
    """Return the received tokens that no rank trains, a row for each feed and policy."""
    for name, feed in status.feeds.items():
        for policy, tokens in msgspec.structs.asdict(feed.lost_tokens).items():
            yield (name, policy), float(tokens)


def dynamic_batching(status: BrokerStatus) -> Rows:
    """Return the tokens of padded micro-batches, a row for each kind of tokens of each feed with dynamic batching."""
    kinds = [field for field in DynamicBatching.__struct_fields__ if field.endswith("_tokens")]
    for name, feed in status.feeds.items():
        if feed.dynamic_batching is not None:
            for kind in kinds:
                yield (name, kind.removesuffix("_tokens")), float(getattr(feed.dynamic_batching, kind))


def rank_tokens(status: BrokerStatus) -> Rows:
    """Return the tokens of a rank's step, before and after balancing, a row for each feed and figure."""
    for name, feed in status.feeds.items():
        for when, spread in (("before", feed.rank_tokens.before), ("after", feed.rank_tokens.after)):
            for figure, tokens in msgspec.structs.asdict(spread).items():
                yield (name, when, figure), tokens


def steps_left(status: BrokerStatus) -> Rows:
    """Return the estimate of steps left and its bounds, a row for each of them and each feed with an estimate."""
    for name, feed in status.feeds.items():
        if feed.steps_left is not None:
            for bound, steps in msgspec.structs.asdict(feed.steps_left).items():
                yield (name, bound), float(steps)


def last_seen(status: BrokerStatus) -> Rows:
    """Return the time at which a producer of each stream was last heard, in seconds since 1970."""
    for row in status.streams:
        if row.last_seen_s is not None:
            yield (row.stream,), status.taken_at - row.last_seen_s


def rejected(status: BrokerStatus) -> Rows:
    """Return the number of rejected samples, a row for each stream and reason."""
    for row in status.streams:
        for reason, count in row.rejected.items():
            yield (row.stream, reason), float(count)


def sample_warnings(status: BrokerStatus) -> Rows:
    """Return the number of delivered samples with a warning, a row for each stream and word."""
    for row in status.streams:
        for word, count in row.warnings.items():
            yield (row.stream, word), float(count)


def refused_values(status: BrokerStatus) -> Rows:
    """Return the samples whose late values are not trained, a row for each stream and reason."""
    for row in status.streams:
        for reason, count in (row.late.refused if row.late is not None else {}).items():
            yield (row.stream, reason), float(count)


def data_wait(status: BrokerStatus) -> Rows:
    """Return the data wait in seconds, a row for each rank and cause; for the cause ``stream`` one for each stream.

    Each second of a wait is in one series. A rank that has not reported yet has no row. A row of 0 would
    look like a reset of the counter after a broker's restart, and old seconds would count again.
    """
    for name, feed in status.feeds.items():
        for row in _listed(feed):
            if not row.has_reported:
                continue
            rank, by_stream = rank_labels(name, row), row.starved_streams
            for cause, seconds in row.starved_s.items():
                unknown = round(max(seconds - sum(by_stream.values()), 0.0), 3) if cause == "stream" else seconds
                yield (*rank, cause, ""), unknown
            for stream, seconds in by_stream.items():
                yield (*rank, "stream", stream), seconds


def build_info(status: BrokerStatus) -> Rows:
    """Return one row with the value 1, labeled with the versions of streampack and Python."""
    return [((status.version, platform.python_version()), 1.0)]


def run_info(status: BrokerStatus) -> Rows:
    """Return a row with the value 1 for each feed, labeled with the run, the feed and the digest of its rules."""
    return [((status.run, name, feed.rules.digest), 1.0) for name, feed in status.feeds.items()]
