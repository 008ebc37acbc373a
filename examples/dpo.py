"""DPO on packs: one program pushes the preference pairs and trains on them.

Run it with ``streampack run -c dpo.yaml -- python dpo.py``.
"""

import copy
import json

import torch
from torch.nn.functional import cross_entropy, logsigmoid

import streampack

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Embedding(16, 16), torch.nn.Linear(16, 16)).double()
reference = copy.deepcopy(model).requires_grad_(False)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)


def answer(prompt, length):  # an example answer: random tokens and reference log-probs
    tokens = torch.cat([prompt, torch.randint(16, (length,))])
    mask = torch.arange(len(tokens)) >= len(prompt)
    labels = torch.where(mask, tokens, -100)[1:]
    score = -cross_entropy(reference(tokens[:-1]), labels, reduction="sum")
    return {"input_ids": tokens, "loss_mask": mask, "reference": score}


with streampack.Producer(stream="pairs") as pairs:
    for _ in range(60):
        prompt, (chosen, rejected) = torch.randint(16, (5,)), torch.randint(1, 20, (2,)).tolist()
        pairs.send_group([answer(prompt, chosen), answer(prompt, rejected)], keep="pack")  # behind each other
    pairs.close(end=True)

with streampack.connect() as loader:
    for step in loader.steps():
        total = 0.0
        for batch in step:
            logprobs = -cross_entropy(model(batch.input_ids), batch.labels, reduction="none")  # 0 where none is learned
            cut = [each.sum(0, keepdim=True) for each in streampack.per_sample(logprobs, batch)]
            margins = torch.cat([logprobs[:0], *cut]) - batch.reference  # [samples]; empty for an empty pack
            chosen, rejected = margins.view(-1, 2).unbind(dim=1)
            loss = -logsigmoid(0.1 * (chosen - rejected)).sum() / (
                step.num_samples / 2
            )  # mean over all pairs of the step
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        print(json.dumps({"step": step.index, "loss": total}), flush=True)
