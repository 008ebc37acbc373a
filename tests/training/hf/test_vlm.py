"""A small Qwen2-VL: a pack with images has the loss and the gradients of its samples alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

import streampack
from streampack.errors import UserError
from tests.integration.running import forked
from tests.training.hf.processor_models import colored_chats
from tests.training.hf.small_vlm import FIELDS, small_model, vlm_sample


@pytest.fixture(scope="module")
def model() -> Any:
    return small_model()


def loss_of(model: Any, labels: torch.Tensor, **inputs: Any) -> torch.Tensor:
    logits = model(**inputs).logits[0]
    return cross_entropy(logits[:-1], labels[0, 1:], reduction="sum")


def test_a_pack_with_images_is_its_samples_alone(model: Any) -> None:
    samples = [vlm_sample(model, number) for number in range(20)]
    together: Any = 0
    seen = []
    with streampack.local(samples, budget=128, format="hf", fields=FIELDS, shuffle=False) as loader:
        for batch in loader:
            seen.append(batch.num_samples)
            together = together + loss_of(model, **batch)
    assert max(seen) > 3
    gradients = torch.autograd.grad(together, list(model.parameters()))
    alone: Any = 0
    for each in samples:
        ids = torch.tensor(each["input_ids"])[None]
        media = {name: torch.tensor(each[name]) for name in ("image_grid_thw", "pixel_values") if name in each}
        positions = torch.tensor(each["position_ids"]).T[:, None]
        alone = alone + loss_of(model, ids, input_ids=ids, position_ids=positions, **media)
    torch.testing.assert_close(together, alone, rtol=1e-9, atol=1e-9)
    for got, expected in zip(gradients, torch.autograd.grad(alone, list(model.parameters())), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


def test_other_samples_stay_as_they_are_when_one_changes(model: Any) -> None:
    samples = [vlm_sample(model, number) for number in range(4)]
    other = samples[0] | {"input_ids": samples[0]["input_ids"] + 1}
    logits = []
    for first in (samples[0], other):
        with streampack.local([first, *samples[1:]], budget=160, format="hf", fields=FIELDS, shuffle=False) as loader:
            (batch,) = list(loader)
        found = streampack.per_sample(model(**batch).logits.detach(), batch)
        numbers = batch.sample_ids[:, 1].tolist()
        logits.append([found[numbers.index(number)] for number in range(4)])
    moved = [float((one - two).abs().max()) for one, two in zip(*logits, strict=True)]
    assert moved[0] > 1e-3
    assert moved[1:] == [0, 0, 0]


def test_a_model_of_three_positions_is_refused_without_them(model: Any) -> None:
    """It finds no samples by one position for each token."""
    with streampack.local([[1, 2, 3], [4, 5]], budget=16, format="hf") as loader:
        (batch,) = list(loader)
    with pytest.raises(UserError, match=r"affect each other.* declare position_ids with shape \[3\]"):
        model(**batch)


def test_a_pack_without_images_has_no_pixels(model: Any) -> None:
    samples = [vlm_sample(model, 3 * number) for number in range(4)]
    with streampack.local(samples, budget=128, format="hf", fields=FIELDS, verify=True) as loader:
        (batch,) = list(loader)
    assert batch["pixel_values"] is batch["image_grid_thw"] is None
    assert batch["position_ids"].shape == (4, 1, 128)
    assert loss_of(model, **batch).isfinite()


def test_the_example_learns_to_name_the_colors_of_images(tmp_path: Path) -> None:
    script = Path(__file__).parents[3] / "examples" / "vlm.py"
    sizes = ("--budget", "1024", "--packs", "1", "--passes", "15", "--lr", "2e-2")
    done = forked("tests.integration.scripts", script, *colored_chats(tmp_path, 96), *sizes)
    assert done.returncode == 0, done.stderr
    losses = [json.loads(line)["loss"] for line in done.stdout.splitlines()]
    assert len(losses) > 40
    assert np.mean(losses[-10:]) < 0.1
