"""What is done to a run: kills, freezes and slow links at random moments, drawn from a seed.

An act names kinds of processes, not processes: which one it hits is drawn as well. ``lot`` is the whole lot at once, as
when a job is preempted, except programs that flood the broker or change the rules. A link that is hit passes few bytes
a second for a while.
"""

from __future__ import annotations

import random
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.soak.members import Member

if TYPE_CHECKING:
    from tests.soak.links import Link

ALONE = "broker alone"
"""The broker, and then nothing for ``QUIET_S``: how long its recovery takes is seen."""
QUIET_S = 6.0
ACTS: tuple[tuple[tuple[str, ...], int], ...] = (
    (("broker",), 21),
    ((ALONE,), 4),
    (("trainer",), 16),
    (("producer",), 8),
    (("producer's child",), 8),
    (("broker", "trainer"), 6),
    (("broker", "producer"), 5),
    (("trainer", "producer"), 4),
    (("broker", "producer's child", "trainer"), 4),
    (("pusher",), 10),
    (("broker", "pusher"), 4),
    (("relay",), 20),
    (("broker", "relay"), 5),
    (("relay", "trainer"), 5),
    (("lot",), 6),
    (("link",), 10),
    (("scorer",), 10),
    (("subscriber",), 6),
    (("broker", "scorer"), 4),
)
STOP_SHARE = 0.2
"""Of the acts, those that stop processes for a while instead of killing them."""
SHORTEST_STOP_S, LONGEST_STOP_S = 0.1, 8.0
LONG_SHARE, LONGEST_FREEZE_S = 0.15, 60.0
"""Of the stops, those that are longer, up to this: whoever is frozen is silent for long enough to be given up."""
SLOWEST, FASTEST = 8e3, 200e3
"""Bytes a second of a slow link; a rank's steps are 100 kB a second at most."""
LONGEST_SLOW_S = 20.0


@dataclass
class Hit:
    """An act as it happened: when, and what it was."""

    at: float
    what: str


@dataclass
class Fire:
    """``kills``, ``stops`` and ``slowed`` links by kind of process; an act every ``every_s`` on average."""

    seed: int
    every_s: float
    kills: Counter[str] = field(default_factory=Counter)
    stops: Counter[str] = field(default_factory=Counter)
    slowed: Counter[str] = field(default_factory=Counter)
    longest_stop_s: float = 0.0
    hits: list[Hit] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed)
        self.next_at = 0.0

    def wait(self, now: float) -> None:
        """Draw when the next act is."""
        self.next_at = now + self._draw.expovariate(1 / self.every_s)

    def delay(self) -> float:
        """How long after its end a process is started again."""
        return self._draw.uniform(0.0, 0.5)

    def act(self, members: list[Member], now: float, links: Sequence[Link] = ()) -> None:
        """One act on those that are there and run."""
        self.wait(now)
        there = {member.kind for member in members} | ({"link"} if links else set())
        acts = [act for act in ACTS if not {"pusher", "relay", "link", "scorer", "subscriber"} & set(act[0]) - there]
        (kinds,) = self._draw.choices([kinds for kinds, _ in acts], [weight for _, weight in acts])
        stops = self._draw.random() < STOP_SHARE
        if kinds == ("link",):
            self._slow(links, now)
            return
        if kinds == (ALONE,):
            kinds, stops, self.next_at = ("broker",), False, now + QUIET_S
        targets = self._targets(kinds, members)
        if targets:
            self.hits.append(Hit(now, f"{'stop' if stops else 'kill'} {' '.join(kind for kind, _, _ in targets)}"))
        for kind, member, child in targets:
            if not stops:
                member.signal(signal.SIGKILL, child)
                self.kills[kind] += 1
            elif child < 0:
                member.signal(signal.SIGSTOP)
                self.stops[kind] += 1
                seconds = self._length_of_stop()
                self.longest_stop_s = max(self.longest_stop_s, seconds)
                member.continue_at = now + seconds

    def _length_of_stop(self) -> float:
        if self._draw.random() < LONG_SHARE:
            return self._between(LONGEST_STOP_S, LONGEST_FREEZE_S)
        return self._between(SHORTEST_STOP_S, LONGEST_STOP_S)

    def _slow(self, links: Sequence[Link], now: float) -> None:
        fast = [link for link in links if link.slow_until is None]
        if fast:
            link = self._draw.choice(fast)
            link.slow(self._between(SLOWEST, FASTEST), now + self._draw.uniform(1.0, LONGEST_SLOW_S))
            self.slowed[link.kind] += 1
            self.hits.append(Hit(now, f"slow {link.kind}"))

    def _between(self, low: float, high: float) -> float:
        """Small values as often as large ones."""
        return low * float((high / low) ** self._draw.random())

    def _targets(self, kinds: tuple[str, ...], members: list[Member]) -> list[tuple[str, Member, int]]:
        """(kind, member, which child or -1) of each process that is hit."""
        there = [
            each
            for each in members
            if each.alive and each.continue_at is None and each.kind not in ("flood", "changer")
        ]
        if kinds == ("lot",):
            return [(member.kind, member, -1) for member in there]
        found = []
        for kind in kinds:
            of_kind = [member for member in there if member.kind == kind.partition("'")[0]]
            if of_kind:
                child = self._draw.randrange(8) if "'" in kind else -1
                found.append((kind, self._draw.choice(of_kind), child))
        return found
