r"""Brace patterns in names of shards: ``web-{000..511}.tar``, expanded as bash does.

A pattern may hold alternatives (``{a,b}``), numbers (``{1..9}``, ``{000..511}`` with zeros, ``{0..9..3}`` with an
increment) and letters (``{a..e}``), also nested. Other braces stay as they are (``{a}``); a backslash keeps the
character after it. Unlike in bash, an unmatched brace is an error, because it is nearly always a typing mistake.
"""

from __future__ import annotations

import re

_RANGE = re.compile(r"(-?\d+|[a-zA-Z])\.\.(-?\d+|[a-zA-Z])(?:\.\.(-?\d+))?", re.ASCII)
_PLAIN = re.compile(r"[^\\{},]+")


def expand_braces(pattern: str) -> list[str]:
    """Return the names that ``pattern`` stands for, in its order. Raises ValueError for an unmatched brace."""
    (names,), end = _alternatives(pattern, 0, nested=False)
    if end < len(pattern):
        raise ValueError(f"got a closing brace without an opening one in {pattern!r}")
    return names


def _alternatives(pattern: str, at: int, nested: bool) -> tuple[list[list[str]], int]:
    """Parse ``pattern`` from index ``at`` to a closing brace or the end.

    Returns (for each alternative the names that it stands for, index where parsing stopped).
    """
    alternatives = [[""]]
    while at < len(pattern) and pattern[at] != "}":
        if pattern[at] == "," and nested:
            alternatives.append([""])
            at += 1
            continue
        if pattern[at] == "{":
            names, at = _group(pattern, at + 1)
        elif plain := _PLAIN.match(pattern, at):
            names, at = [plain[0]], plain.end()
        else:  # an escaped character, a last backslash, or a comma outside braces
            at += pattern[at] == "\\" and at + 1 < len(pattern)
            names, at = [pattern[at]], at + 1
        alternatives[-1] = [before + name for before in alternatives[-1] for name in names]
    return alternatives, at


def _group(pattern: str, at: int) -> tuple[list[str], int]:
    """Expand the brace group whose content begins at index ``at``; return (names, index after the closing brace)."""
    alternatives, end = _alternatives(pattern, at, nested=True)
    if end == len(pattern):
        raise ValueError(f"got an opening brace without a closing one in {pattern!r}")
    names = _range(pattern[at:end])
    if names is None and len(alternatives) == 1:
        names = ["{" + name + "}" for name in alternatives[0]]
    return names or [name for names_of in alternatives for name in names_of], end + 1


def _range(text: str) -> list[str] | None:
    """Return the numbers or letters of ``first..last`` or ``first..last..increment``; None for other text."""
    match = _RANGE.fullmatch(text)
    if match is None or match[1].isalpha() != match[2].isalpha():
        return None
    letters = match[1].isalpha()
    first, last = (ord(text) if letters else int(text) for text in match.group(1, 2))
    increment = abs(int(match[3] or 1)) or 1
    numbers = range(first, last + 1, increment) if first <= last else range(first, last - 1, -increment)
    if letters:
        return [chr(number) for number in numbers]
    padded = any(re.match("-?0.", text) for text in match.group(1, 2))
    width = max(len(match[1]), len(match[2])) if padded else 0
    return [str(number).zfill(width) for number in numbers]
