"""Renders chats (lists of messages with a role and a content) to one text, and finds the spans that are learned.

Theory of operation. A chat template writes the text. The spans of the answers are found in three ways, in this order:

1. The template marks them with ``{% generation %}`` blocks.
2. By prefix. Render the messages before the answer with the generation prompt, and render them with the answer. The
   answer is what the second text adds. This needs both texts to be prefixes of the whole.
3. By difference. Some templates drop the thinking of earlier turns, or write a message in another way because of what
   follows. Then the answer is replaced by a character that no text contains. The difference to the whole is the answer.

If the difference is unclear too, or overlaps a neighbor, the chat is rejected (``template``): a wrong mask is worse
than a missing sample.

A marker token may occur inside the data, for example if a user writes ``<|im_end|>``. Before rendering, each of its
characters gets a prefix character that no text contains. So it differs from the markers that the template writes.

This module knows messages and texts. It does not know ids.
"""

import itertools
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol

# Four Unicode noncharacters, which never occur in valid text. A chat that contains one is rejected.
SPLIT, _PLACE = "\ufdd0", "\ufdd1"
BEGIN, END = "\ufdd2", "\ufdd3"
_OURS = re.compile(f"[{SPLIT}{_PLACE}{BEGIN}{END}]")

Span = tuple[int, int]


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
        return self.role == "assistant"


class Rendered(NamedTuple):
    """A rendered chat.

    - ``text``: the text, in which ``SPLIT`` precedes each character of marker tokens in the data.
    - ``learned``: spans of the text that are learned, as (begin, end), in order and without overlap.
    """

    text: str
    learned: list[Span]


class TemplateError(Exception):
    """The template cannot render this chat, or the places of its answers are unclear; the message says why."""


class Template(Protocol):
    """A chat template: renders messages to a text."""

    @property
    def header(self) -> str:
        """Text that the generation prompt adds after the last message; may be empty."""

    @property
    def has_generation(self) -> bool:
        """True if the template marks answers with ``{% generation %}`` blocks."""

    def render(self, messages: list[dict[str, Any]], tools: Any, *, prompt: bool = False, mark: bool = False) -> str:
        """Return the text of a chat.

        ``prompt``: append the generation prompt. ``mark``: write BEGIN and END around generation blocks. Raises
        TemplateError.
        """


# Messages

_SHAREGPT = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}


def read_messages(messages: object) -> list[ChatMessage] | str:
    """Check and convert a chat's messages; return the reason ``messages`` if invalid, ``empty`` if there are none.

    A message is a mapping with ``role`` and ``content``, or ``from`` and ``value`` as in ShareGPT. The content is a
    text, null, or a list of ``{"type": "text", "text": ...}``. An answer with ``train: false`` or ``weight: 0`` is not
    learned. The template sees all other keys.

    >>> read_messages([{"role": "user", "content": "hi", "weight": 0}])[0][:3]
    ('user', 'hi', False)
    """
    if not isinstance(messages, list):
        return "messages"
    read = [_read_message(message) for message in messages]
    good = [message for message in read if message is not None]
    if len(good) < len(read):
        return "messages"
    return good or "empty"


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


def _read_message(message: object) -> ChatMessage | None:
    """Convert one message to a ChatMessage; None if it is not a valid message."""
    if not isinstance(message, Mapping):
        return None
    ours, null = ("train", "weight"), ("content", "value")  # tables give every message every key: null counts as absent
    raw = {key: value for key, value in message.items() if key not in ours and (value is not None or key in null)}
    if "role" not in raw and "from" in raw:
        role = raw.pop("from")
        raw["role"] = _SHAREGPT.get(role, role) if isinstance(role, str) else role
        raw["content"] = raw.pop("value", None)
    text = _text(raw.get("content"))
    train, weight = message.get("train"), message.get("weight")
    train, weight = True if train is None else train, 1 if weight is None else weight  # null counts as absent
    if text is None or not isinstance(raw.get("role"), str) or not isinstance(train, bool):
        return None
    if not isinstance(weight, int | float) or weight not in (0, 1):
        return None
    return ChatMessage(raw["role"], text, train and weight == 1, raw)


