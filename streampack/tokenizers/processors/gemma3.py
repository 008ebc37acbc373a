"""Gemma 3: each image is scaled to one square, and becomes as many tokens as any other.

The processor of transformers never cuts an image (``do_pan_and_scan``), whatever the folder says, unless a call asks
for it. Tokens of an image see each other in both directions, by ``token_type_ids``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streampack.tokenizers.processors.image_family import ImageFamily, ImageTokens, ProcessorFiles

TYPES = "token_type_ids"


class Gemma3(ImageFamily):
    """A fixed number of tokens, between two markers and empty lines."""

    classes = ("Gemma3Processor",)

    def __init__(self, files: ProcessorFiles) -> None:
        self.placeholder = files.token("boi_token", "<start_of_image>")
        self.token = files.token("image_token", "<image_soft_token>")
        end = files.token("eoi_token", "<end_of_image>")
        self.options = {"do_convert_rgb": True, "do_pan_and_scan": False}
        self._text = f"\n\n{self.placeholder}{self.token}{end}\n\n"
        self._length = int(files.processor.get("image_seq_length") or 256)

    def tokens_of(self, height: int, width: int) -> ImageTokens:
        """Return the tokens of an image, which do not depend on its size."""
        return ImageTokens(self._text, (self._length,), 1)

    def fields(self, tokens: list[int]) -> dict[str, dict[str, Any]]:
        """Return the fields of a run: the types of tokens, and references."""
        return super().fields(tokens) | {TYPES: {"dtype": "int64", "default": 0}}

    def values_of(
        self, is_image: NDArray[np.bool_], images: Sequence[ImageTokens], learned: NDArray[np.uint8]
    ) -> dict[str, NDArray[Any]]:
        """Return the type of each token: 1 for a token of an image."""
        return {TYPES: is_image.astype(np.int64)}
