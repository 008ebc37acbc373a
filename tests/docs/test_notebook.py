"""The notebook of the documentation runs as it stands, and its kept outputs are those of this version."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from docs.generate.notebooks import QUICKSTART, quickstart


def kept() -> Any:
    read: Any = nbformat.read
    return read(QUICKSTART, as_version=4)


def outputs(notebook: Any) -> list[str]:
    """Return the texts that the cells show, without losses, whose last digits differ between processors."""
    texts = ["".join(_text(output) for output in cell.get("outputs", [])) for cell in notebook.cells]
    return [text for text in texts if "loss" not in text]


def _text(output: Any) -> str:
    return str(output.get("text") or output.get("data", {}).get("text/plain", ""))


@pytest.mark.timeout(300)
def test_the_quickstart_runs_with_its_outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # beside other tests, several threads wait for each other
    found = kept()
    NotebookClient(found, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert outputs(found) == outputs(kept())
    errors = [output for cell in found.cells for output in cell.get("outputs", []) if output.get("name") == "stderr"]
    assert errors == []


def test_the_page_has_every_cell_and_output() -> None:
    page = quickstart()
    notebook = kept()
    assert all(cell.source in page for cell in notebook.cells[1:])
    assert page.count("```python") == sum(cell.cell_type == "code" for cell in notebook.cells)
