"""The page of a notebook: its texts, its code and the outputs that are kept in it."""

from __future__ import annotations

import json
from typing import Any

from docs.generate import repository

QUICKSTART = repository.ROOT / "docs/get-started/quickstart.ipynb"


def quickstart() -> str:
    """Return the quickstart as Markdown, without its title."""
    cells = json.loads(QUICKSTART.read_text())["cells"]
    text = "\n\n".join(part for cell in cells for part in _parts(cell))
    return text.partition("\n")[2].strip()


def _parts(cell: dict[str, Any]) -> list[str]:
    """Return the text of a cell, or its code and its outputs."""
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return [source]
    shown = "".join(_shown(output) for output in cell["outputs"]).rstrip()
    return [f"```python\n{source}\n```", *([f"```text\n{shown}\n```"] if shown else [])]


def _shown(output: dict[str, Any]) -> str:
    """Return an output as text: what was printed, or the value of the last line."""
    return "".join(output["text"]) if output["output_type"] == "stream" else "".join(output["data"]["text/plain"])
