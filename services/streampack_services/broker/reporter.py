"""Take snapshots of a broker (``status``) twice a second, and have long waits logged.

The broker's thread takes the snapshots. All other threads read them: HTTP, metrics, history. A snapshot is frozen
and replaced whole, so readers never see a state between two events and never make the broker wait.
"""

from __future__ import annotations

import heapq
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
from streampack.core.stats.data_wait import NextWaits
from streampack.core.stats.fill import Totals, of_budgets
from streampack.core.stats.media_figures import MEDIA_DROPPED
from streampack.core.stats.padding import CAUSES
from streampack.version import __version__
from streampack_services.broker.arena import Arena
from streampack_services.broker.causes.feed_waits import FeedWaits, waiting_for
from streampack_services.broker.causes.headline import HeadlineFacts, headline_of
from streampack_services.broker.causes.waiting_for import WaitingFor
from streampack_services.broker.changes.change_report import changes_status
from streampack_services.broker.log_keeper import Keeper
from streampack_services.broker.memory_plan import Plan
from streampack_services.broker.ranks.rank_status import NodeStatus, RankPage, RanksStatus
from streampack_services.broker.ranks.rank_table import RankTable
from streampack_services.broker.status import (
    AlignedFigures,
    BrokerStatus,
    DealtPacks,
    DisplacementStatus,
    DynamicBatching,
    FeedFigures,
    FeedRules,
    FeedStatus,
    GroupsStatus,
    Histogram,
    Histograms,
    LateStatus,
    LogStatus,
    LostTokens,
    MeanLength,
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
    WindowStatus,
    WindowWaits,
)
from streampack_services.broker.steps_left import steps_left
from streampack_services.figure import filled

