"""Ray Train on packs, with a table in numpy as the model: ``python ray_train.py FOLDER STEPS [WORKERS]``."""

import json, sys, tempfile  # noqa: E401, I001
from pathlib import Path

import numpy as np
import ray.train
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from streampack.integrations import ray as packs

folder, steps, workers = Path(sys.argv[1]).absolute(), int(sys.argv[2]), int([*sys.argv, "2"][3])


def train_fn(config):
    checkpoint = ray.train.get_checkpoint()
    counts = np.load(f"{checkpoint.path}/counts.npy") if checkpoint else np.ones(257)
    with packs.connect("example", format="numpy") as loader, tempfile.TemporaryDirectory() as saved:
        packs.restore(loader, checkpoint)
        for step in loader.steps():
            tokens = np.concatenate([pack.labels[pack.labels >= 0] for pack in step])
            loss = -np.log(counts / counts.sum())[tokens].sum() / max(len(tokens), 1)
            np.add.at(counts, tokens, 1)
            np.save(f"{saved}/counts.npy", counts)
            is_last = step.index + 1 >= config["steps"]
            packs.report({"step": step.index, "loss": float(loss)}, loader, saved if is_last else None)
            if is_last:
                break


folder.mkdir(exist_ok=True)
(folder / "text.jsonl").write_text("".join(json.dumps({"text": f"{i} " * (1 + i % 9)}) + "\n" for i in range(20_000)))
broker = {"state_dir": str(folder / "state"), "rules": {"budget": 512, "step": {"packs": 4}}, "streams": {"text": {}}}
source = {"source": "jsonl", "shards": str(folder / "text.jsonl")}
half = {"num_cpus": 0.5}  # the default is one CPU for each; this leaves some to the workers on a machine with two
packs.start("example", broker, {"streams": {"text": source}}, broker_options=half, producer_options=half)
run = ray.train.RunConfig(name="run", storage_path=str(folder))
scaling = ray.train.ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 0.1})
print(DataParallelTrainer(train_fn, train_loop_config={"steps": steps}, scaling_config=scaling, run_config=run).fit())
packs.shutdown("example")
