"""Dynamic context parallelism with FSDP2, for any number of ranks: ``torchrun dynamic_cp.py STEPS``.

Attention gathers the keys and values of the ranks that share a pack. Their number changes with every micro-batch. The
feed has ``cp: dynamic``.
"""

import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.nn.functional import all_gather
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import streampack


def visible(batch: Any) -> torch.Tensor:
    """The keys that each query of this rank sees, bool [T, ranks * T]."""
    places = torch.as_tensor(batch.canonical.positions())  # of this rank's tokens in the whole pack
    keys = places if batch.cp_group is None else torch.cat(all_gather(places, batch.cp_group))
    bounds = batch.cu_seqlens_padded.long()
    same = torch.bucketize(places, bounds, right=True)[:, None] == torch.bucketize(keys, bounds, right=True)
    return same & (keys <= places[:, None])


class Attention(nn.Module):
    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(size, 3 * size, bias=False), nn.Linear(size, size, bias=False)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        """[T, size] -> [T, size], for the tokens of this rank."""
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in self.qkv(x).chunk(3, dim=-1))
        if group is not None:
            k, v = (torch.cat(all_gather(part.contiguous(), group)) for part in (k, v))
        q, k, v = (part.transpose(0, 1) for part in (q, k, v))
        attended: torch.Tensor = self.out(scaled_dot_product_attention(q, k, v, mask).transpose(0, 1).flatten(1))
        return attended


class Model(nn.Module):
    def __init__(self, vocabulary: int = 257, size: int = 32, longest: int = 128) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(vocabulary, size), nn.Embedding(longest, size)
        self.attention, self.head = Attention(size, heads=4), nn.Linear(size, vocabulary)

    def forward(self, batch: Any) -> torch.Tensor:
        x = self.embed(batch.input_ids) + self.places(batch.position_ids)
        logits: torch.Tensor = self.head(x + self.attention(x, visible(batch), batch.cp_group))
        return logits


steps = int(sys.argv[-1])
torch.manual_seed(0)
mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("dp",))
model = Model().double()
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

groups = streampack.cp_groups()  # of 2, 4, 8, ... ranks, made once
with streampack.connect(mesh=mesh, cp_groups=groups) as loader:
    for step in loader.steps():
        total = torch.zeros((), dtype=torch.float64)
        for batch in step:
            loss = cross_entropy(model(batch), batch.labels, reduction="sum") / step.num_loss_tokens
            (loss * mesh.size()).backward()  # FSDP averages over all ranks
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        sizes = [batch.cp_size for batch in step]
        if mesh.get_rank() == 0:
            line = {"step": step.index, "loss": total.item(), "digest": step.digest, "sizes": sizes}
            print(json.dumps(line), flush=True)
        if step.index + 1 == steps:
            break
dist.destroy_process_group()
