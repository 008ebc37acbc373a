"""Two hosts, an arbiter, and every fault: the run has one history. Take a rule away, and it has two.

``STANDBY_SEEDS`` sets how many seeds run (``STANDBY_SEEDS=10000``) or which (``STANDBY_SEEDS=17:18``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from streampack.core.protocol.events import Effect, Tick
from streampack.core.standby import log_follower
from streampack.core.standby.arbiter_entries import CreateEntry, EntryWritten
from streampack.core.standby.log_follower import FollowerPhase, LogFollower
from streampack.core.standby.log_shipper import LogShipper
from streampack.core.standby.standby_events import Discard, FromPeer, TakeOver, WriteRecords
from tests.simulation.mutating import Patch, expect_failure, registry, wrap
from tests.simulation.seeds import of_seeds
from tests.simulation.standby import run_standby
from tests.simulation.world import run

MUTANTS: list[Any] = []
mutant = registry(MUTANTS)


@of_seeds("300", 100, "STANDBY_SEEDS")
def test_a_run_has_one_history_whichever_host_is_lost(seeds: range) -> None:
    for seed in seeds:
        run_standby(seed)


@of_seeds("4:34", 10)
def test_a_broker_that_waits_for_its_standby_serves_the_same_steps(seeds: range) -> None:
    """After a restart it calls nothing safe, not even what was, before a standby has its log."""
    for seed in seeds:
        run(seed, standby=True)


def test_a_seed_happens_the_same_way_twice() -> None:
    assert run_standby(5) == run_standby(5)


@pytest.mark.parametrize(("patch", "first"), MUTANTS)
def test_a_rule_of_the_standby_that_is_taken_out_is_missed(
    patch: Callable[[Patch], None], first: int, monkeypatch: Patch
) -> None:
    patch(monkeypatch)
    expect_failure(patch.__name__, first, run_standby, seeds=3000)


@mutant(6)
def a_broker_restarts_without_an_entry(patch: Patch) -> None:
    def ask(original: Any, self: LogFollower, newest: Any) -> list[Effect]:
        effects: list[Effect] = original(self, newest)
        if newest is None or newest.active != self.name:
            return effects
        self.phase = FollowerPhase.ACTIVE
        return [TakeOver(msgspec.structs.replace(effects[-1].entry, number=newest.number))]  # type: ignore[attr-defined]

    wrap(patch, LogFollower, "_ask", ask)


@mutant(3)
def an_active_broker_goes_on_alone_without_an_entry(patch: Patch) -> None:
    def remove(original: Any, self: LogShipper, why: str) -> list[Effect]:
        effects: list[Effect] = original(self, why)
        (create,) = [effect for effect in effects if isinstance(effect, CreateEntry)]
        self._entry_written(EntryWritten(create.entry, create.entry))
        return [effect for effect in effects if effect is not create]

    wrap(patch, LogShipper, "_remove_standby", remove)


@mutant(241)
def a_standby_confirms_records_after_it_has_asked(patch: Patch) -> None:
    """It confirms what comes, although its log is what it was when it asked."""

    def handle(original: Any, self: LogFollower, event: Any) -> list[Effect]:
        effects: list[Effect] = original(self, event)
        if self.phase is FollowerPhase.ASKING and isinstance(event, FromPeer):
            effects += [e for e in self._receive(event.envelope) if not isinstance(e, WriteRecords | Discard)]
            self._safe_upto = self._next_lsn
        elif self.phase is FollowerPhase.ASKING and isinstance(event, Tick) and self.leader is not None:
            effects += self._follow()
        return effects

    wrap(patch, LogFollower, "handle", handle)


@mutant(493)
def a_diverged_log_is_not_discarded(patch: Patch) -> None:
    def fits(original: Any, self: LogShipper, message: Any) -> bool:
        known = self._first_lsn <= message.have_upto <= self._next_lsn
        return bool(known and (message.log_epoch != 0 or original(self, message)))

    def newest(original: Any, self: LogFollower, event: Any) -> list[Effect]:
        effects: list[Effect] = original(self, event)
        if self.leader is not None and self.log_epoch:
            self.log_epoch = self.leader.epoch
        return effects

    wrap(patch, LogShipper, "_fits", fits)
    wrap(patch, LogFollower, "_on_newest", newest)


@mutant()
def a_broker_that_is_no_member_takes_over(patch: Patch) -> None:
    patch.setattr(log_follower, "may_start", lambda *_: True)


@mutant(7)
def a_standby_is_a_member_before_it_has_every_record(patch: Patch) -> None:
    def let_in(original: Any, self: LogShipper) -> list[Effect]:
        acked, self.acked = self.acked, self._next_lsn
        effects: list[Effect] = original(self)
        self.acked = acked
        return effects

    wrap(patch, LogShipper, "_let_in", let_in)


@mutant(4)
def a_record_is_safe_before_the_standby_has_it(patch: Patch) -> None:
    def count(_: Any, self: LogShipper) -> None:
        self._safe_upto = self._local_safe

    wrap(patch, LogShipper, "_count_safe", count)


@mutant(1765)
def a_standby_confirms_what_it_has_not_synced(patch: Patch) -> None:
    def handle(original: Any, self: LogFollower, event: Any) -> list[Effect]:
        self._safe_upto = self._next_lsn
        return original(self, event)  # type: ignore[no-any-return]

    wrap(patch, LogFollower, "handle", handle)
