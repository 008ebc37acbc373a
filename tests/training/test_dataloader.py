"""torch's DataLoader over a client: in the trainer's process a loop like any other; in workers it is refused."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import streampack
from streampack.config.typed_yaml import convert
from streampack.errors import PeerError, UserError
from streampack.sources import SourceSettings, open_source
from tests.integration.running import RunningBroker, producing_here, running_broker, write_jsonl

SETTINGS = {
    "rules": {"budget": 256, "step": {"packs": 2}},
    "streams": {"text": {}, "more": {}},
    "feeds": {"train": {"streams": ["text"]}, "valid": {"streams": ["more"]}},  # with several the producers stay
}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningBroker]:
    files = write_jsonl(
        tmp_path_factory.mktemp("data") / "text.jsonl", [{"text": "t" * (1 + i * 7 % 90)} for i in range(200)]
    )
    source = open_source(convert({"source": "jsonl", "shards": str(files)}, SourceSettings))
    with running_broker(SETTINGS) as running, producing_here(running.producers, {"text": source}):
        yield running


@pytest.mark.parametrize("format", ["thd", "hf"])
def test_a_dataloader_in_the_trainers_process_gives_the_views(broker: RunningBroker, format: str) -> None:
    with streampack.connect(broker.trainers, format=format, verify=True) as loader:
        batches = list(DataLoader(loader, batch_size=None, num_workers=0))  # type: ignore[arg-type]
    assert sum(batch.num_samples for batch in batches) == 200
    assert all(isinstance(batch["input_ids"], torch.Tensor) for batch in batches)


def test_a_local_loader_is_taken_like_any_other() -> None:
    with streampack.local([[1] * 8] * 30, budget=16, verify=True) as loader:
        for _ in range(2):
            batches = list(DataLoader(loader, batch_size=None, num_workers=0))  # type: ignore[arg-type]
            assert sum(batch.num_samples for batch in batches) == 30
            streampack.verify(batches[0], rules=loader.rules)
        with pytest.raises(UserError, match="got a client to pickle"):
            pickle.dumps(loader)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_workers_are_refused_with_what_to_do(broker: RunningBroker) -> None:
    with streampack.connect(broker.trainers) as loader:
        for start, error in (("fork", PeerError), ("spawn", UserError)):
            many: Any = DataLoader(loader, None, num_workers=2, multiprocessing_context=start)  # type: ignore[arg-type]
            with pytest.raises(error, match=r"use DataLoader\(loader, batch_size=None, num_workers=0\)"):
                next(iter(many))
        assert sum(pack.num_samples for pack in loader) == 200, "the trainer's own goes on"
