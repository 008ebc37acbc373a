"""The faults of ``make soak``: what is drawn, and that each ends."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.integration.proxy import Proxy
from tests.soak.fire import FASTEST, LONGEST_FREEZE_S, LONGEST_SLOW_S, SLOWEST, Fire
from tests.soak.links import Link
from tests.soak.members import Member


class Watched(Member):
    """A process that only notes the signals that it is sent."""

    @property
    def alive(self) -> bool:
        return True

    def signal(self, number: signal.Signals, child: int = -1) -> None:
        self.codes.append(number)


def burn(links: list[Link], acts: int = 3000) -> tuple[Fire, list[Watched], list[float], set[float]]:
    """Acts, a second apart, on one process of each kind: (fire, members, lengths of freezes, rates of slow links)."""
    fire, freezes, rates = Fire(seed=3, every_s=1.1), list[float](), set[float]()
    members = [Watched(kind, kind, Path(), []) for kind in ("broker", "producer", "trainer")]
    for now in map(float, range(acts)):
        for member in members:
            if member.continue_at is not None and now >= member.continue_at:
                member.continue_at = None
        for link in links:
            link.look(now)
        before = [member.continue_at for member in members]
        fire.act(list(members), now, links)
        after = [member.continue_at for member in members]
        freezes += [at - now for was, at in zip(before, after, strict=True) if at is not None and was is None]
        rates |= {link.proxy.down.bytes_per_s for link in links}
        assert all(link.slow_until is None or link.slow_until <= now + LONGEST_SLOW_S for link in links)
    return fire, members, freezes, rates


def test_processes_are_frozen_for_up_to_a_minute_and_many_for_longer_than_silence_is_borne() -> None:
    fire, members, freezes, _ = burn([])
    assert fire.stops.total() == len(freezes) > 100
    assert 50.0 < max(freezes) <= LONGEST_FREEZE_S
    assert fire.longest_stop_s == pytest.approx(max(freezes))
    assert sum(seconds > 15.0 for seconds in freezes) > 10
    assert all(member.codes.count(signal.SIGSTOP) for member in members)
    assert not fire.slowed


def test_links_are_slow_for_a_while_at_rates_drawn_and_then_as_fast_as_before() -> None:
    links = [Link(kind, Proxy("tcp://127.0.0.1:1")) for kind in ("trainer", "producer")]
    fire, _, _, rates = burn(links)
    assert set(fire.slowed) == {"trainer", "producer"}
    assert 0.0 in rates
    drawn = sorted(rates - {0.0})
    assert SLOWEST <= drawn[0] < 2 * SLOWEST
    assert FASTEST / 2 < drawn[-1] <= FASTEST
    for link in links:
        link.look(1e9)
        assert (link.proxy.up.bytes_per_s, link.proxy.down.bytes_per_s, link.slow_until) == (0.0, 0.0, None)
