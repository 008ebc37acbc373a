"""A tokenizer of chats with images, from a processor's folder.

The chat template writes a placeholder for each image. Its place gets the text of the image, and each token of an image
is repeated once the text is encoded. Ids are those of the processor: it repeats the token in the text. Tokens of images
are never learned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from streampack.core.model.fields import PATCHES
from streampack.errors import ConfigError
from streampack.tokenizers.base import TokenizerSettings
from streampack.tokenizers.chat_spans import Rendered
from streampack.tokenizers.processors.image_family import PIXELS, ImageTokens
from streampack.tokenizers.processors.image_parts import take_images, wrong_count
from streampack.tokenizers.processors.open_family import open_family
from streampack.tokenizers.token_ids import Because, Encoded, digest_of_words
from streampack.tokenizers.tokenizer_json import FileTokenizer


class ProcessorTokenizer(FileTokenizer):
    """The tokenizer of a processor's folder; ``family`` says what an image becomes. Raises ConfigError."""

    def __init__(self, settings: TokenizerSettings) -> None:
        folder = Path(settings.processor or "").expanduser()
        self.family = open_family(folder)
        marks = {self.family.placeholder, self.family.token}
        if self.family.has_prefix and settings.train_on == "all":
            raise ConfigError(
                f"tokenizer.train_on: got `all` for {type(self.family).__name__}, expected `answers`, because tokens "
                "of a question see those after them"
            )
        template = settings.chat_template or self.family.template or None
        settings = msgspec.structs.replace(settings, file=str(folder), processor=None, chat_template=template)
        super().__init__(settings, marks=marks, images=True)
        if missing := sorted(mark for mark in marks if mark not in self._ids):
            raise ConfigError(
                f"tokenizer.processor: the tokenizer in {folder} has no token {missing[0]}, which stands for images. "
                "Give the folder of a processor, with its own tokenizer"
            )
        self._token = self._ids[self.family.token]
        self.image_fields: Mapping[str, Mapping[str, Any]] = self.family.fields(self._token)
        self.digest = digest_of_words(self.digest, type(self.family).__name__, repr(sorted(vars(self.family).items())))

    def encode_chat(
        self, messages: object, tools: object = None, variables: Mapping[str, Any] | None = None
    ) -> Encoded | str:
        """Return the ids, the loss mask and the values of images of a chat, or the reason it is rejected.

        Messages have a ``SizedImage`` in the place of each image.
        """
        plain, images = take_images(messages) if isinstance(messages, list) else (messages, [])
        rendered = self._rendered_chat(plain, tools, variables)
        if isinstance(rendered, str):
            return rendered
        plans = list[ImageTokens]()
        for number, image in enumerate(images):
            try:
                plans.append(self.family.tokens_of(image.height, image.width))
            except ValueError as error:
                return Because("image_size", f"image {number} has {image.width} x {image.height} pixels, and {error}")
        expanded = _expanded(rendered, self.family.placeholder, [plan.text for plan in plans])
        if isinstance(expanded, str):
            return expanded
        encoded = self._encode_parts(expanded) if self.family.has_prefix else self._encode_rendered(expanded)
        if isinstance(encoded, str) or not plans:
            return encoded
        repeats = [number for plan in plans for number in plan.repeats]
        is_image = encoded.tokens == self._token
        if int(is_image.sum()) != len(repeats):
            return wrong_count(len(plans), int(is_image.sum()))
        counts = np.ones(len(is_image), np.int64)
        counts[is_image] = repeats
        mask = np.ones(len(is_image), np.uint8) if encoded.loss_mask is None else encoded.loss_mask.copy()
        mask[is_image] = 0
        tokens, mask = np.repeat(encoded.tokens, counts), np.repeat(mask, counts)
        values: dict[str, Any] = {
            PIXELS: [image.reference for image in images],
            PATCHES: np.array([plan.rows for plan in plans]),
            **{name: [plan.values[name] for plan in plans] for name in plans[0].values},
            **self.family.values_of(tokens, self._token, plans, mask),
        }
        return encoded._replace(tokens=tokens, loss_mask=mask, values=values)

    def _encode_parts(self, rendered: Rendered) -> Encoded | str:
        """Return the ids and loss mask of a chat whose answer, at its end, is encoded apart; or a reason."""
        text = rendered.text
        if len(rendered.learned) != 1 or rendered.learned[0][1] != len(text) or self.family.token not in text:
            return Because("template", f"{type(self.family).__name__} reads one question with images, and one answer")
        begin = rendered.learned[0][0]
        parts = [Rendered(text[:begin], []), Rendered(text[begin:], [(0, len(text) - begin)], rendered.warnings)]
        question, answer = map(self._encode_rendered, parts)
        if isinstance(question, str) or isinstance(answer, str):
            return question if isinstance(question, str) else answer
        masks = [np.zeros(len(question.tokens), np.uint8), np.ones(len(answer.tokens), np.uint8)]
        return answer._replace(tokens=np.concatenate([question.tokens, answer.tokens]), loss_mask=np.concatenate(masks))


def _expanded(rendered: Rendered, placeholder: str, texts: Sequence[str]) -> Rendered | str:
    """Return a rendered chat with a text in the place of each placeholder, or a reason if their numbers differ."""
    pieces = rendered.text.split(placeholder)
    if len(pieces) != len(texts) + 1:
        return wrong_count(len(texts), len(pieces) - 1)
    if not texts:
        return rendered
    sizes = np.array([len(piece) for piece in pieces[:-1]])
    begins = np.cumsum(sizes) + len(placeholder) * np.arange(len(sizes))
    growth = np.concatenate([[0], np.cumsum([len(text) - len(placeholder) for text in texts])])

    def moved(place: int) -> int:
        """Return a place of the old text in the new one."""
        return place + int(growth[np.searchsorted(begins, place)])

    text = pieces[0] + "".join(text + piece for text, piece in zip(texts, pieces[1:], strict=True))
    return rendered._replace(text=text, learned=[(moved(begin), moved(end)) for begin, end in rendered.learned])
