"""transformers' Trainer over packs: ``python hf_trainer.py FOLDER STEPS``, torchrun or ``accelerate launch``.

It needs STREAMPACK_ENDPOINT. It writes a checkpoint into FOLDER every 4 steps, resumes from it when started again, and
prints a line per step.
"""

import json
import os
import sys
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import streampack
from streampack.integrations.hf import PackedTrainerMixin


class PackedTrainer(PackedTrainerMixin, Trainer):
    def log(self, logs: dict[str, float], *_: Any) -> None:
        if "loss" in logs and self.is_world_process_zero():
            step, shown = self.packed_step, {name: logs[name] for name in ("loss", "grad_norm")}
            print(json.dumps({"step": step.index, **shown, "digest": step.digest}), flush=True)


folder, steps = sys.argv[1], int(sys.argv[2])
os.makedirs(folder, exist_ok=True)
torch.manual_seed(0)
torch.set_num_threads(1)
config = LlamaConfig(
    vocab_size=257, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    max_position_embeddings=128,
)  # fmt: skip
args = TrainingArguments(
    folder, max_steps=steps, save_steps=4, logging_steps=1, learning_rate=1e-2, lr_scheduler_type="constant",
    report_to="none", disable_tqdm=True, use_cpu=True,
)  # fmt: skip
place = {"dp": args.world_size, "dp_rank": args.process_index}
with streampack.connect(mesh=place, format="hf") as loader:
    trainer = PackedTrainer(LlamaForCausalLM(config).double(), args, loader=loader)
    trainer.remove_callback(PrinterCallback)  # it would print the logs a second time
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder))
