"""A small Qwen2-VL: a pack with images has the loss and the gradients of its samples alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

import streampack
from streampack.errors import UserError
from tests.integration.running import forked

IMAGE, START, END = 90, 91, 92
FIELDS: dict[str, dict[str, Any]] = {
    "position_ids": {"dtype": "int32", "shape": [3]},
    "image_grid_thw": {"dtype": "int64", "axis": "item", "shape": [3]},
    "pixel_values": {"dtype": "float64", "axis": "patch", "shape": [12]},
}


def small_model(attention: str = "sdpa") -> Any:
    torch.manual_seed(0)
    text = {
        "vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "bos_token_id": 0,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096, "eos_token_id": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
    }  # fmt: skip
    vision = {
        "depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2, "patch_size": 2,
        "temporal_patch_size": 1, "spatial_merge_size": 2, "in_channels": 3,
    }  # fmt: skip
    config = Qwen2VLConfig(
        text_config=text, vision_config=vision, image_token_id=IMAGE, vision_start_token_id=START,
        vision_end_token_id=END, video_token_id=93, attn_implementation=attention,
    )  # fmt: skip
    return Qwen2VLForConditionalGeneration(config).double()


@pytest.fixture(scope="module")
def model() -> Any:
    return small_model()


def sample(model: Any, number: int) -> dict[str, Any]:
    """Text and up to two images of up to 36 patches; four patches are one token."""
    draw = np.random.default_rng(number)
    ids, grid = list[int](), [[1, *(2 * draw.integers(1, 4, 2))] for _ in range(number % 3)]
    for _, height, width in grid:
        ids += [*draw.integers(1, 80, 3), START, *[IMAGE] * (height * width // 4), END]
    ids += list(draw.integers(1, 80, int(draw.integers(3, 20))))
    found: dict[str, Any] = {"input_ids": np.array(ids)}
    if grid:
        patches = np.prod(grid, axis=1)
        found |= {
            "image_grid_thw": np.array(grid), "patches": patches, "pixel_values": draw.normal(size=(patches.sum(), 12))
        }  # fmt: skip
    rows = torch.tensor([ids])
    sizes = torch.tensor(grid) if grid else None
    positions, _ = model.model.get_rope_index(rows, (rows == IMAGE).int(), sizes, None, torch.ones_like(rows))
    return found | {"position_ids": positions[:, 0].T.numpy()}


def loss_of(model: Any, labels: torch.Tensor, **inputs: Any) -> torch.Tensor:
    logits = model(**inputs).logits[0]
    return cross_entropy(logits[:-1], labels[0, 1:], reduction="sum")


def test_a_pack_with_images_is_its_samples_alone(model: Any) -> None:
    samples = [sample(model, number) for number in range(20)]
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
    samples = [sample(model, number) for number in range(4)]
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
    samples = [sample(model, 3 * number) for number in range(4)]
    with streampack.local(samples, budget=128, format="hf", fields=FIELDS, verify=True) as loader:
        (batch,) = list(loader)
    assert batch["pixel_values"] is batch["image_grid_thw"] is None
    assert batch["position_ids"].shape == (4, 1, 128)
    assert loss_of(model, **batch).isfinite()


def test_the_example_learns_to_name_the_colors_of_its_images() -> None:
    script = Path(__file__).parents[3] / "examples" / "vlm.py"
    done = forked("tests.integration.scripts", script)
    assert done.returncode == 0, done.stderr
    losses = [json.loads(line)["loss"] for line in done.stdout.splitlines()]
    assert len(losses) > 40
    assert np.mean(losses[-10:]) < 0.1, "with samples that see each other it ends at 0.77"
