"""Every documented training loop lives through steps without a loss token: losses are 0, and the model stays finite."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import streampack
from streampack.sources import SourceSettings, open_source
from tests.docs.pages import Block
from tests.docs.pasted import CODE, SETTINGS, VOCABULARY, Tiny, tiny_llama
from tests.integration.frameworks.example_runs import EXAMPLES, Run, run
from tests.integration.running import RunningBroker, forked, producing_here, running_broker, write_jsonl

LOOPS = [
    block
    for block in CODE
    if re.search(r"(?s)for step in .*(num_loss_tokens|packed_loss\()", block.code)
    and "streampack.local(" not in block.code  # it has data of its own
]
ROWS: list[dict[str, Any]] = [{"tokens": [1 + number % 9]} for number in range(220)]
"""Samples of one token, which has no token before it."""
PADDED = {"padded": True, "budget": 64, "step": {"samples": 20}}


@pytest.fixture(scope="module", params=["packed", "padded"])
def broker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningBroker]:
    folder = tmp_path_factory.mktemp("data")
    rules = PADDED if request.param == "padded" else {"budget": 16, "window": {"samples": 64}, "step": {"packs": 4}}
    source = open_source(SourceSettings("jsonl", str(write_jsonl(folder / "rows.jsonl", ROWS))))
    feeds = {"train": {"streams": ["data"]}, "other": {"streams": ["more"]}}  # with several the producers stay
    tree = {
        "rules": rules,
        "streams": {"data": {"passes": 3}, "more": {}},
        "fields": SETTINGS["fields"],
        "feeds": feeds,
    }
    with running_broker(tree) as served, producing_here(served.producers, {"data": source, "more": source}):
        yield served


def test_there_are_loops_to_test() -> None:
    assert len({str(block) for block in LOOPS}) >= 5


@pytest.mark.parametrize("block", LOOPS, ids=str)
def test_a_loop_of_the_documentation_stays_finite(block: Block, broker: RunningBroker) -> None:
    padded = "attention_mask" in block.code
    with streampack.connect(broker.trainers, format="numpy") as loader:
        if loader.rules.padded != padded:
            return  # the other broker is for this loop
    torch.manual_seed(0)
    llama, tiny = tiny_llama(), Tiny()
    embed, head = torch.nn.Embedding(VOCABULARY, 24), torch.nn.Linear(8, VOCABULARY)
    modules = torch.nn.ModuleList([llama, tiny, embed, head])
    before = [parameter.detach().clone() for parameter in modules.parameters()]
    totals: list[float] = []

    def logprobs(actor: Tiny, batch: Any) -> torch.Tensor:
        logits = actor(batch.input_ids, batch.position_ids, batch.cu_seqlens_padded)
        return -cross_entropy(logits, batch.labels, reduction="none")

    def policy_loss(new: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
        return -(torch.exp(new - old) * advantages).sum()

    class Noting(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            totals.append(sum(float(p.grad.abs().sum()) for p in modules.parameters() if p.grad is not None))
            super().step()

    names: dict[str, Any] = {
        "streampack": streampack, "torch": torch, "cross_entropy": cross_entropy, "device_mesh": None,
        "model": llama if "**batch" in block.code else tiny, "llama": llama, "actor": tiny, "logprobs": logprobs,
        "gpt": lambda ids, mask: llama(ids, attention_mask=mask, use_cache=False).logits,
        "policy_loss": policy_loss, "qkv": lambda batch: embed(batch.input_ids).view(-1, 3, 2, 4).unbind(1),
        "head": lambda x: head(x.flatten(1)), "optimizer": Noting(modules.parameters(), lr=0.1),
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STREAMPACK_ENDPOINT", broker.trainers)
        exec(compile(re.sub(r"tcp://[\w.-]+:7402", broker.trainers, block.code), str(block), "exec"), names)
    assert len(totals) > 3
    assert totals == [0.0] * len(totals), "nothing to learn, nothing learned"
    assert all(torch.equal(a, b) for a, b in zip(before, modules.parameters(), strict=True))
    assert torch.isfinite(names["loss"])


@pytest.mark.parametrize("broker", ["packed"], indirect=True)
@pytest.mark.parametrize(
    "example", ["plain_torch", "stateful_dataloader", "lightning_module", "torch_distributed", "hf_trainer"]
)
def test_an_example_stays_finite(example: str, broker: RunningBroker, tmp_path: Path) -> None:
    ranks = 2 if example == "torch_distributed" else None
    (lines,) = run(broker, Run(example, tmp_path / example, ranks=ranks))
    assert len(lines) > 3
    assert [line["loss"] for line in lines] == [0.0] * len(lines)


@pytest.mark.parametrize("broker", ["packed"], indirect=True)
@pytest.mark.parametrize("per", ["token", "sample"])
def test_means_of_both_kinds_stay_finite(per: str, broker: RunningBroker) -> None:
    told = {"STREAMPACK_ENDPOINT": broker.trainers}
    done = forked("tests.integration.scripts", EXAMPLES / "sft.py", "3", per, environment=told)
    assert [json.loads(line)["loss"] for line in done.stdout.splitlines()] == [0.0] * 3, done.stderr
