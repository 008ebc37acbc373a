"""Values of late fields that come too late: ``Producer.amend`` names the samples, whatever dropped them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import streampack
from streampack.errors import ValuesRejected
from streampack.producer.late_values import SampleId
from tests.integration.running import PATIENCE_S, RunningBroker, folder, running_broker, until
from tests.integration.samples.late_run import late_settings, rollout

REWARD = {"reward": {"dtype": "float64", "axis": "sample", "late": True}}


def config(path: Path, fields: dict[str, Any] | None = None, **rules: Any) -> dict[str, Any]:
    """The late_settings of a run whose samples wait for a reward, for at most a second."""
    before = late_settings(path)
    return before | {"fields": fields or REWARD, "rules": before["rules"] | {"late_timeout_s": 1} | rules}


@pytest.fixture(scope="module")
def broker() -> Iterator[RunningBroker]:
    with folder() as path, running_broker(config(path)) as running:
        yield running


def producer(broker: RunningBroker, partition: int | None = 0) -> streampack.Producer:
    return streampack.Producer(broker.producers, stream="rollouts", partition=partition, timeout_s=PATIENCE_S)


def dropped(broker: RunningBroker, rollouts: streampack.Producer, number: int = 1) -> SampleId:
    """A sample that the broker has dropped, because no value came."""
    before = broker.said.count("did not come within 1 s")
    seq = rollouts.send(ids(number))
    rollouts.flush()
    until(lambda: broker.said.count("did not come within 1 s") > before)
    return rollouts.sample_ids(seq)[0]


def ids(number: int) -> Any:
    return rollout(number)["input_ids"]


def test_values_of_a_dropped_sample_are_refused_and_counted(broker: RunningBroker) -> None:
    with producer(broker) as rollouts:
        late = dropped(broker, rollouts)
        for reward in (1.5, 2.5):
            seq = rollouts.send(ids(2))
            assert rollouts.amend([late, rollouts.sample_ids(seq)[0]], reward=[reward, 0.0]) == {late: "late_timeout"}
        stats = rollouts.stats()
        assert (stats["amended"], stats["not_amended"], stats["rejected"]) == (2, 2, 0)
    with producer(broker, None) as scorer:
        assert scorer.amend([tuple(late)], reward=[1.5]) == {late: "late_timeout"}
        assert scorer.stats() == {"amended": 0, "not_amended": 1}
    until(lambda: broker.status()["streams"][0]["late"]["refused"] == {"late_timeout": 1})  # each sample counts once
    assert 'streampack_late_refused_samples_total{stream="rollouts",reason="late_timeout"} 1' in broker.get("/metrics")


def test_the_log_of_the_producer_names_the_first_sample(
    broker: RunningBroker, caplog: pytest.LogCaptureFixture
) -> None:
    with producer(broker) as rollouts:
        late = dropped(broker, rollouts)
        for _ in range(2):
            rollouts.amend([late], reward=[1.5])
    (line,) = [each for each in caplog.messages if "are not trained" in each]
    assert f"sample {late.seq} of partition 0 are not trained (late_timeout): the sample was dropped" in line


def test_one_contradicting_value_does_not_hold_back_the_others(broker: RunningBroker) -> None:
    with producer(broker) as rollouts:
        first, second = rollouts.sample_ids(rollouts.send_many([ids(1), ids(2)]))
        rollouts.amend([first], reward=[1.5])
        with pytest.raises(ValuesRejected, match="got another value of reward than before") as refused:
            rollouts.amend([first, second], reward=[2.5, 3.5])
        assert refused.value.samples == {first: "other_value"}
        assert rollouts.amend([first, second], reward=[1.5, 3.5]) == {}
        assert (rollouts.stats()["amended"], rollouts.stats()["not_amended"]) == (4, 1)


def test_a_sample_that_the_producer_rejected_takes_no_value() -> None:
    with folder() as path:
        streams = {"rollouts": {"pushed": True, "partitions": 1, "poison": "drop"}}
        with running_broker(config(path) | {"streams": streams}) as broker, producer(broker) as rollouts:
            good, bad = rollouts.sample_ids(rollouts.send_many([ids(1), {"input_ids": [[1.5, "x"]]}]))
            assert rollouts.amend([good, bad], reward=[1.0, 2.0]) == {bad: "ragged"}
            until(lambda: broker.status()["streams"][0]["rejected"] == {"ragged": 1})


def test_a_value_that_comes_after_its_default_is_refused() -> None:
    fields = {"reward": REWARD["reward"] | {"default": 0.5}}
    with folder() as path, running_broker(config(path, fields)) as broker, producer(broker) as rollouts:
        late = dropped(broker, rollouts)
        assert rollouts.amend([late], reward=[1.5]) == {late: "default_used"}


def test_a_sample_of_an_old_policy_is_named() -> None:
    rules = {"staleness": {"max_policy_lag": 0}, "step": {"samples": 2}}
    with folder() as path, running_broker(config(path, **rules)) as broker, producer(broker) as rollouts:
        (new,) = rollouts.sample_ids(rollouts.send(ids(1), policy_version=5))
        assert rollouts.amend([new], reward=[1.0]) == {}
        (old,) = rollouts.sample_ids(rollouts.send(ids(2), policy_version=1))
        assert rollouts.amend([old], reward=[1.0]) == {old: "policy_lag"}
        assert rollouts.amend([old], reward=[1.0]) == {old: "policy_lag"}


def test_a_sample_after_the_end_of_its_partition_is_named(broker: RunningBroker) -> None:
    with folder() as path, running_broker(config(path)) as ended, producer(ended, None) as scorer:
        rollouts = producer(ended)
        (late,) = rollouts.sample_ids(rollouts.send(ids(1)))
        rollouts.close(end=True)
        beyond = late._replace(seq=7)
        assert scorer.amend([late, beyond], reward=[1.0, 2.0]) == {beyond: "ended"}


def test_a_restarted_broker_still_knows_what_was_dropped_and_who_sent_it() -> None:
    with folder() as path:
        broker = RunningBroker(path, config(path))
        try:
            with producer(broker) as rollouts:
                late = dropped(broker, rollouts)
                (kept,) = rollouts.sample_ids(rollouts.send(ids(2)))
                assert rollouts.amend([late, kept], reward=[1.0, 2.0]) == {late: "late_timeout"}
            with producer(broker) as another:
                (other,) = another.sample_ids(another.send(ids(3)))
                another.amend([other], reward=[3.0])
            broker.kill()
            broker = RunningBroker(path, config(path))
            with producer(broker, None) as scorer:
                assert scorer.amend([late, kept, other], reward=[9.0, 2.0, 3.0]) == {late: "late_timeout"}
                with pytest.raises(ValuesRejected, match="got another value of reward than before") as refused:
                    scorer.amend([late, kept], reward=[9.0, 9.0])
                assert refused.value.samples == {late: "late_timeout", kept: "other_value"}
                foreign = other._replace(process=late.process)
                with pytest.raises(ValuesRejected, match="got a value for a sample of another process") as refused:
                    scorer.amend([foreign], reward=[3.0])
                assert refused.value.samples == {foreign: "lost"}
        finally:
            broker.kill()
