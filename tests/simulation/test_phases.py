"""Every transition that a table of phases allows happens in the simulation, and none that it does not allow."""

from __future__ import annotations

from collections import Counter
from enum import Enum
from typing import Any

import pytest

from streampack.core.model.phases import Phases
from streampack.core.serve.rank_reader import READER_PHASES, ReaderPhase
from streampack.core.sessions.client_phases import CLIENT_PHASES, ClientPhase
from streampack.core.sessions.producer_session import LEASE_PHASES, LeasePhase
from streampack.core.sessions.pushing.push_session import END_PHASES, PUSH_PHASES
from streampack.errors import InternalError
from tests.simulation.attaching import Walk
from tests.simulation.pushing import PushWalk
from tests.simulation.world import run

MAX_SEEDS, MAX_WALKS, TURNS = 30, 2000, 400
WALKS: tuple[tuple[type[Walk | PushWalk], tuple[int, ...], tuple[dict[Any, frozenset[Any]], ...]], ...] = (
    (Walk, (3, 8, 172, 341, 434, 440, 574), (CLIENT_PHASES, READER_PHASES)),
    (PushWalk, (14, 39, 131), (PUSH_PHASES, END_PHASES)),
)
"""Each kind of walk, seeds that once made all its transitions, and the tables of these. The search goes on with other
seeds when these make them no more. The worlds make the transitions of leases.
"""


def transitions(*tables: dict[Any, frozenset[Any]]) -> set[tuple[Enum, Enum]]:
    return {(before, after) for table in tables for before, following in table.items() for after in following}


def test_every_transition_is_reached_in_the_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    worlds: Counter[tuple[Enum, Enum]] = Counter()
    walks: Counter[tuple[Enum, Enum]] = Counter()
    counts = worlds
    original = Phases.go

    def go(self: Phases[Any], to: Enum) -> None:
        counts[self.now, to] += 1
        original(self, to)

    monkeypatch.setattr(Phases, "go", go)
    for seed in range(MAX_SEEDS):
        run(seed)
        if transitions(LEASE_PHASES) <= worlds.keys():
            break
    counts = walks
    wanted = transitions(LEASE_PHASES)
    for walk, seeds, tables in WALKS:
        wanted |= transitions(*tables)
        for seed in (*seeds, *range(MAX_WALKS)):
            walk(seed).run(TURNS)
            if transitions(*tables) <= walks.keys():
                break
    print(f"{'':40}{'worlds':>8} {'walks':>8}")
    for before, after in sorted(wanted, key=lambda pair: (type(pair[0]).__name__, pair[0].name, pair[1].name)):
        print(f"{before.name:16} -> {after.name:16}    {worlds[before, after]:8,} {walks[before, after]:8,}")
    assert not {(before.name, after.name) for before, after in wanted - walks.keys() - worlds.keys()}


def test_a_transition_that_is_not_in_the_table_names_the_peer_and_the_phases_before() -> None:
    phases = Phases("reader host:1 of rank dp=0/2", READER_PHASES, ReaderPhase.ATTACHING)
    phases.go(ReaderPhase.CLAIMS)
    with pytest.raises(
        InternalError, match=r"reader host:1 .* from phase CLAIMS to phase ENTERED.*ATTACHING -> CLAIMS$"
    ):
        phases.go(ReaderPhase.ENTERED)
    assert phases.now is ReaderPhase.CLAIMS


def test_only_the_phase_over_has_no_way_out() -> None:
    closed = [phase for phase, following in CLIENT_PHASES.items() if following <= {phase}]
    assert closed == [ClientPhase.OVER]
    assert [phase for phase, following in READER_PHASES.items() if not following] == [ReaderPhase.GONE]
    assert [phase for phase, following in LEASE_PHASES.items() if not following] == [LeasePhase.OVER]
