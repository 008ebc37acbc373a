"""LLaVA-NeXT: an image becomes a small one and tiles of a larger one, whose rows of features end with a new line.

The larger image has the size of ``image_grid_pinpoints`` that keeps most pixels. Its ratio of sides is kept, and its
padding becomes no tokens. (transformers 5, ``LlavaNextProcessor`` and ``select_best_resolution``)
"""

from __future__ import annotations

from typing import Any

from streampack.errors import ConfigError
from streampack.tokenizers.processors.image_family import ImageFamily, ImageTokens, ProcessorFiles

SIZES = "image_sizes"
_PINPOINTS = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))


class LlavaNext(ImageFamily):
    """A tile of the whole image, and tiles of a grid that fits the image."""

    classes = ("LlavaNextProcessor",)

    def __init__(self, files: ProcessorFiles) -> None:
        self.placeholder = self.token = files.token("image_token", files.processor.get("image_token") or "<image>")
        self._patch = int(files.processor.get("patch_size") or 0)
        if not self._patch:
            raise ConfigError(
                "tokenizer.processor: got no `patch_size` in processor_config.json, expected that of the "
                "model's vision tower. Add the key, such as 14"
            )
        size, crop = (files.image.get(key) or {} for key in ("size", "crop_size"))
        self._side = int(crop.get("height") or size.get("height") or size.get("shortest_edge") or 224)
        self._pinpoints = tuple(map(tuple, files.image.get("image_grid_pinpoints") or _PINPOINTS))
        self._more = int(files.processor.get("num_additional_image_tokens") or 0)
        self._more -= files.processor.get("vision_feature_select_strategy") == "default"
        self.options = {"do_pad": True}

    def tokens_of(self, height: int, width: int) -> ImageTokens:
        """Return the tokens, the tiles and the size of an image."""
        high, wide = max(self._pinpoints, key=lambda size: _kept_pixels(height, width, *size))
        tiles = -(-high // self._side) * -(-wide // self._side) + 1
        own = self._side // self._patch
        rows, columns = _without_padding(height, width, own * (high // self._side), own * (wide // self._side))
        return ImageTokens(
            self.token, (own * own + self._more + rows * (columns + 1),), tiles, {SIZES: (height, width)}
        )

    def fields(self, tokens: list[int]) -> dict[str, dict[str, Any]]:
        """Return the fields of a run: sizes of images, and references."""
        return {SIZES: {"dtype": "int64", "axis": "item", "shape": [2]}, **super().fields(tokens)}


def _kept_pixels(height: int, width: int, high: int, wide: int) -> tuple[int, int]:
    """Return the pixels of an image that stay if it is scaled into [high, wide], and the negative of unused ones."""
    scale = min(wide / width, high / height)
    kept = min(int(width * scale) * int(height * scale), width * height)
    return kept, kept - high * wide


def _without_padding(height: int, width: int, rows: int, columns: int) -> tuple[int, int]:
    """Return the rows and columns of features of an image that are no padding."""
    if width / height > columns / rows:
        return rows - (rows - int(round(height * (columns / width), 7))) // 2 * 2, columns
    return rows, columns - (columns - int(round(width * (rows / height), 7))) // 2 * 2
