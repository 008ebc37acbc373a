"""The README and the pages of ``docs/`` as tests see them: their texts and their code blocks.

A block that cannot run has ``<!-- not run: REASON -->`` in the line before it. A block that a test of another folder
runs has ``<!-- run by: FILE -->`` there.
"""

from __future__ import annotations

import functools
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = {path: path.read_text() for top in ("*.md", "docs/**/*.md", "deploy/*.md") for path in sorted(ROOT.glob(top))}
_FENCE = re.compile(
    r"(?:<!-- (?:not run|run by): (?P<reason>[^>]+?) -->[ \t]*\n\s*)?"
    r"^(?P<indent> *)```(?P<language>\w*)(?P<options>[^\n`]*)\n(?P<code>.*?)^(?P=indent)```[ \t]*$",
    re.MULTILINE | re.DOTALL,
)


NAMED = re.compile(r"`(test_\w+\.py)(?:::(test_\w+))?`")
"""A test that a page names: its file, and its name."""


@functools.cache
def names_in(file: str) -> set[str]:
    """Return the names of the tests in files of this name."""
    texts = [path.read_text() for path in (ROOT / "tests").rglob(file)]
    return {name for text in texts for name in re.findall(r"^ *def (test_\w+)\(", text, re.MULTILINE)}


@dataclass(frozen=True)
class Block:
    """A fenced code block; ``reason`` says why it does not run here, or which file of tests runs it."""

    page: str
    line: int
    language: str
    options: str
    code: str
    reason: str | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(path: Path, text: str) -> list[Block]:
    """Return the code blocks of a page."""
    return [
        Block(
            str(path.relative_to(ROOT)), text.count("\n", 0, found.start("code")), found["language"], found["options"],
            textwrap.dedent(found["code"]), found["reason"],
        )
        for found in _FENCE.finditer(text)
    ]  # fmt: skip


BLOCKS = [
    block
    for path, text in PAGES.items()
    if path == ROOT / "README.md" or ROOT / "docs" in path.parents
    for block in blocks_of(path, text)
]


def written(page: str, folder: Path) -> list[str]:
    """Write the files that a page shows into ``folder``; return their names in the page's order."""
    files = {
        block.code.split()[1]: block.code for block in BLOCKS if block.page == page and block.code.startswith("# ")
    }
    for name, code in files.items():
        (folder / name).write_text(code)
    return list(files)
