"""Take snapshots of a broker (``status``) twice a second, and log the cause of long waits.

The broker's thread takes the snapshots. All other threads read them: HTTP, metrics, history. A snapshot is frozen
and replaced whole, so readers never see a state between two events and never make the broker wait.
"""

from __future__ import annotations

import heapq
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from streampack.core.broker import Broker
from streampack.core.feed.feed import Feed
from streampack.core.form.form_stats import FILL_BOUNDS, ValueCounts
from streampack.core.model.rules import Rules
from streampack.core.stats.data_wait import Missing, NextWaits
from streampack.core.stats.fill import from_moments
from streampack.core.stats.media_figures import MEDIA_DROPPED
from streampack.core.stats.padding import CAUSES
from streampack.version import __version__
from streampack_services.broker.arena import Arena
from streampack_services.broker.log_keeper import Keeper
from streampack_services.broker.memory_plan import Plan
from streampack_services.broker.ranks.rank_status import NodeStatus, RankPage, RanksStatus
from streampack_services.broker.ranks.rank_table import RankTable
from streampack_services.broker.status import (
    AlignedFigures,
    BrokerStatus,
    DealtPacks,
    DynamicBatching,
    FeedFigures,
    FeedRules,
    FeedStatus,
    Histogram,
    Histograms,
    LateStatus,
    LostTokens,
    MediaStatus,
    MemoryStatus,
    MessageCounts,
    PackTotals,
    RankTokens,
    RelaysStatus,
    RelayStatus,
    State,
    StepCounts,
    StreamCredits,
    StreamLag,
    StreamStatus,
    TokenSpread,
    WaitingFor,
    WindowStatus,
    WindowWaits,
)
from streampack_services.broker.steps_left import steps_left
from streampack_services.figure import filled

log = logging.getLogger("streampack.broker")

EVERY_S = 0.5
"""Time between two snapshots, in seconds."""
ROW_S = 0.002
"""Longest age of the rows of streams, in seconds per row. A row takes about 10 us, so all rows take half a percent of
the broker's time."""
RATE_OVER_S = 5.0
"""Time over which ``tokens_per_s`` is the mean, in seconds."""
MOST_RELAYS = 64
"""Most relays that a snapshot lists."""
LOG_AFTER_S = 5.0
"""A wait for a step is logged after this time, in seconds."""
LOG_BUSY_AFTER_S = 60.0
"""A wait for training, which is normal while every rank is attached, is logged after this time, in seconds."""
LOG_AT_MOST_EVERY_S = 30.0
"""Longest time between two lines about the same wait, in seconds."""
LOG_IDLE_EVERY_S = 3600.0
"""Time between two lines about a feed that no rank waits for, in seconds."""
STALLED_AFTER_S = 5.0
"""A feed that a rank waits for is stalled after this time without a step."""


@dataclass(slots=True)
class Counters:
    """Counters of the service. The service writes them and the reporter reads them, in the broker's thread.

    Fields without a description are figures of ``BrokerStatus`` and ``MessageCounts``.
    """

    started: float
    """When the broker began, by the monotonic clock."""
    ready: bool = False
    stopping: bool = False
    """True once the broker was asked to stop."""
    damaged: int = 0
    unsent: int = 0
    cut: int = 0
    strangers: int = 0
    form_seconds: float = 0.0
    sent_tokens: int = 0


@dataclass(slots=True)
class _Watch:
    """Times of a feed's last progress and last log line, in seconds of the monotonic clock."""

    steps: int = -1
    """Steps formed and returned, at the last progress."""
    since: float = 0.0
    """Time of the last progress."""
    logged: float = 0.0
    """Time of the last log line."""
    every: float = LOG_AFTER_S
    """Seconds until the next log line."""
    starved: bool = False
    """True if a rank waited for the feed at the last look."""


