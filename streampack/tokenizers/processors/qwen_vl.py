"""Qwen2-VL and Qwen2.5-VL: a grid of patches, and positions in time, height and width.

An image is scaled so that its sides are multiples of ``patch_size * merge_size`` and its area is within two limits. A
square of ``merge_size`` patches on each side becomes one token. (transformers 5, ``smart_resize`` of
image_processing_qwen2_vl, and ``get_rope_index`` of the models)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from streampack.errors import ConfigError
from streampack.tokenizers.processors.image_family import PIXELS, ImageFamily, ImageTokens, ProcessorFiles

GRID = "image_grid_thw"
LONGEST_ASPECT = 200


class QwenVL(ImageFamily):
    """Grids of patches, and three positions for each token."""

    classes: ClassVar[tuple[str, ...]] = ("Qwen2VLProcessor", "Qwen2_5_VLProcessor")

    def __init__(self, files: ProcessorFiles) -> None:
        self.placeholder = self.token = files.token("image_token", "<|image_pad|>")
        self._patch, self._merge = files.number("patch_size", 14), files.number("merge_size", 2)
        size = files.image.get("size") or {}
        self._least = files.number("min_pixels", size.get("shortest_edge") or size.get("min_pixels") or 56 * 56)
        self._most = files.number("max_pixels", size.get("longest_edge") or size.get("max_pixels") or 28 * 28 * 1280)
        if files.image.get("do_resize") is False:
            raise ConfigError(
                "tokenizer.processor: got `do_resize: false` in the processor's folder, expected true. Remove the key"
            )

    def tokens_of(self, height: int, width: int) -> ImageTokens:
        """Return the tokens, the patches and the grid of an image."""
        rows, columns = (side // self._patch for side in self._resized(height, width))
        grid = (1, rows, columns)
        return ImageTokens(self.token, (rows * columns // self._merge**2,), rows * columns, {GRID: grid})

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        """Return the sides of the scaled image."""
        longer, shorter = max(height, width), min(height, width)
        if longer > LONGEST_ASPECT * shorter:
            raise ValueError(f"its sides have a ratio of {longer / shorter:.0f}, more than {LONGEST_ASPECT}")
        factor = self._patch * self._merge
        sides = round(height / factor) * factor, round(width / factor) * factor
        if sides[0] * sides[1] > self._most:
            scale = math.sqrt(height * width / self._most)
            return tuple(max(factor, math.floor(side / scale / factor) * factor) for side in (height, width))  # type: ignore[return-value]
        if sides[0] * sides[1] < self._least:
            scale = math.sqrt(self._least / (height * width))
            return tuple(math.ceil(side * scale / factor) * factor for side in (height, width))  # type: ignore[return-value]
        return sides

    def fields(self, tokens: list[int]) -> dict[str, dict[str, Any]]:
        """Return the fields of a run: three positions, grids, and references."""
        fields = super().fields(tokens)
        fields[PIXELS]["placeholder"] = {"tokens": tokens, "patches": self._merge**2}
        return {
            "position_ids": {"dtype": "int32", "shape": [3]},
            GRID: {"dtype": "int64", "axis": "item", "shape": [3]},
            **fields,
        }

    def values_of(
        self, is_image: NDArray[np.bool_], images: Sequence[ImageTokens], learned: NDArray[np.uint8]
    ) -> dict[str, NDArray[Any]]:
        """Return the positions of each token, [T, 3].

        A text token is one further than the token before it, along each axis. The tokens of an image begin at the same
        place, and the text behind it begins after the longer side of its grid. So do those of each part of a video.
        """
        positions = np.empty((len(is_image), 3), np.int32)
        of_images = np.flatnonzero(is_image)
        place = used = current = 0
        for rows, columns in (image.values[GRID][1:] for image in images for _ in range(image.values[GRID][0])):
            rows, columns = rows // self._merge, columns // self._merge
            begin = int(of_images[used])
            positions[place:begin] = np.arange(current, current + begin - place)[:, np.newaxis]
            current += begin - place
            used, place = used + rows * columns, begin + rows * columns
            positions[begin:place, 0] = current
            positions[begin:place, 1] = current + np.repeat(np.arange(rows), columns)
            positions[begin:place, 2] = current + np.tile(np.arange(columns), rows)
            current += max(rows, columns)
        positions[place:] = np.arange(current, current + len(is_image) - place)[:, np.newaxis]
        return {"position_ids": positions}
