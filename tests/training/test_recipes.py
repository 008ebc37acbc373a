"""The recipes of ``examples/`` as they stand, against a real broker: their losses, step by step, and the weights that
they end with are those of a loop that knows no packs.

The loop takes the samples of a step one by one, as they were before any packing, and begins with the same weights.
"""

from __future__ import annotations

import copy
import json
import runpy
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, logsigmoid, scaled_dot_product_attention

import streampack
from streampack.config.typed_yaml import convert
from streampack.producer.push import Producer
from streampack.sources import SourceSettings, open_source
from tests.integration.frameworks.example_runs import EXAMPLES
from tests.integration.running import RunningBroker, folder, producing_here, running_broker, write_jsonl

Sample = dict[str, Any]
TEXTS = ["abcdefgh "[i % 5 :] * (1 + i * 7 % 9) for i in range(200)]


class Recipe:
    """One example, what it printed, and what it left behind."""

    def __init__(self, name: str, broker: RunningBroker, capsys: Any, monkeypatch: Any, *arguments: str) -> None:
        monkeypatch.setenv("STREAMPACK_ENDPOINT", broker.trainers)
        monkeypatch.setenv("STREAMPACK_PRODUCERS", broker.producers)
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        self.names = runpy.run_path(str(EXAMPLES / f"{name}.py"))
        self.lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    def learns_as(self, net: nn.Module, lr: float, losses: Iterable[Callable[[], Tensor]]) -> None:
        """A loop of ``net`` over these losses, one an update, had the same ones, and has the same weights now."""
        optimizer, found = torch.optim.SGD(net.parameters(), lr=lr), list[float]()
        for loss_fn in losses:
            optimizer.zero_grad()
            loss = loss_fn()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            found.append(loss.item())
        assert len(found) == len(self.lines) > 5
        torch.testing.assert_close([line["loss"] for line in self.lines], found, rtol=1e-9, atol=1e-9)
        for got, expected in zip(self.names["model"].parameters(), net.parameters(), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


def steps_of(broker: RunningBroker) -> Iterator[list[tuple[int, Tensor]]]:
    """Of each step, read again, each sample's number and its tokens."""
    with streampack.connect(broker.trainers, format="numpy") as loader:
        for step in loader.steps():
            found = []
            for pack in step:
                for i, (_, number, _) in enumerate(pack.sample_ids.tolist()):
                    begin = pack.cu_seqlens_padded[i]
                    end = begin + pack.cu_seqlens[i + 1] - pack.cu_seqlens[i]
                    found.append((number, torch.from_numpy(pack.input_ids[begin:end])))
            yield found


@contextmanager
def pushed(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[RunningBroker, dict[int, Sample]]]:
    """A broker with the broker.yaml that a recipe shows; and by number the samples that ``send_group`` was given."""
    given: dict[int, Sample] = {}
    send = Producer.send_group

    def noted(self: Producer, samples: Iterable[Sample], **how: Any) -> Sequence[int]:
        group = list(samples)
        numbers = send(self, group, **how)
        given.update(zip(numbers, group, strict=True))
        return numbers

    monkeypatch.setattr(Producer, "send_group", noted)
    config = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text())
    with folder() as path, running_broker(config | {"state_dir": str(path / "state")}) as broker:
        yield broker, given


def test_the_recipe_of_sft_averages_by_tokens_and_by_samples(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_jsonl(tmp_path / "text.jsonl", [{"text": text} for text in TEXTS])
    source = open_source(convert({"source": "jsonl", "shards": str(file)}, SourceSettings))
    rules = {"budget": 128, "window": {"samples": 32}, "step": {"packs": 4}, "align": {"sample": 4, "pack": 8}}
    with (
        running_broker({"rules": rules, "streams": {"data": {}}}) as broker,
        producing_here(broker.producers, {"data": source}),
    ):
        recipes = {per: Recipe("sft", broker, capsys, monkeypatch, "8", per) for per in ("token", "sample")}
        steps = [[tokens for _, tokens in step] for _, step in zip(range(8), steps_of(broker), strict=False)]

    def loss(net: Any, samples: list[Tensor], per: str) -> Tensor:
        found = []
        for tokens in samples:
            x = net.embed(tokens)
            q, k, v = net.qkv(x).view(-1, 3, 4, 8).permute(1, 2, 0, 3)
            logits = net.head(x + scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1))
            summed = cross_entropy(logits[:-1], tokens[1:], reduction="sum")
            found.append(summed if per == "token" else summed / max(len(tokens) - 1, 1))
        whole = torch.stack(found).sum()
        return whole / (sum(len(tokens) - 1 for tokens in samples) if per == "token" else len(samples))

    for per, recipe in recipes.items():
        torch.manual_seed(0)
        net = recipe.names["Model"]().double()
        recipe.learns_as(net, 0.5, [partial(loss, net, samples, per) for samples in steps])