EVERY_S = 0.5
"""Time between two snapshots, in seconds."""
ROW_S = 0.002
"""Longest age of the rows of streams, in seconds per row. A row takes about 10 us, so all rows take half a percent of
the broker's time."""
RATE_OVER_S = 5.0
"""Time over which ``tokens_per_s`` is the mean, in seconds."""
STREAM_SILENT_S = 15.0
"""A stream has no producer if none was heard for this time: by then, a silent one has lost its leases."""
MOST_RELAYS = 64
"""Most relays that a snapshot lists."""


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
        self._waits = FeedWaits(core.feeds)
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
        self._waits.note(now, self._core.draining)
        return self.take(now)

    def take(self, now: float) -> BrokerStatus:
        """Return a snapshot of the broker; ``now``: seconds of the monotonic clock."""
        core, counters = self._core, self._counters
        log, standby = (None, None) if self._keeper is None else (self._keeper.status(), self._keeper.standby_status())
        faults = () if log is None else (("log", _log_fault(log)),)
        if standby is not None and standby.stalled:
            faults = (*faults, ("standby", f"No new steps are served. Cause: {standby.stalled}"))
        streams = {name: self._streams[name].at(now, feed) for name, feed in core.feeds.items()}
        feeds = {
            name: self._feed_status(now, feed, faults, self._silent(now, streams[name]))
            for name, feed in core.feeds.items()
        }
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
            streams=[row for rows in streams.values() for row in rows],
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
            log=log,
            standby=standby,
            messages=filled(MessageCounts, counters, core),
        )

    def _silent(self, now: float, rows: list[StreamStatus]) -> dict[str, float]:
        """Return the streams that have no producer, with the seconds since one was heard or since the broker began."""
        up_s = now - self._counters.started
        silent = {
            row.stream: up_s if row.last_seen_s is None else row.last_seen_s
            for row in rows
            if row.weight and row.credits.granted_tokens and row.ended_partitions < row.partitions
        }
        return {name: seconds for name, seconds in silent.items() if seconds >= STREAM_SILENT_S}

    def _feed_status(
        self, now: float, feed: Feed, faults: tuple[tuple[str, str], ...], silent: dict[str, float]
    ) -> FeedStatus:  # fmt: skip
        """Return the snapshot of one feed.

        Args:
            now: Seconds of the monotonic clock.
            feed: The feed.
            faults: (cause, text) of faults of the log and the standby.
            silent: Seconds since a producer was heard, for each stream that has none.
        """
        steps, former, formed = feed.readers.steps, feed.planner.former, feed.figures
        by_budget = formed.by_budget if steps.dealt.padded is None else steps.dealt.padded_by_budget
        counted = sum(by_budget.values(), Totals())
        reasons = waiting_for(feed)
        stalled_s = self._waits.stalled_s(now, feed, reasons)
        waiting = filled(WaitingFor, reasons) if reasons else None
        table = self._ranks[feed.name]
        table.turn(now)
        figures = table.figures
        moved = feed.planner.displacements.latest
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
            waiting_for=waiting,
            headline=headline_of(
                HeadlineFacts(
                    state="serving" if self._counters.ready else "starting",
                    faults=faults,
                    waiting=waiting,
                    still_s=self._waits.still_s(now, feed),
                    stalled_s=stalled_s,
                    returned=steps.released_upto,
                    end=steps.end.num_steps if steps.end is not None else None,
                    all_attached=steps.all_there,
                    silent=silent,
                    slow=figures.slow,
                    recent_waits=figures.recent_waits,
                    recent_streams=figures.recent_streams,
                    recent_s=figures.recent_s,
                    late=figures.late,
                )
            ),
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
                FeedFigures, of_budgets({budget: stats.moments for budget, stats in by_budget.items()}), steps.dealt
            ),
            padded_figures=filled(
                AlignedFigures, of_budgets({budget: stats.slot_moments for budget, stats in by_budget.items()})
            ),
            waste_tokens=dict(zip(CAUSES, feed.waste.tolist(), strict=True)),
            lost_tokens=_lost_tokens(feed),
            rank_tokens=RankTokens(
                **{when: TokenSpread(**tokens) for when, tokens in steps.dealt.rank_tokens().items()}
            ),
            dealt=filled(DealtPacks, steps.dealt),
            dynamic_batching=None if steps.dealt.padded is None else filled(DynamicBatching, steps.dealt.padded),
            groups=None if steps.dealt.groups is None else filled(GroupsStatus, steps.dealt.groups),
            lengths=formed.lengths.rows(),
            waiting_lengths=feed.planner.waiting_lengths.rows(),
            mean_length=_mean_length(feed),
            displacement=None if moved is None else DisplacementStatus(**moved._asdict()),
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
            changes=changes_status(feed),
            media=None if formed.media is None else MediaStatus(**formed.media.counts(), dropped=_dropped_media(feed)),
        )

    def _stream_rows(self, feed: Feed) -> list[StreamStatus]:
        """Return a row for each stream of a feed."""
        leases, counted = self._core.leases, feed.planner.admission.counts
        recent = _recent_shares(feed)
        rows = []
        for number, (stream, counts, mixed) in enumerate(
            zip(feed.latest_rules.streams, counted, feed.mixture(), strict=False)
        ):
            partitions, seen = leases.partitions, leases.seen(stream.name)
            credits = partitions.granted(stream.name)
            rows.append(
                filled(
                    StreamStatus,
                    counts,
                    seen,
                    mixed,
                    feed=feed.name,
                    recent_share=None if not recent else recent[number] if number < len(recent) else 0.0,
                    partitions=stream.partitions,
                    ended_partitions=sum(partitions.intakes[p].ended for p in partitions.of_stream(stream.name)),
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
        """Return the counts of samples that wait for late fields in a stream; None if the stream has none."""
        staging = self._core.leases.staging
        waits = staging.waiting(self._core.leases.partitions.of_stream(stream))
        return None if waits is None else filled(LateStatus, waits, oldest_s=round(waits.oldest_s, 3))

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
        hosts=heapq.nsmallest(MOST_RELAYS, relays.values(), key=lambda relay: (not relay.lost, -relay.queued_bytes)),
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
        trainer_s=table.trainer_s,
        useful_s=table.useful_s,
        timed_s=table.timed_s,
    )


def _log_fault(log: LogStatus) -> str:
    """Return the fault of the log as text; empty without one."""
    return f"The log has stopped accepting records. Cause: {log.stalled}" if log.stalled else log.warning


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


def _recent_shares(feed: Feed) -> list[float]:
    """Return the share of each stream in the last steps, in the unit of the weights; empty before a step."""
    samples, tokens = feed.history.trained.last_sums
    of_streams = samples if feed.rules.weight_unit == "samples" else tokens
    return [count / int(of_streams.sum()) for count in of_streams.tolist()]


def _mean_length(feed: Feed) -> MeanLength | None:
    """Return the mean tokens of a sample, shared tokens included; None before a step."""
    totals, (samples, tokens) = feed.figures.totals, feed.history.trained.last_sums.sum(axis=1).tolist()
    if not totals.samples or not samples:
        return None
    return MeanLength(recent=tokens / samples, total=(totals.tokens + totals.shared_tokens) / totals.samples)


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
