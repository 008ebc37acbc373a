"""Masks for tokens that see those after them, and a check of the shape of images.

Tokens of an image see each other in Gemma 3. transformers 5.24 computes the masks of a pack from the positions in each
sample. It looks up the image of a token at that position in the pack, where another token is. So packs with
``token_type_ids`` get their masks here. So do packs of PaliGemma, in which all tokens of a question see each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from streampack.errors import UserError
from streampack.views.hf import TYPES
from streampack.views.isolation.hf_dependence import attention_of

_TWO_WAY = ("gemma3", "paligemma")
"""Types of models in which some tokens see those after them."""
_BY_PATCHES, _BY_IMAGES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), ("internvl", "llava_next", "gemma3", "paligemma")
"""Types of models by the shape of their ``pixel_values``: rows of patches, or whole images and tiles."""


def check_images(model: Any, keywords: Mapping[str, Any]) -> None:
    """Raise UserError for a pack whose images are those of another model's processor.

    Only shapes are compared. ``keywords``: the arguments of the call.
    """
    config = model.config
    pixels, kind = keywords.get("pixel_values"), getattr(config, "model_type", "")
    if not isinstance(pixels, torch.Tensor) or kind not in (*_BY_PATCHES, *_BY_IMAGES):
        return
    expected = "[images or tiles, channels, height, width]"
    is_right = pixels.ndim == 4
    if kind in _BY_PATCHES:
        vision = config.vision_config
        side = vision.patch_size
        width = vision.in_channels * vision.temporal_patch_size * side * side
        expected = f"[patches, {width}], patches of {side} x {side} pixels"
        is_right = pixels.ndim == 2 and pixels.shape[1] == width
    if not is_right:
        raise UserError(
            f"got pixel_values of shape {list(pixels.shape)} for a model of the type {kind}, expected {expected}. Give "
            "the folder of this model's processor in `tokenizer: {processor: FOLDER}`, and in Media(processor=FOLDER)"
        )


def with_videos(model: Any, keywords: dict[str, Any]) -> dict[str, Any]:
    """Return the keywords of a call with the videos of a pack apart, as models of Qwen take them.

    A pack has images and videos one after another. The tokens that stand for them tell which are videos.
    """
    ids, pixels, grid = (keywords.get(name) for name in ("input_ids", "pixel_values", "image_grid_thw"))
    token = getattr(model.config, "video_token_id", None)
    if token is None or ids is None or pixels is None or grid is None or "pixel_values_videos" in keywords:
        return keywords
    if not (is_video := ids[0] == token).any():
        return keywords
    rows = grid.prod(-1)
    tokens = rows // model.config.vision_config.spatial_merge_size**2
    kinds = is_video[is_video | (ids[0] == model.config.image_token_id)][tokens.cumsum(0) - tokens]
    of_rows = kinds.repeat_interleave(rows)
    images = {"pixel_values": pixels[~of_rows], "image_grid_thw": grid[~kinds]}
    videos = {"pixel_values_videos": pixels[of_rows], "video_grid_thw": grid[kinds]}
    return {**keywords, **(dict.fromkeys(images) if kinds.all() else images), **videos}


def with_image_masks(model: Any, keywords: dict[str, Any]) -> dict[str, Any]:
    """Return the keywords of a call with the mask for tokens that see those after them, if the model has such tokens.

    Raises UserError for an attention implementation, or a sample, that cannot have this mask.
    """
    types, seq_idx = keywords.get(TYPES), keywords.get("seq_idx")
    if types is None or seq_idx is None or keywords.get("attention_mask") is not None:
        return keywords
    if (kind := getattr(model.config, "model_type", "")) not in _TWO_WAY:
        return keywords
    attention = attention_of(model)
    if attention not in ("sdpa", "eager"):
        raise UserError(
            f"got a pack with token_type_ids for {type(model).__name__} and attn_implementation={attention!r}, "
            f"expected 'sdpa' or 'eager', because some tokens see those after them. Load the model with one of these"
        )
    dtype = model.dtype if attention == "eager" else None
    window: Any = getattr(model.config.get_text_config(), "sliding_window", None)
    if kind != "paligemma":
        return {**keywords, "attention_mask": _image_masks(seq_idx, types, window, dtype)}
    longest = keywords.get("max_length_q", seq_idx.shape[-1])
    if window is not None and longest > window:
        raise UserError(
            f"got a segment of {longest} tokens for {type(model).__name__}, expected at most {window}, because "
            f"transformers takes one mask for layers with this window and without it. Set `rules.budget: {window}`"
        )
    return {**keywords, "attention_mask": _shaped(_prefix_mask(seq_idx[0], types[0]), dtype)}


def _prefix_mask(seq_idx: torch.Tensor, types: torch.Tensor) -> torch.Tensor:
    """Return the mask [T, T] of a pack in which the tokens before the first one of type 1 in a sample see each other.

    ``seq_idx``: [T], the number of each token's sample. ``types``: [T], 1 for tokens of answers.
    """
    place = torch.arange(len(types), device=types.device)
    own = seq_idx[:, None] == seq_idx
    sees = own & (place[:, None] >= place)
    is_prefix = ~(sees & (types == 1)).any(-1)
    return sees | (own & is_prefix[:, None] & is_prefix)


def _image_masks(
    seq_idx: torch.Tensor, types: torch.Tensor, window: int, dtype: torch.dtype | None
) -> dict[str, torch.Tensor]:
    """Return the masks [1, 1, T, T] of a pack's layers by the names that transformers has for their attention.

    Args:
        seq_idx: [1, T], the number of each token's sample.
        types: [1, T], 1 for tokens of images. A run of them is one image.
        window: Tokens that sliding attention sees.
        dtype: Floating dtype of an additive mask; None for a boolean mask.
    """
    is_image = types[0] == 1
    begins = is_image & ~torch.nn.functional.pad(is_image, (1, 0))[:-1]
    image = torch.where(is_image, begins.cumsum(0), 0)
    place = torch.arange(len(image), device=image.device)
    back = place[:, None] - place
    own = seq_idx[0][:, None] == seq_idx[0]
    sees = own & ((back >= 0) | ((image[:, None] == image) & is_image))
    masks = {"full_attention": sees, "sliding_attention": sees & (back < window)}
    return {name: _shaped(mask, dtype) for name, mask in masks.items()}


def _shaped(mask: torch.Tensor, dtype: torch.dtype | None) -> Any:
    """Return a mask [T, T] as attention takes it, [1, 1, T, T]."""
    if dtype is None:
        return mask[None, None]
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)[
        None, None
    ]
