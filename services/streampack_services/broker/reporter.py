"""What a broker says about itself: a snapshot of plain values, replaced whole twice a second.

Taken by the thread that owns the broker, read by all others (HTTP, metrics): they never see a
state between two events, and never make the broker wait. Keys are part of what ``/status``
promises; the metrics are read from the same snapshot, so that both always agree.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from streampack.core.broker import Broker
from streampack.core.deal.dynamic_batches import PaddedFigures
from streampack.core.feed.feed import Feed
from streampack.core.form.form_stats import FILL_BOUNDS, Spread
from streampack.core.form.former import Former
from streampack.core.stats.data_wait import CAUSES as STARVED_BY
from streampack.core.stats.data_wait import Missing, NextWaits, Starvation
from streampack.core.stats.fill import from_moments
from streampack.core.stats.padding import CAUSES
from streampack.version import __version__
from streampack_services.broker.steps_left import steps_left

if TYPE_CHECKING:
    from streampack_services.broker.service import BrokerService

log = logging.getLogger("streampack.broker")

Snapshot = dict[str, Any]
_WAITS = {"peers": "trainers", "join": "ranks", "stream": "samples", "memory": "room", "forming": "the packer"}
EVERY_S = 0.5
ROW_S = 0.002
"""A rank's or a stream's row costs 10 us: what is said of them is as many times older, so that it is half a percent of
the time each."""
RATE_OVER_S = 5.0
SAY_AFTER_S = 5.0
SAY_BUSY_AFTER_S = 60.0
"""A broker that is full while every rank is attached waits for training, as it should: said late."""
SAY_AT_MOST_EVERY_S = 30.0
SAY_IDLE_EVERY_S = 3600.0
"""The time between two lines about a feed that no rank waits for."""
STALLED_AFTER_S = 5.0
"""A feed that a rank waits for is stalled after this time without a step."""


@dataclass(slots=True)
class _Watch:
    """Since when a feed stands still, and when that was said."""

    steps: int = -1
    since: float = 0.0
    said: float = 0.0
    every: float = SAY_AFTER_S
    starved: bool = False
    """Whether a rank waited for the feed when this was last looked at."""


class Reporter:
    """Takes the snapshots of ``service`` and says in the log what a long wait is for; the broker's thread calls it."""

    def __init__(self, service: BrokerService) -> None:
        self._service = service
        self._taken = 0.0
        self._rates: dict[str, deque[tuple[float, int]]] = {name: deque() for name in service.core.feeds}
        self._watches = {name: _Watch() for name in service.core.feeds}
        self._rows: dict[tuple[str, str], tuple[float, list[Snapshot]]] = {}
        self._fixed: Snapshot = {
            "version": __version__,
            "run": service.config.run,
            "epoch": service.core.epoch,
            "endpoints": service.endpoints,
        }
        self._rules = {
            name: {**msgspec.to_builtins(feed.rules), "digest": feed.rules.digest}
            for name, feed in service.core.feeds.items()
        }

    def tick(self, now: float) -> Snapshot | None:
        """A new snapshot when it is time for one; ``now`` of the monotonic clock."""
        if now - self._taken < EVERY_S:
            return None
        self._taken = now
        self._say(now)
        return self.take(now)

    def take(self, now: float) -> Snapshot:
        """What is so now, as plain values that nobody changes afterwards."""
        service, core, arena = self._service, self._service.core, self._service.arena
        feeds = {name: self._feed(now, feed) for name, feed in core.feeds.items()}
        stalled_s = max((feed["stalled_s"] for feed in feeds.values() if feed["stalled_s"] is not None), default=None)
        return self._fixed | {
            "taken_at": time.time() - (time.monotonic() - now),  # the same moment, though a turn began with it
            "uptime_s": now - service.started,
            "state": self._state(stalled_s),
            "stalled_s": stalled_s,
            "ready": service.ready,
            "feeds": feeds,
            "streams": [row for feed in core.feeds.values() for row in self._streams_of(now, feed)],
            "producers": core.leases.num_producers,
            "vanished_producers": core.leases.vanished,
            "memory": {
                "arena_bytes": service.plan.memory_bytes,
                "token_bytes": service.plan.token_bytes,
                "live_tokens": arena.live_tokens,
                "moved_tokens": arena.moved_tokens,
                "partition_limit_tokens": service.plan.capacity.quota_tokens,
            },
            "log": service.keeper.figures() if service.keeper is not None else None,
            "messages": {
                "damaged": service.damaged,
                "refused": core.refused,
                "unsent": service.unsent,
                "foreign": core.foreign,
                "strangers": service.strangers,
                "cut": service.cut,
            },
            "form_seconds": service.form_seconds,
            "sent_tokens": service.tokens_sent,
        }

    def _feed(self, now: float, feed: Feed) -> Snapshot:
        core = self._service.core
        totals, readers = feed.figures.totals, feed.readers
        counted = readers.steps.dealt.padded_totals if feed.rules.padded else totals
        reasons, stalled_s = waiting_for(feed), self._stalled_s(now, feed)
        return {
            "state": "ended" if readers.steps.end is not None else "serving" if stalled_s is None else "waiting",
            "stalled_s": stalled_s,
            "waiting_for": reasons._asdict() if reasons else None,
            "round": readers.attempts.round,
            "steps": {
                "formed": readers.steps.formed_upto,
                "returned": readers.steps.released_upto,
                "end": readers.steps.end.num_steps if readers.steps.end is not None else None,
            },
            "lineage": feed.history.lineage,
            "recorded_steps": feed.history.num_steps,
            "committed": feed.history.commits[-1] if feed.history.commits else None,
            "steps_left": steps_left(core, feed),
            "totals": asdict(totals) | {"packs": counted.packs, "empty_packs": counted.empty_packs},
            "figures": asdict(from_moments(counted.packs, counted.tokens, counted.square_tokens, feed.rules.budget))
            | {
                "cost_max_over_mean": readers.steps.dealt.cost_max_over_mean,
                "step_cost_max_over_mean": readers.steps.dealt.step_cost_max_over_mean,
            },
            "padded_figures": asdict(
                from_moments(counted.packs, counted.slot_tokens, counted.square_slot_tokens, feed.rules.budget)
            ),
            "waste_tokens": dict(zip(CAUSES, feed.waste.tolist(), strict=True)),
            "delivered_tokens": feed.delivered_tokens,
            "lost_tokens": _lost(feed),
            "rank_tokens": readers.steps.dealt.rank_tokens(),
            "dealt": {"split_packs": readers.steps.dealt.split_packs, "empty_packs": readers.steps.dealt.empty_packs},
            "dynamic_batching": _padding(readers.steps.dealt.padded) if feed.rules.padded else None,
            "lengths": feed.figures.lengths.rows(),
            "fills": list(zip(FILL_BOUNDS, feed.figures.fill.counts.tolist(), strict=False)),
            "histograms": {
                "pack_fill_ratio": _histogram(feed.figures.fill),
                "pack_samples": _histogram(feed.figures.samples),
                "next_wait_seconds": _histogram(readers.steps.next_waits),
            },
            "tokens_per_s": self._rate(now, feed),
            "readers": self._rows_of(now, (feed.name, "readers"), lambda: _readers(feed)),
            "queued_bytes": readers.steps.queued_bytes,
            "queued_limit_bytes": readers.steps.leaving_bytes,
            "resent_bytes": readers.steps.resent_bytes,
            "num_ranks": readers.num_ranks,
            "all_ranks_attached": readers.steps.all_there,
            "window": {
                "samples": feed.planner.former.num_samples,
                "tokens": feed.planner.former.queued_tokens,
                "oldest_steps": feed.planner.former.oldest_age,
            },
            "waits": _waits(feed.planner.former),
            "held_tokens": feed.memory.held_tokens,
            "held_limit_tokens": feed.plan.merged_tokens,
            "rules": self._rules[feed.name],
        }

    def _streams_of(self, now: float, feed: Feed) -> list[Snapshot]:
        return self._rows_of(now, (feed.name, "streams"), lambda: _streams(self._service.core, feed))

    def _rows_of(self, now: float, what: tuple[str, str], make: Callable[[], list[Snapshot]]) -> list[Snapshot]:
        """A row a rank, or a stream, of a feed; those of thousands are some seconds old at times."""
        taken, rows = self._rows.get(what, (-math.inf, []))
        if now - taken >= len(rows) * ROW_S:
            taken, rows = self._rows[what] = now, make()
        return rows

    def _stalled_s(self, now: float, feed: Feed) -> float | None:
        """The seconds since the last step of a feed that a rank waits for; None if no rank waits for data."""
        still_s, reasons = now - self._watches[feed.name].since, waiting_for(feed)
        if still_s < STALLED_AFTER_S or feed.readers.steps.end is not None or reasons is None:
            return None
        return still_s if reasons.reason not in ("peers", "memory") and feed.readers.steps.any_starved else None

    def _state(self, stalled_s: float | None) -> str:
        core = self._service.core
        if core.draining:
            return "draining"
        if not self._service.ready:
            return "starting"
        if all(feed.readers.steps.end is not None for feed in core.feeds.values()):
            return "ended"
        return "serving" if stalled_s is None else "waiting"

    def _rate(self, now: float, feed: Feed) -> float:
        """Packed tokens a second, over the last seconds."""
        rates, tokens = self._rates[feed.name], feed.figures.totals.tokens
        rates.append((now, tokens))
        while len(rates) > 2 and now - rates[0][0] > RATE_OVER_S:
            rates.popleft()
        (then, before), seconds = rates[0], now - rates[0][0]
        return (tokens - before) / seconds if seconds > 0 and then < now else 0.0

    def _say(self, now: float) -> None:
        """Log a feed that has formed no step for some seconds: again and again if a rank waits for it, else hourly."""
        core = self._service.core
        for name, feed in core.feeds.items():
            moved = feed.figures.totals.steps + feed.readers.steps.released_upto
            if moved != self._watches[name].steps or core.draining:
                self._watches[name] = _Watch(moved, now, now)
        all_still = now - max(watch.since for watch in self._watches.values())
        for name, feed in core.feeds.items():
            self._say_of(now, feed, self._watches[name], all_still)

    def _say_of(self, now: float, feed: Feed, watch: _Watch, all_still_s: float) -> None:
        reasons = waiting_for(feed)
        if now - watch.since < SAY_AFTER_S:
            return
        if (starved := feed.readers.steps.any_starved) != watch.starved:
            watch.starved, watch.every = starved, SAY_AFTER_S
        if reasons is None or now - watch.said < watch.every:
            return
        ready_s = all_still_s if reasons[0] in ("peers", "memory") else SAY_BUSY_AFTER_S
        if ready_s < (
            SAY_BUSY_AFTER_S if feed.readers.steps.all_there else SAY_AFTER_S
        ):  # as it should while another is read
            return
        watch.said = now
        watch.every = min(2 * watch.every, SAY_AT_MOST_EVERY_S) if starved else SAY_IDLE_EVERY_S
        of = f"feed {feed.name!r}: " if len(self._watches) > 1 else ""
        about = {"about": {"feed": feed.name, "step": feed.readers.steps.formed_upto}}
        wanted = feed.readers.steps.all_there and reasons[0] in ("stream", "memory", "log") and not reasons.batch
        level = logging.WARNING if wanted else logging.INFO
        log.log(level, "%sno step for %.0f s: %s", of, now - watch.since, describe(*reasons), extra=about)


