"""The table of public names with their summaries, by the page that documents each."""

from __future__ import annotations

import re
from pathlib import Path

import griffe

ROOT = Path(__file__).parents[2]
PAGES = {
    "trainer": "Trainer",
    "producer": "Producer",
    "packing": "Packing and planning",
    "training": "Losses, attention and masks",
    "integrations": "Integrations",
}
"""Pages of ``docs/reference/api`` with their titles."""


def documented(page: str) -> list[str]:
    """Return the names that a page documents, in their order."""
    return re.findall(r"^::: ([\w.]+)", (ROOT / f"docs/reference/api/{page}.md").read_text(), re.MULTILINE)


def table() -> str:
    """Return a section for each page, and a row for each name."""
    package = griffe.load("streampack", search_paths=[ROOT])
    parts = list[str]()
    for page, title in PAGES.items():
        parts += [f"\n## [{title}](api/{page}.md)\n", "| name | summary |", "|---|---|"]
        for name in documented(page):
            documented_as = package[name.removeprefix("streampack.")].docstring
            summary = documented_as.value.splitlines()[0] if documented_as else ""
            shown = "streampack.local" if name == "streampack.local.local" else name
            parts.append(f"| [`{shown}`][{shown}] | {summary} |".replace("*", r"\*"))
    parts += ["\n## [Errors](errors.md)\n", "Every error is a `StreampackError`."]
    return "\n".join(parts)
