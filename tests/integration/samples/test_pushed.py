"""Rollouts in, steps out: ``streampack.Producer`` and a real broker with its log, whatever is killed between them."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from streampack_services.log.log import read_entries

import streampack
from streampack.core.journal.log_records import ChunkAdmitted, LineageBegan, SamplesRejected, StepFormed
from streampack.errors import Rejected
from streampack.wire.record_frames import decode_record
from tests.integration.running import PATIENCE_S, RunningBroker, folder, until
from tests.integration.running import streampack as command
from tests.integration.samples.pushed_run import SAMPLES, pushed_group, pushed_settings, samples_of

BATCHES, GROUPS = 3, 12


def work(endpoint: str, worker: int) -> None:
    """All that a rollout worker does."""
    with streampack.Producer(endpoint, stream="rollouts", partition=worker, buffer="8KiB") as rollouts:
        for batch in range(BATCHES):
            for i in range(GROUPS):
                number = 1000 * worker + batch * GROUPS + i
                rollouts.send_group(pushed_group(number), policy_version=batch)
            rollouts.end_of_batch(batch)
        rollouts.close(end=True)


def read(endpoint: str) -> list[list[tuple[int, int, int]]]:
    """The samples of each step."""
    steps: list[list[tuple[int, int, int]]] = []
    with streampack.connect(endpoint, format="numpy", verify=True, stall_timeout_s=PATIENCE_S) as loader:
        steps += [samples_of(step) for step in loader.steps()]
    return steps


def connect(broker: RunningBroker) -> streampack.Client:
    return streampack.connect(broker.trainers, format="numpy", verify=True, stall_timeout_s=PATIENCE_S)


def check(steps: list[list[tuple[int, int, int]]]) -> None:
    """Every sample once, none beside others of another batch, groups as their numbers say."""
    assert all(len({version for *_, version in step}) == 1 for step in steps if step)
    found = Counter(token for step in steps for token, *_ in step)
    numbers = [1000 * worker + i for worker in range(2) for i in range(BATCHES * GROUPS)]
    assert found == dict.fromkeys(numbers, SAMPLES)
    assert all(of == SAMPLES * (token % 1000) for step in steps for token, of, _ in step)


def test_every_rollout_is_in_one_step_of_its_batch() -> None:
    with folder() as path:
        broker = RunningBroker(path, pushed_settings(path))
        try:
            with ThreadPoolExecutor() as pool:
                workers = [pool.submit(work, broker.producers, worker) for worker in range(2)]
                check(pool.submit(read, broker.trainers).result(PATIENCE_S))
                for worker in workers:
                    worker.result(PATIENCE_S)
        finally:
            broker.kill()


@pytest.mark.parametrize("durability", ["os", "process"])
def test_a_broker_that_is_killed_loses_no_rollout(durability: str) -> None:
    """Killed while both workers push, and once more when all is safe and they have gone."""
    with folder() as path, ThreadPoolExecutor() as pool:
        config = pushed_settings(path, durability=durability)
        broker = RunningBroker(path, config)
        try:
            workers = [pool.submit(work, broker.producers, worker) for worker in range(2)]
            until(lambda: broker.status()["streams"][0]["samples"] > 0)
            broker.kill()
            broker = RunningBroker(path, config)
            reader = pool.submit(read, broker.trainers)
            for worker in workers:
                worker.result(PATIENCE_S)
            broker.kill()
            broker = RunningBroker(path, config)
            check(reader.result(PATIENCE_S))
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
        config = pushed_settings(path, streams={"rollouts": {"pushed": True, "partitions": 1}})
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
                out, _ = worker.communicate(timeout=PATIENCE_S)
                assert worker.returncode == 0
                safe += [int(line) for line in out.splitlines()]
            steps = pool.submit(read, broker.trainers).result(PATIENCE_S)
        finally:
            broker.kill()
        found = Counter(token for step in steps for token, *_ in step)
        assert set(safe) <= set(found)
        assert set(found.values()) == {3}, "half a pushed_group, or one twice"


def test_a_worker_that_was_stopped_is_told_that_another_took_its_partition() -> None:
    with folder() as path:
        broker = RunningBroker(path, pushed_settings(path, streams={"rollouts": {"pushed": True, "partitions": 1}}))
        try:
            with started(broker.producers, 0, 10**6) as stopped:
                assert stopped.stdout is not None
                stopped.stdout.readline()
                stopped.send_signal(signal.SIGSTOP)
                with streampack.Producer(broker.producers, stream="rollouts") as other:
                    other.send([7])
                    other.flush()
                    with pytest.raises(
                        Rejected, match=r"but the producer at .* holds this partition. Give each producer"
                    ):
                        streampack.Producer(broker.producers, stream="rollouts")
                stopped.send_signal(signal.SIGCONT)
                assert stopped.wait(PATIENCE_S) == 1
        finally:
            broker.kill()


def test_a_partition_that_has_ended_takes_no_more() -> None:
    with folder() as path:
        broker = RunningBroker(path, pushed_settings(path))
        try:
            with streampack.Producer(broker.producers, stream="rollouts", partition=1) as first:
                assert (first.ended, first.next_seq) == (False, 0)
                first.send_many([[1, 2], [3, 4]])
                assert first.next_seq == 2
                first.close(end=True)
                assert (first.ended, first.next_seq) == (True, 2), "also when it is closed"
            for _ in range(2):
                with streampack.Producer(broker.producers, stream="rollouts", partition=1) as again:
                    assert (again.ended, again.next_seq) == (True, 2)
                    with pytest.raises(
                        Rejected, match=r"partition 1: got samples after the end .* would be 2"
                    ) as error:
                        again.send([5])
                    assert error.value.code == "ended"
                    with pytest.raises(Rejected, match="after the end of the partition"):
                        again.end_of_batch(1)
                    again.close(end=True)
            with streampack.Producer(broker.producers, stream="rollouts", partition=0) as other:
                assert (other.ended, other.next_seq) == (False, 0), "each partition ends by itself"
            with pytest.raises(Rejected, match="got partition 2 of stream 'rollouts', expected a number below 2"):
                streampack.Producer(broker.producers, stream="rollouts", partition=2)
        finally:
            broker.kill()


SUPERVISED = """
import sys
import streampack

