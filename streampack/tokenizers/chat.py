"""Chats: a list of messages, each with a role and a content, to one text and the spans of it that are learned.

Theory of operation. A chat template writes the text; which characters of it are an answer, it seldom says. Where it
does (``{% generation %}`` blocks), its word is taken. Else an assistant's message runs from the end of what is
rendered of all messages before it, with the generation prompt, to the end of what is rendered of all up to it. That
holds while each of these renderings is a prefix of the whole. Where one is not (templates that drop the thinking of
earlier turns, or write a message otherwise because of what follows), the message is replaced by a character that no
text holds, and what then differs from the whole is what that message wrote. If that is not clear either, or reaches
into a neighbor, the chat is rejected (``template``): a mask is right or there is none.

Marker tokens inside the data, such as a user who writes ``<|im_end|>``, get a character that no text holds before
each of theirs, before the template sees them; so they can be told from those that the template itself writes.

This module knows messages and texts: never ids.
"""

import itertools
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol

# Four of the code points that Unicode keeps out of texts for ever (noncharacters); a chat with one is rejected.
SPLIT, _PLACE = "\ufdd0", "\ufdd1"
BEGIN, END = "\ufdd2", "\ufdd3"
_OURS = re.compile(f"[{SPLIT}{_PLACE}{BEGIN}{END}]")

Span = tuple[int, int]


class ChatMessage(NamedTuple):
    """``text``: of the content alone. ``train``: whether an answer is learned. ``raw``: all that a template may see."""

    role: str
    text: str
    train: bool
    raw: dict[str, Any]

    @property
    def is_answer(self) -> bool:
        return self.role == "assistant"


class Rendered(NamedTuple):
    """``text``, in which ``SPLIT`` breaks marker tokens of the data; ``learned``: its spans, rising, apart."""

    text: str
    learned: list[Span]


class TemplateError(Exception):
    """This chat cannot be written, or where its answers are is not clear; the message says why."""


class Template(Protocol):
    """What writes a chat. ``header``: what a generation prompt adds to it, "" where it adds nothing."""

    @property
    def header(self) -> str: ...
    @property
    def has_generation(self) -> bool: ...

    def render(self, messages: list[dict[str, Any]], tools: Any, *, prompt: bool = False, mark: bool = False) -> str:
        """The text. ``prompt``: with the generation prompt. ``mark``: BEGIN and END around generation blocks.

        Raises TemplateError.
        """


# Messages

_SHAREGPT = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}


