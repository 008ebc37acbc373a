"""Chats: a list of messages, each with a role and a content.

Theory of operation. What is read here is what training sets hold: ``role``, ``content`` (a text, a list of text
parts, or null beside tool calls), and per message whether it is learned, as ``train: false`` or ``weight: 0``.

This module knows messages and texts: never ids.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Message(NamedTuple):
    """``text``: of the content alone. ``train``: whether an answer is learned. ``raw``: all that a template may see."""

    role: str
    text: str
    train: bool
    raw: dict[str, Any]


def read_messages(messages: object) -> list[Message] | str:
    """The messages of a chat; ``messages`` when it is none, ``empty`` when there is nothing in it.

    >>> read_messages([{"role": "user", "content": "hi", "weight": 0}])[0][:3]
    ('user', 'hi', False)
    """
    if not isinstance(messages, list):
        return "messages"
    read = [_read(message) for message in messages]
    good = [message for message in read if message is not None]
    if len(good) < len(read):
        return "messages"
    return good or "empty"


def without_training(messages: list[Any]) -> list[Any]:
    """The same messages, none of which is learned: a prompt."""
    return [{**message, "train": False} if isinstance(message, dict) else message for message in messages]


def _read(message: object) -> Message | None:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        return None
    text = _text(message.get("content"))
    train = message.get("train", True)
    weight = message.get("weight", 1)
    if text is None or not isinstance(train, bool) or isinstance(weight, bool) or weight not in (0, 1):
        return None
    raw = {key: value for key, value in message.items() if key not in ("train", "weight")}
    return Message(message["role"], text, train and weight == 1, raw)


def _text(content: object) -> str | None:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return None
    parts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in content]
    return None if any(not isinstance(part, str) for part in parts) else "".join(map(str, parts))
