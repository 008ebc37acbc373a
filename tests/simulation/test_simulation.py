"""The whole service, simulated: whatever the network and the processes do, ranks get the reference's steps.

``SIM_SEEDS`` sets how many seeds run (``SIM_SEEDS=5000``) or which (``SIM_SEEDS=17:18``). ``test_bytes`` runs those
before the first ones here, with the same checks, and ``make soak`` runs thousands.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.simulation.checks import BrokerChecks
from tests.simulation.data import FIRST_ARRIVAL, FIRST_READ_BATCH, NUM_CASES, case
from tests.simulation.offline import reference
from tests.simulation.seeds import of_seeds
from tests.simulation.world import run
from tests.soak.simulated import run_every


@of_seeds("24:104", 20)
def test_every_rank_gets_exactly_the_offline_steps_whatever_fails(seeds: range) -> None:
    for seed in seeds:
        run(seed)


@pytest.mark.parametrize(
    "seed", [70333, 553609, 801371, 900339, 900935, 951905, 5002785, 5004234, 7000133, 7000523, 7001047, 7001108]
)
def test_a_seed_that_once_failed_passes(seed: int) -> None:
    run(seed)


@pytest.mark.parametrize("number", [*range(FIRST_ARRIVAL), *range(FIRST_READ_BATCH, NUM_CASES)])
def test_the_cases_are_worth_simulating(number: int) -> None:
    found = reference(number)
    assert len(found.steps) >= 8
    assert case(number).rules.batch or case(number).rules.packs % case(number).dp == 0


@pytest.mark.parametrize("seed", [3, 6, 13])
def test_a_seed_happens_the_same_way_twice(seed: int) -> None:
    assert run(seed) == run(seed)


def test_a_seed_happens_the_same_way_under_another_hash_seed() -> None:
    code = "from tests.simulation.world import run; print(run(13).trace)"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}

    def trace(hash_seed: str) -> str:
        once = {**env, "PYTHONHASHSEED": hash_seed}
        return subprocess.run([sys.executable, "-c", code], env=once, capture_output=True, text=True, check=True).stdout

    assert trace("1") == trace("2")


def test_steps_depend_on_neither_network_nor_producers_nor_their_order() -> None:
    outcomes = [run(seed, case_number=2) for seed in range(1000, 1012)]
    assert len({(outcome.chain, outcome.num_steps) for outcome in outcomes}) == 1
    assert len({outcome.trace for outcome in outcomes}) == len(outcomes)


def test_a_soak_ends_with_one_json_object_that_says_how_many_seeds_ran() -> None:
    command = [sys.executable, "-m", "tests.soak", "--minutes", "0.02", "--seed", "50"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=300)
    found = json.loads(done.stdout)
    assert (found["ok"], found["runs"], found["wrong"]) == (True, 0, [])
    assert found["simulated"] >= 1


def test_a_seed_of_a_soak_that_fails_says_how_to_run_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BrokerChecks, "granted", lambda self, *session: (0, 0))
    found = run_every(7, 2, until=0.0)
    assert found.seeds == 1
    assert "seed 7: AssertionError: R6" in found.wrong[0]
    assert "SIM_SEEDS=7:8 .venv/bin/python -m pytest" in found.wrong[0]
