"""Loaders in torch's checkpoints: found by its protocol, and gone on with where a StatefulDataLoader loads them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch.distributed.checkpoint.stateful import Stateful
from torchdata.stateful_dataloader import StatefulDataLoader

import streampack
from streampack.config.typed_yaml import convert
from streampack.sources import SourceSettings, open_source
from tests.integration.running import RunningBroker, producing_here, running_broker, write_jsonl

SAMPLES = 200
SETTINGS: dict[str, Any] = {
    "rules": {"budget": 256, "window": {"samples": 16}, "step": {"packs": 2}},
    "streams": {"text": {}, "more": {}},
    "feeds": {"train": {"streams": ["text"]}, "valid": {"streams": ["more"]}},
}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningBroker]:
    files = write_jsonl(
        tmp_path_factory.mktemp("data") / "text.jsonl", [{"text": "t" * (1 + i * 7 % 90)} for i in range(SAMPLES)]
    )
    source = open_source(convert({"source": "jsonl", "shards": str(files)}, SourceSettings))
    with running_broker(SETTINGS) as running, producing_here(running.producers, {"text": source}):
        yield running


def test_a_loader_is_found_by_its_protocol_wherever_it_runs(broker: RunningBroker) -> None:
    with streampack.connect(broker.trainers) as loader, streampack.local([[1] * 8] * 9, budget=16) as local:
        assert isinstance(loader, Stateful)
        assert isinstance(local, Stateful)


def test_a_stateful_dataloader_that_loads_around_the_first_iter_begins_where_it_says(broker: RunningBroker) -> None:
    """What torchdata's does with a dataset that is its own iterator: load, iter, load, next."""
    with streampack.connect(broker.trainers) as loader:
        golden = [pack.sample_ids.tolist() for pack in loader]
    with streampack.connect(broker.trainers) as loader:
        for _ in range(6):
            next(loader)
        state = loader.state_dict()
    with streampack.connect(broker.trainers) as loader:
        loader.load_state_dict(state)
        iterator = iter(loader)
        iterator.load_state_dict(state)  # type: ignore[attr-defined]
        assert [pack.sample_ids.tolist() for pack in iterator] == golden[6:]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torch's, of torchdata 0.11.0
def test_torchdatas_own_goes_on_without_reading_anything_twice(broker: RunningBroker) -> None:
    with streampack.connect(broker.trainers) as loader:
        batches = StatefulDataLoader(loader, batch_size=None, num_workers=0)
        first = [batch for _, batch in zip(range(6), batches, strict=False)]
        state = batches.state_dict()
    with streampack.connect(broker.trainers) as loader:
        batches = StatefulDataLoader(loader, batch_size=None, num_workers=0)
        batches.load_state_dict(state)
        rest = list(batches)
        assert loader.stats()["packs"] == len(rest)
    assert sum(batch.num_samples for batch in first + rest) == SAMPLES
