"""Renders a chat to one text, and finds the spans of the answers that are learned.

Theory of operation. A chat template writes the text, three times:

1. As it is.
2. With marks, which tell the message that each piece of the text belongs to (``chat_marks``). Without its marks, the
   text must be the same.
3. With marks, and with a name in the place of every content. This shows where the template puts the contents.

If the template has ``{% generation %}`` blocks, they are learned. Else the learned text of an answer begins after the
generation prompt: the text that the template adds if it is asked to answer there. This prompt depends on few
messages: the instructions, the last question, and the last answer with its tool results. Only they are rendered, so the
time grows linearly with the number of messages. The token that ends the answer is learned with it; white space after
that token is not.

If a place is unclear, the chat is rejected (``template``): a wrong mask is worse than a missing sample. The text of a
prompt inside an answer, or of an answer elsewhere, is unclear. So is an answer that the template does not write.

This module knows messages and texts. It does not know ids.
"""

import itertools
import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from streampack.core.stats.sample_warnings import NO_END_TOKEN, REASONING_LEFT_OUT, TOOL_CALLS_LEFT_OUT
from streampack.tokenizers.chat import REASONING, ChatMessage
from streampack.tokenizers.chat_marks import PLACE, Piece, TemplateError, pieces_of

if TYPE_CHECKING:
    from streampack.tokenizers.chat_template import ChatTemplate

Span = tuple[int, int]
_NAMED = re.compile(f"{PLACE}([0-9]+)([a-zA-Z]){PLACE}")
_CONTENT, _CALL, _THOUGHT = "c", "t", "r"
_INSTRUCTIONS = ("system", "developer")


class Rendered(NamedTuple):
    """A rendered chat.

    - ``text``: the text, in which ``SPLIT`` precedes each character of marker tokens in the data.
    - ``learned``: spans of the text that are learned, as (begin, end), in order and without overlap.
    - ``warnings``: words of ``core.stats.sample_warnings``.
    """

    text: str
    learned: list[Span]
    warnings: tuple[str, ...] = ()


def render_chat(
    template: "ChatTemplate",
    messages: list[ChatMessage],
    tools: Any,
    variables: Mapping[str, Any],
    ends: Collection[str],
) -> Rendered:
    """Render a chat to a text, and find the spans of the answers that are learned.

    ``ends``: tokens that may end an answer. Raises TemplateError.
    """
    chat = _Chat(template, messages, tools, variables, tuple(ends))
    answers = [chat.answer(at) for at, message in enumerate(messages) if message.is_answer and message.train]
    unended = [NO_END_TOKEN] if any(spans and not chat.is_ended(spans) for spans in answers) else []
    return Rendered(chat.text, sorted(itertools.chain(*answers)), (*chat.left_out(), *unended))


