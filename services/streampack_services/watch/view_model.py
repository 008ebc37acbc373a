"""The view of a broker that ``streampack top`` and ``streampack status`` show: its status and recent rates.

A status counts from the start of the broker, and has the data waits of the last minute. Tokens per second of a stream
are the difference to a status about 10 s earlier, of the same broker. Time is the broker's uptime.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from streampack_services.amounts import count_text, counted, share_text
from streampack_services.broker.causes.headline import by_stream
from streampack_services.broker.ranks.rank_status import name_of
from streampack_services.broker.status import PADDING_LABELS, BrokerStatus, FeedStatus, StreamStatus

Tree = dict[str, Any]
Point = tuple[float, float]
"""(uptime in seconds, tokens since the start)."""

LATELY_S = 10.0
"""Time over which rates of streams are taken, in seconds."""
HISTORY_S = 300.0
"""Time that the chart of tokens/s shows, in seconds."""
SMOOTH_S = 10.0
"""Least time of a point of that chart, in seconds. Over less time, whole steps would make it jump."""
STREAM_SILENT_S = 10.0
"""Time without a message of its producers after which a stream is silent, in seconds."""
EVENTS = 200
"""Last events that are kept."""


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
    """Data wait of the last minute, as a share of the rank's time; None if not known."""
    cause: str
    """Main cause of the data wait; empty without a wait."""
    work_s: float | None
    """Seconds in which its trainer works on a step, mean over the last minute; None if not known."""
    cost: float | None
    """Cost of its last step / mean of all ranks; None before a step."""
    p99_ms: float | None
    """99th percentile of its wait for a step, in milliseconds; None if not known."""
    silent_s: float
    """Seconds since the broker heard it."""
    is_slow: bool
    """True if the others wait for this rank."""


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
    """The status of a feed, with its rates and data waits."""

    name: str
    status: FeedStatus
    rates: tuple[Point, ...]
    """Points for ``rates_of``."""
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
    def starved(self) -> dict[str, float]:
        """Data wait of the last minute by cause, as a share of all ranks' time."""
        return {cause: share for cause, share in self.status.ranks.recent_waits.items() if share}

    @property
    def waits_by_cause(self) -> list[tuple[str, float]]:
        """(cause, data wait as in ``starved``), largest first; ``stream NAME`` instead of ``stream``."""
        return by_stream(self.starved, self.status.ranks.recent_streams)

    def waits_text(self, suffix: str = "") -> str:
        """Return the data wait of the last minute, since the start and by cause; ``suffix`` follows the first share."""
        ranks = self.status.ranks
        lately = f"{share_text(sum(self.starved.values()))}{suffix} in the last {ranks.recent_s:.0f} s"
        by_cause = ", ".join(f"{cause} {share_text(share)}" for cause, share in self.waits_by_cause)
        text = f"{lately}, {share_text(self.waits_since_start)} since the start"
        return f"{text}: {by_cause}" if by_cause else text

    @property
    def waits_since_start(self) -> float:
        """Data wait since the start, as a share of all ranks' time."""
        return sum(self.status.ranks.waits.values())

    @property
    def displacement(self) -> str:
        """Displacement and mean length in the last steps, and mean length of all steps, as text."""
        moved, length = self.status.displacement, self.status.mean_length
        if moved is None or length is None:
            return "-"
        steps = f"p50 {moved.p50}, p99 {counted(moved.p99, 'step')}, {moved.early} early, {moved.late} late"
        return f"{steps}; mean length {count_text(length.recent)}, {count_text(length.total)} in all"

    @property
    def worst(self) -> list[Rank]:
        """The ranks that wait for data, longest wait first."""
        return sorted((rank for rank in self.ranks if rank.waits), key=lambda rank: -(rank.waits or 0.0))

    @property
    def waited_for(self) -> Rank | None:
        """The slow rank for which the others wait; None without one."""
        return next((rank for rank in self.ranks if rank.is_slow), None)


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
        feeds = tuple(
            FeedView(name, feed, tuple(self._rates[name]), _rank_views(feed)) for name, feed in now.feeds.items()
        )
        return BrokerView(now, feeds, _stream_views(now, then), tuple(self._events))


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
        is_known = last > first and times[last] > upto - max(width, SMOOTH_S)
        rates.append((points[last][1] - points[first][1]) / (times[last] - times[first]) if is_known else None)
    return rates


def _rank_views(feed: FeedStatus) -> tuple[Rank, ...]:
    """Return the views of a feed's ranks, named by the axes of the mesh that are in use."""
    rows = [(row.dp_rank, row.cp_rank, row.tp_rank, row.pp_rank) for row in feed.readers]
    in_use = [any(axis) for axis in zip(*rows, strict=True)]
    slow = feed.ranks.slow
    return tuple(
        Rank(
            name=name_of(place, in_use), where=row.where,
            step=row.done_upto, ahead=max(0, row.have_upto - row.done_upto),
            waits=row.data_wait, cause=f"stream {row.stream}" if row.cause == "stream" and row.stream else row.cause,
            cost=sum(row.cost) / len(row.cost) if row.cost else None, work_s=row.work_s,
            p99_ms=row.stats.get("next_p99_ms"), silent_s=row.silent_s,
            is_slow=slow is not None and place == (slow.dp_rank, slow.cp_rank, slow.tp_rank, slow.pp_rank),
        )
        for row, place in zip(feed.readers, rows, strict=True)
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
        "waiting_for": now.waiting_for.text if now.waiting_for else "",
        "headline": msgspec.to_builtins(now.headline), "starved": feed.starved,
        "starved_streams": now.ranks.recent_streams, "starved_since_start": feed.waits_since_start,
        "slow": msgspec.to_builtins(now.ranks.slow), "cost_max_over_mean": now.figures.cost_max_over_mean or None,
        "window_samples": now.window.samples, "oldest_steps": now.window.oldest_steps,
        "displacement": msgspec.to_builtins(now.displacement), "mean_length": msgspec.to_builtins(now.mean_length),
        "ranks": list(map(asdict, feed.ranks)), "all_attached": now.all_ranks_attached,
        "attached": now.ranks.attached, "ranks_left_out": now.ranks.left_out,
        "nodes": msgspec.to_builtins(now.ranks.nodes), "nodes_left_out": now.ranks.nodes_left_out,
        "media": msgspec.to_builtins(now.media), "changes": msgspec.to_builtins(now.changes),
    }  # fmt: skip


def _stream_tree(stream: StreamView) -> Tree:
    """Return a stream as a tree for JSON."""
    row = stream.status
    return {
        "name": row.stream, "feed": row.feed, "weight": row.weight, "share": row.share, "passes": row.passes,
        "recent_share": row.recent_share, "trained_share": row.trained_share, "trained_tokens": row.trained_tokens,
        "trained_samples": row.trained_samples, "tokens": row.tokens, "tokens_per_s": stream.tokens_per_s,
        "buffered": stream.buffered, "lag_tokens": row.lag.tokens, "lag_samples": row.lag.samples,
        "last_seen_s": row.last_seen_s, "producers": row.producers, "hosts": row.hosts, "rejected": stream.rejected,
        "warnings": stream.warnings,
        "ended": stream.ended, "late": msgspec.to_builtins(row.late),
    }  # fmt: skip
