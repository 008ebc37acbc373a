"""Groups and policies' versions over real processes: none is torn or unaccounted for, whatever is killed."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

import streampack
from streampack.errors import Rejected, UserError
from tests.integration.running import PATIENCE_S, RunningBroker, folder, in_process, running_broker, until
from tests.integration.samples.pushed_run import pushed_settings

WORKERS, GROUPS = 2, 30
Packs = list[list[int]]
"""By pack the token of each sample, in its order: all samples of a group have the group's."""


def numbers(worker: int) -> range:
    return range(1000 * worker + 1, 1000 * worker + 1 + GROUPS)


def is_pair(number: int) -> bool:
    """Every other group is a pair that is kept in a pack; three samples are, where they can, kept in a step."""
    return number % 2 == 0


def work(endpoint: str, worker: int) -> None:
    with streampack.Producer(endpoint, stream="rollouts", partition=worker, buffer="8KiB") as rollouts:
        for number in numbers(worker):
            if is_pair(number):
                rollouts.send_group([[number] * (5 + number % 20), [number] * (1 + number % 30)], keep="pack")
            else:
                rollouts.send_group([[number] * (1 + (number + 7 * i) % 40) for i in range(3)])
        rollouts.close(end=True)


def read(endpoint: str, dp: int, rank: int, together: Barrier | None = None) -> list[Packs]:
    """What one rank gets of each step. It stays, as a trainer's ranks do, until all are at ``together``: a broker that
    is started again waits for all of them.
    """
    found: list[Packs] = []
    mesh = {"dp": dp, "dp_rank": rank}
    with streampack.connect(endpoint, mesh=mesh, format="numpy", verify=True, stall_timeout_s=PATIENCE_S) as loader:
        for step in loader.steps():
            packs = [(pack, pack.cu_seqlens_padded.tolist()) for pack in step]
            found.append([[int(pack.input_ids[at]) for at in starts[: pack.num_samples]] for pack, starts in packs])
        if together is not None:
            together.wait(PATIENCE_S)
    return found


@pytest.mark.parametrize("step", [{"packs": 4}, {"samples": 8}], ids=["stream", "batches"])
def test_no_group_is_torn_though_the_broker_is_killed(step: dict[str, Any]) -> None:
    """Killed while workers push, and again when all is safe; two ranks read what DEAL makes of it."""
    with folder() as path, ThreadPoolExecutor(WORKERS + 2) as pool:
        config = pushed_settings(path, rules={"budget": 64, "window": {"samples": 8}, "step": step})
        broker = RunningBroker(path, config)
        try:
            workers = [pool.submit(work, broker.producers, worker) for worker in range(WORKERS)]
            until(lambda: broker.status()["streams"][0]["samples"] > 0)
            broker.kill()
            broker = RunningBroker(path, config)
            together = Barrier(2)
            ranks = [pool.submit(read, broker.trainers, 2, rank, together) for rank in range(2)]
            for worker in workers:
                worker.result(PATIENCE_S)
            broker.kill()
            broker = RunningBroker(path, config)
            steps = [one + other for one, other in zip(*(rank.result(PATIENCE_S) for rank in ranks), strict=True)]
            verified = in_process("ledger", "verify", "--state-dir", path / "state", "--json")
            dealt = [why(path, number) for number in range(len(steps))]
        finally:
            broker.kill()
    assert json.loads(verified.stdout)["good"], verified.stdout
    assert [sorted(map(len, packs)) for packs in dealt] == [sorted(map(len, packs)) for packs in steps]
    where = dict[int, list[tuple[int, int, int]]]()
    for number, packs in enumerate(steps):
        for at, pack in enumerate(packs):
            for place, token in enumerate(pack):
                where.setdefault(token, []).append((number, at, place))
    assert sorted(where) == [number for worker in range(WORKERS) for number in numbers(worker)]
    for number, places in where.items():
        assert len(places) == (2 if is_pair(number) else 3)
        if is_pair(number):
            (one, at, place), other = places
            assert other == (one, at, place + 1), "the pair follows each other in one pack"
        elif "samples" in step:
            assert len({one for one, *_ in places}) == 1
    if "samples" in step:
        assert all(8 <= sum(map(len, packs)) <= 10 for packs in steps[:-1]), "a batch ends with the group that fills it"


def why(path: Path, step: int) -> list[list[Any]]:
    """The samples of each pack as two ranks get them, of the ledger."""
    words = ("why", "--step", str(step), "--dp-size", "2", "--state-dir", path / "state", "--json")
    return [pack["samples"] for pack in json.loads(in_process(*words).stdout)["packs"]]


