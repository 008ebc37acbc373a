"""Two ranks of Hugging Face's Trainer under gloo train and evaluate what one does."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.integration.running import forked, running, running_broker, write, write_jsonl

RULES: dict[str, Any] = {"budget": 128, "step": {"samples": 37}, "align": {"sample": 1, "pack": 1}}
SCRIPT = """
import json, os, sys, traceback, torch, torch.distributed as dist, streampack
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainingArguments
from streampack.integrations.hf import PackedTrainerMixin

class PackedTrainer(PackedTrainerMixin, Trainer): ...

def train(folder, rank, ranks):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if ranks > 1:
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        os.environ.update({name: str(value) for name, value in places.items()})  # what torchrun says
        dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=ranks)
    config = LlamaConfig(vocab_size=257, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                         num_attention_heads=2, max_position_embeddings=128)
    args = TrainingArguments(f"{folder}/{ranks}", max_steps=4, logging_steps=1, eval_strategy="steps", eval_steps=2,
                             save_steps=2, learning_rate=1e-2, report_to="none", disable_tqdm=True, use_cpu=True)
    assert args.world_size == ranks
    place = {"format": "hf", "mesh": {"dp": args.world_size, "dp_rank": args.process_index}}
    with streampack.connect(**place) as loader, streampack.connect(feed="valid", **place) as valid:
        trainer = PackedTrainer(LlamaForCausalLM(config), args, loader=loader, eval_loader=valid)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    if rank == 0:
        print(json.dumps([trainer.state.log_history, len(trainer.packed_step)]), flush=True)
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()

for ranks in (1, 2):
    children = []
    for rank in range(ranks):
        children.append(os.fork())
        if not children[-1]:
            code = 1
            try:
                train(sys.argv[1], rank, ranks)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush(), sys.stderr.flush()
                os._exit(code)
    if any([os.waitpid(child, 0)[1] for child in children]):
        sys.exit(1)
"""


def test_two_ranks_have_the_losses_gradients_and_evaluations_of_one(tmp_path: Path) -> None:
    rows = [{"text": "abcdefgh "[i % 5 :] * (1 + i * 7 % 13)} for i in range(300)]
    sizes = {"data": 300, "val": 50}
    files = {name: str(write_jsonl(tmp_path / f"{name}.jsonl", rows[:size])) for name, size in sizes.items()}
    settings = {
        "rules": RULES, "streams": {"data": {}, "val": {}},
        "feeds": {"train": {"streams": ["data"]}, "valid": {"streams": ["val"]}},
    }  # fmt: skip
    with running_broker(settings) as broker:
        streams = {name: {"source": "jsonl", "shards": shards} for name, shards in files.items()}
        config = write(tmp_path / "p.yaml", {"broker": broker.producers, "processes": 1, "streams": streams})
        with running("producer", "produce", "-c", config):
            paths = os.pathsep.join([str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")])
            (tmp_path / "train.py").write_text(SCRIPT)
            told = {"STREAMPACK_ENDPOINT": broker.trainers, "PYTHONPATH": paths}
            done = forked("tests.integration.scripts", tmp_path / "train.py", tmp_path, environment=told)
    assert done.returncode == 0, done.stdout + done.stderr
    (one, packs), (two, packs_of_two) = map(json.loads, done.stdout.splitlines())
    assert packs_of_two < packs, "each has its share"
    for name in ("loss", "grad_norm", "eval_loss"):
        expected = [line[name] for line in one if name in line]
        assert [line[name] for line in two if name in line] == pytest.approx(expected, rel=1e-4)
        assert len(expected) == (2 if name == "eval_loss" else 4)
