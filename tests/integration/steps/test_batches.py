"""Batches over real processes: what workers push for one policy is one step, on any number of ranks, whatever dies."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streampack
from tests.integration.running import PATIENCE_S, RunningBroker, folder, in_process, the_error, until, write
from tests.integration.samples.pushed_run import pushed_settings, samples_of

BATCHES, WORKERS, SAMPLES = 4, 2, 3
Step = tuple[int, int, int, list[tuple[int, int, int]]]
"""(number, micro-batches, samples of all ranks, (token, group, policy version) of each sample of this one)."""


class Policy:
    """Which step the trainers have done: workers push for the newest policy and no other."""

    def __init__(self, ranks: int) -> None:
        self._done, self._moved = [0] * ranks, threading.Condition()

    def trained(self, rank: int, steps: int) -> None:
        with self._moved:
            self._done[rank] = steps
            self._moved.notify_all()

    def wait_for(self, version: int) -> None:
        with self._moved:
            assert self._moved.wait_for(lambda: min(self._done) >= version, PATIENCE_S), "no step has come"


def groups_of(worker: int, version: int) -> list[int]:
    """Numbers of the prompts of one batch: workers push uneven shares."""
    return [100 * version + 10 * worker + i for i in range(2 + (worker + version) % 3)]


def work(endpoint: str, worker: int, policy: Policy, marks: bool) -> None:
    with streampack.Producer(endpoint, stream="rollouts", partition=worker) as rollouts:
        for version in range(BATCHES):
            policy.wait_for(version)
            for number in groups_of(worker, version):
                rollouts.send_group(
                    [[number] * (5 + (7 * number + i) % 40) for i in range(SAMPLES)], policy_version=version
                )
            if marks:
                rollouts.end_of_batch(version)
        rollouts.close(end=True)


def train(endpoint: str, dp: int, rank: int, policy: Policy, after: Callable[[int], None]) -> list[Step]:
    found: list[Step] = []
    mesh = {"dp": dp, "dp_rank": rank}
    with streampack.connect(endpoint, mesh=mesh, format="numpy", verify=True, stall_timeout_s=PATIENCE_S) as loader:
        for step in loader.steps():
            found.append((step.index, len(step), step.num_samples, samples_of(step)))
            after(step.index)
            policy.trained(rank, step.index + 1)
    return found


def check(ranks: list[list[Step]]) -> None:
    """Step k is batch k, whole, in as many packs on every rank."""
    assert all([step[:3] for step in steps] == [step[:3] for step in ranks[0]] for steps in ranks)
    assert len(ranks[0]) == BATCHES
    for version, steps in enumerate(zip(*ranks, strict=True)):
        expected = [
            number for worker in range(WORKERS) for number in groups_of(worker, version) for _ in range(SAMPLES)
        ]
        samples = [sample for *_, part in steps for sample in part]
        assert sorted(token for token, *_ in samples) == sorted(expected)
        assert {policy for *_, policy in samples} == {version}
        assert steps[0][2] == len(expected)


@pytest.mark.parametrize(("dp", "padded"), [(2, False), (4, False), (2, True)])
def test_a_batch_for_a_policy_is_one_step_on_every_rank_though_the_broker_is_killed(dp: int, padded: bool) -> None:
    with folder() as path, ThreadPoolExecutor(WORKERS + dp) as pool:
        config = pushed_settings(path, rules={"budget": 64, "step": {"end_of_batch": True}, "padded": padded})
        running, policy = [RunningBroker(path, config)], Policy(dp)
        try:
            where, killed = (running[0].producers, running[0].trainers), threading.Event()
            workers = [pool.submit(work, where[0], worker, policy, True) for worker in range(WORKERS)]

            def after(step: int) -> None:
                if step == 1 and not killed.is_set():
                    killed.set()

            ranks = [pool.submit(train, where[1], dp, rank, policy, after) for rank in range(dp)]
            assert killed.wait(PATIENCE_S)
            running[0].kill()
            running.append(RunningBroker(path, config))
            check([rank.result(PATIENCE_S) for rank in ranks])
            for worker in workers:
                worker.result(PATIENCE_S)
            dealt = [why(path, step, "--dp-size", str(dp)) for step in range(BATCHES)]
            formed = [why(path, step) for step in range(BATCHES)]
        finally:
            running[-1].kill()
    for step, packs in enumerate(dealt):
        mine = [ranks[rank].result()[step] for rank in range(dp)]
        by_rank = [[len(pack["samples"]) for pack in packs if pack["dp_rank"] == rank] for rank in range(dp)]
        assert [(len(packs), sum(packs)) for packs in by_rank] == [(each[1], len(each[3])) for each in mine]
        for pack in [] if padded else packs:  # rows are of no pack
            whole = [sample["index"] for sample in formed[step][pack["of"]]["samples"]] if pack["samples"] else []
            part = [sample["index"] for sample in pack["samples"]]
            assert part == [index for index in whole if index in part], "a part of the pack that it is of, in its order"
            assert pack["pack"] == pack["of"] or pack["pack"] >= len(formed[step]), (
                "what is split off is numbered behind"
            )


def why(path: Path, step: int, *mesh: str) -> list[dict[str, Any]]:
    found = in_process("why", "--step", str(step), *mesh, "--state-dir", path / "state", "--json")
    packs: list[dict[str, Any]] = json.loads(found.stdout)["packs"]
    return packs


def test_a_batch_of_so_many_samples_comes_as_soon_as_they_are_there() -> None:
    """Nobody marks anything, and no sample behind a batch is needed to close it."""
    with folder() as path:
        config = pushed_settings(path, rules={"budget": 64, "step": {"samples": 8, "micro_batch_multiple": 2}})
        broker = RunningBroker(path, config)
        try:
            with (
                streampack.Producer(broker.producers, stream="rollouts", partition=0) as rollouts,
                streampack.connect(broker.trainers, format="numpy", verify=True) as loader,
            ):
                steps, counts = loader.steps(), list[int]()
                for k in range(3):
                    rollouts.send_many([[8 * k + i + 1] * (1 + 5 * i) for i in range(8)])
                    step = next(steps)
                    assert len(step) % 2 == 0
                    counts.append(len(step))
                    tokens = sorted(token for token, *_ in samples_of(step))
                    assert tokens == list(range(8 * k + 1, 8 * k + 9))
            until(lambda: broker.status()["feeds"]["train"]["steps"]["formed"] == 3)
            feed = broker.status()["feeds"]["train"]
            assert feed["dealt"] == {"split_packs": sum(counts) - feed["totals"]["packs"], "empty_packs": 0}
        finally:
            broker.kill()


def test_a_rank_that_waits_for_a_batch_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    def lines() -> list[logging.LogRecord]:
        return [record for record in caplog.records if "waiting for" in record.getMessage()]

    caplog.set_level(logging.INFO, "streampack.client")
    with folder() as path, ThreadPoolExecutor(1) as pool:
        broker = RunningBroker(path, pushed_settings(path, rules={"budget": 64, "step": {"end_of_batch": True}}))
        try:
            with ExitStack() as stack:
                workers = [
                    stack.enter_context(streampack.Producer(broker.producers, stream="rollouts", partition=partition))
                    for partition in range(WORKERS)
                ]
                loader = stack.enter_context(streampack.connect(broker.trainers, format="numpy"))
                steps = loader.steps()
                for batch in range(2):
                    for partition, worker in enumerate(workers):
                        worker.send_many([[1, 2, 3]] * 4)
                        if batch == 0 or partition > 0:
                            worker.end_of_batch(batch)
                assert next(steps).num_samples == 4 * WORKERS
                waits = pool.submit(next, steps)
                until(lambda: bool(lines()))
                broker.wait_for("no step for")
                workers[0].end_of_batch(1)
                assert waits.result(PATIENCE_S).num_samples == 4 * WORKERS
            said = next(line for line in broker.said.splitlines() if "no step for" in line)
        finally:
            broker.kill()
    assert {record.levelno for record in lines()} == {logging.INFO}
    awaited = "waiting for the end_of_batch call for batch 1 of stream 'rollouts' partition 0 from the producer at "
    assert awaited in lines()[0].getMessage()
    assert awaited in said
    assert "INFO" in said


def push_until_told(endpoint: str) -> None:
    """A batch that never ends."""
    with (
        suppress(streampack.errors.StreampackError),
        streampack.Producer(endpoint, stream="rollouts", partition=0, timeout_s=PATIENCE_S) as rollouts,
    ):
        rollouts._pushing._timeout_s = 3  # now, that it is connected
        while True:
            rollouts.send_many([np.ones(4000, np.int32)] * 4)


def test_a_batch_that_memory_cannot_hold_is_said_to_its_trainers() -> None:
    with folder() as path:
        config = pushed_settings(
            path, rules={"budget": 4096, "step": {"end_of_batch": True}}, memory="4MiB",
            limits={"chunk": "16KiB", "sample_tokens": 4096},
        )  # fmt: skip
        broker = RunningBroker(path, config)
        pushing = threading.Thread(target=push_until_told, args=(broker.producers,))
        pushing.start()
        try:
            with (
                pytest.raises(streampack.errors.Rejected, match="The batch is incomplete, but the memory is full"),
                streampack.connect(broker.trainers, format="numpy") as loader,
            ):
                next(loader.steps())
        finally:
            broker.kill()
            pushing.join(PATIENCE_S)


@pytest.mark.parametrize(
    ("rules", "streams", "why"),
    [
        ({"step": {"packs": 8, "samples": 4}}, {}, "step: got packs and samples, expected only one of packs, samples"),
        ({"step": {"end_of_batch": True}}, {}, "rules.step: got `end_of_batch` with stream 'web', which is not pushed"),
        ({"step": {"micro_batch_multiple": 2}}, {}, "rules: step: got micro_batch_multiple without samples or"),
        ({"step": {"samples": 4, "min_samples": 2}}, {}, "got `min_samples: 2` with `samples: 4`"),
        (
            {"step": {"samples": 4, "empty": "error"}}, {"planned_mesh": {"dp": 8}},
            "planned_mesh: got batches of 4 samples with dp=8 and `rules.step.empty: error`",
        ),
        ({"staleness": {"max_policy_lag": 2}}, {}, "rules.staleness.max_policy_lag: got 2 without a pushed stream"),
        ({"warmup": {"init": 9000, "steps": 4}}, {}, "got warmup.init 9000, expected 1 (align.pack) to 8192"),
    ],
)  # fmt: skip
def test_steps_that_cannot_be_are_refused_before_anything_starts(
    tmp_path: Path, rules: dict[str, Any], streams: dict[str, Any], why: str
) -> None:
    path = write(tmp_path / "broker.yaml", {"rules": rules, "streams": {"web": {}}} | streams)
    assert why in the_error(in_process("check", path), 2)


def test_check_says_what_follows_of_batches(tmp_path: Path) -> None:
    rules = {"budget": 512, "step": {"samples": 64, "min_micro_batches": 2}, "warmup": {"init": 128, "steps": 100}}
    path = write(tmp_path / "broker.yaml", {"rules": rules, "streams": {"web": {}}, "planned_mesh": {"dp": 3}})
    rows = json.loads(in_process("check", path, "--json").stdout)
    found = {row["path"]: row["value"] for row in [*rows["values"], *rows["follows"]]}
    assert found["rules.step.samples"] == 64
    assert found["rules.warmup.init"] == 128
    assert found["feeds.train.micro_batches"] == 2
    assert found["feeds.train.dp_sizes"][:4] == [1, 2, 3, 4]
    assert found["feeds.train.batch_tokens"] > 64 * 512


def test_a_feed_may_have_steps_of_another_kind_than_the_run(tmp_path: Path) -> None:
    path = write(tmp_path / "broker.yaml", {
        "rules": {"step": {"packs": 8}}, "streams": {"web": {}, "val": {}},
        "feeds": {"train": {"streams": ["web"]}, "valid": {"streams": ["val"], "rules": {"step": {"samples": 10}}}},
    })  # fmt: skip
    rows = json.loads(in_process("check", path, "--json").stdout)
    found = {row["path"]: row["value"] for row in rows["follows"]}
    assert found["feeds.train.step_tokens"] == 8 * 8192
    assert "feeds.valid.step_tokens" not in found
    assert found["feeds.valid.batch_tokens"] > 0
