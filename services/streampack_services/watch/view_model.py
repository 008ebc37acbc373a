"""The view of a broker that ``streampack top`` and ``streampack status`` render: its status, and what changed lately.

A status counts from the start. A figure of the *last seconds* is the difference to an earlier status of the same broker
and of the same process of a rank; where there is none, it counts from the start. The view does not know terminals,
addresses or clocks: time is the broker's uptime.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from streampack_services.broker.status import BrokerStatus, FeedStatus, RankStatus, StreamStatus

Tree = dict[str, Any]
Point = tuple[float, float]
"""(uptime in seconds, tokens since the start)."""

LATELY_S = 10.0
HISTORY_S = 300.0
"""Seconds that the line of tokens/s shows."""
SMOOTH_S = 10.0
"""Least seconds that a point of that line covers: steps come at once, so tokens/s of less would jump."""
STREAM_SILENT_S = 10.0
"""A stream is silent when its producers were heard longer ago."""
EVENTS = 200
DIMENSIONS = ("dp", "cp", "tp", "pp")


@dataclass(frozen=True, slots=True)
class Rank:
    """A rank of a feed.

    ``waits`` is the share of its time lately that it waited for a step (None: not known), ``cause`` the main cause, and
    ``cost`` that of its last step over the mean of all ranks.
    """

    name: str
    where: str
    step: int
    ahead: int
    waits: float | None
    cause: str
    cost: float | None
    p99_ms: float | None
    silent_s: float


@dataclass(frozen=True, slots=True)
class StreamView:
    """A stream, and its tokens per second lately (None: not known)."""

    status: StreamStatus
    tokens_per_s: float | None

    @property
    def buffered(self) -> float:
        """The tokens that wait for the merge, as a share of those that may."""
        return self.status.credits.used_tokens / max(self.status.credits.granted_tokens, 1)

    @property
    def rejected(self) -> int:
        """Samples that could not be used."""
        return sum(self.status.rejected.values())

    @property
    def ended(self) -> bool:
        """True when all partitions have ended."""
        return self.status.ended_partitions == self.status.partitions

    @property
    def is_silent(self) -> bool:
        """True when no producer of a stream that goes on was heard lately."""
        seen = self.status.last_seen_s
        return not self.ended and (seen is None or seen > STREAM_SILENT_S)


@dataclass(frozen=True, slots=True)
class FeedView:
    """A feed. ``starved`` (by cause) and ``starved_streams`` are shares of all ranks' time lately."""

    name: str
    status: FeedStatus
    rates: tuple[Point, ...]
    """Points for ``rates_of``."""
    starved: dict[str, float]
    starved_streams: dict[str, float]
    ranks: tuple[Rank, ...]

    @property
    def waste(self) -> dict[str, float]:
        """Padding by cause, as a share of the tokens delivered."""
        delivered = max(self.status.delivered_tokens, 1)
        return {cause: tokens / delivered for cause, tokens in self.status.waste_tokens.items()}

    @property
    def starved_by(self) -> list[tuple[str, float]]:
        """(cause, share of all ranks' time), the worst first; streams by name instead of the cause ``stream``."""
        shares = {
            cause: share for cause, share in self.starved.items() if cause != "stream" or not self.starved_streams
        }
        shares |= {f"stream {name}": share for name, share in self.starved_streams.items()}
        return sorted(shares.items(), key=lambda each: -each[1])

    @property
    def worst(self) -> list[Rank]:
        """The ranks that wait, the one that waits most first."""
        return sorted((rank for rank in self.ranks if rank.waits), key=lambda rank: -(rank.waits or 0.0))

    @property
    def waited_for(self) -> Rank | None:
        """The rank that waits least, if waiting for peers is the main cause of the others' waits."""
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
        """Bytes of the tokens held."""
        return self.status.memory.live_tokens * self.status.memory.token_bytes

    @property
    def bad_messages(self) -> int:
        """Messages and connections that went wrong."""
        return sum(msgspec.structs.astuple(self.status.messages))

    def streams_of(self, feed: FeedView) -> list[StreamView]:
        """Return the streams of a feed."""
        return [stream for stream in self.streams if stream.status.feed == feed.name]


