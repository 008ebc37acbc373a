"""Does packing change what a model learns? ``python -m benchmarks.training.padded_and_packed`` prints a table.

The task can be learned from a sample alone: repeat its first token at its end. The loss of held-out samples is taken
after every 160 samples. Ways: rows padded to the longest, packs of the same samples in each update, full packs,
packs whose model gets the tokens without their boundaries, which is wrong, and padded rows whose updates have the
samples of those of full packs. It runs on a CPU in two minutes.

``padded_and_packed 200 60`` then takes 60 other orders of the samples. For each, it trains padded rows in float32: in
updates of 16 samples, in the updates of full packs, and in as many updates as full packs have, of equal size. It prints
the last loss of 512 held-out samples, and the mean differences with their standard errors.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

import streampack

SEPARATOR, SAMPLES, EVERY = 31, 16, 160
BUDGET = 128
WAYS = ("padded", "packed, same samples", "full packs", "packed, no boundaries", "padded, updates of full packs")
Sample = dict[str, list[int]]


def samples(count: int, seed: int) -> list[Sample]:
    """Return samples whose last token is their first; the loss counts the last alone."""
    draw = torch.Generator().manual_seed(seed)
    rows = list[Sample]()
    for length in torch.randint(3, 40, (count,), generator=draw).tolist():
        ids = torch.randint(1, SEPARATOR, (length,), generator=draw).tolist()
        ids += [SEPARATOR, ids[0]]
        rows.append({"input_ids": ids, "labels": [-100] * (length + 1) + ids[-1:]})
    return rows


def model() -> Any:
    """Return a small GPT-2 in float64, with the same weights in each call. Llama would compute its norms in float32."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=SEPARATOR + 1, n_positions=BUDGET, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0,
        attn_pdrop=0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config).double()


def loss_of_rows(gpt: Any, rows: list[Sample]) -> torch.Tensor:
    """Return the summed loss of samples as rows that are padded to the longest."""
    ids, labels = (
        pad_sequence([torch.tensor(row[key]) for row in rows], batch_first=True, padding_value=filler)
        for key, filler in (("input_ids", 0), ("labels", -100))
    )
    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    logits = gpt(ids, attention_mask=(torch.arange(ids.shape[1]) < lengths[:, None]).long(), use_cache=False).logits
    return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")


def of_equal_size(rows: list[Sample], count: int) -> list[list[Sample]]:
    """Return ``count`` updates of the samples in their order."""
    edges = [len(rows) * update // count for update in range(count + 1)]
    return [rows[first:last] for first, last in itertools.pairwise(edges)]


def of_full_packs(rows: list[Sample]) -> list[list[Sample]]:
    """Return the samples of each update of full packs."""
    with streampack.local(rows, budget=BUDGET, shuffle=False, packs=3) as loader:
        return [[rows[n] for pack in step for n in pack.sample_ids[:, 1].tolist()] for step in loader.steps()]


def updates(way: str, gpt: Any, rows: list[Sample]) -> Iterator[int]:
    """Compute the gradients of one update after another, and yield its number of samples."""
    shape: dict[str, Any] = {"packs": 3} if "full packs" in way else {"samples": SAMPLES}
    if "padded" in way:
        for group in of_full_packs(rows) if "full packs" in way else of_equal_size(rows, len(rows) // SAMPLES):
            torch.autograd.backward(loss_of_rows(gpt, group) / len(group))
            yield len(group)
        return
    with streampack.local(rows, budget=BUDGET, shuffle=False, format="hf_shifted", **shape) as loader:
        for step in loader.steps():
            for batch in step:
                names = ["input_ids"] if way == "packed, no boundaries" else [n for n in batch if "labels" not in n]
                logits = gpt(**{name: batch[name] for name in names}).logits.flatten(0, 1)
                loss = cross_entropy(logits, batch["shift_labels"].flatten(), reduction="sum")
                torch.autograd.backward(loss / step.num_loss_tokens)
            yield step.num_samples


def curve(way: str, train: list[Sample], held_out: list[Sample], gpt: Any = None) -> list[float]:
    """Return the loss of ``held_out`` before training, and after every ``EVERY`` samples of ``train``."""
    gpt = gpt or model()
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=2e-3)
    trained, losses = 0, list[float]()

    def measured() -> None:
        while len(losses) <= trained // EVERY:
            with torch.no_grad():
                losses.append(loss_of_rows(gpt, held_out).item() / len(held_out))

    measured()
    for count in updates(way, gpt, train):
        optimizer.step()
        optimizer.zero_grad()
        trained += count
        measured()
    return losses


def last_loss(groups: list[list[Sample]], held_out: list[Sample]) -> float:
    """Train padded rows in float32, an update for each group; return the loss of ``held_out``."""
    gpt = model().float()
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=2e-3)
    for group in groups:
        torch.autograd.backward(loss_of_rows(gpt, group) / len(group))
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return loss_of_rows(gpt, held_out).item() / len(held_out)


def compare_orders(train: list[Sample], orders: int) -> None:
    """Print the last losses for other orders of ``train``, and their mean differences."""
    held_out, ends = samples(512, 1), list[list[float]]()
    for seed in range(orders):
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed)).tolist()
        rows = [train[n] for n in order]
        full = of_full_packs(rows)
        ways = (of_equal_size(rows, len(rows) // SAMPLES), full, of_equal_size(rows, len(full)))
        ends.append([last_loss(groups, held_out) for groups in ways])
        padded, packs, fewer = ends[-1]
        print(f"order {seed}: padded {padded:.3f}, full packs {packs:.3f}, {len(full)} updates {fewer:.3f}", flush=True)
    for name, one, other in (("full packs", 1, 0), ("as few updates of equal size", 2, 0)):
        apart = [row[one] - row[other] for row in ends]
        error = statistics.stdev(apart) / len(apart) ** 0.5
        higher = sum(difference > 0 for difference in apart)
        print(f"{name} - padded: {statistics.mean(apart):+.3f}, standard error {error:.3f}, higher in {higher}")


def main(updates_of_padded: int, orders: int = 0) -> None:
    began = time.monotonic()
    train, held_out = samples(SAMPLES * updates_of_padded, 0), samples(128, 1)
    curves = [curve(way, train, held_out) for way in WAYS]
    print(f"| samples trained | {' | '.join(WAYS)} |\n|---|{'---|' * len(WAYS)}")
    for row, losses in enumerate(zip(*curves, strict=False)):
        print(f"| {row * EVERY:,} | {' | '.join(f'{loss:.3f}' for loss in losses)} |")
    for pair in ((0, 1), (2, 4)):
        apart = max(abs(one - two) for one, two in zip(*(curves[way] for way in pair), strict=True))
        print(f"{' / '.join(WAYS[way] for way in pair)}: at most {apart:.1e} apart")
    if orders > 1:
        compare_orders(train, orders)
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*map(int, sys.argv[1:] or ["200"]))
