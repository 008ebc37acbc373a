"""StatefulDataLoader over packs: ``python stateful_dataloader.py FOLDER STEPS``, with STREAMPACK_ENDPOINT set.

It writes a checkpoint into FOLDER every 4 steps, resumes from it when started again, and prints a line per step.
"""

import json
import os
import sys
from pathlib import Path

import torch
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

import streampack

folder, steps = Path(sys.argv[1]), int(sys.argv[2])
folder.mkdir(parents=True, exist_ok=True)
torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Embedding(257, 32), nn.Linear(32, 257)).double()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
saved = folder / "checkpoint.pt"

with streampack.connect() as loader:
    batches = StatefulDataLoader(loader, batch_size=None, num_workers=0)  # packs are whole batches
    if saved.exists():
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        batches.load_state_dict(state["batches"])
    total = 0.0
    for batch in batches:
        logits = model(batch.input_ids)
        loss = nn.functional.cross_entropy(logits, batch.labels, reduction="sum") / batch.step_num_loss_tokens
        loss.backward()
        total += loss.item()
        if batch.micro_batch + 1 < batch.num_micro_batches:
            continue
        optimizer.step()
        optimizer.zero_grad()
        print(json.dumps({"step": batch.step, "loss": total}), flush=True)
        total = 0.0
        if (batch.step + 1) % 4 == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "batches": batches.state_dict()}
            torch.save(state, folder / "checkpoint.part")
            os.replace(folder / "checkpoint.part", saved)
            loader.commit(batch.step)
        if batch.step + 1 == steps:
            break
