"""Late fields with a real broker: processes that give values, one that is killed, and everything that is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import streampack
from streampack.errors import DataStall, Rejected, SampleError, UserError
from tests.integration.running import PATIENCE_S, RunningBroker, folder, in_process, running_broker, until
from tests.integration.running import streampack as command
from tests.integration.samples.late_run import late_settings, rollout

GROUPS, MEMBERS = 60, 4


def score(endpoint: str, ids: Any, numbers: list[int], twice: bool = False) -> None:
    """A reward process: it has only the ids."""
    with streampack.Producer(endpoint, stream="rollouts", partition=None, timeout_s=PATIENCE_S) as scorer:
        for _ in range(1 + twice):
            scorer.amend(ids, reward=[number / 4 for number in numbers])


def generate(endpoint: str) -> None:
    """Sends groups; other processes give rewards in another order, and this one gives advantages."""
    with (
        streampack.Producer(endpoint, stream="rollouts", timeout_s=PATIENCE_S) as rollouts,
        ThreadPoolExecutor(2) as pool,
    ):
        waiting = []
        for group in range(GROUPS):
            numbers = list(range(group * MEMBERS, group * MEMBERS + MEMBERS))
            seqs = rollouts.send_group([rollout(number) for number in numbers])
            scored = pool.submit(score, endpoint, rollouts.sample_ids(seqs), numbers, group % 3 == 0)
            waiting.append((seqs, numbers, scored))
            if group % 8 == 7:
                for mine, given, done in reversed(waiting):
                    done.result()
                    lengths = [len(rollout(number)["input_ids"]) for number in given]
                    values = [np.full(n, number, np.float32) for n, number in zip(lengths, given, strict=True)]
                    rollouts.amend(mine, advantages=values)
                waiting.clear()
        for mine, given, done in waiting:
            done.result()
            rollouts.amend(mine, advantages=[np.full(len(rollout(n)["input_ids"]), n, np.float32) for n in given])
        rollouts.close(end=True)


def read(endpoint: str) -> list[tuple[list[int], float, list[float], list[float]]]:
    found = []
    with streampack.connect(endpoint, format="numpy", verify=True, stall_timeout_s=PATIENCE_S) as loader:
        for step in loader.steps():
            for pack in step:
                for i in range(pack.num_samples):
                    span = slice(*pack.cu_seqlens[i : i + 2].tolist())
                    found.append((
                        pack.input_ids[span].tolist(), float(pack["reward"][i]),
                        pack["advantages"][span].tolist(), pack["logprobs"][span].tolist(),
                    ))  # fmt: skip
    return found


def check(found: list[tuple[list[int], float, list[float], list[float]]]) -> None:
    by_ids = {tuple(ids): (reward, advantages, logprobs) for ids, reward, advantages, logprobs in found}
    assert len(found) == len(by_ids) == GROUPS * MEMBERS
    for number in range(GROUPS * MEMBERS):
        ids = tuple(rollout(number)["input_ids"].tolist())
        reward, advantages, logprobs = by_ids[ids]
        assert reward == number / 4
        assert advantages == [float(number)] * (len(ids) - 1) + [0.0]
        assert logprobs == [float(number)] * (len(ids) - 1) + [0.0]


def test_values_come_with_their_samples_whoever_is_killed() -> None:
    """The broker is killed twice with samples that wait for values."""
    with folder() as path, ThreadPoolExecutor() as pool:
        config = late_settings(path)
        broker = RunningBroker(path, config)
        try:
            worker = pool.submit(generate, broker.producers)
            until(lambda: broker.status()["streams"][0]["samples"] > 40)
            broker.kill()
            broker = RunningBroker(path, config)
            until(lambda: broker.status()["streams"][0]["samples"] > 40)
            reader = pool.submit(read, broker.trainers)
            until(lambda: broker.feed()["steps"]["returned"] > 2)
            broker.kill()
            broker = RunningBroker(path, config)
            worker.result(PATIENCE_S)
            check(reader.result(PATIENCE_S))
        finally:
            broker.kill()
        state = ("--state-dir", str(path / "state"))
        assert json.loads(command("ledger", "verify", *state, "--json").stdout)["good"]
        found = [json.loads(in_process("why", "--sample", f"rollouts:0:{number}", *state, "--json").stdout)
                 for number in range(0, GROUPS * MEMBERS, 17)]  # fmt: skip
        for number, each in zip(range(0, GROUPS * MEMBERS, 17), found, strict=True):
            (place,) = each["places"]
            assert (each["is"], each["sent"]["seq"]) == ("step", number)
            assert place["length"] == len(rollout(number)["input_ids"])
        moved = next(each for each in found if each["index"] != each["sent"]["seq"])
        shown = command("why", "--sample", f"rollouts:0:{moved['sent']['seq']}", *state).stdout
        assert f"rollouts:{moved['index']}  feed train" in shown
        said = "was sent as sample {seq} of partition 0, and waited for its late fields (advantages,"
        assert said.format(**moved["sent"]) in shown


def test_why_tells_of_a_sample_that_waits() -> None:
    with folder() as path, running_broker(late_settings(path)) as broker:
        with streampack.Producer(broker.producers, stream="rollouts", timeout_s=PATIENCE_S) as rollouts:
            seq = rollouts.send(rollout(1))
            rollouts.amend(seq, reward=[1.5])
        shown = command("why", "--sample", f"rollouts:0:{seq}", "--state-dir", str(path / "state")).stdout
        assert shown == (
            f"rollouts:0:{seq}  feed train\nwaiting: the sample waits for its late fields (advantages, reward)\n"
        )


@pytest.fixture(scope="module")
def broker() -> Iterator[RunningBroker]:
    with folder() as path:
        rules = late_settings(path)["rules"] | {"late_timeout_s": 2}
        with running_broker(late_settings(path, rules=rules)) as running:
            yield running


def test_a_value_is_given_once(broker: RunningBroker) -> None:
    with streampack.Producer(broker.producers, stream="rollouts", timeout_s=PATIENCE_S) as rollouts:
        seq = rollouts.send(rollout(1))
        length = len(rollout(1)["input_ids"])
        rollouts.amend(seq, reward=[1.5])
        rollouts.amend([seq], reward=[1.5])
        with pytest.raises(Rejected, match=r"got another value of reward than before"):
            rollouts.amend(seq, reward=[2.5])
        rollouts.amend(seq, advantages=[np.zeros(length)])
        with pytest.raises(Rejected, match=r"got another value of advantages than before"):
            rollouts.amend(seq, advantages=[np.ones(length)])


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"reward": ["x"]}, SampleError, r"got a value of reward that cannot be used \(dtype\)"),
        ({"reward": [[1.0]]}, SampleError, r"\(shape\), expected dtype float64 and shape \[\]"),
        ({"reward": [1.0, 2.0]}, UserError, "got 2 values of reward for 1 samples"),
        ({"logprobs": [np.zeros(6)]}, UserError, "got values of 'logprobs', expected one of the late fields: adv"),
        ({}, UserError, "got no values"),
        ({"advantages": [np.zeros(3)]}, Rejected, "got 3 values, expected 6, one per token"),
    ],
)
def test_values_that_do_not_fit_are_refused(
    broker: RunningBroker, fields: dict[str, Any], error: type[Exception], message: str
) -> None:
    with streampack.Producer(broker.producers, stream="rollouts", timeout_s=PATIENCE_S) as rollouts:
        seq = rollouts.send(rollout(1))
        with pytest.raises(error, match=message):
            rollouts.amend(seq, **fields)


def test_a_process_that_is_started_again_gives_values_to_samples_of_the_one_before(broker: RunningBroker) -> None:
    with streampack.Producer(broker.producers, stream="rollouts", timeout_s=PATIENCE_S) as rollouts:
        seq = rollouts.send(rollout(1))
        own = rollouts.sample_ids(seq)
    with streampack.Producer(broker.producers, stream="rollouts", timeout_s=PATIENCE_S) as rollouts:
        assert rollouts.sample_ids(seq)[0].process == 0
        rollouts.amend(seq, reward=[1.5])
        rollouts.amend(own, reward=[1.5])


def test_ids_that_name_no_sample_are_refused(broker: RunningBroker) -> None:
    with streampack.Producer(broker.producers, stream="rollouts", timeout_s=PATIENCE_S) as rollouts:
        seq = rollouts.send(rollout(1))
        (partition, _, process) = rollouts.sample_ids(seq)[0]
        with pytest.raises(DataStall, match="It may not have these samples yet"):
            rollouts.amend([(partition, seq + 5, process)], reward=[1.0], timeout_s=0.5)
        with pytest.raises(Rejected, match="got a value for a sample of another process"):
            rollouts.amend([(partition, seq, process + 1)], reward=[1.0])
        with pytest.raises(UserError, match=r"expected an id from Producer\.sample_ids"):
            rollouts.amend(["7"], reward=[1.0])  # type: ignore[list-item]
        with pytest.raises(SampleError, match="got a value of reward with a sample, expected none"):
            rollouts.send(rollout(1) | {"reward": 1.0})
    with streampack.Producer(broker.producers, stream="rollouts", partition=None, timeout_s=PATIENCE_S) as scorer:
        with pytest.raises(UserError, match="got samples for a producer without a partition"):
            scorer.send([1, 2])
        with pytest.raises(Rejected, match="expected a partition of a stream with late fields"):
            scorer.amend([(3, 0, 0)], reward=[1.0])


def test_a_value_that_never_comes_is_said_and_counted(broker: RunningBroker) -> None:
    with streampack.Producer(broker.producers, stream="rollouts", timeout_s=PATIENCE_S) as rollouts:
        before = broker.status()["streams"][0]["rejected"].get("late_timeout", 0)
        rollouts.send(rollout(1))
        rollouts.flush()
        until(lambda: broker.status()["streams"][0]["rejected"].get("late_timeout", 0) > before)
    assert "did not come within 2 s (late_timeout_s)" in broker.said
