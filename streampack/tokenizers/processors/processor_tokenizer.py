"""A tokenizer of chats with images, from a processor's folder.

The chat template writes a placeholder for each image. Its place gets the text of the image, and each token of an image
is repeated once the text is encoded. Ids are those of the processor: it repeats the token in the text. Tokens of images
are never learned.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from streampack.core.model.fields import PATCHES
from streampack.core.stats.sample_warnings import VIDEO_AT_OTHER_RATE
from streampack.errors import ConfigError
from streampack.tokenizers.base import TokenizerSettings
from streampack.tokenizers.chat_spans import Rendered
from streampack.tokenizers.processors.image_family import PIXELS, ImageTokens
from streampack.tokenizers.processors.image_parts import Sized, SizedImage, SizedVideo, take_images, wrong_count
from streampack.tokenizers.processors.open_family import open_family
from streampack.tokenizers.token_ids import Because, Encoded, digest_of_words
from streampack.tokenizers.tokenizer_json import FileTokenizer


class ProcessorTokenizer(FileTokenizer):
    """The tokenizer of a processor's folder; ``family`` says what an image becomes. Raises ConfigError."""

    def __init__(self, settings: TokenizerSettings) -> None:
        folder = Path(settings.processor or "").expanduser()
        self.family = open_family(folder)
        marks = {self.family.placeholder, self.family.token, self.family.video_token} - {""}
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
        tokens = [self._ids[token] for token in (self.family.token, self.family.video_token) if token]
        self._image_ids = np.array(tokens, np.int32)
        self._kinds = {self.family.placeholder: "image"} | dict.fromkeys({self.family.video_token} - {""}, "video")
        self.image_fields: Mapping[str, Mapping[str, Any]] = self.family.fields(tokens)
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
        plans, warnings = list[ImageTokens](), list[str]()
        for number, image in enumerate(images):
            plan = self._plan(image, number)
            if isinstance(plan, str):
                return plan
            plans.append(plan)
            if isinstance(image, SizedVideo) and self.family.frames_of_video(image.size).at_other_rate:
                warnings.append(VIDEO_AT_OTHER_RATE)
        kinds = ["video" if isinstance(image, SizedVideo) else "image" for image in images]
        expanded = _expanded(rendered, self._kinds, kinds, [plan.text for plan in plans])
        if isinstance(expanded, str):
            return expanded
        encoded = self._encode_parts(expanded) if self.family.has_prefix else self._encode_rendered(expanded)
        if isinstance(encoded, str) or not plans:
            return encoded
        repeats = [number for plan in plans for number in plan.repeats]
        is_image = np.isin(encoded.tokens, self._image_ids)
        if int(is_image.sum()) != len(repeats):
            return wrong_count("image", len(repeats), int(is_image.sum()))
        counts = np.ones(len(is_image), np.int64)
        counts[is_image] = repeats
        mask = np.ones(len(is_image), np.uint8) if encoded.loss_mask is None else encoded.loss_mask.copy()
        mask[is_image] = 0
        tokens, mask = np.repeat(encoded.tokens, counts), np.repeat(mask, counts)
        values: dict[str, Any] = {
            PIXELS: [image.reference for image in images],
            PATCHES: np.array([plan.rows for plan in plans]),
            **{name: [plan.values[name] for plan in plans] for name in plans[0].values},
            **self.family.values_of(np.repeat(is_image, counts), plans, mask),
        }
        return encoded._replace(
            tokens=tokens, loss_mask=mask, values=values, warnings=(*encoded.warnings, *warnings)
        )  # fmt: skip

    def _plan(self, image: Sized, number: int) -> ImageTokens | str:
        """Return what an image or a video becomes, or the reason why the processor rejects it."""
        if isinstance(image, SizedImage):
            try:
                return self.family.tokens_of(image.height, image.width)
            except ValueError as error:
                return Because("image_size", f"image {number} has {image.width} x {image.height} pixels, and {error}")
        name, size = type(self.family).__name__, image.size
        if not self.family.video_token:
            return Because("video_family", f"{name} reads no videos here. Processors that do: Qwen3VLProcessor")
        try:
            return self.family.tokens_of_video(size)
        except ValueError as error:
            about = f"{size.frames} frames of {size.width} x {size.height} pixels"
            return Because("video_size", f"video {number} has {about}, and {error}")

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


def _expanded(
    rendered: Rendered, placeholders: Mapping[str, str], kinds: Sequence[str], texts: Sequence[str]
) -> Rendered | str:  # fmt: skip
    """Return a rendered chat with a text in the place of each placeholder, or a reason if they do not fit.

    ``placeholders``: the kind that each stands for. ``kinds``, ``texts``: those of the images and videos, in order.
    """
    places = list(re.finditer("|".join(map(re.escape, placeholders)), rendered.text))
    written = [placeholders[place[0]] for place in places]
    if written != list(kinds):
        for kind in ("image", "video"):
            if written.count(kind) != kinds.count(kind):
                return wrong_count(kind, kinds.count(kind), written.count(kind))
        return Because("template", "the chat template writes images and videos in another order than the messages")
    if not texts:
        return rendered
    begins = np.array([place.start() for place in places])
    sizes = [len(text) - len(place[0]) for text, place in zip(texts, places, strict=True)]
    growth = np.concatenate([[0], np.cumsum(sizes)])

    def moved(place: int) -> int:
        """Return a place of the old text in the new one."""
        return place + int(growth[np.searchsorted(begins, place)])

    rest = iter(texts)
    text = re.sub("|".join(map(re.escape, placeholders)), lambda _: next(rest), rendered.text)
    return rendered._replace(text=text, learned=[(moved(begin), moved(end)) for begin, end in rendered.learned])
