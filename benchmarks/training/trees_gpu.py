"""Measure the training speed of a Llama with 1B parameters on answers that share a prompt, with and without trees.

A broker with a log forms the steps. A program pushes groups of answers, and this process trains on each group once:

- *rows*: each answer has its own prompt, with a kernel for packed sequences;
- *rows, flex*: the same packs, with FlexAttention under the masks of batches;
- *trees*: ``share: prefix``, so that the model computes a prompt once for its answers.

*answers/s* is what counts, because all ways train on the same answers. *computed* is the tokens that the model
computes, over those of the rows. *loss* is the mean of the losses of all answers: it is the same, up to the dtype.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import streampack
from benchmarks.report import arguments, head, say
from benchmarks.training.shared_prefixes import GROUPS
from benchmarks.training.train_gpu import TINY, Llama, Size, under_mask, within
from tests.integration.running import RunningBroker

Group = list[dict[str, Any]]
WAYS: dict[str, tuple[bool, bool]] = {"rows": (False, False), "rows, flex": (False, True), "trees": (True, True)}
"""Trees, and block masks, by way."""


def groups_of(kind: str, count: int, vocabulary: int, longest: int) -> list[Group]:
    """Groups of answers with an advantage each; an answer learns what comes after the tokens that all share."""
    draw = np.random.default_rng(0)
    found = []
    for _ in range(count):
        rows = [row[:longest] % vocabulary for row in GROUPS[kind](draw)]
        shortest = min(map(len, rows))
        same = np.all([row[:shortest] == rows[0][:shortest] for row in rows], axis=0)
        prompt = min(int(np.argmin(same)) if not same.all() else shortest, shortest - 1)
        found.append([
            {
                "input_ids": row, "loss_mask": np.arange(len(row)) >= prompt,
                "advantages": np.full(len(row), draw.normal(), np.float32),
            }
            for row in rows
        ])  # fmt: skip
    return found


def settings(path: Path, budget: int, share: bool) -> dict[str, Any]:
    """A broker that holds one step; its budget holds the largest tree."""
    sides = {side: f"ipc://{path}/{side}" for side in ("producers", "trainers")}
    rules = {"budget": budget, "step": {"end_of_batch": True}, "overlong": "error"}
    return {
        "run": "trees", "listen": {**sides, "http": "127.0.0.1:0"}, "merge": "arrival", "memory": "8GiB",
        "limits": {"chunk": "16MiB"},
        "state_dir": str(path / "state"), "rules": rules | ({"share": "prefix"} if share else {}),
        "streams": {"rollouts": {"pushed": True, "partitions": 1}},
        "fields": {"loss_mask": {}, "advantages": {"dtype": "float32", "align": "target"}},
    }  # fmt: skip


def train(model: Llama, batches: list[list[Group]], budget: int, device: str, way: str) -> dict[str, float]:
    """Train on all but the first batch of groups, which is there to compile; one optimizer step a batch."""
    share, masks = WAYS[way]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)  # no way shall learn from the one before
    tokens = computed = packs = answers = 0
    waited = loss_sum = began = 0.0
    with tempfile.TemporaryDirectory() as folder:
        broker = RunningBroker(Path(folder), settings(Path(folder), budget, share))
        try:
            with (
                streampack.Producer(broker.producers, stream="rollouts", buffer="64MiB") as rollouts,
                streampack.connect(
                    broker.trainers, format="thd", masks="flex" if masks else None, device=device
                ) as loader,
            ):
                for number, groups in enumerate(batches):
                    for group in groups:
                        rollouts.send_group(group, share="prefix" if share else None)
                    rollouts.end_of_batch(number)
                steps = loader.steps()
                for number in range(len(batches)):
                    if number == 1:
                        _wait_for(device)
                        began, waited = time.perf_counter(), 0.0
                        tokens = computed = packs = answers = 0
                        loss_sum = 0.0
                    before = time.perf_counter()
                    step = next(steps)
                    waited += time.perf_counter() - before
                    losses = []
                    for batch in step:
                        logits = model(
                            batch.input_ids, batch.position_ids, partial(under_mask if masks else within, batch)
                        )
                        logprobs = streampack.target_logprobs(logits, batch.labels, batch)
                        loss = streampack.packed_loss(
                            loss_fn, logprobs, batch, batch.labels, batch.advantages, denominator=step.num_samples
                        )
                        loss.backward()  # type: ignore[no-untyped-call]
                        losses.append(loss.detach())
                        assert batch.canonical is not None, "a loader's view has its pack"
                        packs, computed = packs + 1, computed + int(batch.canonical.cu_seqlens[-1])
                    optimizer.step()
                    optimizer.zero_grad()
                    loss_sum += float(torch.stack(losses).sum())
                    answers += step.num_samples
                _wait_for(device)
                seconds = time.perf_counter() - began
                rollouts.close(end=True)
        finally:
            broker.kill()
    tokens = sum(len(row["input_ids"]) for groups in batches[1:] for group in groups for row in group)
    return {
        "answers_per_s": answers / seconds, "tokens_per_s": tokens / seconds, "computed": computed / tokens,
        "packs": packs, "seconds": seconds, "next_share": waited / seconds, "loss": loss_sum / (len(batches) - 1),
    }  # fmt: skip


def loss_fn(logprobs: torch.Tensor, labels: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """Return the policy gradient's loss of one answer, a mean over its tokens."""
    learned = labels >= 0
    return -(logprobs * advantages * learned).sum() / learned.sum().clamp(min=1)


