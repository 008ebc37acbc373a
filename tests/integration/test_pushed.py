"""Rollouts in, steps out: ``streampack.Producer`` and a real broker with its log, whatever is killed between them."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import streampack
from streampack.errors import Rejected
from tests.integration.running import RunningBroker, folder, until

BATCHES, GROUPS, SAMPLES = 3, 12, 3


def settings(path: Path, **changes: Any) -> dict[str, Any]:
    """Of a run in ``path``: a broker that is started again listens where the first one did."""
    sides = {side: f"ipc://{path}/{side}" for side in ("producers", "trainers")}
    return {
        "run": "grpo",
        "listen": {**sides, "http": "127.0.0.1:0"},
        "merge": "arrival",
        "state_dir": str(path / "state"),
        "rules": {"budget": 64, "window": {"samples": 16}, "step": {"packs": 2}},
        "streams": {"rollouts": {"pushed": True, "partitions": 2}},
        "fields": {"group": {}, "policy_version": {}},
    } | changes


def group(number: int) -> list[list[int]]:
    """Samples that say whose they are."""
    return [[number] * (3 + number % 7 + i) for i in range(SAMPLES)]


def work(endpoint: str, worker: int) -> None:
    """All that a rollout worker does."""
    with streampack.Producer(endpoint, stream="rollouts", partition=worker, buffer="8KiB") as rollouts:
        for batch in range(BATCHES):
            for i in range(GROUPS):
                number = 1000 * worker + batch * GROUPS + i
                rollouts.send_group(group(number), policy_version=batch)
            rollouts.end_of_batch(batch)
        rollouts.close(end=True)


def read(endpoint: str) -> list[list[tuple[int, int, int]]]:
    """By step: (token, group, policy version) of each sample; all of it is checked to be whole."""
    steps = []
    with streampack.connect(endpoint, format="numpy", verify=True, stall_timeout_s=20) as loader:
        for step in loader.steps():
            samples = []
            for pack in step:
                starts, ends = pack.cu_seqlens_padded[:-1].tolist(), pack.cu_seqlens_padded[1:].tolist()
                for i in range(pack.num_samples):
                    ids = pack.input_ids[starts[i] : ends[i]].tolist()
                    assert len(set(ids)) == 1
                    samples.append((ids[0], int(pack["group"][i]), int(pack["policy_version"][i])))
            steps.append(samples)
    return steps


def check(steps: list[list[tuple[int, int, int]]]) -> None:
    """Every sample once, none beside others of another batch, groups as their numbers say."""
    assert all(len({version for *_, version in step}) == 1 for step in steps if step)
    found = Counter(token for step in steps for token, *_ in step)
    numbers = [1000 * worker + i for worker in range(2) for i in range(BATCHES * GROUPS)]
    assert found == dict.fromkeys(numbers, SAMPLES)
    assert all(of == SAMPLES * (token % 1000) for step in steps for token, of, _ in step)


def test_every_rollout_is_in_one_step_of_its_batch() -> None:
    with folder() as path:
        broker = RunningBroker(path, settings(path))
        try:
            with ThreadPoolExecutor() as pool:
                workers = [pool.submit(work, broker.producers, worker) for worker in range(2)]
                check(pool.submit(read, broker.trainers).result(timeout=60))
                for worker in workers:
                    worker.result(timeout=20)
        finally:
            broker.kill()


@pytest.mark.parametrize("durability", ["os", "process"])
def test_a_broker_that_is_killed_loses_no_rollout(durability: str) -> None:
    """Killed while both workers push, and once more when all is safe and they have gone."""
    with folder() as path, ThreadPoolExecutor() as pool:
        config = settings(path, durability=durability)
        broker = RunningBroker(path, config)
        try:
            workers = [pool.submit(work, broker.producers, worker) for worker in range(2)]
            until(lambda: broker.status()["streams"][0]["samples"] > 0)
            broker.kill()
            broker = RunningBroker(path, config)
            reader = pool.submit(read, broker.trainers)
            for worker in workers:
                worker.result(timeout=30)
            broker.kill()
            broker = RunningBroker(path, config)
            check(reader.result(timeout=30))
        finally:
            broker.kill()


WORKER = """
import sys, streampack
with streampack.Producer(sys.argv[1], stream="rollouts", partition=0) as rollouts:
    first = int(sys.argv[2])
    for number in range(first, first + int(sys.argv[3])):
        rollouts.send_group([[number] * (1 + i) for i in range(3)])
        rollouts.flush()
        print(number, flush=True)
    rollouts.close(end=True)
"""


def started(endpoint: str, first: int, count: int) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", WORKER, endpoint, str(first), str(count)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


def test_a_worker_that_is_killed_loses_nothing_that_it_flushed() -> None:
    with folder() as path, ThreadPoolExecutor() as pool:
        config = settings(path, streams={"rollouts": {"pushed": True, "partitions": 1}})
        broker = RunningBroker(path, config)
        safe: list[int] = []
        try:
            for first in (0, 1000):
                with started(broker.producers, first, 10**6) as worker:
                    assert worker.stdout is not None
                    safe += [int(worker.stdout.readline()) for _ in range(5)]
                    worker.kill()
                    safe += [int(line) for line in worker.stdout if line.endswith("\n")]
            with started(broker.producers, 2000, 5) as worker:
                out, _ = worker.communicate(timeout=60)
                assert worker.returncode == 0
                safe += [int(line) for line in out.splitlines()]
            steps = pool.submit(read, broker.trainers).result(timeout=60)
        finally:
            broker.kill()
        found = Counter(token for step in steps for token, *_ in step)
        assert set(safe) <= set(found)
        assert set(found.values()) == {3}, "half a group, or one twice"


def test_a_worker_that_was_stopped_is_told_that_another_took_its_partition() -> None:
    with folder() as path:
        broker = RunningBroker(path, settings(path, streams={"rollouts": {"pushed": True, "partitions": 1}}))
        try:
            with started(broker.producers, 0, 10**6) as stopped:
                assert stopped.stdout is not None
                stopped.stdout.readline()
                stopped.send_signal(signal.SIGSTOP)
                with streampack.Producer(broker.producers, stream="rollouts") as other:
                    other.send([7])
                    other.flush()
                    with pytest.raises(Rejected, match=r"which the producer at .* holds: give each producer"):
                        streampack.Producer(broker.producers, stream="rollouts")
                stopped.send_signal(signal.SIGCONT)
                assert stopped.wait(timeout=30) == 1
        finally:
            broker.kill()


def test_a_partition_that_has_ended_takes_no_more() -> None:
    with folder() as path:
        broker = RunningBroker(path, settings(path))
        try:
            streampack.Producer(broker.producers, stream="rollouts", partition=1).close(end=True)
            with pytest.raises(Rejected, match=r"partition 1: got samples of a partition that has ended"):
                streampack.Producer(broker.producers, stream="rollouts", partition=1)
            with pytest.raises(Rejected, match="got partition 2 of stream 'rollouts', expected one below 2"):
                streampack.Producer(broker.producers, stream="rollouts", partition=2)
        finally:
            broker.kill()
