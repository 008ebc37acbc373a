"""The view of a broker that ``streampack top`` and ``streampack status`` show: its status and recent rates.

A status counts from the start of the broker. A *recent* figure is the difference to a status about 10 s earlier, of the
same broker and of the same process of a rank. Without an earlier status, it counts from the start. Time is the broker's
uptime.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from streampack_services.broker.ranks.rank_status import RankStatus
from streampack_services.broker.status import PADDING_LABELS, BrokerStatus, FeedStatus, StreamStatus

Tree = dict[str, Any]
Point = tuple[float, float]
"""(uptime in seconds, tokens since the start)."""

LATELY_S = 10.0
"""Time over which recent figures are taken, in seconds."""
HISTORY_S = 300.0
"""Time that the chart of tokens/s shows, in seconds."""
SMOOTH_S = 10.0
"""Least time of a point of that chart, in seconds. Over less time, whole steps would make it jump."""
STREAM_SILENT_S = 10.0
"""Time without a message of its producers after which a stream is silent, in seconds."""
EVENTS = 200
"""Last events that are kept."""
DIMENSIONS = ("dp", "cp", "tp", "pp")


@dataclass(frozen=True, slots=True)
class Rank:
    """A rank of a feed. Names of the fields are keys of ``streampack top --json``."""

    name: str
    """Its place in the mesh: ``dp=0 cp=1``."""
    where: str
    """``host:pid``."""
    step: int
    """Steps returned in this iteration."""
    ahead: int
    """Steps received and not returned."""
    waits: float | None
    """Recent data wait, as a share of the rank's time; None if not known."""
    cause: str
    """Main cause of the data wait; empty without a wait."""
    cost: float | None
    """Cost of its last step / mean of all ranks; None before a step."""
    p99_ms: float | None
    """99th percentile of its wait for a step, in milliseconds; None if not known."""
    silent_s: float
    """Seconds since the broker heard it."""


@dataclass(frozen=True, slots=True)
class StreamView:
    """The status of a stream, and its tokens per second over about 10 s (None if not known)."""

    status: StreamStatus
    tokens_per_s: float | None

    @property
    def buffered(self) -> float:
        """Tokens that wait for the merge, divided by the granted tokens."""
        return self.status.credits.used_tokens / max(self.status.credits.granted_tokens, 1)

    @property
    def rejected(self) -> int:
        """Samples that could not be used."""
        return sum(self.status.rejected.values())

    @property
    def warnings(self) -> int:
        """Number of warnings about delivered samples."""
        return sum(self.status.warnings.values())

    @property
    def ended(self) -> bool:
        """True if all partitions have ended."""
        return self.status.ended_partitions == self.status.partitions

    @property
    def is_silent(self) -> bool:
        """True if the stream has not ended and none of its producers has sent a message for ``STREAM_SILENT_S``."""
        seen = self.status.last_seen_s
        return not self.ended and (seen is None or seen > STREAM_SILENT_S)


@dataclass(frozen=True, slots=True)
class FeedView:
    """The status of a feed, with rates and data wait over about 10 s."""

    name: str
    status: FeedStatus
    rates: tuple[Point, ...]
    """Points for ``rates_of``."""
    starved: dict[str, float]
    """Recent data wait by cause, as a share of all ranks' time."""
    starved_streams: dict[str, float]
    """The part of the cause ``stream``, by stream."""
    ranks: tuple[Rank, ...]

    @property
    def padding(self) -> dict[str, float]:
        """Padding by cause, as a share of the tokens delivered."""
        delivered = max(self.status.delivered_tokens, 1)
        return {cause: tokens / delivered for cause, tokens in self.status.waste_tokens.items()}

    @property
    def padding_by_cause(self) -> list[tuple[str, float]]:
        """(label of a cause, padding as a share of the tokens delivered) of each cause with padding."""
        return [(PADDING_LABELS.get(cause, cause), share) for cause, share in self.padding.items() if share]

    @property
    def waits_by_cause(self) -> list[tuple[str, float]]:
        """(cause, data wait as a share of all ranks' time), largest first; ``stream NAME`` instead of ``stream``."""
        shares = {
            cause: share for cause, share in self.starved.items() if cause != "stream" or not self.starved_streams
        }
        shares |= {f"stream {name}": share for name, share in self.starved_streams.items()}
        return sorted(shares.items(), key=lambda each: -each[1])

    @property
    def worst(self) -> list[Rank]:
        """The ranks that wait for data, longest wait first."""
        return sorted((rank for rank in self.ranks if rank.waits), key=lambda rank: -(rank.waits or 0.0))

    @property
    def waited_for(self) -> Rank | None:
        """The rank that waits least, if ``peers`` is the main cause of data wait; else None."""
        if max(self.starved, key=self.starved.__getitem__, default="") != "peers" or self.starved["peers"] < 0.01:
            return None
        known = [rank for rank in self.ranks if rank.waits is not None]
        return min(known, key=lambda rank: rank.waits or 0.0) if len(known) > 1 else None