def waiting_for(feed: Feed) -> Missing | None:
    """What keeps a feed's next step from being formed or read; None at the end, while draining."""
    readers = feed.readers
    if readers.steps.draining:
        return None
    if readers.num_readers and not readers.steps.joined:
        return Missing("join", readers.absent or f"all {readers.num_ranks} ranks are there, and some are not ready")
    if readers.steps.end is not None:
        left = readers.steps.end.num_steps - readers.steps.released_upto
        return Missing("peers", f"{left} last steps are not returned: {readers.steps.slowest}") if left else None
    return feed.waiting_for()


def describe(reason: str, detail: str, stream: str | None = None, batch: bool = False) -> str:
    """``waiting for trainers: no rank is attached``."""
    if reason == "failed":
        return detail
    if batch:
        return f"waiting for {detail}"
    return f"waiting for {_WAITS.get(reason, reason)}: {detail}"


def _lost(feed: Feed) -> dict[str, int]:
    """Tokens that came and are in no step that is trained, by what took them: the over-long policies, a policy that was
    too old, ``tail: drop`` and skipped steps."""
    lost, counted = {"truncate": 0, "drop": 0}, feed.planner.admission.counts
    for stream, counts in zip(feed.latest_rules.streams, counted, strict=False):
        if stream.overlong in lost:
            lost[stream.overlong] += counts.lost_tokens
    return {
        "truncated": lost["truncate"],
        "dropped": lost["drop"],
        "policy_lag": sum(counts.stale_tokens for counts in counted),
        "tail": feed.figures.totals.dropped_tokens,
        "skipped": feed.readers.steps.dealt.skipped_tokens,
    }


