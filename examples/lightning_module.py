"""Lightning over packs: ``python lightning_module.py FOLDER STEPS``, with STREAMPACK_ENDPOINT set; or torchrun.

It writes a checkpoint into FOLDER every 4 steps, resumes from it when started again, and prints a line per step.
"""

import json
import os
import sys
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from streampack.integrations.lightning import PackedDataModule

PACKS = 4  # packs of a step over all ranks, as in broker.yaml


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(257, 32), nn.Linear(32, 257)).double()
        self.total = torch.zeros(1, dtype=torch.float64)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        data: PackedDataModule = self.trainer.datamodule
        loss = nn.functional.cross_entropy(self.net(batch.input_ids), batch.labels, reduction="sum")
        loss = loss / data.step.num_loss_tokens  # tokens of all packs on all ranks
        self.total += loss.detach()
        if batch.micro_batch + 1 == batch.num_micro_batches:
            total = self.all_gather(self.total).sum().item()
            if self.trainer.is_global_zero:
                print(json.dumps({"step": batch.step, "loss": total, "digest": data.step.digest}), flush=True)
            self.total.zero_()
        return loss * data.averaged_over  # undo the averaging of Lightning and DDP

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


folder, steps, ranks = sys.argv[1], int(sys.argv[2]), int(os.environ.get("WORLD_SIZE", "1"))
torch.manual_seed(0)
torch.set_num_threads(1)
trainer = Trainer(
    accelerator="cpu", devices=ranks, max_steps=steps, accumulate_grad_batches=PACKS // ranks, logger=False,
    enable_progress_bar=False, callbacks=[ModelCheckpoint(folder, every_n_train_steps=4, save_top_k=0, save_last=True)],
)  # fmt: skip
trainer.fit(Model(), datamodule=PackedDataModule(), ckpt_path="last")