class Reporter:
    """Takes snapshots and logs long waits; the broker's thread calls it."""

    def __init__(
        self, run: str, endpoints: dict[str, str], core: Broker, plan: Plan, arena: Arena, keeper: Keeper | None,
        counters: Counters,
    ) -> None:  # fmt: skip
        self._run, self._endpoints, self._core = run, endpoints, core
        self._plan, self._arena, self._keeper, self._counters = plan, arena, keeper, counters
        self._taken = 0.0
        self._rates: dict[str, deque[tuple[float, int]]] = {name: deque() for name in core.feeds}
        self._watches = {name: _Watch() for name in core.feeds}
        self._ranks = {name: RankTable(feed) for name, feed in core.feeds.items()}
        self._streams = {name: _StreamRows(self._stream_rows) for name in core.feeds}
        self._rules = {name: _feed_rules(feed.rules) for name, feed in core.feeds.items()}

    def rank_page(self, feed: str, node: str | None, first: int) -> RankPage | None:
        """Return some ranks of a feed, as of the last pass over its ranks. Any thread may call this.

        Args:
            feed: Name of the feed, which must exist.
            node: Host whose ranks are listed; None for all ranks.
            first: Number of ranks to leave out before the first that is listed.

        Returns:
            At most ``PAGE_RANKS`` ranks in their order; None if no rank was on the node.
        """
        return self._ranks[feed].figures.page(feed, node, first)

    def tick(self, now: float) -> BrokerStatus | None:
        """Return a new snapshot if one is due, else None; ``now``: seconds of the monotonic clock."""
        if now - self._taken < EVERY_S:
            return None
        self._taken = now
        self._log_waits(now)
        return self.take(now)

    def take(self, now: float) -> BrokerStatus:
        """Return a snapshot of the broker; ``now``: seconds of the monotonic clock."""
        core, counters = self._core, self._counters
        feeds = {name: self._feed_status(now, feed) for name, feed in core.feeds.items()}
        stalled_s = max((feed.stalled_s for feed in feeds.values() if feed.stalled_s is not None), default=None)
        return filled(
            BrokerStatus,
            counters,
            version=__version__,
            run=self._run,
            epoch=core.epoch,
            endpoints=self._endpoints,
            taken_at=time.time() - (time.monotonic() - now),  # the moment ``now``, though a turn began with it
            uptime_s=now - counters.started,
            state=self._state(stalled_s),
            stalled_s=stalled_s,
            feeds=feeds,
            streams=[row for name, feed in core.feeds.items() for row in self._streams[name].at(now, feed)],
            producers=core.leases.num_producers,
            vanished_producers=core.leases.rebalancer.vanished,
            relays=_relays_status(core.feeds.values()),
            memory=filled(
                MemoryStatus,
                self._arena,
                self._plan,
                arena_bytes=self._plan.memory_bytes,
                partition_limit_tokens=self._plan.capacity.quota_tokens,
            ),
            log=self._keeper.status() if self._keeper is not None else None,
            standby=self._keeper.standby_status() if self._keeper is not None else None,
            messages=filled(MessageCounts, counters, core),
        )

    def _feed_status(self, now: float, feed: Feed) -> FeedStatus:
        """Return the snapshot of one feed; ``now``: seconds of the monotonic clock."""
        steps, former, formed = feed.readers.steps, feed.planner.former, feed.figures
        budget = feed.rules.budget
        counted = formed.totals if steps.dealt.padded is None else steps.dealt.padded_totals
        reasons = waiting_for(feed)
        stalled_s = self._stalled_s(now, feed, reasons)
        table = self._ranks[feed.name]
        table.turn(now)
        figures = table.figures
        return filled(
            FeedStatus,
            feed,
            feed.readers,
            feed.readers.attempts,
            feed.history,
            feed.memory,
            feed.readers.receivers.flows,
            state="ended" if steps.end is not None else "serving" if stalled_s is None else "waiting",
            stalled_s=stalled_s,
            waiting_for=filled(WaitingFor, reasons) if reasons else None,
            round=feed.readers.attempts.iteration,
            steps=StepCounts(
                formed=steps.formed_upto,
                returned=steps.released_upto,
                end=steps.end.num_steps if steps.end is not None else None,
            ),
            recorded_steps=feed.history.num_steps,
            committed=feed.history.commits[-1] if feed.history.commits else None,
            steps_left=steps_left(self._core, feed),
            totals=filled(PackTotals, formed.totals, packs=counted.packs, empty_packs=counted.empty_packs),
            figures=filled(
                FeedFigures, from_moments(counted.packs, counted.tokens, counted.square_tokens, budget), steps.dealt
            ),
            padded_figures=filled(
                AlignedFigures, from_moments(counted.packs, counted.slot_tokens, counted.square_slot_tokens, budget)
            ),
            waste_tokens=dict(zip(CAUSES, feed.waste.tolist(), strict=True)),
            lost_tokens=_lost_tokens(feed),
            rank_tokens=RankTokens(
                **{when: TokenSpread(**tokens) for when, tokens in steps.dealt.rank_tokens().items()}
            ),
            dealt=filled(DealtPacks, steps.dealt),
            dynamic_batching=None if steps.dealt.padded is None else filled(DynamicBatching, steps.dealt.padded),
            lengths=formed.lengths.rows(),
            waiting_lengths=feed.planner.waiting_lengths.rows(),
            fills=list(zip(FILL_BOUNDS, formed.fill.counts.tolist(), strict=False)),
            histograms=Histograms(
                pack_fill_ratio=_histogram(formed.fill),
                pack_samples=_histogram(formed.samples),
                next_wait_seconds=_histogram(steps.next_waits),
            ),
            tokens_per_s=self._tokens_per_s(now, feed),
            readers=figures.readers,
            ranks=_ranks_status(now, feed, table),
            queued_limit_bytes=feed.readers.receivers.flows.leaving_bytes,
            all_ranks_attached=steps.all_there,
            window=filled(
                WindowStatus,
                former,
                samples=former.num_samples,
                tokens=former.queued_tokens,
                oldest_steps=former.oldest_age,
            ),
            waits=filled(
                WindowWaits,
                former,
                p99_steps=former.waits.p99,
                longest_steps=former.longest_wait,
                bound_steps=former.waits.bound,
                outliers=former.num_outliers,
            ),
            held_limit_tokens=feed.plan.merged_tokens,
            rules=self._rules[feed.name],
            media=None if formed.media is None else MediaStatus(**formed.media.counts(), dropped=_dropped_media(feed)),
        )

    def _stream_rows(self, feed: Feed) -> list[StreamStatus]:
        """Return a row for each stream of a feed."""
        leases, counted = self._core.leases, feed.planner.admission.counts
        rows = []
        for stream, counts, mixed in zip(feed.latest_rules.streams, counted, feed.mixture(), strict=False):
            every, seen = leases.partitions, leases.seen(stream.name)
            credits = every.granted(stream.name)
            rows.append(
                filled(
                    StreamStatus,
                    counts,
                    seen,
                    mixed,
                    feed=feed.name,
                    partitions=stream.partitions,
                    ended_partitions=sum(every.intakes[p].ended for p in every.of_stream(stream.name)),
                    rejected=mixed.rejected,
                    warnings=dict(counts.warnings),
                    last_seen_s=seen.last_s,
                    credits=filled(StreamCredits, credits),
                    lag=StreamLag(samples=credits.missing_samples, tokens=credits.granted_tokens - credits.used_tokens),
                    late=self._late(stream.name),
                )
            )
        return rows

    def _late(self, stream: str) -> LateStatus | None:
        """Return what waits for late fields in a stream; None if the stream has none."""
        staging = self._core.leases.staging
        waits = staging.waiting(self._core.leases.partitions.of_stream(stream))
        return None if waits is None else filled(LateStatus, waits, oldest_s=round(waits.oldest_s, 3))

    def _stalled_s(self, now: float, feed: Feed, reasons: Missing | None) -> float | None:
        """Return the seconds since the feed's last step; None if no rank waits for data, for these ``reasons``."""
        still_s = now - self._watches[feed.name].since
        if still_s < STALLED_AFTER_S or feed.readers.steps.end is not None or reasons is None:
            return None
        return still_s if reasons.reason not in ("peers", "memory") and feed.readers.steps.any_starved else None

    def _state(self, stalled_s: float | None) -> State:
        """Return the broker's state; ``stalled_s``: the longest stall of a feed in seconds, None if no feed stalls."""
        core = self._core
        if core.draining or self._counters.stopping:
            return "draining"
        if not self._counters.ready:
            return "starting"
        if all(feed.readers.steps.end is not None for feed in core.feeds.values()):
            return "ended"
        return "serving" if stalled_s is None else "waiting"

    def _tokens_per_s(self, now: float, feed: Feed) -> float:
        """Return the tokens formed per second over the last seconds."""
        rates, tokens = self._rates[feed.name], feed.figures.totals.tokens
        rates.append((now, tokens))
        while len(rates) > 2 and now - rates[0][0] > RATE_OVER_S:
            rates.popleft()
        (then, before), seconds = rates[0], now - rates[0][0]
        return (tokens - before) / seconds if seconds > 0 and then < now else 0.0

    def _log_waits(self, now: float) -> None:
        """Log the feeds that make no progress: at least every 30 s while a rank waits for data, else hourly."""
        core = self._core
        for name, feed in core.feeds.items():
            moved = feed.figures.totals.steps + feed.readers.steps.released_upto
            if moved != self._watches[name].steps or core.draining:
                self._watches[name] = _Watch(moved, now, now)
        all_still = now - max(watch.since for watch in self._watches.values())
        for name, feed in core.feeds.items():
            self._log_wait(now, feed, self._watches[name], all_still)

    def _log_wait(self, now: float, feed: Feed, watch: _Watch, all_still_s: float) -> None:
        """Log the wait of one feed if a log line is due; ``all_still_s``: seconds since any feed made progress."""
        reasons = waiting_for(feed)
        if now - watch.since < LOG_AFTER_S:
            return
        if (starved := feed.readers.steps.any_starved) != watch.starved:
            watch.starved, watch.every = starved, LOG_AFTER_S
        if reasons is None or now - watch.logged < watch.every:
            return
        ready_s = all_still_s if reasons[0] in ("peers", "memory") else LOG_BUSY_AFTER_S
        if ready_s < (LOG_BUSY_AFTER_S if feed.readers.steps.all_there else LOG_AFTER_S):
            return  # normal: trainers read another feed
        watch.logged = now
        watch.every = min(2 * watch.every, LOG_AT_MOST_EVERY_S) if starved else LOG_IDLE_EVERY_S
        of = f"feed {feed.name!r}: " if len(self._watches) > 1 else ""
        about = {"about": {"feed": feed.name, "step": feed.readers.steps.formed_upto}}
        wanted = feed.readers.steps.all_there and reasons[0] in ("stream", "memory", "log") and not reasons.batch
        level = logging.WARNING if wanted else logging.INFO
        log.log(level, "%sno step for %.0f s: %s", of, now - watch.since, filled(WaitingFor, reasons).text, extra=about)


