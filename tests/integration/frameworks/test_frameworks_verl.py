"""verl's own package: micro-batches by streampack have the losses of verl's; a pushed stream is its replay buffer."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import streampack
from streampack.errors import SampleError
from streampack.integrations import verl as adapter
from tests.integration.running import PATIENCE_S, folder, running_broker

VOCAB, PROMPT, RESPONSE, LIMIT = 50, 24, 40, 80


@pytest.fixture
def verl() -> Any:
    """Verl's functions, as they were before and after a test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns of engines that are not here
        from verl.utils import seqlen_balancing
        from verl.workers.engine import utils

    before = vars(seqlen_balancing)["rearrange_micro_batches"]
    yield utils
    for module in (seqlen_balancing, utils):
        vars(module)["rearrange_micro_batches"] = before


def batch_of(count: int, seed: int = 0) -> Any:
    """Rollouts in verl's layout, and what its loss reads."""
    from tensordict import TensorDict

    draw = torch.Generator().manual_seed(seed)
    prompts = torch.randint(2, PROMPT + 1, (count,), generator=draw)
    responses = (torch.rand(count, generator=draw) ** 3 * (RESPONSE - 1)).long() + 1
    ids = torch.randint(1, VOCAB, (count, PROMPT + RESPONSE), generator=draw)
    places = torch.arange(PROMPT + RESPONSE)
    mask = (places >= PROMPT - prompts[:, None]) & (places < PROMPT + responses[:, None])
    response_mask = mask[:, PROMPT:]
    advantages = torch.randn(count, RESPONSE, generator=draw) * response_mask
    return TensorDict(
        {
            "input_ids": ids * mask, "attention_mask": mask.long(), "response_mask": response_mask.float(),
            "advantages": advantages, "index": torch.arange(count),
        },
        batch_size=count,
    )  # fmt: skip


def loss_of(model: nn.Module, micro_batches: list[Any], total: float) -> tuple[float, list[torch.Tensor]]:
    """The loss of a step by gradient accumulation, and its gradients."""
    model.zero_grad()
    found = 0.0
    for each in micro_batches:
        logits = model(each["input_ids"])[:, PROMPT - 1 : -1]
        labels = each["input_ids"][:, PROMPT:]
        logprobs = -cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
        loss = -(logprobs * each["advantages"] * each["response_mask"]).sum() / total
        loss.backward()
        found += float(loss.detach())
    return found, [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def test_a_step_has_the_loss_that_it_has_with_verls_own_split(verl: Any) -> None:
    from verl.utils import tensordict_utils

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB)).double()
    batch = batch_of(200)
    total = float(batch["response_mask"].sum())
    data = tensordict_utils.get_tensordict(dict(batch), {"use_dynamic_bsz": True, "max_token_len_per_gpu": LIMIT})
    theirs, _ = verl.prepare_micro_batches(data)
    adapter.install()
    ours, places = verl.prepare_micro_batches(data)
    assert sorted(at for each in places for at in each) == list(range(200))
    assert [each["index"].tolist() for each in ours] == places
    assert all(int(each["attention_mask"].sum()) <= LIMIT for each in ours)
    assert len(ours) < len(theirs), "fewer micro-batches, since they are full"
    results = torch.cat([each["index"] for each in ours])
    from verl.utils.seqlen_balancing import restore_dynamic_batch

    assert restore_dynamic_batch(results, places).tolist() == list(range(200)), "verl puts results back in order"
    (one, grads), (other, others) = loss_of(model, theirs, total), loss_of(model, ours, total)
    assert one == pytest.approx(other, rel=1e-12)
    for grad, expected in zip(grads, others, strict=True):
        torch.testing.assert_close(grad, expected, rtol=1e-9, atol=1e-12)


def test_nested_batches_keep_groups_and_multiples(verl: Any) -> None:
    from tensordict import TensorDict

    adapter.install()
    lengths = np.random.default_rng(3).integers(1, 60, 48)
    ids = torch.nested.as_nested_tensor([torch.ones(int(n), dtype=torch.long) for n in lengths], layout=torch.jagged)
    batch = TensorDict({"input_ids": ids}, batch_size=48)
    micro_batches, places = verl.rearrange_micro_batches(
        batch, max_token_len=256, num_batches_divided_by=4, force_group_size=2
    )
    assert len(micro_batches) % 4 == 0
    for each, held in zip(micro_batches, places, strict=True):
        assert int(each["input_ids"].offsets()[-1]) == sum(int(lengths[at]) for at in held) <= 256
        assert [at + 1 for at in held[::2]] == held[1::2], "pairs stay together"
    with pytest.raises(SampleError, match="expected 1 to 32, the budget"):
        verl.rearrange_micro_batches(batch, max_token_len=32)


def settings(path: Path) -> dict[str, Any]:
    sides = {side: f"ipc://{path}/{side}" for side in ("producers", "trainers")}
    per_token = {"dtype": "float32", "align": "token"}
    return {
        "run": "verl", "listen": {**sides, "http": "127.0.0.1:0"}, "merge": "arrival", "state_dir": str(path / "state"),
        "rules": {"budget": 256, "step": {"samples": 32}}, "streams": {"rollouts": {"pushed": True, "partitions": 1}},
        "fields": {
            "response_mask": per_token, "advantages": per_token, "prompt_length": {"dtype": "int64", "axis": "sample"},
        },
    }  # fmt: skip


def test_rollouts_come_back_from_the_stream_as_they_were(verl: Any) -> None:
    from verl import DataProto

    batch, names = batch_of(32), ("response_mask", "advantages")
    with folder() as path, running_broker(settings(path)) as broker:
        with streampack.Producer(broker.producers, stream="rollouts", timeout_s=PATIENCE_S) as rollouts:
            assert adapter.push(rollouts, batch, policy_version=3, fields=names, group_size=4) == list(range(32))
            rollouts.close(end=True)
        with streampack.connect(broker.trainers, format="numpy", timeout_s=PATIENCE_S) as loader:
            step = next(iter(loader.steps()))
            found = adapter.pull(step, names)
            order = step.sample_ids[:, 1].tolist()
    data = DataProto.from_single_dict(dict(found))
    assert len(data) == 32
    for at, number in enumerate(order):
        kept = batch["attention_mask"][number].bool()
        assert (
            found["input_ids"][at][found["attention_mask"][at].bool()].tolist()
            == batch["input_ids"][number][kept].tolist()
        )
        size = int(batch["response_mask"][number].sum())
        assert found["responses"][at, :size].tolist() == batch["input_ids"][number, PROMPT : PROMPT + size].tolist()
        for name in names:
            torch.testing.assert_close(found[name][at, :size], batch[name][number, :size])
            assert not found[name][at, size:].any()
    assert found["position_ids"][:, -1].max() == found["attention_mask"].sum(dim=1).max() - 1
