"""Fine-tune a small Qwen2-VL on images. Samples refer to files; the trainer fetches and decodes them ahead of use.

Run it with ``python vlm.py``. It draws its images, each of one color, and learns to name the color.
"""

import io
import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration, Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

import streampack

PATCH, MERGE = 4, 2  # pixels of a patch's side; MERGE * MERGE patches become one token
IMAGE, START, END, COLORS = 60, 61, 62, ((200, 30, 30), (30, 200, 30), (30, 30, 200))
SIZES = {"min_pixels": 64, "max_pixels": 4096}
processor = Qwen2VLImageProcessorPil(patch_size=PATCH, temporal_patch_size=1, merge_size=MERGE, **SIZES)


def decode(data, reference):  # the bytes of a file, to an array [patches, values]
    image = Image.open(io.BytesIO(data)).convert("RGB")
    return processor(images=[image], return_tensors="np")["pixel_values"]


def sample(model, path):  # reads the size of the image, not its pixels
    width, height = Image.open(path).size
    height, width = smart_resize(height, width, PATCH * MERGE, **SIZES)
    grid = np.array([[1, height // PATCH, width // PATCH]])
    ids = [1, START, *[IMAGE] * (grid.prod() // MERGE**2), END, 2, 10 + int(path.stem) % 3]
    places, _ = model.model.get_rope_index(
        torch.tensor([ids]), torch.tensor([ids]) == IMAGE, torch.tensor(grid), None, torch.ones(1, len(ids))
    )
    return {
        "input_ids": ids, "loss_mask": [0] * (len(ids) - 1) + [1], "position_ids": places[:, 0].T.numpy(),
        "image_grid_thw": grid, "pixel_values": [str(path)], "patches": grid.prod(axis=1),
    }  # fmt: skip


torch.manual_seed(0)
text = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
}  # fmt: skip
vision = {
    "depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": PATCH, "temporal_patch_size": 1,
    "spatial_merge_size": MERGE,
}  # fmt: skip
tokens = {"image_token_id": IMAGE, "vision_start_token_id": START, "vision_end_token_id": END, "video_token_id": 63}
model = Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=text, vision_config=vision, **tokens))
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

with tempfile.TemporaryDirectory() as folder:
    draw = np.random.default_rng(0)
    for number in range(96):
        noise = draw.integers(-20, 21, (*draw.integers(8, 49, 2), 3))
        Image.fromarray((np.array(COLORS[number % 3]) + noise).astype(np.uint8)).save(Path(folder, f"{number}.png"))
    samples = [sample(model, path) for path in sorted(Path(folder).iterdir())]
    with streampack.local(
        samples, budget=256, packs=2, passes=24, format="hf", media=streampack.Media(decode, threads=2),
        fields={
            "loss_mask": {}, "position_ids": {"dtype": "int32", "shape": [3]},
            "image_grid_thw": {"dtype": "int64", "axis": "item", "shape": [3]},
            "pixel_values": {
                "dtype": "reference", "axis": "item", "placeholder": {"tokens": [IMAGE], "patches": MERGE**2},
            },
        },
    ) as loader:  # fmt: skip
        for step in loader.steps():
            total, patches = 0.0, 0
            for batch in step:
                loss = model(**batch, num_items_in_batch=step.num_loss_tokens).loss
                loss.backward()
                total, patches = total + loss.item(), patches + int(batch.cu_patches[-1])
            optimizer.step()
            optimizer.zero_grad()
            print(json.dumps({"step": step.index, "loss": round(total, 4), "patches": patches}), flush=True)
