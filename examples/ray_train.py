"""Ray Train on packs: ``python ray_train.py FOLDER STEPS [WORKERS]``. Run it again with more steps and other workers.

It goes on from the last checkpoint in FOLDER. The model is a table in numpy, so that this needs no torch.
"""

import json, sys, tempfile  # noqa: E401, I001
from pathlib import Path

import numpy as np
import ray.train
from ray.train.data_parallel_trainer import DataParallelTrainer

from streampack.integrations import ray as packs

folder, steps, workers = Path(sys.argv[1]).absolute(), int(sys.argv[2]), int([*sys.argv, "2"][3])


def train_fn(config):
    counts = np.ones(257)
    with packs.connect("example", format="numpy") as loader:
        packs.restore(loader, ray.train.get_checkpoint())
        for step in loader.steps():
            tokens = np.concatenate([pack.labels[pack.labels >= 0] for pack in step])
            loss = -np.log(counts / counts.sum())[tokens].mean()
            np.add.at(counts, tokens, 1)
            with tempfile.TemporaryDirectory() as saved:
                is_last = step.index + 1 >= config["steps"]
                packs.report({"step": step.index, "loss": float(loss)}, loader, saved if is_last else None)
            if is_last:
                break


folder.mkdir(exist_ok=True)
(folder / "text.jsonl").write_text("".join(json.dumps({"text": f"{i} " * (1 + i % 9)}) + "\n" for i in range(2000)))
broker = {"state_dir": str(folder / "state"), "rules": {"budget": 512, "step": {"packs": 4}}, "streams": {"text": {}}}
packs.start("example", broker, {"streams": {"text": {"source": "jsonl", "shards": str(folder / "text.jsonl")}}})
run = ray.train.RunConfig(name="run", storage_path=str(folder))
scaling = ray.train.ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 0.1})
print(DataParallelTrainer(train_fn, train_loop_config={"steps": steps}, scaling_config=scaling, run_config=run).fit())
packs.shutdown("example")