@dataclass(frozen=True, slots=True)
class BrokerView:
    """A broker: its last status, its feeds and streams, and its last events."""

    status: BrokerStatus
    feeds: tuple[FeedView, ...]
    streams: tuple[StreamView, ...]
    events: tuple[Tree, ...]

    @property
    def memory_bytes(self) -> int:
        """Bytes of the tokens in memory."""
        return self.status.memory.live_tokens * self.status.memory.token_bytes

    @property
    def bad_messages(self) -> int:
        """Number of bad messages and connections."""
        return self.status.messages.bad

    def streams_of(self, feed: FeedView) -> list[StreamView]:
        """Return the streams of a feed."""
        return [stream for stream in self.streams if stream.status.feed == feed.name]


class Watch:
    """Collects the statuses, events and history of a broker, and makes views of them."""

    def __init__(self) -> None:
        self._seen: deque[BrokerStatus] = deque()
        self._rates: dict[str, deque[Point]] = {}
        self._events: deque[Tree] = deque(maxlen=EVENTS)

    def knows(self, epoch: int) -> bool:
        """Return True if the last status was of the broker process of this epoch."""
        return bool(self._seen) and bool(self._seen[-1].epoch == epoch)

    def last_seq(self, epoch: int) -> int:
        """Return the number of the last event of the broker process of this epoch, or 0."""
        return int(self._events[-1]["seq"]) if self.knows(epoch) and self._events else 0

    def add(
        self, status: BrokerStatus, events: Iterable[Tree] = (), history: Mapping[str, Iterable[Point]] = {}
    ) -> None:
        """Add a later status. Forget all earlier data if the status is from another broker process.

        Args:
            status: The status.
            events: Events since the last call.
            history: Earlier points of each feed.
        """
        if not self.knows(status.epoch):
            self._seen.clear()
            self._rates.clear()
            self._events.clear()
        if not self._seen or self._seen[-1].taken_at != status.taken_at:
            self._seen.append(status)
        now = status.uptime_s
        while len(self._seen) > 2 and now - self._seen[1].uptime_s >= LATELY_S:
            self._seen.popleft()
        for name, feed in status.feeds.items():
            self._add_points(name, [*history.get(name, ()), (now, feed.totals.tokens)])
        self._events.extend(event for event in events if event["seq"] > self.last_seq(status.epoch))

    def _add_points(self, feed: str, points: Iterable[Point]) -> None:
        """Add points that are later than the last point; drop points that the chart no longer needs."""
        kept = self._rates.setdefault(feed, deque())
        kept.extend(point for point in points if not kept or point[0] > kept[-1][0])
        while kept[-1][0] - kept[0][0] > HISTORY_S + SMOOTH_S:
            kept.popleft()

    def view(self) -> BrokerView:
        """Return the view of the last status; call ``add`` first."""
        now, then = self._seen[-1], self._seen[0]
        earlier = then.feeds if now.uptime_s > then.uptime_s else {}
        seconds = now.uptime_s - (then.uptime_s if earlier else 0.0)
        feeds = (
            _feed_view(name, feed, earlier.get(name), seconds, tuple(self._rates[name]))
            for name, feed in now.feeds.items()
        )
        return BrokerView(now, tuple(feeds), _stream_views(now, then), tuple(self._events))


