"""Two ranks under torchrun, as the README says: the gradients are those of one process with the whole step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import streampack
from streampack.config.typed_yaml import convert
from streampack.sources import SourceSettings, open_source
from tests.integration.running import PATIENCE_S, producing_here, running_broker, write_jsonl
from tests.training.tiny_gradients import gradients, model

SCRIPT = """
import json, sys, torch, torch.distributed as dist, streampack
from tests.training.tiny_gradients import gradients, model

dist.init_process_group("gloo")
ddp = torch.nn.parallel.DistributedDataParallel(model())
with streampack.connect(order="dp", verify=True) as loader:
    found = [(step.digest, len(step), gradients(ddp, step, dist.get_world_size())) for step in loader.steps()]
if dist.get_rank() == 0:
    print(json.dumps(found))
dist.barrier()
del ddp  # it holds the process group: gloo's threads must end before the interpreter does
dist.destroy_process_group()
"""
RULES: dict[str, Any] = {"budget": 256, "window": {"samples": 32}, "step": {"packs": 4}}


def test_two_ranks_have_the_gradients_of_one(tmp_path: Path) -> None:
    files = write_jsonl(tmp_path / "text.jsonl", [{"text": "t" * (1 + i * 7 % 90)} for i in range(200)])
    source = open_source(convert({"source": "jsonl", "shards": str(files)}, SourceSettings))
    (tmp_path / "train.py").write_text(SCRIPT)
    settings = {"rules": RULES | {"align": {"sample": 1, "pack": 1}}, "streams": {"data": {}}}
    with running_broker(settings) as broker, producing_here(broker.producers, {"data": source}):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        paths = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            [*command, str(tmp_path / "train.py")], capture_output=True, text=True, timeout=PATIENCE_S,
            env=os.environ | {"STREAMPACK_ENDPOINT": broker.trainers, "PYTHONPATH": paths},
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    net = model()
    with streampack.local(files, budget=256, window=32, packs=4) as loader:
        expected = [(step.digest, gradients(net, step, 1)) for step in loader.steps()]
    assert len(found) > 5
    for (digest, packs, got), (said, each) in zip(found, expected, strict=True):
        assert (digest, packs) == (said, 2)
        torch.testing.assert_close(got, each, rtol=1e-4, atol=1e-6)
