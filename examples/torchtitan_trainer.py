"""torchtitan's own Trainer: ``torchrun torchtitan_trainer.py FOLDER STEPS``, with STREAMPACK_ENDPOINT set."""

import json
import os
import sys
from dataclasses import dataclass
from typing import Any

import torchtitan_without_gpu  # type: ignore[import-not-found] # noqa: F401  where there is no GPU

# isort: split
from tokenizers import Tokenizer, models
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import default_adamw
from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

from streampack.integrations.torchtitan import StreampackDataLoader


class Lines(MetricsProcessor):
    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config): ...

    def log(self, step: int, loss: float, most: float, grad_norm: float, *args: Any, **kwargs: Any) -> None:
        if os.environ["RANK"] == "0":
            print(json.dumps({"step": step - 1, "loss": loss, "grad_norm": grad_norm}), flush=True)


folder, steps = sys.argv[1], int(sys.argv[2])
alone = {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
os.environ |= alone | os.environ
Tokenizer(models.WordLevel()).save(f"{folder}/tokenizer.json")  # for torchtitan: the samples are ids already
llama = model_registry("debugmodel", attn_backend="varlen")
llama.model.layers = llama.model.layers[:1]
training = TrainingConfig(seq_len=128, local_batch_size=1, global_batch_size=4, steps=steps, disable_cuda_graphs=True)
trainer = Trainer.Config(
    model_spec=llama, hf_assets_path=folder, dump_folder=folder, metrics=Lines.Config(log_freq=1),
    dataloader=StreampackDataLoader.Config(), loss=CrossEntropyLoss.Config(), optimizer=default_adamw(lr=1e-3),
    training=training, checkpoint=CheckpointManager.Config(enable=True, interval=4), activation_checkpoint=None,
    debug=DebugConfig(seed=0), parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
).build()  # fmt: skip
trainer.train()
trainer.close()
