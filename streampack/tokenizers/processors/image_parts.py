"""The images and videos of a chat's messages: parts of a content, or marks in a text with a list beside it.

Such parts are read::

    {"type": "image"}                                     the next image of the list
    {"type": "image", "image": ...}                       also url, path, base64 or bytes in place of image
    {"type": "image_url", "image_url": {"url": ...}}
    "<image>" in a text, or in a part of the type text    the next image of the list

The same holds for ``video``. Values are whatever the data has: a path, a URL, bytes. This module does not read them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from streampack.tokenizers.processors.image_family import VideoSize
from streampack.tokenizers.token_ids import Because

KINDS = ("image", "video")
_CONTENTS = ("content", "value")
_SOURCES = ("url", "path", "base64", "bytes")
_TYPES = {
    f"{before}{kind}{after}": kind for kind in KINDS for before, after in (("", ""), ("", "_url"), ("input_", ""))
}
_SIZED = "sized"


class SizedImage(NamedTuple):
    """An image in a message: where it is, and the size that it has upright."""

    reference: Any
    height: int
    width: int


class SizedVideo(NamedTuple):
    """A video in a message: where it is, and its header."""

    reference: Any
    size: VideoSize


Sized = SizedImage | SizedVideo


class MediaPlaces:
    """Puts images and videos into the places of messages that stand for them, in order.

    Args:
        listed: The images and the videos beside the chat, for places that name none. A kind without a list has no
            marks: ``<image>`` in a text is text.
        sized: Function from a kind and a value of the data to the image or the video.
    """

    def __init__(self, listed: Mapping[str, Sequence[Any]], sized: Callable[[str, Any], Sized]) -> None:
        self._rest: dict[str, Iterator[Any]] = {kind: iter(values) for kind, values in listed.items()}
        self._mark = re.compile("|".join(f"<({kind})>" for kind in listed)) if listed else None
        self._sized = sized
        self._places, self._filled = dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0)

    def fill(self, chat: list[Any]) -> list[Any]:
        """Return the messages with an image or a video in each place; places without one stay empty."""
        return [self._message(message) for message in chat]

    def wrong_count(self) -> Because | None:
        """Return the reason if a chat has more or fewer images or videos than places; None if the numbers are equal."""
        for kind in KINDS:
            left = len(list(self._rest.get(kind, ())))
            if left or self._places[kind] != self._filled[kind]:
                return wrong_count(kind, self._filled[kind] + left, self._places[kind])
        return None

    def _message(self, message: Any) -> Any:
        """Return a message with images and videos in their places."""
        key = _key_of_content(message)
        content, parts = message[key] if key else None, list[Any]()
        if isinstance(content, str) and not (self._mark and self._mark.search(content)):
            return message
        if not isinstance(content, str | list):
            return message
        for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind == "text" and self._mark and isinstance(part.get("text"), str):
                parts += self._split(part, self._mark)
            elif kind in _TYPES:
                named = (_TYPES[kind], f"{_TYPES[kind]}_url", *_SOURCES)
                name = next((name for name in named if part.get(name) is not None), "")
                value = part.get(name)
                parts.append(self._part(_TYPES[kind], f"data:;base64,{value}" if name == "base64" else value))
            else:
                parts.append(part)
        return {**message, key: parts}

    def _split(self, part: Mapping[str, Any], mark: re.Pattern[str]) -> list[Any]:
        """Return the parts of a text with marks."""
        parts, place = list[Any](), 0
        for match in mark.finditer(part["text"]):
            if text := part["text"][place : match.start()]:
                parts.append({**part, "text": text})
            parts.append(self._part(match[0][1:-1]))
            place = match.end()
        text = part["text"][place:]
        return [*parts, {**part, "text": text}] if text or not parts else parts

    def _part(self, kind: str, value: Any = None) -> dict[str, Any]:
        """Return the part for a value, by default the next one of the list; an empty one if there is none."""
        self._places[kind] += 1
        value = next(self._rest.get(kind, iter(())), None) if value is None else value
        if value is None:
            return {"type": kind}
        self._filled[kind] += 1
        return {"type": kind, _SIZED: self._sized(kind, value)}


def take_images(chat: list[Any]) -> tuple[list[Any], list[Sized]]:
    """Return the messages with ``{"type": "image"}`` in the place of each image, and the images in order."""
    images: list[Sized] = []

    def plain(part: Any) -> Any:
        """Return a part without its image."""
        if isinstance(part, Mapping) and _SIZED in part:
            images.append(part[_SIZED])
            return {"type": part["type"]}
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


def wrong_count(kind: str, images: int, places: int) -> Because:
    """Return the reason for a chat with more or fewer images, or videos, than places that stand for them."""
    return Because(
        f"{kind}_count", f"the row has {images} {kind}s, and {places} places for {kind}s in its messages"
    )  # fmt: skip
