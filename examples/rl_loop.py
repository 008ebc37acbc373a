"""An RL loop in two processes: a generator and a trainer, which know each other only through the broker.

Run both with ``streampack run -c rl_loop.yaml -- python rl_loop.py``. Or start ``streampack broker -c rl_loop.yaml``,
``python rl_loop.py generate`` and ``python rl_loop.py train`` in three terminals, the last two with
STREAMPACK_ENDPOINT=tcp://127.0.0.1:7402 and STREAMPACK_PRODUCERS=tcp://127.0.0.1:7401. Kill any of them with
``kill -9`` and start it again: it goes on where it was.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

import streampack

STEPS, GROUP, VOCAB, LENGTH = 40, 16, 8, 12
WEIGHTS, CHECKPOINT = Path("weights"), Path("checkpoint.pt")
model = torch.nn.Sequential(torch.nn.Embedding(VOCAB, 32), torch.nn.Linear(32, VOCAB))


class LLM:
    """Stands for an inference engine such as vLLM: it loads weights, and continues prompts."""

    version = -1

    def load(self, version):
        if version != self.version:
            model.load_state_dict(torch.load(WEIGHTS / f"{version}.pt"))
            self.version = version

    @torch.no_grad()
    def generate(self, prompts):
        rows = torch.tensor(prompts)[:, None]
        for _ in range(LENGTH):
            rows = torch.cat([rows, model(rows[:, -1]).softmax(-1).multinomial(1)], dim=1)
        return [row[: 2 + int(torch.randint(LENGTH, ()))] for row in rows]


def generate():
    llm, rewards = LLM(), torch.full((VOCAB,), 0.5)
    with streampack.Producer(stream="rollouts") as rollouts, streampack.results(timeout_s=0.05) as results:
        while llm.version < STEPS:
            version = rollouts.wait_to_start(GROUP)  # waits until these samples would not be too old
            llm.load(version)
            for step in results:  # the trainer's values make prompts that are learned rarer
                rewards.index_put_(
                    (torch.tensor(step.values["prompt"]).long(),), torch.tensor(step.values["reward"]).float()
                )
            prompt = int((1.2 - rewards).multinomial(1))
            answers = llm.generate([prompt] * GROUP)
            seqs = rollouts.send_group(
                [{"input_ids": row, "loss_mask": torch.arange(len(row)) > 0} for row in answers], policy_version=version
            )
            reward = torch.stack([1 - (row[1:] - prompt).abs().float().mean() / VOCAB for row in answers])
            gains = (reward - reward.mean()) / (reward.std() + 0.01)
            rollouts.amend(
                seqs, reward=reward, advantages=[g.expand(len(r)) for g, r in zip(gains, answers, strict=True)]
            )  # waits until all is durable: safe from here on, whoever is killed


def logprobs(batch):
    return -cross_entropy(model(batch.input_ids), batch.labels, reduction="none")  # 0 where nothing is learned


def train():
    torch.manual_seed(0)
    WEIGHTS.mkdir(exist_ok=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    with streampack.connect() as loader:
        first = 0
        if CHECKPOINT.exists():
            saved = torch.load(CHECKPOINT)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            loader.load_state_dict(saved["loader"])
            first = saved["step"]
        publish(loader, first)
        if first == STEPS:
            return
        for step in loader.steps():
            forward = step.regroup(budget=1024)  # a pass without gradients takes larger packs
            with torch.no_grad():
                old = forward.tokens_back({pack: logprobs(pack) for pack in forward})
            losses, rewards, prompts = [], [], []
            for batch, before in zip(step, old, strict=True):
                ratio = (logprobs(batch) - before).exp()
                loss = -(ratio * batch.advantages * (batch.labels >= 0)).sum() / step.num_loss_tokens
                loss.backward()
                losses.append(loss.item())
                rewards.extend(batch.reward.tolist())
                prompts.extend(batch.input_ids[batch.cu_seqlens[: batch.num_samples].long()].tolist())
            optimizer.step()
            optimizer.zero_grad()
            step.report({"reward": rewards, "prompt": prompts})
            reward = sum(rewards) / len(rewards)
            print(json.dumps({"step": step.index, "loss": sum(losses), "reward": round(reward, 4)}), flush=True)
            publish(loader, step.index + 1)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step.index + 1}
            torch.save(state | {"loader": loader.state_dict()}, CHECKPOINT.with_suffix(".new"))
            os.replace(CHECKPOINT.with_suffix(".new"), CHECKPOINT)
            loader.commit(step.index)
            if step.index + 1 == STEPS:
                break


def publish(loader, version):
    """Save weights for generators, and tell these of them."""
    torch.save(model.state_dict(), WEIGHTS / "new.pt")
    os.replace(WEIGHTS / "new.pt", WEIGHTS / f"{version}.pt")
    loader.publish(version)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        {"generate": generate, "train": train}[sys.argv[1]]()
    else:
        parts = [subprocess.Popen([sys.executable, __file__, part]) for part in ("generate", "train")]
        while not any(part.poll() for part in parts) and any(part.poll() is None for part in parts):
            time.sleep(0.2)
        for part in parts:
            part.kill()  # one has failed, or both have ended
        sys.exit(any(part.wait() for part in parts))