class Watch:
    """Collects what a broker says and makes a view of it."""

    def __init__(self) -> None:
        self._seen: deque[BrokerStatus] = deque()
        self._rates: dict[str, deque[Point]] = {}
        self._events: deque[Tree] = deque(maxlen=EVENTS)

    def knows(self, epoch: int) -> bool:
        """Say whether the last status was of the broker of this epoch."""
        return bool(self._seen) and bool(self._seen[-1].epoch == epoch)

    def last_seq(self, epoch: int) -> int:
        """Return the number of the last known event of the broker of this epoch, or 0."""
        return int(self._events[-1]["seq"]) if self.knows(epoch) and self._events else 0

    def add(
        self, status: BrokerStatus, events: Iterable[Tree] = (), history: Mapping[str, Iterable[Point]] = {}
    ) -> None:
        """Add a later status, the events since the last one, and earlier points by feed; forget another broker's."""
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
        kept = self._rates.setdefault(feed, deque())
        kept.extend(point for point in points if not kept or point[0] > kept[-1][0])
        while kept[-1][0] - kept[0][0] > HISTORY_S + SMOOTH_S:
            kept.popleft()

    def view(self) -> BrokerView:
        """Return the view of the last status; there must be one."""
        now, then = self._seen[-1], self._seen[0]
        feeds = (_feed(name, feed, then.feeds.get(name), tuple(self._rates[name])) for name, feed in now.feeds.items())
        return BrokerView(now, tuple(feeds), _streams(now, then), tuple(self._events))


def rates_of(points: Sequence[Point], columns: int) -> list[float | None]:
    """Return tokens per second in each of ``columns`` equal parts of the last ``HISTORY_S``; None where not known.

    >>> rates_of([(t, 100 * t) for t in range(0, 151)], 4)
    [None, None, 100.0, 100.0]
    """
    if not points:
        return [None] * columns
    times, end, width = [time for time, _ in points], points[-1][0], HISTORY_S / columns
    found: list[float | None] = []
    for column in range(columns):
        upto = end - (columns - 1 - column) * width
        last = bisect_left(times, upto + 1e-9) - 1
        first = max(bisect_left(times, upto - max(width, SMOOTH_S)), 0)
        known = last > first and times[last] > upto - max(width, SMOOTH_S)
        found.append((points[last][1] - points[first][1]) / (times[last] - times[first]) if known else None)
    return found


def _feed(name: str, now: FeedStatus, then: FeedStatus | None, rates: tuple[Point, ...]) -> FeedView:
    changes = [_Waited(row, before) for row, before in _same_ranks(now, then)]
    whole = sum(each.seconds for each in changes)
    starved, by_stream = (_shares((getattr(each, part) for each in changes), whole) for part in ("causes", "streams"))
    return FeedView(name, now, rates, starved, by_stream, _ranks(now.readers, changes))


class _Waited:
    """Seconds that a rank waited, by cause, and that its trainer had a step, since ``before`` or since it began."""

    def __init__(self, row: RankStatus, before: RankStatus | None) -> None:
        self.causes = _less(row.starved_s, before.starved_s if before else {})
        self.streams = _less(row.starved_streams, before.starved_streams if before else {})
        self.waited = sum(self.causes.values())
        self.seconds = self.waited + max(row.trainer_s - (before.trainer_s if before else 0.0), 0.0)

    @property
    def cause(self) -> str:
        """The cause of most of the wait; ``stream NAME`` for a stream."""
        if not self.waited:
            return ""
        cause = max(self.causes, key=self.causes.__getitem__)
        if cause == "stream" and self.streams:
            return f"stream {max(self.streams, key=self.streams.__getitem__)}"
        return cause


