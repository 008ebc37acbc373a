"""Reads chats: lists of messages with a role and a content.

Messages become what a chat template of transformers gets. Keys that are null are left out, and the names of reasoning
(``reasoning_content``, ``thinking``, ``reasoning``) are aliases.

A marker token may occur inside the data, for example if a user writes ``<|im_end|>``. Before rendering, each of its
characters gets a prefix character that no text contains. So it differs from the markers that the template writes.

This module knows messages. ``chat_spans`` renders them.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from itertools import groupby
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from streampack.core.stats.sample_warnings import TEMPLATE_KWARGS_LEFT_OUT, TOOLS_LEFT_OUT
from streampack.tokenizers.chat_marks import RESERVED, SPLIT, TemplateError
from streampack.tokenizers.token_ids import Because, Encoded

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning, the one that counts first."""
ANSWER = "assistant"
"""Role of the messages that are learned."""
_ROLES = ("system", "developer", "user", ANSWER, "tool")
_SHAREGPT = {"human": "user", "gpt": ANSWER, "function_call": ANSWER, "observation": "tool"}
_MEANT = {**_SHAREGPT, "prompter": "user", "bot": ANSWER, "chatbot": ANSWER, "model": ANSWER, "ai": ANSWER}
"""The usual meaning of roles that templates do not know."""


class ChatMessage(NamedTuple):
    """One message of a chat.

    - ``role``: such as ``user`` or ``assistant``.
    - ``text``: the content as plain text.
    - ``train``: whether an answer is learned.
    - ``raw``: the mapping that the template sees.
    """

    role: str
    text: str
    train: bool
    raw: dict[str, Any]

    @property
    def is_answer(self) -> bool:
        """True if the assistant wrote the message."""
        return self.role == ANSWER


# Messages


def read_messages(
    messages: object,
    roles: Mapping[str, str] | None = None,
    *,
    any_role: bool = False,
    images: bool = False,
) -> list[ChatMessage] | str:
    """Check and convert a chat's messages; return the reason ``messages``, ``roles``, or ``empty`` without any.

    A message is a mapping with ``role`` and ``content``, or ``from`` and ``value`` as in ShareGPT. The content is a
    text, null, or a list of ``{"type": "text", "text": ...}``; with ``images``, also ``{"type": "image"}``. An answer
    with ``train: false`` or ``weight: 0`` is not learned. The template sees all other keys. ``roles`` maps roles in the
    data to those of the template. The reason is ``roles`` for an unknown role that it does not map, unless ``any_role``
    is set.

    >>> read_messages([{"role": "user", "content": "hi", "weight": 0}])[0][:3]
    ('user', 'hi', False)
    """
    if not isinstance(messages, list):
        return "messages"
    roles = roles or {}
    read = [_read_message(message, roles, images) for message in messages]
    good = [message for message in read if message is not None]
    if len(good) < len(read):
        return "messages"
    for number, message in enumerate([] if any_role else good):
        if message.role not in _ROLES and message.role not in roles.values():
            return _unknown_role(number, message.role)
    return good or "empty"


def _unknown_role(number: int, role: str) -> Because:
    """Return the reason ``roles`` for a message with an unknown role."""
    name = role if re.fullmatch("[A-Za-z_][A-Za-z0-9_-]*", role) else repr(role[:40])
    if (meant := _MEANT.get(role.lower())) is not None:
        advice = f"Set tokenizer: {{roles: {{{name}: {meant}}}}}"
    else:
        advice = (
            f"Set tokenizer: {{roles: {{{name}: {ANSWER}}}}} if the assistant wrote it. Set "
            f"{{roles: {{{name}: user}}}} if the user did, or {{roles: {{{name}: {name}}}}} if the template knows this "
            "role"
        )
    return Because("roles", f"message {number} has the role {name}, not {', '.join(_ROLES)}. {advice}")


def wrong_variables(variables: object) -> str | None:
    """Return what is wrong with the variables for a chat template; None if they can be used."""
    if variables is not None and not isinstance(variables, Mapping):
        return f"chat_template_kwargs: got a {type(variables).__name__}, expected a mapping of names to values"
    reserved = sorted(set(variables or ()) & {"messages", "tools", "add_generation_prompt"})
    if reserved:
        return f"chat_template_kwargs: got {reserved[0]}, which streampack gives the template itself. Remove it"
    return None


def left_out(tools: object, variables: object, reads: Collection[str] = ()) -> list[str]:
    """Return warnings about tools and template variables of a row that are not among the names that are read."""
    warnings = [TOOLS_LEFT_OUT] if tools and "tools" not in reads else []
    names = variables if isinstance(variables, Mapping) else ()
    return warnings + [TEMPLATE_KWARGS_LEFT_OUT] * any(name not in reads for name in names)


def pair_messages(prompt: object, completion: object) -> list[Any] | None:
    """Join a prompt and its completion to one chat in which only the completion is learned.

    ``prompt``: a list of messages. ``completion``: another list, or the text of an answer. None for others.
    """
    if not isinstance(prompt, list):
        return None
    if isinstance(completion, str):
        completion = [{"role": "assistant", "content": completion}]
    if not isinstance(completion, list):
        return None
    return [{**message, "train": False} if isinstance(message, dict) else message for message in prompt] + completion