def _wait_for(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark."""
    parser = arguments(__doc__, "a tiny model and few groups, once")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--set", choices=sorted(GROUPS), default="math", help="groups, as in shared_prefixes (math)")
    parser.add_argument("--budget", type=int, help="tokens of a pack (16384; 4096 with --quick)")
    parser.add_argument("--groups", type=int, help="groups of an optimizer step (8; 1 with --quick)")
    parser.add_argument(
        "--steps", type=int, help="optimizer steps of each way, after one to compile (4; 1 with --quick)"
    )
    parser.add_argument("--rounds", type=int, help="rounds of all ways in turns (3; 1 with --quick)")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("got no GPU that torch can use, expected one: or --device cpu --quick")
    budget = args.budget or (4096 if args.quick else 16_384)
    torch.manual_seed(0)
    model = Llama(TINY if args.quick else Size()).to(args.device, torch.bfloat16 if args.device == "cuda" else None)
    longest, count = budget // (4 if args.quick else 1), args.groups or (1 if args.quick else 8)
    steps = 1 + (args.steps or (1 if args.quick else 4))
    groups = groups_of(args.set, count * steps, model.size.vocabulary, longest)
    if args.quick:
        groups = [group[:3] for group in groups]
    batches = [groups[i * count : (i + 1) * count] for i in range(steps)]
    name = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    report = head(
        "trees_gpu", device=name, torch=torch.__version__, set=args.set, budget=budget, groups=count, steps=steps - 1,
        parameters=sum(each.numel() for each in model.parameters()),
    )  # fmt: skip
    train_one: Callable[[str], dict[str, float]] = partial(train, model, batches, budget, args.device)
    rounds = [{way: train_one(way) for way in WAYS} for _ in range(args.rounds or (1 if args.quick else 3))]
    rows = {way: {key: statistics.median(each[way][key] for each in rounds) for key in rounds[0][way]} for way in WAYS}
    print(f"{name}, {report['parameters'] / 1e6:,.1f}M parameters, {budget} tokens a pack, {args.set}")
    print("way         answers/s  of rows  computed  packs   next()      loss")
    for way, row in rows.items():
        gain = row["answers_per_s"] / rows["rows"]["answers_per_s"]
        print(
            f"{way:<11} {row['answers_per_s']:>9.1f} {gain:>7.2f}x {row['computed']:>9.1%} {row['packs']:>6.0f} "
            f"{row['next_share']:>8.3%} {row['loss']:>9.5f}"
        )
    say(report | {"ways": rows, "rounds": rounds}, args.json)


if __name__ == "__main__":
    main()