def waiting_for(feed: Feed) -> Missing | None:
    """Return the reason why the feed's next step is not formed or read; None at the end and while the feed drains."""
    readers = feed.readers
    if readers.steps.draining:
        return None
    if readers.num_readers and not readers.steps.joined:
        return Missing("join", readers.absent or f"all {readers.num_ranks} ranks are connected, but some are not ready")
    if readers.steps.end is not None:
        left = readers.steps.end.num_steps - readers.steps.released_upto
        return Missing("peers", f"{left} last steps are not returned: {readers.steps.slowest}") if left else None
    return feed.waiting_for()


class _StreamRows:
    """A cache of one feed's streams, which expires after ``ROW_S`` seconds for each stream."""

    def __init__(self, take: Callable[[Feed], list[StreamStatus]]) -> None:
        self._take = take
        self._taken = -math.inf
        self._rows: list[StreamStatus] = []

    def at(self, now: float, feed: Feed) -> list[StreamStatus]:
        """Return the cached rows, or new rows if the cache has expired at ``now`` (monotonic clock, seconds)."""
        if now - self._taken >= len(self._rows) * ROW_S:
            self._taken, self._rows = now, self._take(feed)
        return self._rows


def _relays_status(feeds: Iterable[Feed]) -> RelaysStatus:
    """Return what a snapshot says of the relays; a relay reads several feeds at once."""
    relays: dict[str, RelayStatus] = {}
    for feed in feeds:
        for row in feed.readers.receivers.relay_stats():
            other = relays.get(row.host)
            relays[row.host] = RelayStatus(
                host=row.host,
                lost=row.lost and (other is None or other.lost),
                ranks=row.ranks + (0 if other is None else other.ranks),
                queued_bytes=row.queued_bytes + (0 if other is None else other.queued_bytes),
            )
    lost = sum(relay.lost for relay in relays.values())
    return RelaysStatus(
        connected=len(relays) - lost,
        lost=lost,
        ranks=sum(relay.ranks for relay in relays.values()),
        hosts=heapq.nsmallest(MOST_RELAYS, relays.values(), key=lambda each: (not each.lost, -each.queued_bytes)),
    )


