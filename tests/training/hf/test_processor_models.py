"""Packs of chats with images have the loss and the gradients of the chats alone, as the processor makes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

import streampack
from tests.tokenizers.processors.processor_folders import FOLDERS, folder_of, oracle_of
from tests.tokenizers.processors.random_chats import random_chat
from tests.training.hf.processor_models import model_for

CHATS = 7


def loss_of(model: Any, labels: torch.Tensor, **inputs: Any) -> torch.Tensor:
    logits = model(**inputs).logits[0]
    return cross_entropy(logits[:-1], labels[0, 1:], reduction="sum")


@pytest.fixture
def only_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms and eager attention of transformers compute in float32, which would round packs and samples differently."""
    softmax = torch.nn.functional.softmax
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(torch.nn.functional, "softmax", lambda values, dim, dtype=None: softmax(values, dim))


@pytest.mark.usefixtures("only_float64")
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FOLDERS)
def test_a_pack_is_its_chats_alone(family: str, attention: str, tmp_path: Path) -> None:
    folder = folder_of(family, tmp_path / family)
    model, oracle = model_for(family, folder, attention), oracle_of(folder)
    chats = [random_chat(tmp_path, 2 * seed)[0] for seed in range(CHATS)]
    together, counts, labels = torch.zeros(()).double(), list[int](), dict[int, Any]()
    with streampack.local(
        [{"messages": chat} for chat in chats], tokenizer={"processor": str(folder)}, budget=1024, format="hf",
        shuffle=False, prefetch=1,
    ) as loader:  # fmt: skip
        for batch in loader:
            counts.append(batch.num_samples)
            bounds = batch["cu_seq_lens_q"].tolist()
            for at, (_, number, *_) in enumerate(batch.sample_ids.tolist()):
                labels[number] = batch["labels"][:, bounds[at] : bounds[at + 1]].clone()
            pixels = batch["pixel_values"]
            batch["pixel_values"] = pixels if pixels is None else pixels.double()
            together = together + loss_of(model, **batch)
    assert max(counts) > 2
    gradients: Any = torch.autograd.grad(together, list(model.parameters()), allow_unused=True)
    alone = torch.zeros(()).double()
    for number, chat in enumerate(chats):
        inputs = dict(oracle.apply_chat_template([chat], tokenize=True, return_dict=True, return_tensors="pt"))
        inputs = {name: value for name, value in inputs.items() if name != "attention_mask" and value is not None}
        if "pixel_values" in inputs:
            inputs["pixel_values"] = torch.as_tensor(np.asarray(inputs["pixel_values"])).double()
        else:
            inputs.pop("mm_token_type_ids", None)
        own = labels[number]
        own[:, 0] = -100
        alone = alone + loss_of(model, own, **inputs)
    torch.testing.assert_close(together, alone, rtol=1e-9, atol=1e-9)
    expected = torch.autograd.grad(alone, list(model.parameters()), allow_unused=True)
    for got, wanted in zip(gradients, expected, strict=True):
        if got is not None:
            torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)
