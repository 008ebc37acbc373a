"""GRPO on prefix trees: a prompt goes through the model once for all of its answers.

Run it with ``streampack run -c grpo_tree.yaml -- python grpo_tree.py``.
"""

import json

import torch
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import cross_entropy, pad, scaled_dot_product_attention

import streampack


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.places = torch.nn.Embedding(8, 32), torch.nn.Embedding(512, 32)
        self.qkv, self.head = torch.nn.Linear(32, 96), torch.nn.Linear(32, 8)

    def forward(self, ids, positions, batch=None):  # ids [T] of a pack, or [B, T] of rows
        x = self.embed(ids) + self.places(positions)
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).movedim(-3, 0).transpose(-2, -3)
        if batch is None:
            out = scaled_dot_product_attention(q, k, v, is_causal=True)
        elif q.is_cuda:
            out = flex_attention(q[None], k[None], v[None], block_mask=batch.block_mask)[0]
        else:  # FlexAttention has no backward pass on a CPU
            mask = streampack.block_causal_mask(batch)
            out = scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask)[0]
        return self.head(x + out.transpose(-2, -3).flatten(-2))


torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else None
model = Model().double().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=2.0)


@torch.no_grad()
def group(wanted):  # answers to one prompt of 24 tokens, which ask for the last of them
    prompt = torch.cat([torch.randint(8, (23,)), torch.tensor([wanted])])
    rows = prompt.expand(8, -1).to(device)
    for _ in range(16):
        logits = model(rows, torch.arange(rows.shape[1], device=device))[:, -1]
        rows = torch.cat([rows, logits.softmax(-1).multinomial(1)], dim=1)
    rewards = (rows[:, 24:] == wanted).double().mean(dim=1)
    for row, gain in zip(rows, rewards - rewards.mean(), strict=True):
        tokens = row[: 24 + int(torch.randint(1, 17, ()))]
        logits = model(tokens[None], torch.arange(len(tokens), device=device)[None])[0]
        old = pad(-cross_entropy(logits[:-1], tokens[1:], reduction="none"), (1, 0))
        learned = torch.arange(len(tokens)) >= 24
        yield {"input_ids": tokens, "loss_mask": learned, "advantages": gain.expand(len(tokens)), "logprobs": old}


def loss_fn(logprobs, labels, old, gains):  # mean over the learned tokens of one answer
    ratio, gains = (logprobs - old)[labels >= 0].exp(), gains[labels >= 0]
    return -torch.minimum(ratio * gains, ratio.clamp(0.8, 1.2) * gains).sum() / max(len(gains), 1)


with (
    streampack.Producer(stream="rollouts") as rollouts,
    streampack.connect(format="thd", masks="flex", device=device) as loader,
):
    steps = loader.steps()
    for version in range(8):
        for wanted in range(8):
            rollouts.send_group(group(wanted), policy_version=version, share="prefix")
        rollouts.end_of_batch(version)
        step, total, computed = next(steps), 0.0, 0
        for batch in step:
            logits = model(batch.input_ids, batch.position_ids, batch)  # [T, 8]; the rest has a row for each target
            logprobs = streampack.target_logprobs(logits, batch.labels, batch)
            values = batch, batch.labels, batch.logprobs, batch.advantages
            loss = streampack.packed_loss(loss_fn, logprobs, *values, denominator=step.num_samples)
            loss.backward()
            total, computed = total + loss.item(), computed + len(batch.labels)
        optimizer.step()
        optimizer.zero_grad()
        print(json.dumps({"step": step.index, "loss": total, "tokens": step.num_tokens, "rows": computed}), flush=True)