def _with_relays(nodes: list[NodeStatus], feed: Feed) -> list[NodeStatus]:
    """Return nodes with the state of their relays."""
    lost = {row.host: row.lost for row in feed.readers.receivers.relay_stats()}
    return [
        msgspec.structs.replace(node, relay="lost" if lost[node.host] else "connected") if node.host in lost else node
        for node in nodes
    ]


def _ranks_status(now: float, feed: Feed, table: RankTable) -> RanksStatus:
    """Return what a snapshot says of all ranks; ``now``: seconds of the monotonic clock."""
    figures = table.figures
    return filled(
        RanksStatus,
        figures,
        attached=len(feed.readers.registry.held),
        left_out=figures.attached - len(figures.readers),
        nodes=_with_relays(figures.nodes, feed),
        nodes_left_out=figures.num_nodes - len(figures.nodes),
        age_s=max(now - figures.began, 0.0) if figures.attached else 0.0,
        starved_s=table.waited_s,
    )


def _feed_rules(rules: Rules) -> FeedRules:
    return FeedRules(**{name: getattr(rules, name) for name in rules.__struct_fields__}, digest=rules.digest)


def _lost_tokens(feed: Feed) -> LostTokens:
    lost, counted = {"truncate": 0, "drop": 0}, feed.planner.admission.counts
    for stream, counts in zip(feed.latest_rules.streams, counted, strict=False):
        if stream.overlong in lost:
            lost[stream.overlong] += counts.lost_tokens
    return LostTokens(
        truncated=lost["truncate"],
        dropped=lost["drop"],
        policy_lag=sum(counts.stale_tokens for counts in counted),
        tail=feed.figures.totals.dropped_tokens,
        skipped=feed.readers.steps.dealt.skipped_tokens,
    )


def _dropped_media(feed: Feed) -> dict[str, int]:
    """Return the number of media items that the clients of the attached ranks have dropped, by reason."""
    dropped: dict[str, int] = {}
    for reader in feed.readers.registry.held.values():
        for name, count in reader.stats.items():
            if name.startswith(MEDIA_DROPPED) and count > 0 and math.isfinite(count):
                reason = name.removeprefix(MEDIA_DROPPED)
                dropped[reason] = dropped.get(reason, 0) + int(count)
    return dict(sorted(dropped.items()))


def _histogram(spread: ValueCounts | NextWaits) -> Histogram:
    return Histogram(bounds=list(spread.bounds), counts=list(map(int, spread.counts)), sum=spread.sum)
