"""Runs with relays: ranks get the same bytes through them as directly, whatever fails.

``SIM_SEEDS`` sets how many seeds run (``SIM_SEEDS=2000``) or which (``SIM_SEEDS=17:18``).
"""

from __future__ import annotations

import os

import pytest

from tests.simulation.world import run

CHUNK = 10


def _chunks() -> list[range]:
    first, _, stop = os.environ.get("SIM_SEEDS", "60").rpartition(":")
    begin, end = int(first or 0), int(stop)
    return [range(at, min(at + CHUNK, end)) for at in range(begin, end, CHUNK)]


@pytest.mark.parametrize("seeds", _chunks(), ids=lambda seeds: f"{seeds.start}-{seeds.stop - 1}")
def test_ranks_behind_relays_get_exactly_the_offline_steps_whatever_fails(seeds: range) -> None:
    for seed in seeds:
        run(seed, relays=True)


def test_a_seed_with_relays_happens_the_same_way_twice() -> None:
    assert run(3, relays=True) == run(3, relays=True)
