"""The layout of the code: names, sizes and texts of folders, and import circles.

import-linter checks the layers between folders (pyproject.toml). Here are the rules that it cannot see.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parents[1]
DISTRIBUTIONS = (ROOT / "streampack", ROOT / "services" / "streampack_services")
CODE = [path for root in DISTRIBUTIONS for path in sorted(root.rglob("*.py"))]
FOLDERS = sorted({path.parent for path in CODE})
MAX_FILES = 13

SHARED_NAMES = {"__init__", "hf", "megatron", "torchtitan"}
"""File names that may occur twice in a distribution: names of frameworks and formats."""

LOADED_BY_NAME = {
    "streampack": "names of the face, when they are asked for",
    "streampack.__main__": "the command of the services",
    "streampack.local": "the services, which the library does without",
    "streampack.integrations": "one module for each framework",
    "streampack.media.media": "a user's function",
    "streampack.media.processor": "transformers, an extra",
    "streampack.sources.files.image_files": "Pillow, an extra",
    "streampack.sources.files.video_files": "PyAV, if videos are read",
    "streampack.sources.files.read_bytes": "fsspec, an extra",
    "streampack.core.jit": "the class of a named tuple among a kernel's arguments",
    "streampack.kernels.helper": "kernels that another process asks for",
    "streampack.sources.open_source": "the format that a configuration names",
    "streampack_services.entry": "the command of the library",
    "streampack.tokenizers.callable_tokenizer": "a user's function",
    "streampack.sources.files.compressed": "Zstandard, an extra",
    "streampack.sources.files.remote": "fsspec, an extra",
    "streampack.sources.formats.arrow": "pyarrow, an extra",
    "streampack.training.attention": "flash-attn and torch",
    "streampack.views.formats": "torch",
    "streampack_services.plan.charts": "matplotlib",
}
"""Modules that import others by a name in a string, and what they import. Neither import-linter nor grimp sees that."""


def name_of(path: Path) -> str:
    """The dotted name of a module's file."""
    root = next(root for root in DISTRIBUTIONS if path.is_relative_to(root))
    return ".".join(path.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__")


def circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Modules that import each other, directly or through others: strongly connected parts of more than one module.

    Takes modules away that import nothing which is left, and those that nothing which is left imports.
    """
    left = {module: set(imported) for module, imported in imports.items()}
    while True:
        targets = set().union(*left.values()) if left else set()
        gone = {module for module, imported in left.items() if not imported & left.keys() or module not in targets}
        if not gone:
            break
        left = {module: imported - gone for module, imported in left.items() if module not in gone}
    found: list[list[str]] = []
    while left:
        start = min(left)
        circle = _reached(start, left) & {each for each in left if start in _reached(each, left)} | {start}
        if len(circle) > 1:
            found.append(sorted(circle))
        left = {module: imported - circle for module, imported in left.items() if module not in circle}
    return found


def _reached(start: str, imports: dict[str, set[str]]) -> set[str]:
    reached: set[str] = set()
    ahead = [start]
    while ahead:
        for each in imports.get(ahead.pop(), ()):
            if each not in reached:
                reached.add(each)
                ahead.append(each)
    return reached


def test_circles_are_found_and_chains_are_none() -> None:
    chain = {"a": {"b"}, "b": {"c"}, "c": set[str]()}
    assert circles(chain) == []
    assert circles(chain | {"c": {"a"}}) == [["a", "b", "c"]]
    two = {"a": {"b"}, "b": {"a", "c"}, "c": {"d"}, "d": {"c"}, "e": {"a"}}
    assert circles(two) == [["a", "b"], ["c", "d"]]


def test_no_modules_import_each_other() -> None:
    """Imports in functions and for types count."""
    graph = grimp.build_graph("streampack", "streampack_services", cache_dir=None)
    assert circles({module: graph.find_modules_directly_imported_by(module) for module in graph.modules}) == []


@pytest.mark.parametrize("root", DISTRIBUTIONS, ids=lambda root: root.name)
def test_file_names_are_unique_in_a_distribution(root: Path) -> None:
    counts = Counter(path.stem for path in root.rglob("*.py"))
    assert {name for name, count in counts.items() if count > 1} <= SHARED_NAMES


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(ROOT)))
def test_a_folder_is_small_and_its_text_names_each_file(folder: Path) -> None:
    files = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    assert len(files) <= MAX_FILES
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    assert [name for name in sorted(files) if f"``{name}``" not in text] == []


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(ROOT)))
def test_the_text_of_a_folder_lists_only_what_is_there(folder: Path) -> None:
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    listed = {word.strip("`/") for line in text.splitlines() if line.startswith("- ``") for word in _leading(line)}
    assert sorted(listed - {path.stem for path in folder.iterdir()}) == []


def _leading(line: str) -> Iterable[str]:
    """The names in double backticks before the colon of a list's line."""
    return (word.strip(" ,()") for word in line[2:].partition(":")[0].split(" ") if word.startswith("``"))


def test_modules_are_loaded_by_name_only_where_it_is_said() -> None:
    found = {name_of(path) for path in CODE if any(map(_loads_by_name, ast.walk(ast.parse(path.read_text()))))}
    assert found == set(LOADED_BY_NAME)


def _loads_by_name(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ("import_module", "__import__")