def _padding(figures: PaddedFigures) -> dict[str, float]:
    """ROLL's figures of padded micro-batches: real tokens, those of batches as wide as their longest sample, and those
    that are computed."""
    return asdict(figures) | {
        "removed_padding_tokens": figures.removed_padding_tokens,
        "removed_padding_ratio": figures.removed_padding_ratio,
    }


def _histogram(spread: Spread | NextWaits) -> Snapshot:
    """``counts[i]`` values are at most ``bounds[i]`` and above the bound before, the last above all of them."""
    return {"bounds": spread.bounds, "counts": list(map(int, spread.counts)), "sum": spread.sum}


def _waits(former: Former) -> dict[str, int | None]:
    """Steps that samples have waited in the window, 99 of 100 and all, since this broker began, and that none waits
    beyond; and how many of those in it wait for others as long."""
    return {
        "p99_steps": former.waits.p99,
        "longest_steps": former.longest_wait,
        "bound_steps": former.waits.bound,
        "outliers": former.num_outliers,
    }


def _readers(feed: Feed) -> list[Snapshot]:
    """A row a rank; of the figures that a client sends, those that are numbers: JSON has no others."""
    rows: list[Snapshot] = []
    streams, costs = {stream.name for stream in feed.latest_rules.streams}, feed.readers.steps.dealt.costs_by_rank()
    for row in feed.readers.steps.stats():
        stats, dp_rank = row["stats"], row["dp_rank"]
        assert isinstance(stats, dict)
        assert isinstance(dp_rank, int)
        row["stats"] = {key: value for key, value in stats.items() if math.isfinite(value)}
        row["cost"] = costs[dp_rank] if dp_rank < len(costs) else []
        rows.append(row | _starved(row.pop("starvation"), streams))
    return rows


