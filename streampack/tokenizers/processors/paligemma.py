"""PaliGemma: each image is scaled to one square, and becomes as many tokens as any other.

A chat is one question with images, and its answer. Tokens of the question see each other in both directions, by
``token_type_ids``. The question and the answer are encoded apart, as the processor does with ``text`` and ``suffix``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streampack.tokenizers.processors.gemma3 import TYPES
from streampack.tokenizers.processors.image_family import ImageFamily, ImageTokens, ProcessorFiles

_TEMPLATE = "".join(
    (
        "{% for message in messages %}",
        "{% if message['role'] != ('user' if loop.first else 'assistant') %}",
        "{{ raise_exception('PaliGemma reads one question with images, and one answer') }}",
        "{% endif %}",
        "{% set images = message['content'] | selectattr('type', 'equalto', 'image') | list %}",
        "{% set place = namespace(left=images | length) %}",
        "{% for part in message['content'] %}",
        "{% if part['type'] == 'image' %}",
        "{% set place.left = place.left - 1 %}",
        "{{ '<image>' }}{{ '' if place.left else bos_token }}",
        "{% else %}",
        "{{ part['text'] }}",
        "{% endif %}",
        "{% endfor %}",
        "{{ eos_token if message['role'] == 'assistant' else '\n' }}",
        "{% endfor %}",
    )
)
"""The text of the processor: a question has its BOS after the last image, and a line end."""


class PaliGemma(ImageFamily):
    """A fixed number of tokens; the question is a prefix without causality."""

    classes = ("PaliGemmaProcessor",)
    template = _TEMPLATE
    has_prefix = True

    def __init__(self, files: ProcessorFiles) -> None:
        self.placeholder = self.token = "<image>"
        self._length = files.number("image_seq_length", 0) or int(files.processor.get("image_seq_length") or 256)

    def tokens_of(self, height: int, width: int) -> ImageTokens:
        """Return the tokens of an image, which do not depend on its size."""
        return ImageTokens(self.token, (self._length,), 1)

    def fields(self, tokens: list[int]) -> dict[str, dict[str, Any]]:
        """Return the fields of a run: the types of tokens, and references."""
        return super().fields(tokens) | {TYPES: {"dtype": "int64", "default": 1}}

    def values_of(
        self, is_image: NDArray[np.bool_], images: Sequence[ImageTokens], learned: NDArray[np.uint8]
    ) -> dict[str, NDArray[Any]]:
        """Return the type of each token: 0 for the question, 1 for the answer."""
        return {TYPES: learned.astype(np.int64)}
