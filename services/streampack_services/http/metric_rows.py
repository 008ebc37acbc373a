"""The series of each metric: functions from a broker's status to rows, which ``metrics`` lists in its table."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable

import msgspec

from streampack_services.broker.status import (
    BrokerStatus,
    DynamicBatching,
    FeedStatus,
    Histogram,
    Histograms,
    LogStatus,
    RankStatus,
    StreamStatus,
)

Labels = tuple[str, ...]
Rows = Iterable[tuple[Labels, float]]
"""(label values, value) of each series."""
HistogramRows = Iterable[tuple[Labels, Histogram]]
RANKS = ("dp_rank", "cp_rank", "tp_rank", "pp_rank", "host")


def at(value: Callable[[BrokerStatus], float]) -> Callable[[BrokerStatus], Rows]:
    """Return one row: a figure of the broker."""
    return lambda status: [((), float(value(status)))]


def of_feeds(value: Callable[[FeedStatus], float | None]) -> Callable[[BrokerStatus], Rows]:
    """Return a row for each feed that has the figure."""

    def rows(status: BrokerStatus) -> Rows:
        for name, feed in status.feeds.items():
            if (found := value(feed)) is not None:
                yield (name,), float(found)

    return rows


def of_streams(value: Callable[[StreamStatus], float]) -> Callable[[BrokerStatus], Rows]:
    """Return a row for each stream."""
    return lambda status: [((row.stream,), float(value(row))) for row in status.streams]


def of_log(value: Callable[[LogStatus], float]) -> Callable[[BrokerStatus], Rows]:
    """Return one row: a figure of the log, if there is one."""
    return lambda status: [] if status.log is None else [((), float(value(status.log)))]


def of_readers(value: Callable[[RankStatus], float | None]) -> Callable[[BrokerStatus], Rows]:
    """Return a row for each rank that has the figure."""

    def rows(status: BrokerStatus) -> Rows:
        for name, feed in status.feeds.items():
            for row in feed.readers:
                if (found := value(row)) is not None:
                    yield rank_labels(name, row), float(found)

    return rows


def client_figure(key: str, scale: float = 1.0) -> Callable[[BrokerStatus], Rows]:
    """Return a row for each rank whose client sends the figure ``key``."""
    return of_readers(lambda row: row.stats[key] * scale if key in row.stats else None)


def histograms(value: Callable[[Histograms], Histogram]) -> Callable[[BrokerStatus], HistogramRows]:
    """Return a histogram of each feed."""
    return lambda status: [((name,), value(feed.histograms)) for name, feed in status.feeds.items()]


def rank_labels(feed: str, row: RankStatus) -> Labels:
    """Return the values of the labels ``feed`` and ``RANKS``."""
    return feed, str(row.dp_rank), str(row.cp_rank), str(row.tp_rank), str(row.pp_rank), row.host


def ended(feed: FeedStatus) -> bool:
    """Say whether all ranks have returned the last step of the iteration."""
    return feed.steps.end is not None and feed.steps.returned >= feed.steps.end


def removed_ratio(feed: FeedStatus) -> float | None:
    """Return the share of padding that dynamic batching removes; None without dynamic batching."""
    return None if feed.dynamic_batching is None else feed.dynamic_batching.removed_padding_ratio


def trainer_seconds(row: RankStatus) -> float | None:
    """Return the time that the rank's trainer had a step; None until its client has sent it."""
    return row.trainer_s if row.has_reported else None


def bad_messages(status: BrokerStatus) -> Rows:
    """Return a row for each reason."""
    return [((reason,), float(count)) for reason, count in msgspec.structs.asdict(status.messages).items()]


def waste(status: BrokerStatus) -> Rows:
    """Return a row for each feed and cause of padding."""
    for name, feed in status.feeds.items():
        for cause, tokens in feed.waste_tokens.items():
            yield (name, cause), float(tokens)


def lost(status: BrokerStatus) -> Rows:
    """Return a row for each feed and policy that takes tokens."""
    for name, feed in status.feeds.items():
        for policy, tokens in msgspec.structs.asdict(feed.lost_tokens).items():
            yield (name, policy), float(tokens)


def padding(status: BrokerStatus) -> Rows:
    """Return a row for each kind of tokens of padded micro-batches, for feeds that have them."""
    kinds = [field for field in DynamicBatching.__struct_fields__ if field.endswith("_tokens")]
    for name, feed in status.feeds.items():
        if feed.dynamic_batching is not None:
            for kind in kinds:
                yield (name, kind.removesuffix("_tokens")), float(getattr(feed.dynamic_batching, kind))


def rank_tokens(status: BrokerStatus) -> Rows:
    """Return a row for each feed, before and after balancing, and figure."""
    for name, feed in status.feeds.items():
        for when, spread in (("before", feed.rank_tokens.before), ("after", feed.rank_tokens.after)):
            for figure, tokens in msgspec.structs.asdict(spread).items():
                yield (name, when, figure), tokens


def steps_left(status: BrokerStatus) -> Rows:
    """Return a row for each bound, for feeds whose steps left can be estimated."""
    for name, feed in status.feeds.items():
        if feed.steps_left is not None:
            for bound, steps in msgspec.structs.asdict(feed.steps_left).items():
                yield (name, bound), float(steps)


def last_seen(status: BrokerStatus) -> Rows:
    """Return the time at which each stream was heard, in seconds since 1970."""
    for row in status.streams:
        if row.last_seen_s is not None:
            yield (row.stream,), status.taken_at - row.last_seen_s


def rejected(status: BrokerStatus) -> Rows:
    """Return the number of rejected samples, a row for each stream and reason."""
    for row in status.streams:
        for reason, count in row.rejected.items():
            yield (row.stream, reason), float(count)


def starved(status: BrokerStatus) -> Rows:
    """Return a row for each rank and cause, and one for each stream of the cause ``stream``.

    Each second of a wait is in one series. A rank that has not reported has none: it may have waited for hours under
    the broker before, and a counter that falls to 0 and comes back would count those hours again.
    """
    for name, feed in status.feeds.items():
        for row in feed.readers:
            if not row.has_reported:
                continue
            rank, by_stream = rank_labels(name, row), row.starved_streams
            for cause, seconds in row.starved_s.items():
                unknown = round(max(seconds - sum(by_stream.values()), 0.0), 3) if cause == "stream" else seconds
                yield (*rank, cause, ""), unknown
            for stream, seconds in by_stream.items():
                yield (*rank, "stream", stream), seconds


def build(status: BrokerStatus) -> Rows:
    """Return 1, labeled with the versions of streampack and of Python."""
    return [((status.version, platform.python_version()), 1.0)]


def run(status: BrokerStatus) -> Rows:
    """Return 1 for each feed, labeled with the run, the feed and the digest of its rules."""
    return [((status.run, name, feed.rules.digest), 1.0) for name, feed in status.feeds.items()]