def read_messages(messages: object) -> list[ChatMessage] | str:
    """The messages of a chat; ``messages`` when it is none, ``empty`` when there is nothing in it.

    ``role`` and ``content``: a text, null, or a list of ``{"type": "text", "text": ...}``; or ShareGPT's ``from`` and
    ``value``. ``train: false`` or ``weight: 0`` keeps an answer out of the loss. All other keys are the template's.

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


def pair_messages(prompt: object, completion: object) -> list[Any] | None:
    """A prompt and its completion as one chat, of which the completion is learned; None where they are no chats.

    ``prompt``: a list of messages; ``completion``: another, or the text of an answer.
    """
    if not isinstance(prompt, list):
        return None
    if isinstance(completion, str):
        completion = [{"role": "assistant", "content": completion}]
    if not isinstance(completion, list):
        return None
    return [{**message, "train": False} if isinstance(message, dict) else message for message in prompt] + completion


def _read(message: object) -> ChatMessage | None:
    if not isinstance(message, Mapping):
        return None
    ours, null = ("train", "weight"), ("content", "value")  # tables give every message every key: null is not there
    raw = {key: value for key, value in message.items() if key not in ours and (value is not None or key in null)}
    if "role" not in raw and "from" in raw:
        role = raw.pop("from")
        raw["role"] = _SHAREGPT.get(role, role) if isinstance(role, str) else role
        raw["content"] = raw.pop("value", None)
    text = _text(raw.get("content"))
    train, weight = message.get("train"), message.get("weight")
    train, weight = True if train is None else train, 1 if weight is None else weight  # a column has nulls
    if text is None or not isinstance(raw.get("role"), str) or not isinstance(train, bool):
        return None
    if not isinstance(weight, int | float) or weight not in (0, 1):
        return None
    return ChatMessage(raw["role"], text, train and weight == 1, raw)


def _text(content: object) -> str | None:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return None
    parts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in content]
    return None if any(not isinstance(part, str) for part in parts) else "".join(map(str, parts))


# Markers


def split_markers(value: Any, markers: re.Pattern[str] | None) -> Any:
    """``value`` with SPLIT before every character of every marker, in all the strings in it.

    Raises TemplateError where a string holds one of this module's own characters.
    """
    if isinstance(value, str):
        if _OURS.search(value):
            raise TemplateError("a text has one of the characters U+FDD0 to U+FDD3, which no text should have")
        return markers.sub(lambda found: re.sub("(?s)(.)", rf"{SPLIT}\1", found[0]), value) if markers else value
    if isinstance(value, Mapping):
        return {key: split_markers(item, markers) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [split_markers(item, markers) for item in value]
    return value


def any_of(words: Iterable[str]) -> re.Pattern[str] | None:
    """What finds any of ``words`` that is not split, the longest first; None where there are none."""
    longest = sorted(filter(None, words), key=len, reverse=True)
    return re.compile(f"(?<!{SPLIT})(?:{'|'.join(map(re.escape, longest))})") if longest else None


# Spans


def render_chat(template: Template, messages: list[ChatMessage], tools: Any, stops: re.Pattern[str] | None) -> Rendered:
    """The text of a chat and the spans of its answers that are learned.

    ``stops``: the marker tokens. The first one right after an answer ends its turn, and is learned with it; white
    space after that is not. Raises TemplateError.
    """
    raw = [message.raw for message in messages]
    whole = template.render(raw, tools)
    answers = [number for number, message in enumerate(messages) if message.is_answer]
    learned = [number for number in answers if messages[number].train]
    if template.has_generation:
        spans = _generation_spans(template, raw, tools, whole)
        if len(learned) < len(answers):
            if len(spans) != len(answers):
                raise TemplateError(f"it has {len(spans)} generation blocks for {len(answers)} answers")
            spans = [span for span, number in zip(spans, answers, strict=True) if messages[number].train]
        return Rendered(whole, spans)
    finder = _Finder(template, raw, tools, whole, stops)
    spans = [finder.span(number) for number in learned]
    for before, after in itertools.pairwise(spans):
        if before[1] > after[0]:
            raise TemplateError("the answers overlap in what it writes")
    return Rendered(whole, spans)


def _generation_spans(template: Template, raw: list[dict[str, Any]], tools: Any, whole: str) -> list[Span]:
    pieces = re.split(f"([{BEGIN}{END}])", template.render(raw, tools, mark=True))
    if "".join(pieces[::2]) != whole:
        raise TemplateError("it writes another text when its generation blocks are marked")
    spans, place, begins = [], 0, []
    for piece in pieces:
        if piece == BEGIN:
            begins.append(place)
        elif piece == END:
            begin = begins.pop()
            if not begins:  # a block within a block is part of it
                spans.append((begin, place))
        else:
            place += len(piece)
    return spans


class _Finder:
    """Finds what single messages wrote in ``whole``."""

    def __init__(
        self,
        template: Template,
        raw: list[dict[str, Any]],
        tools: Any,
        whole: str,
        stops: re.Pattern[str] | None,
    ) -> None:
        self._template, self._raw, self._tools, self._whole, self._stops = template, raw, tools, whole, stops
        self._regions: dict[int, Span] = {}

    def span(self, number: int) -> Span:
        """What is learned of message ``number``."""
        span = self._by_prefix(number)
        if span is None:
            return self._by_difference(number)
        if self._template.header:
            return span
        try:  # without a generation prompt, the prefix may leave a header before the answer
            return self._by_difference(number)
        except TemplateError:
            if self._raw[number].get("content"):
                raise
            return span  # a tool call, in whose place it may write no text

    def _by_prefix(self, number: int) -> Span | None:
        try:
            before = self._template.render(self._raw[:number], self._tools, prompt=True)
            if not self._whole.startswith(before):
                return None
            last = number + 1 == len(self._raw)
            upto = self._whole if last else self._template.render(self._raw[: number + 1], self._tools)
        except TemplateError:  # a chat that it does not write may begin one that it does
            return None
        if not (upto.startswith(before) and self._whole.startswith(upto)):
            return None
        found = list(self._stops.finditer(upto, len(before))) if self._stops else []
        if found and not upto[found[-1].end() :].strip():
            return len(before), found[-1].end()
        return len(before), len(upto)

    def _by_difference(self, number: int) -> Span:
        begin, end = self._region(number)
        floor = self._region(number - 1)[1] if number else 0
        ceiling = self._region(number + 1)[0] if number + 1 < len(self._raw) else len(self._whole)
        if not floor <= begin <= end <= ceiling:
            raise TemplateError(f"what it writes of message {number} cannot be told from its neighbors")
        header = self._template.header
        at = self._whole.rfind(header, floor, begin) if header else -1
        if at >= 0:
            begin = at + len(header)
        elif not header:
            begin = self._after_prompt(number, begin)
        stop = self._stops.search(self._whole, end, ceiling) if self._stops else None
        if stop and not self._whole[end : stop.start()].strip():
            end = stop.end()
        return begin, end

    def _after_prompt(self, number: int, begin: int) -> int:
        """Where an answer begins whose content is at ``begin``: before white space that no prompt ends with.

        Mistral's templates write ``[/INST]`` and then a space and the answer, without a generation prompt. The model
        is asked after ``[/INST]``, so the space is its own. A header that the template writes is not.
        """
        previous = self._region(number - 1)[0] if number else 0
        try:
            prompt = self._template.render(self._raw[:number], self._tools, prompt=True)
        except TemplateError:
            return begin
        first = len(self._whole[:begin].rstrip())
        for end in range(begin, max(first, previous) - 1, -1):
            if prompt.endswith(self._whole[previous:end]):
                return end
        return begin

    def _region(self, number: int) -> Span:
        """The characters that depend on what message ``number`` holds."""
        if number in self._regions:  # of a message between two answers
            return self._regions[number]
        message = self._raw[number]
        other = {"role": message["role"]} if message["role"] == "assistant" else dict(message)
        in_parts = isinstance(message.get("content"), list)
        other["content"] = [{"type": "text", "text": _PLACE}] if in_parts else _PLACE
        changed = self._template.render([*self._raw[:number], other, *self._raw[number + 1 :]], self._tools)
        if changed.count(_PLACE) != 1:
            raise TemplateError(f"it writes the content of message {number} {changed.count(_PLACE)} times")
        begin = _common(self._whole, changed)
        end = len(self._whole) - _common(self._whole[begin:][::-1], changed[begin:][::-1])
        self._regions[number] = begin, end
        return begin, end


def _common(one: str, other: str) -> int:
    """The length of the longest common prefix."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