def rates_of(points: Sequence[Point], columns: int) -> list[float | None]:
    """Return the tokens per second in each of ``columns`` equal parts of the last ``HISTORY_S``; None if not known.

    >>> rates_of([(t, 100 * t) for t in range(0, 151)], 4)
    [None, None, 100.0, 100.0]
    """
    if not points:
        return [None] * columns
    times, end, width = [time for time, _ in points], points[-1][0], HISTORY_S / columns
    rates: list[float | None] = []
    for column in range(columns):
        upto = end - (columns - 1 - column) * width
        last = bisect_left(times, upto + 1e-9) - 1
        first = max(bisect_left(times, upto - max(width, SMOOTH_S)), 0)
        known = last > first and times[last] > upto - max(width, SMOOTH_S)
        rates.append((points[last][1] - points[first][1]) / (times[last] - times[first]) if known else None)
    return rates


def _feed_view(
    name: str, now: FeedStatus, then: FeedStatus | None, seconds: float, rates: tuple[Point, ...]
) -> FeedView:
    """Return the view of a feed: its status ``now``, with differences to ``then``, so many seconds before."""
    changes = [_Waited(row, before) for row, before in _same_ranks(now, then)]
    if now.ranks.left_out:
        waited = _increase(now.ranks.starved_s, then.ranks.starved_s if then else {})
        starved, by_stream = _shares([waited], max(now.ranks.attached * seconds, 1e-9)), dict[str, float]()
    else:
        whole = sum(each.seconds for each in changes)
        starved, by_stream = (
            _shares((getattr(each, part) for each in changes), whole) for part in ("causes", "streams")
        )
    return FeedView(name, now, rates, starved, by_stream, _rank_views(now.readers, changes))


class _Waited:
    """Data wait by cause and total time of a rank, in seconds, since ``before`` or since its client began."""

    def __init__(self, row: RankStatus, before: RankStatus | None) -> None:
        self.causes = _increase(row.starved_s, before.starved_s if before else {})
        self.streams = _increase(row.starved_streams, before.starved_streams if before else {})
        self.waited = sum(self.causes.values())
        self.seconds = self.waited + max(row.trainer_s - (before.trainer_s if before else 0.0), 0.0)

    @property
    def cause(self) -> str:
        """The main cause of the wait; ``stream NAME`` if a stream is the cause."""
        if not self.waited:
            return ""
        cause = max(self.causes, key=self.causes.__getitem__)
        if cause == "stream" and self.streams:
            return f"stream {max(self.streams, key=self.streams.__getitem__)}"
        return cause


def _same_ranks(now: FeedStatus, then: FeedStatus | None) -> Iterable[tuple[RankStatus, RankStatus | None]]:
    """Yield each rank's row, with its earlier row if the process is the same and has reported since; else None."""
    before = {_process(row): row for row in (then.readers if then else ())}
    for row in now.readers:
        old = before.get(_process(row))
        has_news = old is not None and (row.starved_s, row.trainer_s) != (old.starved_s, old.trainer_s)
        yield row, old if has_news else None


def _process(row: RankStatus) -> tuple[str, int, int, int, int]:
    """Return ``host:pid`` and ranks, which name a rank in a process: one process may run several ranks in threads."""
    return row.where, row.dp_rank, row.cp_rank, row.tp_rank, row.pp_rank