with streampack.Producer(sys.argv[1], stream="rollouts", timeout_s=60) as rollouts:
    for number in range(rollouts.next_seq, 200):
        print(number, flush=True)
        rollouts.send([number])
    print("closing", flush=True)
    rollouts.close(end=True)
    print("done", rollouts.ended, rollouts.next_seq, flush=True)
"""
"""A program that a supervisor starts again, whatever has become of the one before."""


def test_a_supervised_pusher_goes_on_and_ends_with_code_0_whenever_it_is_killed() -> None:
    """Killed before, within and after ``close(end=True)``; the broker is killed, too."""
    with folder() as path:
        config = pushed_settings(path, streams={"rollouts": {"pushed": True, "partitions": 1}})
        broker = RunningBroker(path, config)
        try:
            for last in ("40", "90", "120", "closing", "closing"):
                with supervised(broker.producers) as worker:
                    assert worker.stdout is not None
                    assert any(line == f"{last}\n" for line in worker.stdout)
                if last == "90":
                    broker.kill()
                    broker = RunningBroker(path, config)
            for _ in range(2):
                with supervised(broker.producers) as worker:
                    out, _ = worker.communicate(timeout=PATIENCE_S)
                assert (worker.returncode, out.splitlines()[-2:]) == (0, ["closing", "done True 200"])
            with ThreadPoolExecutor(1) as pool:
                steps = pool.submit(read, broker.trainers).result(PATIENCE_S)
        finally:
            broker.kill()
        found = [token for step in steps for token, *_ in step]
        assert sorted(found) == list(range(200)), "each sample once"


@contextmanager
def supervised(endpoint: str) -> Iterator[subprocess.Popen[str]]:
    """A life of the program, killed in the end."""
    with subprocess.Popen([sys.executable, "-c", SUPERVISED, endpoint], stdout=subprocess.PIPE, text=True) as worker:
        try:
            yield worker
        finally:
            worker.kill()


def logged(state_dir: Path, step: int) -> tuple[Counter[int], Counter[str], list[LineageBegan]]:
    """Numbers of the samples that came after ``step`` was formed and before the lineage after it began; reasons of all
    that were rejected; the lineages.
    """
    later: Counter[int] = Counter()
    reasons: Counter[str] = Counter()
    began: list[LineageBegan] = []
    formed = False
    for entry in read_entries(state_dir):
        record, payload = decode_record(entry.kind, entry.body)
        if isinstance(record, StepFormed):
            formed = formed or record.step == step
        elif isinstance(record, ChunkAdmitted) and formed and not began:
            lengths, tokens = np.frombuffer(record.lengths_u32, "<u4"), np.frombuffer(payload[0], "<i4")
            later.update(tokens[np.cumsum(lengths) - lengths].tolist())
        elif isinstance(record, SamplesRejected):
            reasons.update(record.reasons)
        elif isinstance(record, LineageBegan):
            began.append(record)
    return later, reasons, began


@pytest.mark.parametrize("on_rewind", ["discard", "replay"])
def test_trainers_that_go_back_have_what_came_since_again_or_never(on_rewind: str) -> None:
    """And the broker that is killed afterwards knows of it."""
    discards = on_rewind == "discard"
    with folder() as path:
        config = pushed_settings(path, feeds={"train": {"on_rewind": on_rewind}})
        broker = RunningBroker(path, config)
        first: list[streampack.Step] = []
        second: list[streampack.Step] = []
        state: dict[str, Any] = {}
        try:
            with ExitStack() as workers:
                producers = [
                    workers.enter_context(streampack.Producer(broker.producers, stream="rollouts", partition=worker))
                    for worker in range(2)
                ]

                def push(begin: int, end: int) -> None:
                    for worker, producer in enumerate(producers):
                        for number in range(begin, end):
                            producer.send_group(pushed_group(number + 1000 * worker))
                    for producer in producers:
                        producer.flush()

                push(0, 20)
                with connect(broker) as loader:
                    for step in loader.steps():
                        first.append(step)
                        if step.index == 3:
                            list(step)
                            state = loader.state_dict()
                            push(20, 45)
                        if step.index == 9:
                            break
                with connect(broker) as loader:
                    loader.load_state_dict(state)
                    steps = loader.steps()
                    until(lambda: broker.feed()["lineage"] == int(discards))  # or these are lost, too
                    push(45, 60)
                    second += [next(steps) for _ in range(4)]
                    assert loader.state_dict()["lineage"] == int(discards)
                    broker.kill()
                    broker = RunningBroker(path, config)
                    push(60, 80)
                    for producer in producers:
                        producer.close(end=True)
                    second += steps
                    assert loader.state_dict()["lineage"] == int(discards)
            verified = command("ledger", "verify", "-c", path / "broker.yaml", "--json")
            assert verified.returncode == 0, verified.stdout + verified.stderr
        finally:
            broker.kill()
        came_since, rejected, began = logged(path / "state", 3)
        pushed = Counter(dict.fromkeys((1000 * worker + i for worker in range(2) for i in range(80)), SAMPLES))
        found = Counter(token for step in [*first[:4], *second] for token, *_ in samples_of(step))
        assert [step.index for step in second] == list(range(4, 4 + len(second)))
        if discards:
            assert [(each.lineage, each.step) for each in began] == [(1, 4)]
            assert {number % 1000 for number in came_since} >= set(range(20, 45)), "all that was pushed before"
            assert found == pushed - came_since
            assert rejected == {"discarded": came_since.total()}
        else:
            assert [step.digest for step in second[:6]] == [step.digest for step in first[4:10]]
            assert (found, rejected, began) == (pushed, {}, [])