class _Chat:
    """A chat that is rendered three times: see the module."""

    def __init__(
        self,
        template: "ChatTemplate",
        messages: list[ChatMessage],
        tools: Any,
        variables: Mapping[str, Any],
        ends: tuple[str, ...],
    ) -> None:
        self._template, self._messages, self._tools, self._variables = template, messages, tools, variables
        self._ends = ends
        self._raw = [message.raw for message in messages]
        roles = (message.role for message in messages)
        self._first = next((at for at, role in enumerate(roles) if role not in _INSTRUCTIONS), len(messages))
        self._latest = _latest(messages)
        self.text = template.render(self._raw, tools, variables)
        pieces = self._pieces(self._raw)
        if "".join(piece.text for piece in pieces) != self.text:
            raise TemplateError("the template renders a different text when its messages are marked")
        self._own = self._by_message(pieces)
        named = self._pieces([_with_names(number, message) for number, message in enumerate(messages)])
        self._named_own = self._by_message(named)
        self._places: dict[tuple[int, str], list[Piece]] = {}
        for piece in named:
            for place in _NAMED.finditer(piece.text):
                self._places.setdefault((int(place[1]), place[2].lower()), []).append(piece)
        self._check_places()

    def answer(self, number: int) -> list[Span]:
        """Return the learned spans of answer ``number``. Raises TemplateError if they are unclear."""
        own = self._own.get(number, [])
        if self._template.has_generation:
            return [(piece.begin, piece.end) for piece in own if piece.generated]
        text = "".join(piece.text for piece in own)
        begin, end = self._begin(number, text), len(text.rstrip() if self._ends_with_token(text) else text)
        spans, place = [], 0
        for piece in own:
            first, last = max(begin - place, 0), min(end - place, len(piece.text))
            if first < last:
                spans.append((piece.begin + first, piece.begin + last))
            place += len(piece.text)
        if spans and not self.is_ended(spans):
            spans += self._closing(number, own[-1].end)
        return spans

    def is_ended(self, spans: list[Span]) -> bool:
        """Return whether a token ends the text of ``spans``."""
        return self._ends_with_token(self.text[spans[-1][0] : spans[-1][1]])

    def left_out(self) -> list[str]:
        """Return warnings about what the template does not write."""
        warnings = []
        calls = [number for number, raw in enumerate(self._raw) if raw.get("tool_calls")]
        if any((number, _CALL) not in self._places for number in calls):
            warnings.append(TOOL_CALLS_LEFT_OUT)
        answers = [number for number, message in enumerate(self._messages) if message.is_answer]
        # Many templates leave out the reasoning of earlier turns on purpose.
        if any(_reasoning(self._raw[number]) and (number, _THOUGHT) not in self._places for number in answers[-1:]):
            warnings.append(REASONING_LEFT_OUT)
        return warnings

    def _pieces(self, raw: list[dict[str, Any]], *, prompt: bool = False) -> list[Piece]:
        """Return the pieces of the text of messages."""
        marked = self._template.render(raw, self._tools, self._variables, prompt=prompt, mark=True)
        return pieces_of(marked)

    def _by_message(self, pieces: list[Piece]) -> dict[int, list[Piece]]:
        """Return the pieces of each message, in order.

        An end-of-text token after the loop over the messages belongs to the last message. So does a generation block
        outside of it.
        """
        own: dict[int, list[Piece]] = {}
        for piece in pieces:
            if piece.message is not None:
                own.setdefault(piece.message, []).append(piece)
        last = len(self._messages) - 1
        rest = itertools.takewhile(lambda piece: piece.message is None, reversed(pieces))
        tail = list(rest)[::-1] if last in own else []
        is_end = "".join(piece.text for piece in tail).strip() == self._template.eos_token != ""
        if tail and (is_end or any(piece.generated for piece in tail)):
            own[last] = [*own[last], *tail]
        return own

    def _check_places(self) -> None:
        """Raise TemplateError if contents are not where they belong."""
        for number, message in enumerate(self._messages):
            places = self._places.get((number, _CONTENT), [])
            owners = {piece.message for piece in places}
            if message.is_answer:
                written = any((number, kind) in self._places for kind in (_CONTENT, _CALL, _THOUGHT))
                if _has_content(message.raw) and not written:
                    raise TemplateError(f"the template does not write the text of message {number}, an answer")
                calls = {piece.message for piece in self._places.get((number, _CALL), [])}
                if owners - {number} or (calls and number not in calls):
                    raise TemplateError(f"it is unclear where the template writes message {number}, an answer")
                continue
            generated = self._template.has_generation and any(piece.generated for piece in places)
            if generated or any(owner is not None and self._messages[owner].is_answer for owner in owners):
                raise TemplateError(f"the template writes the text of message {number} ({message.role}) in an answer")
            if _has_content(message.raw) and not places:
                raise TemplateError(
                    f"the template does not write message {number}, whose role is {message.role}. Set another "
                    "template, remove the message, or map its role, such as tokenizer: "
                    f"{{roles: {{{message.role}: user}}}}"
                )

    def _begin(self, number: int, text: str) -> int:
        """Return where the learned part of an answer's ``text`` begins: after the prompt."""
        prompt, header = self._prompt(number), self._template.header
        for prefix in filter(None, (prompt, header)):
            if text.startswith(prefix):
                return len(prefix)
        if prompt == "" and header:  # nothing is added to ask for this answer
            return 0
        named = "".join(piece.text for piece in self._named_own.get(number, []))
        place = _NAMED.search(named)
        lead = _common_prefix(text, named[: place.start()] if place else text)
        for prefix in filter(None, (prompt, header)):  # other white space, or a BOS, may precede it here
            at = text.find(prefix.strip(), 0, lead) if prefix.strip() else -1
            if at >= 0:
                return at + _common_prefix(text[at:], prefix.lstrip())
        common = max(_common_prefix(text, prompt or ""), _common_prefix(text, header))
        if text[:common].strip() or not place:
            return min(common, lead)
        return lead if text[:lead].strip() else 0  # white space is the model's own unless a prompt ends with it

    def _prompt(self, number: int) -> str | None:
        """Return the text that the template adds to ask for answer ``number``; None if it is unclear."""
        try:
            pieces = self._pieces([self._raw[at] for at in self._near(number)], prompt=True)
        except TemplateError:  # the template may accept the whole chat but not a part of it
            return None
        owned = [at for at, piece in enumerate(pieces) if piece.message is not None]
        return "".join(piece.text for piece in pieces[owned[-1] + 1 :]) if owned else None

    def _closing(self, number: int, place: int) -> list[Span]:
        """Return the span of the token that ends answer ``number`` after its own text, which ends at ``place``.

        A template may write it after its loop, or with the next message. It also writes it if the chat ends there.
        """
        try:
            pieces = self._pieces([self._raw[at] for at in (*self._near(number), number)])
        except TemplateError:
            return []
        rest = itertools.takewhile(lambda piece: piece.message is None, reversed(pieces))
        tail = "".join(piece.text for piece in list(rest)[::-1])
        size = len(tail) - len(tail.lstrip())
        ends = [size + len(token) for token in self._ends if tail.startswith(token, size)]
        return [(place, place + max(ends))] if ends and self.text.startswith(tail[: max(ends)], place) else []

    def _near(self, number: int) -> list[int]:
        """Return the messages that the prompt of answer ``number`` depends on.

        They are the instructions that the chat begins with, the last question, and the last answer after it with its
        tool results.
        """
        question, answer = self._latest[number]
        numbers = [] if question is None else [question]
        after = self._first if question is None else question + 1
        return [*range(min(self._first, number)), *numbers, *range(after if answer is None else answer, number)]

    def _ends_with_token(self, text: str) -> bool:
        """Return whether ``text`` ends with a token, but for white space."""
        return text.rstrip().endswith(self._ends)


