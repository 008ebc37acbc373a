"""Peers of another protocol version hear both versions at once, instead of waiting for an answer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import streampack
from streampack.errors import Rejected
from streampack.producer.loop import ProducerLoop
from streampack.sources import SourceSettings, TokenizerSettings, open_source, open_tokenizer
from streampack.wire import frames as wire
from tests.integration.running import PATIENCE_S, RunningBroker, folder, write_jsonl
from tests.integration.samples.pushed_run import pushed_settings

SOON_S = 5.0


@pytest.fixture(scope="module")
def broker() -> Iterator[RunningBroker]:
    with folder() as path:
        streams = {"rollouts": {"pushed": True, "partitions": 2}, "web": {}}
        found = RunningBroker(path, pushed_settings(path, streams=streams))
        yield found
        found.kill()


@pytest.mark.parametrize("version", [0, 2, 255])
@pytest.mark.parametrize("peer", ["trainer", "producer", "pushing"])
def test_a_peer_of_another_version_hears_both_at_once(
    broker: RunningBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int, peer: str
) -> None:
    ours = wire.VERSION

    def come() -> None:
        if peer == "trainer":
            streampack.connect(broker.trainers, timeout_s=PATIENCE_S)
        elif peer == "pushing":
            streampack.Producer(broker.producers, stream="rollouts", partition=0, timeout_s=PATIENCE_S)
        else:
            shards = str(write_jsonl(tmp_path / "a.jsonl", [{"tokens": [1]}]))
            source = open_source(
                SourceSettings(source="jsonl", shards=shards, tokens_key="tokens"), open_tokenizer(TokenizerSettings())
            )
            ProducerLoop(broker.producers, {"web": source}, timeout_s=PATIENCE_S).run()

    monkeypatch.setattr(wire, "VERSION", version)
    began = time.monotonic()
    with pytest.raises(Rejected) as error:
        come()
    assert time.monotonic() - began < SOON_S
    assert error.value.code == "version"
    assert f"uses protocol version {version}" in str(error.value)
    assert f"uses version {ours}" in str(error.value)


def test_a_broker_serves_others_beside_a_peer_of_another_version(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(wire, "VERSION", wire.VERSION + 1)
        with pytest.raises(Rejected):
            streampack.connect(broker.trainers)
    with streampack.Producer(broker.producers, stream="rollouts", partition=0) as producer:
        producer.send(np.array([1, 2, 3], np.int32), policy_version=0, group=0)
