"""Ranks that meet at a barrier each step, one of them killed at every step: they go on from their checkpoint, and all
end on the same step. Real processes under gloo; a launcher starts them again, as torchelastic does.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import streampack
from tests.integration.running import forked, running, running_broker, write, write_jsonl

RULES: dict[str, Any] = {"budget": 256, "window": {"samples": 32}, "step": {"packs": 4}}
RANKS = 2
EVERY = 2
"""Steps between two checkpoints."""

LAUNCHER = """
import json, os, signal, sys
import torch, torch.distributed as dist, streampack

folder, ranks, every = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
saved = os.path.join(folder, "checkpoint.json")

def train(rank, attempt):
    dist.init_process_group("gloo", init_method=f"file://{folder}/group-{attempt}", rank=rank, world_size=ranks)
    out = open(os.path.join(folder, f"rank-{rank}.jsonl"), "a", buffering=1)
    with streampack.connect(mesh={"dp": ranks, "dp_rank": rank}, format="numpy", verify=True) as loader:
        if os.path.exists(saved):
            loader.load_state_dict(json.load(open(saved)))
        for step in loader.steps():
            if step.index == attempt and rank == attempt % ranks:
                os.kill(os.getpid(), signal.SIGKILL)
            where = torch.tensor([step.index])
            dist.all_reduce(where, dist.ReduceOp.MAX)
            assert int(where) == step.index, "ranks are at different steps"
            ids = [row for pack in step for row in pack.sample_ids.tolist()]
            out.write(json.dumps([attempt, step.index, step.digest, step.chain, ids]) + "\\n")
            if (step.index + 1) % every == 0:
                state = loader.state_dict()
                states = [None] * ranks
                dist.all_gather_object(states, json.dumps(state, sort_keys=True))
                assert len(set(states)) == 1, "ranks have different states"
                if rank == 0:
                    with open(saved + ".part", "w") as file:
                        json.dump(state, file)
                    os.replace(saved + ".part", saved)
                    loader.commit(step.index)
                dist.barrier()
    dist.barrier()
    dist.destroy_process_group()

def launch(attempt):
    children = {}
    for rank in range(ranks):
        pid = os.fork()
        if not pid:
            code = 1
            try:
                train(rank, attempt)
                code = 0
            finally:
                sys.stdout.flush(), sys.stderr.flush()
                os._exit(code)
        children[pid] = rank
    codes = {}
    while children:
        pid, status = os.wait()
        codes[children.pop(pid)] = status
        if status:
            for other in children:
                os.kill(other, signal.SIGKILL)
    return codes

codes, attempt = {0: 1}, 0
while any(codes.values()) and attempt < 20:
    codes = launch(attempt)
    attempt += 1
    print(attempt, codes, flush=True)
sys.exit(any(codes.values()))
"""


def test_ranks_of_which_one_is_killed_at_every_step_have_the_same_steps_and_end_together(tmp_path: Path) -> None:
    rows = [{"text": "t" * (1 + i * 7 % 90)} for i in range(110)]
    files = write_jsonl(tmp_path / "text.jsonl", rows)
    with streampack.local(files, budget=256, window=32, packs=4, format="numpy") as loader:
        golden = [(step.digest, step.chain) for step in loader.steps()]
    streams = {"data": {"source": "jsonl", "shards": str(files)}}
    settings = {"rules": RULES | {"align": {"sample": 1, "pack": 1}}, "streams": {"data": {}}}
    with running_broker(settings) as broker:
        config = write(tmp_path / "p.yaml", {"broker": broker.producers, "processes": 1, "streams": streams})
        with running("producer", "produce", "-c", config):
            paths = os.pathsep.join([str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")])
            (tmp_path / "launch.py").write_text(LAUNCHER)
            words = [str(tmp_path / "launch.py"), str(tmp_path), str(RANKS), str(EVERY)]
            told = {"STREAMPACK_ENDPOINT": broker.trainers, "PYTHONPATH": paths}
            done = forked("tests.integration.scripts", *words, environment=told)
    assert done.returncode == 0, done.stdout + done.stderr
    assert 4 < len(golden) < 8, "small, and more than one checkpoint"
    assert len(done.stdout.splitlines()) == len(golden) + 1, "one attempt a step, and one that comes to the end"
    seen: list[tuple[int, ...]] = []
    for rank in range(RANKS):
        lines = [json.loads(line) for line in (tmp_path / f"rank-{rank}.jsonl").read_text().splitlines()]
        assert all((digest, chain) == golden[index] for _, index, digest, chain, _ in lines)
        last = {index: ids for _, index, _, _, ids in lines}
        assert sorted(last) == list(range(len(golden))), "both ranks end on the same step"
        seen += [tuple(row) for ids in last.values() for row in ids]
    assert len(seen) == len(set(seen)) == len(rows)