def _text(content: object) -> str | None:
    """Return the plain text of a message's content; None if the content is invalid."""
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
    """Return ``value`` with SPLIT before every character of every marker token, in all strings that it contains.

    ``markers``: a pattern of the marker tokens. Raises TemplateError if a string contains one of this module's
    reserved characters.
    """
    if isinstance(value, str):
        if _OURS.search(value):
            raise TemplateError("a text contains a character from U+FDD0 to U+FDD3, which are not valid in text")
        return markers.sub(lambda found: re.sub("(?s)(.)", rf"{SPLIT}\1", found[0]), value) if markers else value
    if isinstance(value, Mapping):
        return {key: split_markers(item, markers) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [split_markers(item, markers) for item in value]
    return value


def any_of(words: Iterable[str]) -> re.Pattern[str] | None:
    """Return a pattern that finds any of ``words``, unless split by SPLIT, longest first; None without words."""
    longest = sorted(filter(None, words), key=len, reverse=True)
    return re.compile(f"(?<!{SPLIT})(?:{'|'.join(map(re.escape, longest))})") if longest else None


# Spans


def render_chat(template: Template, messages: list[ChatMessage], tools: Any, stops: re.Pattern[str] | None) -> Rendered:
    """Render a chat to a text, and find the spans of the answers that are learned.

    ``stops``: a pattern of the marker tokens. The marker right after an answer ends its turn and is learned with it;
    white space after the marker is not. Raises TemplateError.
    """
    raw = [message.raw for message in messages]
    whole = template.render(raw, tools)
    answers = [number for number, message in enumerate(messages) if message.is_answer]
    learned = [number for number in answers if messages[number].train]
    if template.has_generation:
        spans = _generation_spans(template, raw, tools, whole)
        if len(learned) < len(answers):
            if len(spans) != len(answers):
                raise TemplateError(
                    f"the template renders {len(spans)} generation blocks for {len(answers)} answers, expected one "
                    "block for each answer"
                )
            spans = [span for span, number in zip(spans, answers, strict=True) if messages[number].train]
        return Rendered(whole, spans)
    finder = _AnswerFinder(template, raw, tools, whole, stops)
    spans = [finder.span(number) for number in learned]
    for before, after in itertools.pairwise(spans):
        if before[1] > after[0]:
            raise TemplateError("the answers overlap in the text that the template renders")
    return Rendered(whole, spans)


def _generation_spans(template: Template, raw: list[dict[str, Any]], tools: Any, whole: str) -> list[Span]:
    """Return the spans of the outermost ``{% generation %}`` blocks in ``whole``. Raises TemplateError."""
    pieces = re.split(f"([{BEGIN}{END}])", template.render(raw, tools, mark=True))
    if "".join(pieces[::2]) != whole:
        raise TemplateError("the template renders a different text when its generation blocks are marked")
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


class _AnswerFinder:
    """Finds the span of a message's answer in ``whole``, the rendered text of all messages."""

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
        """Return the learned span of message ``number``. Raises TemplateError if it is unclear."""
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
            return span  # a tool call, for which the template may write no text

    def _by_prefix(self, number: int) -> Span | None:
        """Return the span by comparing prefixes of the whole text; None if they are not prefixes."""
        try:
            before = self._template.render(self._raw[:number], self._tools, prompt=True)
            if not self._whole.startswith(before):
                return None
            last = number + 1 == len(self._raw)
            upto = self._whole if last else self._template.render(self._raw[: number + 1], self._tools)
        except TemplateError:  # the template may accept the whole chat but not its beginning
            return None
        if not (upto.startswith(before) and self._whole.startswith(upto)):
            return None
        found = list(self._stops.finditer(upto, len(before))) if self._stops else []
        if found and not upto[found[-1].end() :].strip():
            return len(before), found[-1].end()
        return len(before), len(upto)

    def _by_difference(self, number: int) -> Span:
        """Return the span by replacing the message and comparing the texts. Raises TemplateError if unclear."""
        begin, end = self._region(number)
        floor = self._region(number - 1)[1] if number else 0
        ceiling = self._region(number + 1)[0] if number + 1 < len(self._raw) else len(self._whole)
        if not floor <= begin <= end <= ceiling:
            raise TemplateError(f"the text of message {number} cannot be distinguished from the text of its neighbors")
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
        """Return where the learned span of an answer begins, given that its content begins at ``begin``.

        White space before the content belongs to the answer unless the prompt ends with it. For example, Mistral's
        templates write ``[/INST]``, a space and the answer, without a generation prompt. The model generates after
        ``[/INST]``, so it learns the space.
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
        """Return the span of the whole text that depends on the content of message ``number``. Raises TemplateError."""
        if number in self._regions:  # a message between two answers is asked for twice
            return self._regions[number]
        message = self._raw[number]
        other = {"role": message["role"]} if message["role"] == "assistant" else dict(message)
        in_parts = isinstance(message.get("content"), list)
        other["content"] = [{"type": "text", "text": _PLACE}] if in_parts else _PLACE
        changed = self._template.render([*self._raw[:number], other, *self._raw[number + 1 :]], self._tools)
        if changed.count(_PLACE) != 1:
            raise TemplateError(
                f"message {number} is {changed.count(_PLACE)} times in the text that the template renders, expected "
                "once"
            )
        begin = _common_prefix(self._whole, changed)
        end = len(self._whole) - _common_prefix(self._whole[begin:][::-1], changed[begin:][::-1])
        self._regions[number] = begin, end
        return begin, end


def _common_prefix(one: str, other: str) -> int:
    """Return the length of the longest common prefix."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
