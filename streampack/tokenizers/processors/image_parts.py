"""The images of a chat's messages: parts of a content, or ``<image>`` in a text with a list of images beside it.

Such parts are read::

    {"type": "image"}                                     the next image of the list
    {"type": "image", "image": ...}                       also url, path, base64 or bytes in place of image
    {"type": "image_url", "image_url": {"url": ...}}
    "<image>" in a text, or in a part of the type text    the next image of the list

Values are whatever the data has: a path, a URL, bytes. This module does not read them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from streampack.tokenizers.token_ids import Because

MARK = "<image>"
"""Text that stands for an image in data as LLaVA and ShareGPT have it."""
_CONTENTS = ("content", "value")
_SOURCES = ("image", "url", "path", "base64", "bytes", "image_url")
_TYPES = ("image", "image_url", "input_image")
_SIZED = "sized"


class SizedImage(NamedTuple):
    """An image in a message: where it is, and the size that it has upright."""

    reference: Any
    height: int
    width: int


def place_images(
    chat: list[Any], listed: Sequence[Any] | None, sized: Callable[[Any], SizedImage]
) -> tuple[list[Any], int, list[Any]]:
    """Return the messages with a ``SizedImage`` in the place of each image.

    Also return the number of places that stand for one, and the images of the list that are left.

    Places beyond the images of the list stay empty, so the caller compares the numbers.

    Args:
        chat: The messages.
        listed: The images beside the chat, for places that name no image. None if the data has no such list; then
            ``<image>`` in a text is text.
        sized: Function from an image's value to the image.
    """
    rest = iter(listed or ())
    count = itertools.count()
    placed = [_with_images(message, rest, listed is not None, count, sized) for message in chat]
    return placed, next(count), list(rest)


def take_images(chat: list[Any]) -> tuple[list[Any], list[SizedImage]]:
    """Return the messages with ``{"type": "image"}`` in the place of each image, and the images in order."""
    images: list[SizedImage] = []

    def plain(part: Any) -> Any:
        """Return a part without its image."""
        if isinstance(part, Mapping) and _SIZED in part:
            images.append(part[_SIZED])
            return {"type": "image"}
        return part

    messages = []
    for message in chat:
        key = _key_of_content(message)
        content = message[key] if key else None
        messages.append({**message, key: list(map(plain, content))} if isinstance(content, list) else message)
    return messages, images


def _key_of_content(message: Any) -> str:
    """Return the key of a message's content; empty if it has none."""
    return next((key for key in _CONTENTS if isinstance(message, Mapping) and message.get(key) is not None), "")


def _with_images(
    message: Any, rest: Iterator[Any], is_marked: bool, count: Iterator[int], sized: Callable[[Any], SizedImage]
) -> Any:
    """Return a message with images in place; ``rest`` are the images of the list that are left."""
    key = _key_of_content(message)
    content, parts = message[key] if key else None, []
    if isinstance(content, str) and (not is_marked or MARK not in content):
        return message
    if not isinstance(content, str | list):
        return message
    for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text" and is_marked and isinstance(part.get("text"), str):
            parts += _split(part, rest, count, sized)
        elif kind in _TYPES:
            name = next((name for name in _SOURCES if part.get(name) is not None), "")
            value = part.get(name)
            value = f"data:;base64,{value}" if name == "base64" else value
            parts.append(_image(next(rest, None) if value is None else value, count, sized))
        else:
            parts.append(part)
    return {**message, key: parts}


def _split(
    part: Mapping[str, Any], rest: Iterator[Any], count: Iterator[int], sized: Callable[[Any], SizedImage]
) -> list[Any]:
    """Return the parts of a text with marks."""
    parts: list[Any] = []
    for number, text in enumerate(part["text"].split(MARK)):
        if number:
            parts.append(_image(next(rest, None), count, sized))
        if text or part["text"] == "":
            parts.append({**part, "text": text})
    return parts


def _image(value: Any, count: Iterator[int], sized: Callable[[Any], SizedImage]) -> dict[str, Any]:
    """Return the part for an image; without the image if ``value`` is None."""
    next(count)
    return {"type": "image"} if value is None else {"type": "image", _SIZED: sized(value)}


def wrong_count(images: int, places: int) -> Because:
    """Return the reason for a chat with more or fewer images than places that stand for them."""
    return Because("image_count", f"the row has {images} images, and {places} places for images in its messages")