def _latest(messages: list[ChatMessage]) -> list[tuple[int | None, int | None]]:
    """Return, for each message, the numbers of the last question before it, and of the last answer after that."""
    latest: list[tuple[int | None, int | None]] = []
    question = answer = None
    for number, message in enumerate(messages):
        latest.append((question, answer))
        if message.role == "user":
            question, answer = number, None
        elif message.is_answer:
            answer = number
    return latest


def _with_names(number: int, message: ChatMessage) -> dict[str, Any]:
    """Return a message with a name in the place of its content, its reasoning, and the names of its tool calls."""
    raw = dict(message.raw)
    if _has_content(raw):
        name = _name(number, _CONTENT)
        content = raw["content"]
        parts = [] if isinstance(content, str) else [part for part in content if part["type"] != "text"]
        raw["content"] = name if isinstance(content, str) else [*parts, {"type": "text", "text": name}]
    if reasoning := _reasoning(raw):
        raw |= {key: _name(number, _THOUGHT) for key in REASONING if raw.get(key) == reasoning}
    if isinstance(calls := raw.get("tool_calls"), list):
        raw["tool_calls"] = [_with_call_name(number, call) for call in calls]
    return raw


def _with_call_name(number: int, call: Any) -> Any:
    """Return a tool call with another name."""
    if not isinstance(call, Mapping):
        return call
    if isinstance(function := call.get("function"), Mapping):
        return {**call, "function": {**function, "name": _name(number, _CALL)}}
    return {**call, "name": _name(number, _CALL)} if "name" in call else call


def _name(number: int, kind: str) -> str:
    """Return the name for a part of message ``number``."""
    return f"{PLACE}{number}{kind}{PLACE}"


def _has_content(raw: Mapping[str, Any]) -> bool:
    """Return whether a message has a content that is more than white space."""
    content = raw.get("content")
    texts = [part.get("text", "") for part in content] if isinstance(content, list) else [content or ""]
    return any(text.strip() for text in texts)


def _reasoning(raw: Mapping[str, Any]) -> str:
    """Return the reasoning of a message that ``read_messages`` read; empty without any."""
    reasoning = raw.get(REASONING[0])
    return reasoning if isinstance(reasoning, str) else ""


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