def _same_ranks(now: FeedStatus, then: FeedStatus | None) -> Iterable[tuple[RankStatus, RankStatus | None]]:
    """Yield each rank's row, with its earlier row if that is of the same process and the rank has reported since."""
    before = {_process(row): row for row in (then.readers if then else ())}
    for row in now.readers:
        old = before.get(_process(row))
        has_news = old is not None and (row.starved_s, row.trainer_s) != (old.starved_s, old.trainer_s)
        yield row, old if has_news else None


def _process(row: RankStatus) -> tuple[str, int, int, int, int]:
    """Return the name of a rank in its process: one process may be several ranks, in threads."""
    return row.where, row.dp_rank, row.cp_rank, row.tp_rank, row.pp_rank


def _less(now: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    return {key: max(value - before.get(key, 0.0), 0.0) for key, value in now.items()}


def _shares(parts: Iterable[dict[str, float]], whole: float) -> dict[str, float]:
    """Return the sums by key over ``whole``, without those that are 0."""
    sums: dict[str, float] = {}
    for part in parts:
        for key, seconds in part.items():
            sums[key] = sums.get(key, 0.0) + seconds
    return {key: seconds / whole for key, seconds in sums.items() if seconds > 0}


def _ranks(rows: Sequence[RankStatus], changes: Sequence[_Waited]) -> tuple[Rank, ...]:
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


def _streams(now: BrokerStatus, then: BrokerStatus) -> tuple[StreamView, ...]:
    seconds = now.uptime_s - then.uptime_s
    before = {(row.feed, row.stream): row.tokens for row in then.streams if seconds > 0}
    return tuple(
        StreamView(row, max(row.tokens - old, 0) / seconds if old is not None else None)
        for row in now.streams
        for old in (before.get((row.feed, row.stream)),)
    )


def as_tree(view: BrokerView) -> Tree:
    """Return the JSON of ``streampack top --json``."""
    status = view.status
    return {
        "run": status.run, "state": status.state, "stalled_s": status.stalled_s, "version": status.version,
        "uptime_s": status.uptime_s, "taken_at": status.taken_at, "feeds": list(map(_feed_tree, view.feeds)),
        "streams": list(map(_stream_tree, view.streams)), "producers": status.producers,
        "memory_bytes": view.memory_bytes, "memory_limit_bytes": status.memory.arena_bytes,
        "log": msgspec.to_builtins(status.log), "bad_messages": view.bad_messages, "events": list(view.events),
    }  # fmt: skip


def _feed_tree(feed: FeedView) -> Tree:
    now = feed.status
    return {
        "name": feed.name, "state": now.state, "round": now.round, "formed": now.steps.formed,
        "returned": now.steps.returned, "end": now.steps.end, "committed": now.committed,
        "steps_left": msgspec.to_builtins(now.steps_left), "tokens_per_s": now.tokens_per_s, "packs": now.totals.packs,
        "utilization": now.figures.utilization, "packing_efficiency": now.figures.packing_efficiency,
        "waste": feed.waste, "waits_for": now.waiting_for.reason if now.waiting_for else "",
        "waiting_for": now.waiting_for.text if now.waiting_for else "", "starved": feed.starved,
        "starved_streams": feed.starved_streams, "cost_max_over_mean": now.figures.cost_max_over_mean or None,
        "window_samples": now.window.samples, "oldest_steps": now.window.oldest_steps,
        "ranks": list(map(asdict, feed.ranks)), "all_attached": now.all_ranks_attached,
    }  # fmt: skip


def _stream_tree(stream: StreamView) -> Tree:
    row = stream.status
    return {
        "name": row.stream, "feed": row.feed, "weight": row.weight, "tokens": row.tokens,
        "tokens_per_s": stream.tokens_per_s, "buffered": stream.buffered, "lag_tokens": row.lag.tokens,
        "last_seen_s": row.last_seen_s, "producers": row.producers, "hosts": row.hosts, "rejected": stream.rejected,
        "ended": stream.ended,
    }  # fmt: skip
