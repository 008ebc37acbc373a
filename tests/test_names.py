"""One name, one class: no class name is defined in two places, so that a search for it finds the one that is meant."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
TWICE = {
    "View": "streampack's view of a pack; a kernel's argument, named in numba's caches on disk",
}
"""Names that two modules define, and why they may."""


def defined_classes() -> dict[str, list[str]]:
    """Every class of the library and the services, with the files that define it."""
    found = defaultdict(list)
    for folder in ("streampack", "services/streampack_services"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    found[node.name].append(str(path.relative_to(ROOT)))
    return found


def test_no_class_name_is_defined_twice() -> None:
    found = {name: files for name, files in defined_classes().items() if len(files) > 1}
    assert {name: files for name, files in found.items() if name not in TWICE} == {}
    assert TWICE.keys() <= found.keys(), "take names that are defined once out of the list"
