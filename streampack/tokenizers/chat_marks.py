"""Marks in the text that a chat template renders: which text belongs to which message, and what the model generates.

Each mark is a Unicode noncharacter, which never occurs in valid text. A chat that contains one is rejected. A template
writes the marks of a rendering (``ChatTemplate``), and ``pieces_of`` reads them.
"""

import re
from typing import NamedTuple

SPLIT, PLACE = "\ufdd0", "\ufdd1"
"""SPLIT precedes each character of a marker token in the data. PLACE encloses the name of a value in its place."""
BEGIN, END = "\ufdd2", "\ufdd3"
"""Around a ``{% generation %}`` block."""
_ENTER, LEAVE = "\ufdd4", "\ufdd5"
"""Around the text that a template writes for a message; _ENTER also follows the message's number."""
RESERVED = re.compile("[\ufdd0-\ufdd5]")
_MARK = re.compile(f"([{BEGIN}{END}{LEAVE}]|{_ENTER}[0-9]+{_ENTER})")


class TemplateError(Exception):
    """The template cannot render this chat, or the places of its answers are unclear; the message says why."""


class Piece(NamedTuple):
    """A piece of a rendered text.

    - ``text``: the text, without marks.
    - ``begin``: place of its first character in the rendered text.
    - ``message``: number of the message that it belongs to; None for text outside of all messages.
    - ``generated``: whether it is in a ``{% generation %}`` block.
    """

    text: str
    begin: int
    message: int | None
    generated: bool

    @property
    def end(self) -> int:
        """Place after the last character."""
        return self.begin + len(self.text)


def entering(number: int) -> str:
    """Return the mark before the text of message ``number``."""
    return f"{_ENTER}{number}{_ENTER}"


def pieces_of(marked: str) -> list[Piece]:
    """Return the pieces of a rendered text with marks, without empty ones. Raises TemplateError."""
    pieces: list[Piece] = []
    messages: list[int] = []
    place = blocks = 0
    for position, part in enumerate(_MARK.split(marked)):
        if position % 2 == 0:
            if part:
                pieces.append(Piece(part, place, messages[-1] if messages else None, blocks > 0))
            place += len(part)
        elif part == LEAVE:
            if not messages:
                raise TemplateError("the template takes texts apart that it wrote for messages")
            messages.pop()
        elif part in (BEGIN, END):
            blocks += 1 if part == BEGIN else -1
        else:
            messages.append(int(part.strip(_ENTER)))
    return pieces
