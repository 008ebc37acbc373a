"""SFT on packs: ``python sft.py STEPS [token | sample]``, with STREAMPACK_ENDPOINT set; prints a line per step.

A mean over the step's tokens gives long answers more weight; a mean over its samples gives all the same weight. Neither
depends on the packing, the number of ranks or the number of micro-batches.
"""

import json
import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import streampack

steps, per = int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "token"


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.head = nn.Embedding(257, 32), nn.Linear(32, 96), nn.Linear(32, 257)

    def forward(self, batch):
        x = self.embed(batch.input_ids)
        q, k, v = self.qkv(x).view(-1, 3, 4, 8).unbind(1)  # [T, heads, head size] each
        return self.head(x + streampack.varlen_attention(q, k, v, batch).flatten(1))


def loss_fn(logits, labels):  # the loss of one sample
    summed = cross_entropy(logits, labels, reduction="sum")
    return summed if per == "token" else summed / (labels != -100).sum().clamp(min=1)


torch.manual_seed(0)
model = Model().double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
with streampack.connect() as loader:
    for _, step in zip(range(steps), loader.steps(), strict=False):
        denominator = step.num_loss_tokens if per == "token" else step.num_samples
        total = 0.0
        for batch in step:  # under DDP or FSDP: packed_loss(..., averaged_over=dist.get_world_size())
            loss = streampack.packed_loss(loss_fn, model(batch), batch, batch.labels, denominator=denominator)
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        print(json.dumps({"step": step.index, "loss": total, "digest": step.digest}), flush=True)
