"""RL loops: late values, pacing and results under all faults of the simulation, and when a standby takes over.

``SIM_SEEDS`` sets how many seeds run (``SIM_SEEDS=5000``) or which (``SIM_SEEDS=17:18``).
"""

from __future__ import annotations

from tests.simulation.rl.cases import RL_CASES, RL_MEDIA, TIMED, rl_case
from tests.simulation.rl.world import LoopWorld, checked, run_loop
from tests.simulation.seeds import of_seeds


@of_seeds("6:12", 6)
def test_an_rl_loop_keeps_its_promises_whatever_fails(seeds: range) -> None:
    for seed in seeds:
        run_loop(seed)


@of_seeds("6", 6)
def test_an_rl_loop_with_relays_and_standbys_keeps_its_promises(seeds: range) -> None:
    for seed in seeds:
        run_loop(seed, relays=True, standby=bool(seed % 2))


@of_seeds("2", 6)
def test_an_rl_loop_with_media_keeps_its_promises(seeds: range) -> None:
    for seed in seeds:
        run_loop(seed, [*RL_MEDIA][seed % len(RL_MEDIA)])


@of_seeds("6", 6)
def test_an_rl_loop_names_the_samples_whose_values_come_too_late(seeds: range) -> None:
    worlds = [checked(LoopWorld(seed, TIMED, standby=bool(seed % 2))) for seed in seeds]
    assert any(world.too_late for world in worlds)


def test_an_rl_loop_happens_the_same_way_twice() -> None:
    assert run_loop(4) == run_loop(4)


def test_the_cases_have_late_fields_or_pacing() -> None:
    cases = [rl_case(number) for number in RL_CASES]
    assert all(case.is_staged and case.pushed == case.names for case in cases)
    assert {bool(case.late_fields) for case in cases} == {case.rules.paces for case in cases} == {True, False}
