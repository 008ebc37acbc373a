"""Small models for the processors in ``tests.tokenizers.processors``."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.tokenizers.processors.processor_folders import FOLDERS, folder_of

_SIZES = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 4096,
}  # fmt: skip
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}


def model_for(family: str, folder: Path, attention: str) -> Any:
    """A small model in float64 for the processor in a folder."""
    transformers: Any = import_module("transformers")
    torch: Any = import_module("torch")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.convert_tokens_to_ids
    text: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
        **_SIZES,
    }
    torch.manual_seed(0)
    if family == "internvl":
        config = transformers.InternVLConfig(
            vision_config={
                "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
                "image_size": [32, 32], "patch_size": [8, 8],
            },
            text_config={"model_type": "qwen2", **text}, image_token_id=ids("<IMG_CONTEXT>"), image_seq_length=4,
            attn_implementation=attention,
        )  # fmt: skip
        return transformers.InternVLForConditionalGeneration(config).double()
    if family == "gemma3":
        config = transformers.Gemma3Config(
            vision_config={
                "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
                "image_size": 32, "patch_size": 8,
            },
            text_config={"head_dim": 8, "sliding_window": 16, **text}, mm_tokens_per_image=4,
            boi_token_index=ids("<start_of_image>"), eoi_token_index=ids("<end_of_image>"),
            image_token_id=ids("<image_soft_token>"), attn_implementation=attention,
        )  # fmt: skip
        return transformers.Gemma3ForConditionalGeneration(config).double()
    if family == "llava_next":
        config = transformers.LlavaNextConfig(
            vision_config={
                "model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
                "num_attention_heads": 2, "image_size": 32, "patch_size": 8, "projection_dim": 16,
            },
            text_config={"model_type": "llama", **text}, image_token_index=ids("<image>"),
            image_grid_pinpoints=FOLDERS[family]["settings"]["image_grid_pinpoints"], attn_implementation=attention,
        )  # fmt: skip
        return transformers.LlavaNextForConditionalGeneration(config).double()
    if family == "paligemma":
        config = transformers.PaliGemmaConfig(
            vision_config={
                "model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
                "num_attention_heads": 2, "image_size": 32, "patch_size": 16, "projection_dim": 16,
            },
            text_config={"model_type": "gemma", "head_dim": 8, **text}, image_token_index=ids("<image>"),
            projection_dim=16, hidden_size=16, attn_implementation=attention,
        )  # fmt: skip
        return transformers.PaliGemmaForConditionalGeneration(config).double()
    kind = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}[family]
    vision: dict[str, Any] = {
        "depth": 2,
        "num_heads": 2,
        "spatial_merge_size": 2,
        "patch_size": 14,
        "temporal_patch_size": 2,
    }
    if family == "qwen2_vl":
        vision |= {"embed_dim": 16, "hidden_size": 16}
    elif family == "qwen2_5_vl":
        vision |= {
            "hidden_size": 16,
            "intermediate_size": 32,
            "out_hidden_size": 16,
            "window_size": 112,
            "fullatt_block_indexes": [1],
        }
    else:
        vision |= {
            "hidden_size": 16, "intermediate_size": 32, "out_hidden_size": 16, "patch_size": 16,
            "deepstack_visual_indexes": [0], "num_position_embeddings": 64,
        }  # fmt: skip
        text["head_dim"] = 8
    config = getattr(transformers, f"{kind}Config")(
        text_config={**text, **_ROPE}, vision_config=vision, image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"), vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"), attn_implementation=attention,
    )  # fmt: skip
    return getattr(transformers, f"{kind}ForConditionalGeneration")(config).double()


COLORS = {"red": (200, 30, 30), "green": (30, 200, 30), "blue": (30, 30, 200)}


def colored_chats(path: Path, count: int) -> tuple[str, str]:
    """Write a small Qwen2-VL, and chats that name the color of an image; return the folder and the file."""
    folder = folder_of("qwen2_vl", path / "model")
    model_for("qwen2_vl", folder, "sdpa").float().save_pretrained(folder)
    draw, rows = np.random.default_rng(0), []
    for number in range(count):
        name = list(COLORS)[number % 3]
        noise = draw.integers(-20, 21, (*draw.integers(8, 80, 2), 3))
        Image.fromarray((np.array(COLORS[name]) + noise).astype(np.uint8)).save(path / f"{number}.png")
        image = {"type": "image", "path": str(path / f"{number}.png")}
        rows.append({"messages": [{"role": "user", "content": [image]}, {"role": "assistant", "content": name}]})
    (path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return str(folder), str(path / "chats.jsonl")