def test_a_group_that_cannot_be_kept_together_is_refused_and_says_what_to_do() -> None:
    with folder() as path, running_broker(pushed_settings(path)) as broker:
        with streampack.Producer(broker.producers, stream="rollouts") as rollouts:
            with pytest.raises(UserError, match=r"expected keep='pack' or no keep\. For batches, set"):
                rollouts.send_group([[1], [2]], keep="step")
            rollouts.send_group([[1] * 40, [2] * 24], keep="pack")
            rollouts.flush()
        with pytest.raises(Rejected, match="samples rollouts:4 to 6: got a group of 2 samples and 65 tokens "):
            push_pair(broker.producers, 40, 25)


def push_pair(endpoint: str, *lengths: int) -> None:
    with streampack.Producer(endpoint, stream="rollouts") as rollouts:
        rollouts.send_group([[1] * length for length in lengths], keep="pack")


def of_the_stream(broker: RunningBroker, name: str) -> Any:
    """What the status says of the only one."""
    return broker.status()["streams"][0][name]


def test_a_pair_that_no_pack_holds_is_dropped_whole_and_counted_where_the_policy_says_so() -> None:
    with folder() as path:
        rules = {"budget": 64, "window": {"samples": 8}, "step": {"packs": 2}, "overlong": "drop"}
        with running_broker(pushed_settings(path, rules=rules)) as broker:
            with streampack.Producer(broker.producers, stream="rollouts") as rollouts:
                rollouts.send_group([[1] * 40, [1] * 25], keep="pack")
                rollouts.send_group([[2] * 40, [2] * 24], keep="pack")
                rollouts.send_group([[3] * 65, [3] * 30, [3] * 30], keep="pack")  # two of it are a pair
                rollouts.close(end=True)
            streampack.Producer(broker.producers, stream="rollouts", partition=1).close(end=True)
            assert [pack for step in read(broker.trainers, 1, 0) for pack in step if pack] == [[2, 2], [3, 3]]
            until(lambda: of_the_stream(broker, "overlong") == 3)  # what is published is half a second old
            assert of_the_stream(broker, "lost_tokens") == 130
            verified = json.loads(in_process("ledger", "verify", "--state-dir", path / "state", "--json").stdout)
    assert verified["good"], verified
    assert verified["feeds"]["train"]["streams"]["rollouts"]["rejected"] == 3


def test_samples_of_an_old_policy_are_dropped_and_counted_though_the_broker_is_killed() -> None:
    with folder() as path:
        rules = {"budget": 64, "window": {"samples": 8}, "step": {"packs": 2}, "overlong": "drop"}
        rules |= {"staleness": {"max_policy_lag": 1}}
        config = pushed_settings(path, rules=rules)
        broker = RunningBroker(path, config)
        try:
            with streampack.Producer(broker.producers, stream="rollouts") as rollouts:
                rollouts.send_group([[1], [1]], policy_version=3)
                rollouts.send_many([[2], [2]], policy_version=2)  # as old as may be
                rollouts.flush()
                broker.kill()
                broker = RunningBroker(path, config)
                rollouts.send_group([[3], [3], [3]], keep="pack", policy_version=1)
                rollouts.send([4])
                rollouts.send([5], policy_version=4)
                rollouts.send([6], policy_version=2)
                rollouts.close(end=True)
            streampack.Producer(broker.producers, stream="rollouts", partition=1).close(end=True)
            until(lambda: of_the_stream(broker, "rejected") == {"policy_lag": 4})
            broker.kill()
            broker = RunningBroker(path, config)
            tokens = sorted(token for step in read(broker.trainers, 1, 0) for pack in step for token in pack)
            until(lambda: of_the_stream(broker, "rejected") == {"policy_lag": 4})
            lost, metrics = broker.status()["feeds"]["train"]["lost_tokens"], broker.get("/metrics")
            verified = json.loads(in_process("ledger", "verify", "--state-dir", path / "state", "--json").stdout)
            why_not = in_process("why", "--sample", "rollouts:8", "--state-dir", path / "state", "--json")
        finally:
            broker.kill()
    assert tokens == [1, 1, 2, 2, 4, 5]
    assert (lost["policy_lag"], lost["dropped"]) == (4, 0), "none of it was over-long"
    assert 'reason="policy_lag"' in metrics
    assert verified["good"], verified
    assert verified["feeds"]["train"]["streams"]["rollouts"]["rejected"] == 4
    found = json.loads(why_not.stdout)
    assert (found["is"], found["why"]) == ("rejected", "policy_lag")
