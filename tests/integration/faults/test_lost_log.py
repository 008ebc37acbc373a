"""A pushed stream's log that is lost: the trainers hear what was lost, and do not wait for it in the dark."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import streampack
from streampack.client.connect import Client
from streampack.errors import StreampackError
from tests.integration.running import PATIENCE_S, RunningBroker, folder, until
from tests.integration.samples.pushed_run import pushed_settings

SAMPLES = 300


def push(broker: RunningBroker, first: int) -> None:
    with streampack.Producer(broker.producers, stream="rollouts", partition=0, timeout_s=PATIENCE_S) as producer:
        for i in range(SAMPLES):
            producer.send([1, 2, 3, first + i], policy_version=0, group=i)


def connect(broker: RunningBroker) -> Client:
    return streampack.connect(broker.trainers, stall_timeout_s=8.0)


def state_at(broker: RunningBroker, step: int) -> dict[str, Any]:
    with connect(broker) as loader:
        for found in loader.steps():
            if found.index == step:
                return loader.state_dict(step)
    raise AssertionError("the feed has ended")


@pytest.mark.parametrize(("step", "pushed_again"), [(2, False), (2, True), (0, True), (0, False)])
def test_trainers_hear_that_the_log_was_lost(step: int, pushed_again: bool, caplog: pytest.LogCaptureFixture) -> None:
    """With a snapshot in the checkpoint (step 2), and without. Where nothing was pushed again, and no snapshot says
    how much there was, the trainer waits and says so.
    """
    with folder() as path, ThreadPoolExecutor(1) as pool:
        config = pushed_settings(path, streams={"rollouts": {"pushed": True, "partitions": 1}})
        broker = RunningBroker(path, config)
        push(broker, 0)
        state = state_at(broker, step)
        broker.kill()
        shutil.rmtree(path / "state")
        broker = RunningBroker(path, config)
        try:
            if pushed_again:
                push(broker, 5)
            with connect(broker) as loader:
                loader.load_state_dict(state)
                reading = pool.submit(lambda: next(loader.steps()))
                until(lambda: reading.done() or "are lost" in caplog.text)
            with pytest.raises(StreampackError) as error:
                reading.result(PATIENCE_S)
            said = caplog.text if (step, pushed_again) == (0, False) else str(error.value)
            assert " lost" in said
            assert "state_dir" in said
        finally:
            broker.kill()
