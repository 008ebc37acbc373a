"""GRPO on packs: one program pushes the rollouts and trains on them.

Run it with ``streampack run -c grpo.yaml -- python grpo.py``.
"""

import json

import torch
from torch.nn.functional import cross_entropy, pad

import streampack

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Embedding(8, 16), torch.nn.Linear(16, 8)).double()
optimizer = torch.optim.SGD(model.parameters(), lr=5.0)


def group(prompt):  # rollouts of one prompt, with advantages relative to their mean
    rows = torch.full((4, 1), prompt)
    for _ in range(20):
        rows = torch.cat([rows, model(rows[:, -1]).softmax(-1).multinomial(1)], dim=1)
    rewards = (rows == prompt).double().mean(dim=1)
    for row, gain in zip(rows, rewards - rewards.mean(), strict=True):
        tokens = row[: int(torch.randint(2, 20, ()))]
        old = pad(-cross_entropy(model(tokens[:-1]), tokens[1:], reduction="none"), (1, 0)).detach()
        yield {"input_ids": tokens, "advantages": gain.expand(len(tokens)), "logprobs": old}


def loss_fn(logits, labels, old, gains):  # mean over the tokens of one rollout
    ratio, gains = (-cross_entropy(logits, labels, reduction="none") - old)[labels >= 0].exp(), gains[labels >= 0]
    if len(ratio):  # a rollout of one token has nothing to learn
        metrics.append({"ratio_min": ratio.min(), "ratio_max": ratio.max()})
    return -torch.minimum(ratio * gains, ratio.clamp(0.8, 1.2) * gains).sum() / max(len(gains), 1)


with streampack.Producer(stream="rollouts") as rollouts, streampack.connect() as loader:
    steps = loader.steps()
    for version in range(8):
        sent = [rollouts.send_group(group(prompt), policy_version=version) for prompt in range(8)]
        rollouts.end_of_batch(version)
        step = next(steps)
        for _ in range(2):  # only the second update has ratios other than 1
            metrics = []
            for batch in step:
                values = model(batch.input_ids), batch, batch.labels, batch.logprobs, batch.advantages
                loss = streampack.packed_loss(loss_fn, *values, denominator=step.num_samples)
                loss.backward()
                metrics.append({"loss": loss})
            optimizer.step()
            optimizer.zero_grad()
            print(json.dumps({"step": step.index, **streampack.reduce_metrics(metrics)}, default=float), flush=True)