class PairEncoder(ABC):
    """Base of tokenizers: encodes pairs, of messages as a chat, and of texts as the tokenizer does."""

    image_fields: Mapping[str, Mapping[str, Any]] = MappingProxyType({})

    @abstractmethod
    def encode_chat(
        self, messages: object, tools: object = None, variables: Mapping[str, Any] | None = None
    ) -> Encoded | str:
        """Return the ids and loss mask of a chat, or a reason."""

    @abstractmethod
    def _encode_texts(self, prompt: str, completion: str) -> Encoded | str:
        """Return the ids of a prompt and its completion, and a loss mask that is 1 for the completion, or a reason."""

    def encode_pair(
        self, prompt: object, completion: object, tools: object = None, variables: Mapping[str, Any] | None = None
    ) -> Encoded | str:
        """Return the ids and loss mask of a prompt and its completion, or the reason the pair is rejected."""
        messages = pair_messages(prompt, completion)
        if messages is not None:
            return self.encode_chat(messages, tools, variables)
        if not (isinstance(prompt, str) and isinstance(completion, str)):
            return "dtype"
        encoded = self._encode_texts(prompt, completion)
        if isinstance(encoded, str):
            return encoded
        return encoded._replace(warnings=(*left_out(tools, variables), *encoded.warnings))


def _read_message(message: object, roles: Mapping[str, str], images: bool) -> ChatMessage | None:
    """Convert one message to a ChatMessage; None if it is not a valid message."""
    if not isinstance(message, Mapping):
        return None
    raw = {key: value for key, value in message.items() if key not in ("train", "weight") and value is not None}
    if "role" not in raw and "from" in raw:
        role, content = raw.pop("from"), raw.pop("value", None)
        raw["role"] = _SHAREGPT.get(role, role) if isinstance(role, str) else role
        raw |= {} if content is None else {"content": content}
    text = _text(raw.get("content"), images)
    train, weight = message.get("train"), message.get("weight")
    train, weight = True if train is None else train, 1 if weight is None else weight  # null counts as absent
    if text is None or not isinstance(raw.get("role"), str) or not isinstance(train, bool):
        return None
    if not isinstance(weight, int | float) or weight not in (0, 1):
        return None
    raw["role"] = roles.get(raw["role"], raw["role"])
    return ChatMessage(raw["role"], text, train and weight == 1, _with_reasoning(raw))


def _with_reasoning(raw: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose reasoning has the names that templates read, as transformers gives them."""
    reasoning = next((raw[name] for name in REASONING if name in raw), None)
    return raw if reasoning is None else {"thinking": reasoning, **raw, "reasoning_content": reasoning}


def _text(content: object, images: bool) -> str | None:
    """Return the plain text of a message's content; None if the content is invalid. ``images``: parts may be images."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return None
    parts = [_text_of_part(part, images) for part in content]
    return None if any(not isinstance(part, str) for part in parts) else "".join(map(str, parts))


def _text_of_part(part: object, images: bool) -> object:
    """Return the text of a part of a content, empty for an image; None if the part is invalid."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in ("image", "video") and images:
        return ""
    return part.get("text") if isinstance(part, Mapping) and kind == "text" else None


# Markers


def split_markers(value: Any, markers: re.Pattern[str] | None) -> Any:
    """Return ``value`` with SPLIT before every character of every marker token, in all strings and keys in it.

    ``markers``: a pattern of the marker tokens. Numbers of numpy become Python's. Raises TemplateError if a string
    contains a reserved character.
    """
    if isinstance(value, str):
        if RESERVED.search(value):
            raise TemplateError("a text contains a character from U+FDD0 to U+FDD5, which are not valid in text")
        return markers.sub(lambda marker: re.sub("(?s)(.)", rf"{SPLIT}\1", marker[0]), value) if markers else value
    if isinstance(value, Mapping):
        return {split_markers(key, markers): split_markers(item, markers) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [split_markers(item, markers) for item in value]
    return value.item() if isinstance(value, np.generic) else value


def any_of(words: Iterable[str]) -> re.Pattern[str] | None:
    """Return a pattern that finds any of ``words``, unless split by SPLIT, longest first; None without words.

    Words with the same first two characters are one alternative, which makes the search 20 times faster. SPLIT
    precedes each character of a split word, so only words of one character need a check.
    """
    longest = sorted(filter(None, words), key=lambda word: (word[:2], -len(word)))
    groups = {
        start: "|".join(re.escape(word[2:]) for word in group)
        for start, group in groupby(longest, lambda word: word[:2])
    }
    parts = [f"{re.escape(start)}(?:{rest})" for start, rest in groups.items() if len(start) == 2]
    parts += [f"(?<!{SPLIT}){re.escape(start)}" for start in groups if len(start) == 1]
    return re.compile("|".join(parts)) if parts else None
