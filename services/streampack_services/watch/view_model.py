"""What ``streampack top`` shows, as plain values: out of a broker's snapshots and events, as they come.

A snapshot counts from the start; what is so *lately* is the difference to an earlier one, of the same broker and the
same process of a rank, and from the start where there is none. Knows nothing of terminals, addresses or clocks: time is
the broker's uptime.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from streampack_services.broker.status import BrokerStatus, FeedStatus, LogStatus, RankStatus, StepsLeft

Tree = dict[str, Any]
Point = tuple[float, float]
"""(uptime, tokens since the start)."""

LATELY_S = 10.0
HISTORY_S = 300.0
"""What the line of tokens/s shows."""
SMOOTH_S = 10.0
"""Steps come at once: tokens/s of less time than one takes would jump."""
EVENTS = 200
DIMENSIONS = ("dp", "cp", "tp", "pp")


@dataclass(frozen=True, slots=True)
class Rank:
    """A rank: the share of its time lately that it waited for a step (None: not known) and what for, mostly; its cost
    of the last step over the mean of all."""

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
class Stream:
    """A stream: ``buffered``, the share of the tokens that may wait for the merge which do; ``lag_tokens``, those that
    might and have not come; ``last_seen_s``, since a producer of it was heard."""

    name: str
    feed: str
    weight: float
    tokens: int
    tokens_per_s: float | None
    buffered: float
    lag_tokens: int
    last_seen_s: float | None
    producers: int
    hosts: tuple[str, ...]
    rejected: int
    ended: bool


@dataclass(frozen=True, slots=True)
class Feed:
    """A feed: ``waste`` by cause, of what was delivered; ``starved`` by cause, of all ranks' time lately."""

    name: str
    state: str
    round: int
    formed: int
    returned: int
    end: int | None
    committed: int | None
    steps_left: StepsLeft | None
    tokens_per_s: float
    rates: tuple[Point, ...]
    """As far as known, for ``rates_of``."""
    packs: int
    utilisation: float
    packing_efficiency: float
    waste: dict[str, float]
    waits_for: str
    """One of the causes, or none."""
    waiting_for: str
    starved: dict[str, float]
    starved_streams: dict[str, float]
    cost_max_over_mean: float | None
    window_samples: int
    oldest_steps: int | None
    ranks: tuple[Rank, ...]
    all_attached: bool

    @property
    def worst(self) -> list[Rank]:
        """The ranks that wait, the one that waits most first."""
        return sorted((rank for rank in self.ranks if rank.waits), key=lambda rank: -(rank.waits or 0.0))

    @property
    def waited_for(self) -> Rank | None:
        """The rank that waits least, where others wait for it more than for anything else."""
        if max(self.starved, key=self.starved.__getitem__, default="") != "peers" or self.starved["peers"] < 0.01:
            return None
        known = [rank for rank in self.ranks if rank.waits is not None]
        return min(known, key=lambda rank: rank.waits or 0.0) if len(known) > 1 else None


@dataclass(frozen=True, slots=True)
class View:
    """A broker."""

    run: str
    state: str
    stalled_s: float | None
    version: str
    uptime_s: float
    taken_at: float
    feeds: tuple[Feed, ...]
    streams: tuple[Stream, ...]
    producers: int
    memory_bytes: int
    memory_limit_bytes: int
    log: LogStatus | None
    bad_messages: int
    events: tuple[Tree, ...]


class Watch:
    """Takes what a broker says, and makes a view of it."""

    def __init__(self) -> None:
        self._seen: deque[BrokerStatus] = deque()
        self._rates: dict[str, deque[Point]] = {}
        self._events: deque[Tree] = deque(maxlen=EVENTS)

    def knows(self, epoch: int) -> bool:
        """Whether the last snapshot was of the broker of this epoch."""
        return bool(self._seen) and bool(self._seen[-1].epoch == epoch)

    def last_seq(self, epoch: int) -> int:
        """Of the events that are known of the broker of this epoch."""
        return int(self._events[-1]["seq"]) if self.knows(epoch) and self._events else 0

    def add(
        self, status: BrokerStatus, events: Iterable[Tree] = (), history: Mapping[str, Iterable[Point]] = {}
    ) -> None:
        """Add a later snapshot, the events since the last one, and earlier points by feed; forget another broker's."""
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

    def view(self) -> View:
        """Return the view of the last snapshot; there must be one."""
        now, then = self._seen[-1], self._seen[0]
        return View(
            run=now.run, state=now.state, stalled_s=now.stalled_s, version=now.version, uptime_s=now.uptime_s,
            taken_at=now.taken_at,
            feeds=tuple(
                _feed(name, feed, then.feeds.get(name), tuple(self._rates[name])) for name, feed in now.feeds.items()
            ),
            streams=_streams(now, then),
            producers=now.producers, memory_bytes=now.memory.live_tokens * now.memory.token_bytes,
            memory_limit_bytes=now.memory.arena_bytes, log=now.log,
            bad_messages=sum(msgspec.structs.astuple(now.messages)), events=tuple(self._events),
        )  # fmt: skip


def rates_of(points: Sequence[Point], columns: int) -> list[float | None]:
    """Tokens a second in each of ``columns`` equal parts of the last ``HISTORY_S``, None where nothing is known.

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


def _feed(name: str, now: FeedStatus, then: FeedStatus | None, rates: tuple[Point, ...]) -> Feed:
    delivered = max(now.delivered_tokens, 1)
    changes = [_Waited(row, before) for row, before in _same_ranks(now, then)]
    whole = sum(each.seconds for each in changes)
    return Feed(
        name=name, state=now.state, round=now.round, formed=now.steps.formed, returned=now.steps.returned,
        end=now.steps.end, committed=now.committed, steps_left=now.steps_left,
        tokens_per_s=now.tokens_per_s, rates=rates, packs=now.totals.packs,
        utilisation=now.figures.utilisation, packing_efficiency=now.figures.packing_efficiency,
        waste={cause: tokens / delivered for cause, tokens in now.waste_tokens.items()},
        waits_for=now.waiting_for.reason if now.waiting_for else "",
        waiting_for=now.waiting_for.text if now.waiting_for else "",
        starved=_shares((each.causes for each in changes), whole),
        starved_streams=_shares((each.streams for each in changes), whole),
        cost_max_over_mean=now.figures.cost_max_over_mean or None, window_samples=now.window.samples,
        oldest_steps=now.window.oldest_steps,
        ranks=_ranks(now.readers, changes), all_attached=now.all_ranks_attached,
    )  # fmt: skip


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


def _streams(now: BrokerStatus, then: BrokerStatus) -> tuple[Stream, ...]:
    seconds = now.uptime_s - then.uptime_s
    before = {(row.feed, row.stream): row.tokens for row in then.streams}
    return tuple(
        Stream(
            name=row.stream, feed=row.feed, weight=row.weight, tokens=row.tokens,
            tokens_per_s=max(row.tokens - before[row.feed, row.stream], 0) / seconds
            if seconds > 0 and (row.feed, row.stream) in before else None,
            buffered=row.credits.used_tokens / max(row.credits.granted_tokens, 1),
            lag_tokens=row.lag.tokens, last_seen_s=row.last_seen_s, producers=row.producers,
            hosts=tuple(row.hosts), rejected=sum(row.rejected.values()),
            ended=row.ended_partitions == row.partitions,
        )
        for row in now.streams
    )  # fmt: skip
