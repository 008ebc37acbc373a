"""Values that trainers report, policies that they publish, and a broker that is killed in between."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, Event
from typing import Any

import numpy as np
import pytest
import torch

import streampack
from streampack.errors import DataStall, Rejected, UserError
from tests.integration.running import PATIENCE_S, RunningBroker, folder, running_broker, until
from tests.integration.running import streampack as command

COUNT, BATCH = 96, 12


def settings(path: Path, **changes: Any) -> dict[str, Any]:
    sides = {side: f"ipc://{path}/{side}" for side in ("producers", "trainers")}
    return {
        "run": "results",
        "listen": {**sides, "http": "127.0.0.1:0"},
        "merge": "arrival",
        "state_dir": str(path / "state"),
        "rules": {"budget": 64, "step": {"samples": BATCH}},
        "planned_mesh": {"dp": 2, "cp": 2},
        "streams": {"rollouts": {"pushed": True, "partitions": 2}},
    } | changes


def push(endpoint: str, partition: int) -> None:
    with streampack.Producer(endpoint, stream="rollouts", partition=partition, timeout_s=PATIENCE_S) as rollouts:
        for number in range(COUNT // 2):
            rollouts.send([1000 * partition + number + 1] * (3 + number % 5))
        rollouts.close(end=True)


def train(endpoint: str, dp_rank: int, cp_rank: int, together: Barrier, resume: Event) -> int:
    """Report the part of each sample's tokens that this rank holds, and a value that all ranks have whole.

    All ranks take a step at the same time, as trainers do. After three steps they wait for ``resume``.
    """
    mesh = {"dp": 2, "cp": 2, "dp_rank": dp_rank, "cp_rank": cp_rank}
    done = 0
    with streampack.connect(
        endpoint, mesh=mesh, format="numpy", stall_timeout_s=PATIENCE_S, timeout_s=PATIENCE_S
    ) as loader:
        for step in loader.steps():
            held = []
            for pack in step:
                mine = streampack.per_sample(torch.from_numpy(pack.input_ids), pack)
                held += [float((ids > 0).sum()) for ids in mine]
            step.report({"tokens": held})
            step.report({"index": torch.tensor(step.sample_ids[:, 1]).bfloat16().float()}, reduce="same")
            if dp_rank == cp_rank == 0:
                loader.publish(step.index + 1)
            done += 1
            if done == 3:
                resume.wait(PATIENCE_S)
            together.wait(PATIENCE_S)
    return done


def read(endpoint: str, name: str, start: Any = "oldest", upto: int = COUNT // BATCH) -> list[streampack.StepResults]:
    found = []
    with streampack.results(endpoint, start=start, timeout_s=PATIENCE_S) as steps:
        for step in steps:
            if name in step.values:
                found.append(step)
            if len(found) == upto:
                break
    return found


def check(found: list[streampack.StepResults]) -> None:
    """Each sample of each step once, with the values of all ranks."""
    assert [step.step for step in found] == list(range(COUNT // BATCH))
    seen = set()
    for step in found:
        assert len(step) == BATCH
        for row in range(len(step)):
            partition, seq = int(step.partitions[row]), int(step.seqs[row])
            assert step.values["tokens"][row] == 3 + seq % 5
            assert step.sample_ids[row].tolist() == [0, 2 * seq + partition, 0]
            assert step.streams[row] == "rollouts"
            seen.add((partition, seq))
    assert seen == {(partition, seq) for partition in range(2) for seq in range(COUNT // 2)}


def test_values_of_all_ranks_come_back_once_whoever_is_killed() -> None:
    with folder() as path, ThreadPoolExecutor(8) as pool:
        config = settings(path)
        broker = RunningBroker(path, config)
        try:
            pushed = [pool.submit(push, broker.producers, partition) for partition in range(2)]
            together, resume = Barrier(4), Event()
            ranks = [
                pool.submit(train, broker.trainers, dp, cp, together, resume) for dp in range(2) for cp in range(2)
            ]
            live = pool.submit(read, broker.trainers, "tokens")
            until(lambda: broker.feed()["steps"]["returned"] == 2)
            broker.kill()
            resume.set()
            broker = RunningBroker(path, config)
            assert [rank.result(PATIENCE_S) for rank in ranks] == [COUNT // BATCH] * 4
            for each in pushed:
                each.result(PATIENCE_S)
            check(live.result(PATIENCE_S))
            check(read(broker.trainers, "tokens"))
            third = read(broker.trainers, "tokens", upto=3)[-1]
            rest = read(broker.trainers, "tokens", start=third.cursor, upto=COUNT // BATCH - 3)
            assert [step.step for step in rest] == list(range(3, COUNT // BATCH)), "goes on from a cursor"
            same = read(broker.trainers, "index")
            assert sorted(step.step for step in same) == list(range(COUNT // BATCH))
            assert [step.values["index"].tolist() for step in same] == [
                step.sample_ids[:, 1].astype(float).tolist() for step in same
            ], "a value that each context-parallel rank has whole is not added up"
            state = ("--state-dir", str(path / "state"))
            for step in same[::3]:
                partition, seq = int(step.partitions[5]), int(step.seqs[5])
                name = f"rollouts:{partition}:{seq}"
                (place,) = json.loads(command("why", "--sample", name, *state, "--json").stdout)["places"]
                assert (place["step"], place["values"]) == (
                    step.step, {"tokens": 3 + seq % 5, "index": 2 * seq + partition}
                )  # fmt: skip
        finally:
            broker.kill()


def test_a_step_that_others_are_done_with_is_complete_after_the_broker_has_restarted() -> None:
    """A rank reports the last step after the broker was killed, and the other rank has reported it and left."""
    with folder() as path:
        config = settings(path, planned_mesh={"dp": 2}) | {"rules": {"budget": 64, "step": {"samples": 2}}}
        broker = RunningBroker(path, config)
        try:
            with streampack.Producer(broker.producers, stream="rollouts", timeout_s=PATIENCE_S) as rollouts:
                rollouts.send_many([[1, 2], [3, 4]])
            ranks = [
                streampack.connect(
                    broker.trainers, mesh={"dp": 2, "dp_rank": rank}, format="numpy", timeout_s=PATIENCE_S
                )
                for rank in range(2)
            ]
            with ThreadPoolExecutor(2) as pool:
                steps = list(pool.map(lambda rank: next(rank.steps()), ranks))
            steps[0].report({"reward": [5.0] * len(steps[0].sample_ids)})
            ranks[0].close()
            broker.kill()
            broker = RunningBroker(path, config)
            until(lambda: broker.feed()["ranks"].get("attached") == 1)
            steps[1].report({"reward": [5.0] * len(steps[1].sample_ids)})
            (complete,) = read(broker.trainers, "reward", upto=1)
            assert complete.values["reward"].tolist() == [5.0, 5.0]
            ranks[1].close()
        finally:
            broker.kill()


@pytest.fixture(scope="module")
def broker() -> Iterator[RunningBroker]:
    with folder() as path:
        rules = {"budget": 64, "step": {"samples": 2}, "staleness": {"max_policy_lag": 1}}
        with running_broker(settings(path, rules=rules, planned_mesh={})) as running:
            yield running


def test_a_published_policy_is_told_to_those_that_push(broker: RunningBroker) -> None:
    with streampack.Producer(broker.producers, stream="rollouts", timeout_s=PATIENCE_S) as rollouts:
        assert rollouts.policy_version() is None
        with pytest.raises(DataStall, match="policy version 0, which the trainers have not published"):
            rollouts.wait_for(0, timeout_s=0.3)
        with streampack.connect(broker.trainers, format="numpy", timeout_s=PATIENCE_S) as loader:
            loader.publish(3)
            assert rollouts.wait_for(2) == 3
            assert rollouts.policy_version() == 3
            with pytest.raises(UserError, match="got policy version 2 after version 3"):
                loader.publish(2)
            with pytest.raises(UserError, match="got version=-1"):
                loader.publish(-1)
            loader.publish(4)
            assert rollouts.wait_for(4) == 4
            for wrong in (-1, "new", 1.5, None):
                with pytest.raises(UserError, match=r"got version=.*, expected an integer of at least 0"):
                    rollouts.wait_for(wrong)  # type: ignore[arg-type]
                with pytest.raises(UserError, match=r"got samples=.*, expected a whole number of at least 0"):
                    rollouts.give_back(wrong)  # type: ignore[arg-type]
            with pytest.raises(UserError, match="got policy_version='old', expected an integer of at least 0"):
                rollouts.give_back(0, "old")  # type: ignore[arg-type]
            rollouts.give_back(0)
        rollouts.send([1, 2, 3], policy_version=3)
        rollouts.send([1, 2, 3], policy_version=2)
        rollouts.flush()
        until(lambda: broker.status()["streams"][0]["rejected"].get("policy_lag") == 1)


def test_values_that_do_not_fit_are_refused(broker: RunningBroker) -> None:
    with streampack.Producer(broker.producers, stream="rollouts", partition=1, timeout_s=PATIENCE_S) as rollouts:
        rollouts.send_many([[1, 2], [3, 4], [5, 6], [7, 8]])
    with streampack.connect(broker.trainers, format="numpy", timeout_s=PATIENCE_S) as loader:
        step = next(iter(loader.steps()))
        with pytest.raises(UserError, match=r"got values of reward of shape \[3\], expected \[2\]"):
            step.report({"reward": np.zeros(3)})
        with pytest.raises(UserError, match="got values of reward that are not numbers"):
            step.report({"reward": ["x", "y"]})
        with pytest.raises(UserError, match="got 0 values for each sample"):
            step.report({})
        with pytest.raises(UserError, match="got reduce='mean'"):
            step.report({"reward": [1.0, 2.0]}, reduce="mean")  # type: ignore[arg-type]
        step.report({"reward": [1.0, 2.0]})
        step.report({"reward": [3.0, 4.0]})  # the first one counts
        (found,) = read(broker.trainers, "reward", upto=1)
        assert found.values["reward"].tolist() == [1.0, 2.0]
        from dataclasses import replace

        with pytest.raises(Rejected, match="got values for step 99, expected a step that was served"):
            replace(step, index=99).report({"reward": [1.0, 2.0]})
    with pytest.raises(UserError, match="expected 'oldest', 'newest' or the cursor"):
        streampack.results(broker.trainers, start="first")  # type: ignore[arg-type]
    with pytest.raises(Rejected, match="got feed 'zz', expected one of: 'train'"):
        next(streampack.results(broker.trainers, feed="zz", timeout_s=PATIENCE_S))


def test_the_iteration_over_results_ends_if_no_step_comes_in_time(tmp_path: Path) -> None:
    with (
        running_broker(settings(tmp_path)) as broker,
        streampack.results(broker.trainers, start="oldest", timeout_s=1) as steps,
    ):
        assert list(steps) == []


def test_a_long_wait_for_a_policy_is_information_that_names_it(
    broker: RunningBroker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with streampack.Producer(broker.producers, stream="rollouts", partition=0, timeout_s=PATIENCE_S) as rollouts:
        with pytest.raises(DataStall, match="policy version 50"):
            rollouts.wait_for(50, timeout_s=6)
        said = [record for record in caplog.records if "waiting for policy version 50" in record.getMessage()]
        assert {record.levelname for record in said} == {"INFO"}


def test_errors_of_a_subscriber_do_not_speak_of_a_producer(broker: RunningBroker) -> None:
    steps = streampack.results(broker.trainers)
    steps.close()
    with pytest.raises(UserError, match="the client is closed"):
        next(steps)
