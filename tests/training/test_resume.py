"""Loaders in torch's checkpoints: found by its protocol, saved by every rank, loaded on another number of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.stateful import Stateful
from torchdata.stateful_dataloader import StatefulDataLoader

import streampack
from streampack.sources import SourceSettings, open_source
from streampack.typed_tree import convert
from tests.integration.running import PATIENCE_S, RunningBroker, producing_here, running_broker, write_jsonl

SAMPLES = 200
SETTINGS: dict[str, Any] = {
    "rules": {"budget": 256, "window": {"samples": 16}, "step": {"packs": 2}},
    "streams": {"text": {}, "more": {}},
    "feeds": {"train": {"streams": ["text"]}, "valid": {"streams": ["more"]}},
}
SCRIPT = """
import json, sys, torch.distributed as dist, torch.distributed.checkpoint as dcp, streampack

folder, resume, count = sys.argv[1], sys.argv[2] == "resume", int(sys.argv[3])
dist.init_process_group("gloo")
with streampack.connect(order="dp", verify=True) as loader:
    if resume:
        dcp.load({"loader": loader}, checkpoint_id=folder)  # asks for a state before it gives one
    steps = loader.steps()
    found = [(step.digest, step.sample_ids.tolist()) for _, step in zip(range(count), steps)]  # takes none too many
    dcp.save({"loader": loader}, checkpoint_id=folder)
    if dist.get_rank() == 0:
        loader.commit(loader.state_dict()["next_step"] - 1)
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, (found, loader.state_dict()))
if dist.get_rank() == 0:
    print(json.dumps(ranks))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningBroker]:
    files = write_jsonl(
        tmp_path_factory.mktemp("data") / "text.jsonl", [{"text": "t" * (1 + i * 7 % 90)} for i in range(SAMPLES)]
    )
    source = open_source(convert({"source": "jsonl", "shards": str(files)}, SourceSettings))
    with running_broker(SETTINGS) as running, producing_here(running.producers, {"text": source}):
        yield running


def torchrun(script: Path, ranks: int, broker: RunningBroker, *arguments: str) -> Any:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    paths = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*command, str(script), *arguments], capture_output=True, text=True, timeout=PATIENCE_S,
        env=os.environ | {"STREAMPACK_ENDPOINT": broker.trainers, "PYTHONPATH": paths},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_distributed_checkpoint_of_two_ranks_is_gone_on_with_by_one(broker: RunningBroker, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    folder = str(tmp_path / "checkpoint")
    two = torchrun(tmp_path / "train.py", 2, broker, folder, "begin", "5")
    (one,) = torchrun(tmp_path / "train.py", 1, broker, folder, "resume", "1000000")
    assert two[0][1] == two[1][1], "the state is the same on all ranks"
    assert two[0][1]["next_step"] == 5
    with streampack.connect(broker.trainers) as loader:
        golden = [step.digest for step in loader.steps()]
    assert [digest for digest, _ in two[0][0] + one[0]] == golden
    samples = [tuple(each) for rank in (*two, one) for _, ids in rank[0] for each in ids]
    assert len(samples) == len(set(samples)) == SAMPLES


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
