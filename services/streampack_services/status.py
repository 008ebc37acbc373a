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
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import msgspec

import streampack
from streampack.core.broker import Broker
from streampack.core.figures import from_moments

if TYPE_CHECKING:
    from streampack_services.broker import BrokerService

log = logging.getLogger("streampack.broker")

Snapshot = dict[str, Any]
_WAITS = {"peers": "trainers", "join": "ranks", "stream": "samples", "memory": "room", "forming": "the packer"}
EVERY_S = 0.5
RATE_OVER_S = 5.0
SAY_AFTER_S = 5.0
SAY_BUSY_AFTER_S = 60.0
"""A broker that is full while every rank is attached waits for training, as it should: said late."""
SAY_AT_MOST_EVERY_S = 30.0


class Reporter:
    """Takes the snapshots of ``service`` and says in the log what a long wait is for; the broker's thread calls it."""

    def __init__(self, service: BrokerService) -> None:
        self._service = service
        self._taken = 0.0
        self._rates: deque[tuple[float, int]] = deque()
        self._steps = -1
        self._still_since = 0.0
        self._said = 0.0
        self._say_every = SAY_AFTER_S
        rules = service.plan.rules
        self._fixed: Snapshot = {
            "version": streampack.__version__,
            "run": service.config.run,
            "feed": service.config.feed,
            "epoch": service.core.epoch,
            "endpoints": service.endpoints,
            "rules": {**msgspec.to_builtins(rules), "digest": rules.digest},
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
        service, core = self._service, self._service.core
        totals, arena = core.totals, service.arena
        reasons = waiting_for(core)
        return self._fixed | {
            "taken_at": time.time(),
            "uptime_s": now - service.started,
            "state": self._state(),
            "ready": service.ready,
            "waiting_for": {"reason": reasons[0], "detail": reasons[1]} if reasons else None,
            "steps": {
                "formed": core.readers.formed_upto,
                "returned": core.readers.released_upto,
                "end": core.readers.end.num_steps if core.readers.end is not None else None,
            },
            "totals": asdict(totals),
            "figures": asdict(from_moments(totals.packs, totals.tokens, totals.square_tokens, core.rules.budget))
            | {"cost_max_over_mean": core.readers.cost_max_over_mean},
            "waste_tokens": _waste(core),
            "tokens_per_s": self._rate(now, totals.tokens),
            "streams": _streams(core),
            "producers": core.leases.num_producers,
            "vanished_producers": core.leases.vanished,
            "readers": _readers(core),
            "all_ranks_attached": core.readers.joined,
            "window": {"samples": core.former.num_samples, "tokens": core.former.queued_tokens},
            "memory": {
                "arena_bytes": service.plan.memory_bytes,
                "token_bytes": service.plan.token_bytes,
                "live_tokens": arena.live_tokens,
                "moved_tokens": arena.moved_tokens,
                "held_tokens": core.held_tokens,
                "held_limit_tokens": service.plan.capacity.merged_tokens,
                "partition_limit_tokens": service.plan.capacity.quota_tokens,
            },
            "messages": {
                "damaged": service.damaged,
                "refused": core.leases.refused,
                "unsent": service.unsent,
                "foreign": core.foreign,
            },
            "form_seconds": service.form_seconds,
            "sent_tokens": service.tokens_sent,
        }

    def _state(self) -> str:
        core = self._service.core
        if core.draining:
            return "draining"
        if not self._service.ready:
            return "starting"
        return "ended" if core.readers.end is not None else "serving"

    def _rate(self, now: float, tokens: int) -> float:
        """Packed tokens a second, over the last seconds."""
        self._rates.append((now, tokens))
        while len(self._rates) > 2 and now - self._rates[0][0] > RATE_OVER_S:
            self._rates.popleft()
        (then, before), seconds = self._rates[0], now - self._rates[0][0]
        return (tokens - before) / seconds if seconds > 0 and then < now else 0.0

    def _say(self, now: float) -> None:
        """A line after some seconds without a step, and then ever less often until there is one."""
        core = self._service.core
        moved = core.readers.formed_upto + core.readers.released_upto
        if moved != self._steps or core.draining:
            self._steps, self._still_since, self._said, self._say_every = moved, now, now, SAY_AFTER_S
            return
        reasons = waiting_for(core)
        if reasons is None or now - self._said < self._say_every:
            return
        if reasons[0] in ("peers", "memory") and core.readers.joined and now - self._still_since < SAY_BUSY_AFTER_S:
            return
        self._said, self._say_every = now, min(2 * self._say_every, SAY_AT_MOST_EVERY_S)
        log.info("no step for %.0f s: %s", now - self._still_since, describe(*reasons))


def waiting_for(core: Broker) -> tuple[str, str] | None:
    """What keeps the next step from being formed or read: (reason, detail); None at the end and while draining."""
    readers = core.readers
    if core.draining:
        return None
    if readers.num_readers and not readers.joined:
        return "join", f"{readers.num_readers} attached so far, their mesh has more"
    if readers.end is not None:
        left = readers.end.num_steps - readers.released_upto
        return ("peers", f"{left} last steps are not returned: {readers.slowest}") if left else None
    return core.waiting_for()


def describe(reason: str, detail: str) -> str:
    """``waiting for trainers: no rank is attached``."""
    return f"waiting for {_WAITS.get(reason, reason)}: {detail}"


def _waste(core: Broker) -> dict[str, int]:
    """Tokens of formed packs that are not samples', by cause; they add up to packs * budget - tokens."""
    totals, budget = core.totals, core.rules.budget
    return {
        "alignment": totals.slot_tokens - totals.tokens,
        "pack_tail": (totals.packs - totals.empty_packs) * budget - totals.slot_tokens,
        "empty_pack": totals.empty_packs * budget,
    }


def _readers(core: Broker) -> list[Snapshot]:
    """A row a rank; of the figures that a client sends, those that are numbers: JSON has no others."""
    rows: list[Snapshot] = []
    for row in core.readers.stats():
        stats = row["stats"]
        assert isinstance(stats, dict)
        rows.append(row | {"stats": {key: value for key, value in stats.items() if math.isfinite(value)}})
    return rows


def _streams(core: Broker) -> list[Snapshot]:
    rows = []
    first = 0
    for stream, counts in zip(core.rules.streams, core.leases.counts, strict=True):
        ended = sum(intake.ended for intake in core.leases.intakes[first : first + stream.partitions])
        first += stream.partitions
        rows.append(
            {
                "stream": stream.name,
                "weight": stream.weight,
                "partitions": stream.partitions,
                "ended_partitions": ended,
                "samples": counts.samples,
                "tokens": counts.tokens,
                "overlong": counts.overlong,
                "lost_tokens": counts.lost_tokens,
                "rejected": dict(counts.rejected),
            }
        )
    return rows
