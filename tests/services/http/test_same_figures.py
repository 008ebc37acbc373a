"""Every figure keeps its place in ``/status`` and its name in ``/metrics``: dashboards and alerts know them.

Where figures change on purpose, write them anew, and say in the changelog which name is gone:

    python -m tests.services.http.test_same_figures
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
from streampack_services.http.metrics import exposition

from tests.services.full_status import full_status

FIXTURES = Path(__file__).parents[2] / "fixtures"


def metrics() -> str:
    """Return the broker's series, without those of its process."""
    lines = exposition(full_status()).decode().splitlines(keepends=True)
    return "".join(line for line in lines if "streampack_" in line and "streampack_build_info{" not in line)


def tree() -> Any:
    return json.loads(msgspec.json.encode(full_status()))


def test_the_status_has_every_figure_where_it_was() -> None:
    assert tree() == json.loads((FIXTURES / "status.json").read_text())


def test_the_metrics_have_their_names_labels_and_values() -> None:
    found, expected = metrics().splitlines(), (FIXTURES / "metrics.txt").read_text().splitlines()
    assert found == expected


if __name__ == "__main__":
    (FIXTURES / "status.json").write_text(json.dumps(tree(), indent=1) + "\n")
    (FIXTURES / "metrics.txt").write_text(metrics())
