"""A small model of images and text, and samples for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

FIELDS: dict[str, dict[str, Any]] = {
    "position_ids": {"dtype": "int32", "shape": [3]},
    "image_grid_thw": {"dtype": "int64", "axis": "item", "shape": [3]},
    "pixel_values": {"dtype": "float64", "axis": "patch", "shape": [12]},
}
IMAGE, START, END = 90, 91, 92


def small_model(attention: str = "sdpa") -> Any:
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration  # takes seconds

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


def vlm_sample(model: Any, number: int) -> dict[str, Any]:
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