def test_the_recipe_of_grpo_trains_on_groups(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pushed("grpo", monkeypatch) as (broker, given):
        recipe = Recipe("grpo", broker, capsys, monkeypatch)
        steps = [[given[number] for number, _ in step] for _, step in zip(range(8), steps_of(broker), strict=False)]
    assert [len(step) for step in steps] == [32] * 8
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(8, 16), nn.Linear(16, 8)).double()
    ratios: list[list[float]] = []

    def loss(rollouts: list[Sample]) -> Tensor:
        found, seen = [], list[Tensor]()
        for one in rollouts:
            tokens, old, gains = one["input_ids"], one["logprobs"][1:], one["advantages"][1:]
            logprobs = net(tokens[:-1]).log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
            ratio = (logprobs - old).exp()
            found.append(-torch.minimum(ratio * gains, ratio.clamp(0.8, 1.2) * gains).mean())
            seen.append(ratio.detach())
        ratios.append([torch.cat(seen).min().item(), torch.cat(seen).max().item()])
        return torch.stack(found).mean()

    recipe.learns_as(net, 5.0, [partial(loss, samples) for samples in steps for _ in range(2)])
    printed = [[line["ratio_min"], line["ratio_max"]] for line in recipe.lines]
    torch.testing.assert_close(printed, ratios, rtol=1e-9, atol=1e-9)
    assert any(low < 0.8 and high > 1.2 for low, high in ratios), "some are clipped, at both ends"


def test_the_recipe_of_grpo_trains_on_trees(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pushed("grpo_tree", monkeypatch) as (broker, given):
        recipe = Recipe("grpo_tree", broker, capsys, monkeypatch)
        steps = [[given[number] for number, _ in step] for _, step in zip(range(8), steps_of(broker), strict=False)]
    assert [len(step) for step in steps] == [64] * 8
    whole = [sum(len(one["input_ids"]) for one in step) for step in steps]
    for line, rows in zip(recipe.lines, whole, strict=True):
        assert rows <= line["rows"] <= rows + 8, "a pack may have a row that counts for nothing"
        assert line["tokens"] < 0.55 * rows, "prompts are computed once"
    torch.manual_seed(0)
    net = recipe.names["Model"]().double()

    def loss(rollouts: list[Sample]) -> Tensor:
        found = []
        for one in rollouts:
            tokens, learned = one["input_ids"], one["loss_mask"][1:]
            old, gains = one["logprobs"][1:][learned], one["advantages"][1:][learned]
            logits = net(tokens[None], torch.arange(len(tokens))[None])[0, :-1]
            ratio = (logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0][learned] - old).exp()
            found.append(-torch.minimum(ratio * gains, ratio.clamp(0.8, 1.2) * gains).mean())
        return torch.stack(found).mean()

    recipe.learns_as(net, 2.0, [partial(loss, samples) for samples in steps])


def test_the_recipe_of_dpo_trains_on_pairs(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pushed("dpo", monkeypatch) as (broker, given):
        recipe = Recipe("dpo", broker, capsys, monkeypatch)
        steps = [sorted(number for number, _ in step) for step in steps_of(broker)]
    assert sorted(number for step in steps for number in step) == list(range(120))
    net, reference = (copy.deepcopy(recipe.names["reference"]).requires_grad_() for _ in range(2))

    def score(of: nn.Module, sample: Sample) -> Tensor:
        tokens, learned = sample["input_ids"], sample["loss_mask"][1:]
        return of(tokens[:-1]).log_softmax(-1).gather(1, tokens[1:, None])[learned].sum()  # type: ignore[no-any-return]

    def loss(numbers: list[int]) -> Tensor:
        found = []
        for chosen, rejected in zip(numbers[::2], numbers[1::2], strict=True):
            assert (chosen % 2, rejected) == (0, chosen + 1)
            margins = [score(net, given[n]) - score(reference, given[n]) for n in (chosen, rejected)]
            found.append(-logsigmoid(0.1 * (margins[0] - margins[1])))
        return torch.stack(found).mean()

    recipe.learns_as(net, 1.0, [partial(loss, numbers) for numbers in steps])
