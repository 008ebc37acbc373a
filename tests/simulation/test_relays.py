"""Runs with relays: ranks get the same bytes through them as directly, whatever fails.

``SIM_SEEDS`` sets how many seeds run (``SIM_SEEDS=2000``) or which (``SIM_SEEDS=17:18``).
"""

from __future__ import annotations

import pytest

from tests.simulation.data import WIDE
from tests.simulation.seeds import of_seeds
from tests.simulation.world import run

KEPT = (152, 328, 640, 827, 1087, 1094, 1109, 1442)
"""Seeds that once failed. A relay kept steps for a process that was replaced, or that had requested nothing; it got
parts after its goodbye; a middle pipeline stage got a part each two seconds; a relay asked again for steps that a rank
had from the broker."""


@of_seeds("6:26", 10)
def test_ranks_behind_relays_get_exactly_the_offline_steps_whatever_fails(seeds: range) -> None:
    for seed in seeds:
        run(seed, relays=True)


@pytest.mark.parametrize("seed", KEPT)
def test_a_seed_that_once_failed_passes(seed: int) -> None:
    run(seed, relays=True)


@of_seeds("4", 4)
def test_32_ranks_on_four_hosts_get_the_offline_steps(seeds: range) -> None:
    """Dp = 8, cp = 2, tp = 2; the arrays of every rank are compared."""
    for seed in seeds:
        run(seed, WIDE[1], relays=True)


def test_a_seed_with_relays_happens_the_same_way_twice() -> None:
    assert run(3, relays=True) == run(3, relays=True)