def _increase(now: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    """Return the increase of each value from ``before`` to ``now``, at least 0."""
    return {key: max(value - before.get(key, 0.0), 0.0) for key, value in now.items()}


def _shares(parts: Iterable[dict[str, float]], whole: float) -> dict[str, float]:
    """Sum dicts by key, and return each sum / ``whole``, without sums of 0."""
    sums: dict[str, float] = {}
    for part in parts:
        for key, seconds in part.items():
            sums[key] = sums.get(key, 0.0) + seconds
    return {key: seconds / whole for key, seconds in sums.items() if seconds > 0}


def _rank_views(rows: Sequence[RankStatus], changes: Sequence[_Waited]) -> tuple[Rank, ...]:
    """Return the views of ranks, named by the axes of the mesh that are in use."""
    places = [dict(zip(DIMENSIONS, _process(row)[1:], strict=True)) for row in rows]
    named = [name for name in DIMENSIONS if name == "dp" or any(place[name] for place in places)]
    return tuple(
        Rank(
            name=" ".join(f"{name}={place[name]}" for name in named), where=row.where,
            step=row.done_upto, ahead=max(0, row.have_upto - row.done_upto),
            waits=waited.waited / waited.seconds if waited.seconds else None, cause=waited.cause,
            cost=sum(row.cost) / len(row.cost) if row.cost else None,
            p99_ms=row.stats.get("next_p99_ms"), silent_s=row.silent_s,
        )
        for row, place, waited in zip(rows, places, changes, strict=True)
    )  # fmt: skip


def _stream_views(now: BrokerStatus, then: BrokerStatus) -> tuple[StreamView, ...]:
    """Return the views of streams, with tokens per second since the status ``then``."""
    seconds = now.uptime_s - then.uptime_s
    before = {(row.feed, row.stream): row.tokens for row in then.streams if seconds > 0}
    return tuple(
        StreamView(row, max(row.tokens - old, 0) / seconds if old is not None else None)
        for row in now.streams
        for old in (before.get((row.feed, row.stream)),)
    )


def as_tree(view: BrokerView) -> Tree:
    """Return the tree that ``streampack top --json`` prints."""
    status = view.status
    return {
        "run": status.run, "state": status.state, "stalled_s": status.stalled_s, "version": status.version,
        "uptime_s": status.uptime_s, "taken_at": status.taken_at, "feeds": list(map(_feed_tree, view.feeds)),
        "streams": list(map(_stream_tree, view.streams)), "producers": status.producers,
        "memory_bytes": view.memory_bytes, "memory_limit_bytes": status.memory.arena_bytes,
        "media_bytes": status.memory.media_bytes,
        "log": msgspec.to_builtins(status.log), "bad_messages": view.bad_messages, "events": list(view.events),
    }  # fmt: skip


def _feed_tree(feed: FeedView) -> Tree:
    """Return a feed as a tree for JSON."""
    now = feed.status
    return {
        "name": feed.name, "state": now.state, "round": now.round, "formed": now.steps.formed,
        "returned": now.steps.returned, "end": now.steps.end, "committed": now.committed,
        "steps_left": msgspec.to_builtins(now.steps_left), "tokens_per_s": now.tokens_per_s, "packs": now.totals.packs,
        "utilization": now.figures.utilization, "packing_efficiency": now.figures.packing_efficiency,
        "waste": feed.padding, "waits_for": now.waiting_for.reason if now.waiting_for else "",
        "waiting_for": now.waiting_for.text if now.waiting_for else "", "starved": feed.starved,
        "starved_streams": feed.starved_streams, "cost_max_over_mean": now.figures.cost_max_over_mean or None,
        "window_samples": now.window.samples, "oldest_steps": now.window.oldest_steps,
        "ranks": list(map(asdict, feed.ranks)), "all_attached": now.all_ranks_attached,
        "attached": now.ranks.attached, "ranks_left_out": now.ranks.left_out,
        "nodes": msgspec.to_builtins(now.ranks.nodes), "nodes_left_out": now.ranks.nodes_left_out,
        "media": msgspec.to_builtins(now.media),
    }  # fmt: skip


def _stream_tree(stream: StreamView) -> Tree:
    """Return a stream as a tree for JSON."""
    row = stream.status
    return {
        "name": row.stream, "feed": row.feed, "weight": row.weight, "share": row.share, "passes": row.passes,
        "trained_share": row.trained_share, "trained_tokens": row.trained_tokens,
        "trained_samples": row.trained_samples, "tokens": row.tokens, "tokens_per_s": stream.tokens_per_s,
        "buffered": stream.buffered, "lag_tokens": row.lag.tokens, "lag_samples": row.lag.samples,
        "last_seen_s": row.last_seen_s, "producers": row.producers, "hosts": row.hosts, "rejected": stream.rejected,
        "warnings": stream.warnings,
        "ended": stream.ended, "late": msgspec.to_builtins(row.late),
    }  # fmt: skip
