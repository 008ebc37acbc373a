"""A loop of plain torch over packs: ``python plain_torch.py FOLDER STEPS``, with STREAMPACK_ENDPOINT set.

It writes a checkpoint into FOLDER every 4 steps, resumes from it when started again, and prints a line per step.
"""

import json
import os
import sys
from pathlib import Path

import torch
from torch import nn

import streampack

folder, steps = Path(sys.argv[1]), int(sys.argv[2])
folder.mkdir(parents=True, exist_ok=True)
torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Embedding(257, 32), nn.Linear(32, 257)).double()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
saved = folder / "checkpoint.pt"

with streampack.connect() as loader:
    if saved.exists():
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        loader.load_state_dict(state["loader"])
    for step in loader.steps():
        total = 0.0
        for batch in step:
            logits = model(batch.input_ids)
            loss = nn.functional.cross_entropy(logits, batch.labels, reduction="sum") / step.num_loss_tokens
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        print(json.dumps({"step": step.index, "loss": total, "digest": step.digest}), flush=True)
        if (step.index + 1) % 4 == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "loader": loader.state_dict()}
            torch.save(state, folder / "checkpoint.part")
            os.replace(folder / "checkpoint.part", saved)
            loader.commit(step.index)
        if step.index + 1 == steps:
            break