def _starved(said: Any, streams: set[str]) -> Snapshot:
    """Why a rank has waited, in seconds since it began: of causes and streams that there are, whatever it says."""
    said = said if isinstance(said, Starvation) else Starvation()
    return {
        "starved_s": {cause: said.causes_s.get(cause, 0.0) for cause in STARVED_BY},
        "starved_streams": {name: seconds for name, seconds in said.streams_s.items() if name in streams},
        "trainer_s": said.trainer_s,
        "step_s": said.step_s,
    }


def _streams(core: Broker, feed: Feed) -> list[Snapshot]:
    rows = []
    books = core.leases.books
    for stream, counts in zip(feed.latest_rules.streams, feed.planner.admission.counts, strict=False):
        ended = sum(books.intakes[p].ended for p in books.partitions(stream.name))
        seen, credits = core.leases.seen(stream.name), core.leases.books.credits_of(stream.name)
        rows.append(
            {
                "stream": stream.name,
                "feed": feed.name,
                "weight": stream.weight,
                "partitions": stream.partitions,
                "ended_partitions": ended,
                "samples": counts.samples,
                "tokens": counts.tokens,
                "overlong": counts.overlong,
                "lost_tokens": counts.lost_tokens,
                "rejected": dict(counts.rejected),
                "producers": seen.producers,
                "hosts": seen.hosts,
                "last_seen_s": seen.last_s,
                "credits": {"granted_tokens": credits.granted_tokens, "used_tokens": credits.used_tokens},
                "lag": {
                    "samples": credits.missing_samples,
                    "tokens": credits.granted_tokens - credits.used_tokens,
                },
            }
        )
    return rows
