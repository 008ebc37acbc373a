"""TRL's AsyncGRPO: our batcher in place of its own gives the same loss, in fewer and more even micro-batches."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from streampack.errors import UserError
from streampack.integrations import trl as adapter

VOCAB, RANKS, BUDGET = 64, 4, 512


@pytest.fixture(autouse=True)
def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")


def rollouts(groups: int, members: int = 8, seed: int = 0) -> list[dict[str, Any]]:
    """Groups of completions of one prompt, with a long tail."""
    draw = torch.Generator().manual_seed(seed)
    found = list[dict[str, Any]]()
    for group in range(groups):
        prompt = torch.randint(VOCAB, (int(torch.randint(8, 64, (), generator=draw)),), generator=draw)
        for _ in range(members):
            size = int((torch.rand((), generator=draw) ** 4 * 400).item()) + 2
            completion = torch.randint(VOCAB, (size,), generator=draw)
            ids = torch.cat([prompt, completion])
            found.append({
                "input_ids": ids, "completion_mask": (torch.arange(len(ids)) >= len(prompt)).long(),
                "old_log_probs": -torch.rand(len(ids), generator=draw), "group_id": group,
                "advantage": float(torch.randn((), generator=draw)), "metrics": {"number": float(len(found))},
            })  # fmt: skip
    return found


def loss_of(micro_batches: list[list[Any]], weights: torch.Tensor) -> torch.Tensor:
    """TRL's clipped loss over the terms that its collator selects, with a model that knows only the last token."""
    terms = []
    for rows in micro_batches:
        for row in rows:
            packed = row.pack()
            at = packed["token_index"]
            labels = packed["shift_labels"][at]
            logprobs = -cross_entropy(weights[packed["input_ids"][at]], labels, reduction="none")
            ratio, gains = (logprobs - packed["old_log_probs"]).exp(), packed["advantages"]
            terms.append(-torch.minimum(ratio * gains, ratio.clamp(0.8, 1.2) * gains))
    return torch.cat(terms).double().mean()


def test_the_loss_is_that_of_trls_own_batcher() -> None:
    from trl.experimental.async_grpo import async_grpo_trainer as theirs

    samples, metrics = rollouts(40), defaultdict[str, list[float]](list)
    before = theirs.TokenBudgetBatcher
    own = list(before(samples, RANKS, BUDGET, metrics))
    try:
        adapter.install()
        ours = list(theirs.TokenBudgetBatcher(samples, RANKS, BUDGET, metrics))
    finally:
        theirs.TokenBudgetBatcher = before
    trained = Counter(int(s["metrics"]["number"]) for rows in ours for row in rows for s in row.samples)
    assert trained == Counter(range(len(samples))), "each rollout once"
    for rows in ours:
        assert len(rows) == RANKS
        assert all(0 < len(row.tokens) <= BUDGET and row.trained <= BUDGET for row in rows)
    seen = {int(s["metrics"]["number"]) for rows in own for row in rows for s in row.samples}
    both = [sample for sample in samples if int(sample["metrics"]["number"]) in seen]  # its last one stays open
    weights = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1))
    ours = list(adapter.WindowBatcher(both, RANKS, BUDGET, metrics))
    torch.testing.assert_close(loss_of(ours, weights), loss_of(own, weights), rtol=1e-6, atol=1e-7)
    assert len(ours) <= len(own)
    assert critical(ours) < critical(own), "ranks wait less for each other"
    batch = theirs.DataCollatorForRollout(0, RANKS, metrics=metrics, token_budget=BUDGET).torch_call([ours[0]])
    assert batch["input_ids"].shape[0] == RANKS


def critical(micro_batches: list[list[Any]]) -> int:
    """Cost of the dearest row of each micro-batch, summed: for these the other ranks wait."""
    return sum(max(row.load for row in rows) for rows in micro_batches)


def test_rollouts_are_planned_as_they_come_and_long_ones_are_counted() -> None:
    metrics = defaultdict[str, list[float]](list)

    def endless() -> Iterator[dict[str, Any]]:
        while True:
            yield from rollouts(8)

    first = next(iter(adapter.WindowBatcher(endless(), RANKS, BUDGET, metrics, window=1)))
    assert len(first) == RANKS
    few = rollouts(1, members=6)
    (rows,) = list(adapter.WindowBatcher(few, RANKS, 4096, metrics))
    assert [len(row.samples) > 0 for row in rows] == [True] * RANKS, "a group is split so that no rank is idle"
    long = [sample | {"input_ids": torch.zeros(9, dtype=torch.long)} for sample in few]
    assert list(adapter.WindowBatcher(long, RANKS, 8, metrics)) == []
    assert len(metrics["batch/dropped_oversize_total"]) == 6
    with pytest.raises(UserError, match="got window=0"):
        adapter.install(window=0)
