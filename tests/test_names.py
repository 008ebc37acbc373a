"""Names lead to one place and say what they name; no test module is imported by another."""

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


def test_locals_say_what_they_hold() -> None:
    """A result is not called ``found``: the name tells nothing, and hundreds of functions had it."""
    nameless = list[str]()
    for path in (*(ROOT / "streampack").rglob("*.py"), *(ROOT / "services").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == "found":
                nameless.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert nameless == []


def test_no_test_module_imports_another() -> None:
    """Code that two of them need is in a module that has no tests, or in a conftest."""
    importers = dict[str, list[str]]()
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(module.rpartition(".")[2].startswith("test_") for module in modules):
                importers.setdefault(str(path.relative_to(ROOT)), []).append(ast.unparse(node))
    assert importers == {}
