"""FSDP2 with distributed checkpoints, for any number of ranks: ``torchrun torch_distributed.py FOLDER STEPS``."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import streampack

folder, steps = Path(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(0)
mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("dp",))
model = nn.Sequential(nn.Embedding(257, 32), nn.Linear(32, 257)).double()
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

with streampack.connect(mesh=mesh) as loader:
    state: dict[str, Any] = {"loader": loader}
    if saved := sorted(folder.glob("*/.metadata")):  # which is written last
        state["model"], state["optimizer"] = get_state_dict(model, optimizer)
        load(state, checkpoint_id=saved[-1].parent)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    for step in loader.steps():
        total = torch.zeros((), dtype=torch.float64)
        for batch in step:
            loss = nn.functional.cross_entropy(model(batch.input_ids), batch.labels, reduction="sum")
            (loss / step.num_loss_tokens * mesh.size()).backward()  # FSDP averages over ranks
            total += loss.detach() / step.num_loss_tokens
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        if mesh.get_rank() == 0:
            print(json.dumps({"step": step.index, "loss": total.item(), "digest": step.digest}), flush=True)
        if (step.index + 1) % 4 == 0:
            state["model"], state["optimizer"] = get_state_dict(model, optimizer)
            save(state, checkpoint_id=folder / f"{step.index:08}")
            loader.commit(step.index)  # one rank is enough
        if step.index + 1 == steps:
            break
dist.destroy_process_group()
