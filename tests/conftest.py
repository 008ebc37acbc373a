"""One hypothesis profile for all tests: machines are shared, and the first call of a kernel compiles it.

And one thread for numpy and for torch, here and in every process that a test starts: numpy's starting of threads that
nobody uses is half of what its import costs, and tiny models lose much by threads where tests run beside each other.

Signals have their usual meaning, also where the tests were started with nohup or in the background of a script: daemons
that tests start inherit it.
"""

import gc
import os
import signal
from itertools import islice, pairwise

import pytest
from hypothesis import settings

for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = "1"

signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

SLOW = (
    "test_frameworks_ray.py", "test_frameworks_veomni.py", "test_pretrain.py", "test_frameworks_automodel.py",
    "test_frameworks_torchtitan.py", "R9-a_producer_says_the_end_once", "test_image_kills.py", "test_a_first_run",
    "test_relay_deaths.py", "test_frameworks_torch.py", "test_hybrid_cp.py", "test_jax.py",
    "test_public_names_of_the_frameworks_integrations", "test_two_ranks_exchange_rollouts",
    "test_an_rl_loop_with_relays_and_standbys", "test_pods.py", "test_a_helper_that_is_killed", "test_the_loop_goes_on",
    "test_each_question_after_a_loss_spike", "test_a_relay_that_is_killed_is_started_again", "test_the_quickstart_runs",
    "test_provocations.py",
)  # fmt: skip
"""Parts of the names of tests that take more than 40 s each, or of files with such tests, which share a fixture."""

settings.register_profile("streampack", deadline=None, max_examples=int(os.environ.get("EXAMPLES", "40")))
settings.load_profile("streampack")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each worker slow tests first, or all others wait for them at the end.

    pytest-xdist cuts the list into equal parts, one for each worker. A worker that is done takes tests from another's
    end.
    """
    parts = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    slow: list[list[pytest.Item]] = [[] for _ in range(parts)]
    for number, name in enumerate(SLOW):
        slow[number % parts] += [item for item in items if name in item.nodeid]
    others = iter([item for item in items if not any(name in item.nodeid for name in SLOW)])
    bounds = [len(items) * part // parts for part in range(parts + 1)]
    items[:] = [
        item
        for part, (begin, end) in enumerate(pairwise(bounds))
        for item in [*slow[part], *islice(others, max(end - begin - len(slow[part]), 0))]
    ] + list(others)


def pytest_collection_finish() -> None:
    """What is imported by now stays: a collection that walks torch's and numba's objects, too, takes half a second."""
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
