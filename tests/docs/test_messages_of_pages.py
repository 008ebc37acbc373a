"""Messages that pages quote in tables are those of the code: each part between ``...`` is in one of its texts."""

from __future__ import annotations

import ast
import functools
import re

import pytest

from tests.docs.pages import PAGES, ROOT

QUOTING = ("docs/how-to/troubleshooting.md", "docs/how-to/slurm.md")
OF_OTHERS = ("CUDA out of memory", "Out of memory: Killed", "The hostname of the client socket")
"""Texts of torch and of the kernel."""


@functools.cache
def texts() -> str:
    """Return the texts in the code, a line each, with ``...`` in place of values."""
    found = []
    for path in [*(ROOT / "streampack").rglob("*.py"), *(ROOT / "services").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "..." for part in node.values)
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def messages(page: str) -> list[str]:
    """Return the messages in the tables of a page that have a column ``message``."""
    quoted = []
    for header, rows in re.findall(
        r"^(\|.*\bmessage\b.*\|)\n\|[-|]+\|\n((?:\|.*\n)+)", PAGES[ROOT / page], re.MULTILINE
    ):
        column = [cell.strip() for cell in header.strip("|").split("|")].index("message")
        cells = [row.strip("|\n").split(" | ")[column].strip() for row in rows.splitlines()]
        quoted += [re.search(r"`(.+)`", cell)[1] for cell in cells if "`" in cell]  # type: ignore[index]
    return [text for text in quoted if not any(other in text for other in OF_OTHERS)]


@pytest.mark.parametrize("page", QUOTING)
def test_each_message_of_a_page_is_in_the_code(page: str) -> None:
    assert len(messages(page)) >= 4
    parts = [part.strip() for text in messages(page) for part in re.split(r"\.\.\.", text)]
    assert [part for part in parts if len(part) > 3 and part not in texts()] == []
