"""Every public name has a docstring that lists its parameters, and an example that runs."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import os
import pkgutil
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from msgspec import Struct

import streampack
from streampack import errors, integrations, planning, views

INTERNAL = {
    "streampack.integrations.checks", "streampack.views.isolation", "streampack.views.device",
    "streampack.views.format_validation", "streampack.views.formats", "streampack.views.hf",
    "streampack.views.block_mask", "streampack.views.padded", "streampack.views.static_shapes",
    "streampack.views.tensors", "streampack.views.torchtitan",
}  # fmt: skip
"""Modules of the public packages that users do not import. Every other module there declares ``__all__``."""
RETURNED = {"streampack.packs.forward_packs": ["ForwardPacks"], "streampack.local": ["LocalLoader"]}
"""Classes that users get from public functions and do not import, by module."""
CALLED_BY_FRAMEWORKS = ("StreampackDataset", "PackedTrainerMixin", "PackedDataModule", "Datasink")
"""Classes whose methods a framework calls, not the user."""
SECTIONS = ("Args", "Returns", "Raises", "Example")
FRAMEWORKS = "streampack.integrations."


def public_modules() -> list[str]:
    packages = (integrations, views)
    names = [f"{each.__name__}.{name}" for each in packages for _, name, _ in pkgutil.iter_modules(each.__path__)]
    return [streampack.__name__, errors.__name__, planning.__name__, *RETURNED, *sorted(set(names) - INTERNAL)]


LIGHT = [name for name in public_modules() if not name.startswith(FRAMEWORKS)]
ALONE = {"streampack.integrations.veomni": Path(sys.prefix) / "veomni"}
"""Modules whose framework needs other versions of what others need, and the folder with these."""
HEAVY = [name for name in public_modules() if name.startswith(FRAMEWORKS) and name not in ALONE]


def public_names(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Yield the public functions and classes of a module, and the classes' methods, properties and classes."""
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    everything = [name for name in own if not name.startswith("_") and inspect.isclass(vars(module)[name])]
    for name in RETURNED.get(module.__name__) or getattr(module, "__all__", everything):
        value = getattr(module, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            yield name, value
        yield from members(name, value) if inspect.isclass(value) else ()


def members(name: str, kind: type) -> Iterator[tuple[str, Any]]:
    """Yield the public methods, properties and nested classes that a class defines itself."""
    for own, value in vars(kind).items():
        value = value.__func__ if isinstance(value, staticmethod | classmethod) else value
        if not own.startswith("_") and (
            inspect.isfunction(value) or isinstance(value, property) or inspect.isclass(value)
        ):
            yield f"{name}.{own}", value
            yield from members(f"{name}.{own}", value) if inspect.isclass(value) else ()


def sections(text: str) -> dict[str, str]:
    """Split a Google-style docstring into its sections by name; the text before them has the name ''."""
    first, *pieces = re.split(rf"^({'|'.join(SECTIONS)}):\n", text, flags=re.MULTILINE)
    return {"": first, **dict(zip(pieces[::2], map(textwrap.dedent, pieces[1::2]), strict=True))}


def parameters(value: Callable[..., Any]) -> list[str]:
    """Return the names of the parameters that a caller may give; those of a class are its constructor's."""
    if inspect.isclass(value):
        if is_record(value) or "__init__" not in vars(value) or getattr(value, "_is_protocol", False):
            return []  # a record's fields are documented where they are declared
        value = value.__init__
    return [name for name in inspect.signature(value).parameters if name not in ("self", "cls", "_")]


def is_record(kind: type) -> bool:
    return is_dataclass(kind) or issubclass(kind, Struct)


def bare_fields(kind: type) -> list[str]:
    """Return the fields that a class declares without a docstring behind them."""
    (found,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(found, ast.ClassDef)
    return [
        ast.unparse(each.target)
        for each, after in zip(found.body, [*found.body[1:], None], strict=True)
        if isinstance(each, ast.AnnAssign) and not ast.unparse(each.target).startswith("_")
        if not (isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant))
    ]


def faults(name: str, value: Any, scope: dict[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the docstring of a public function, class or property."""
    text = inspect.cleandoc(value.__doc__ or "")
    first, *rest = text.splitlines() or [""]
    if not first.endswith((".", "``")) or len(first) > 110 or (rest and rest[0]):
        yield f"{name}: expected a summary of one line, got {first!r}"
    found = sections(text)
    if not isinstance(value, property):
        documented = re.findall(r"^\*{0,2}(\w+)(?: \([^)]*\))?:", found.get("Args", ""), flags=re.MULTILINE)
        if documented != parameters(value):
            yield f"{name}: expected Args {parameters(value)}, got {documented}"
        error = inspect.isclass(value) and issubclass(value, Exception) and value is not errors.StreampackError
        if not ("." in name or error or ">>> " in found.get("Example", "")):
            yield f"{name}: expected an example"
    if inspect.isclass(value) and (bare := bare_fields(value)):
        yield f"{name}: expected docstrings of the fields {bare}"
    if ">>> " in text:
        example = doctest.DocTestParser().get_doctest(text, scope | {"streampack": streampack}, name, None, 0)
        said: list[str] = []
        if doctest.DocTestRunner().run(example, out=said.append).failed:
            yield f"{name}: its example fails: {''.join(said)}"


def without_example(name: str, method: Any, owner: type) -> bool:
    """True if neither the method nor its class has an example that calls it."""
    own = f".{name.rpartition('.')[2]}("
    shown = sections(inspect.cleandoc(owner.__doc__ or "")).get("Example", "")
    return inspect.isfunction(method) and ">>> " not in (method.__doc__ or "") and own not in shown


def faults_of(module: str) -> list[str]:
    """Import a module and return the faults of its public names."""
    loaded = importlib.import_module(module)
    found = []
    for name, value in public_names(loaded):
        owner, _, method = name.rpartition(".")
        asked = owner and owner not in CALLED_BY_FRAMEWORKS and "." not in owner
        if asked and without_example(name, value, getattr(loaded, owner)):
            found.append(f"{module}.{name}: expected an example, here or in the class, that calls .{method}()")
        code = value.fget if isinstance(value, property) else value
        found += [f"{module}.{fault}" for fault in faults(name, value, dict(vars(sys.modules[code.__module__])))]
    return found


def test_examples_of_core_and_services_run() -> None:
    files = [*Path("streampack/core").rglob("*.py"), *Path("services/streampack_services").rglob("*.py")]
    names = [
        ".".join(path.with_suffix("").parts).removeprefix("services.") for path in files if ">>> " in path.read_text()
    ]
    assert len(names) > 40
    assert {name: doctest.testmod(importlib.import_module(name)).failed for name in names} == dict.fromkeys(names, 0)


@pytest.mark.parametrize("module", LIGHT)
def test_public_names_are_documented(module: str) -> None:
    assert faults_of(module) == []


def test_public_names_of_the_frameworks_integrations_are_documented() -> None:
    """In a process of their own, since some frameworks change others that are imported after them."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.test_public_docstrings", *HEAVY]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"checked {name}" for name in HEAVY], done.stderr


@pytest.mark.parametrize("module", ALONE)
def test_public_names_of_an_integration_with_its_own_packages_are_documented(module: str) -> None:
    if not ALONE[module].exists():
        pytest.skip(f"no packages of {module}: see requirements-{ALONE[module].name}.txt")
    command = [sys.executable, "-W", "ignore", "-m", "tests.test_public_docstrings", module]
    told = os.environ | {"PYTHONPATH": str(ALONE[module])}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=told)
    assert done.stdout.endswith(f"checked {module}\n"), done.stderr


@pytest.mark.parametrize("name", sorted({*public_modules(), *INTERNAL}))
def test_a_module_of_the_public_packages_is_internal_or_says_what_is_public(name: str) -> None:
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    declared = "\n__all__" in Path(spec.origin).read_text()
    assert name in (errors.__name__, planning.__name__, *RETURNED) or declared is (name not in INTERNAL)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('"""Pack."""\n', "expected Args ['lengths', 'budget'], got []"),
        ('"""Pack.\n\n    Args:\n        lengths: Tokens.\n        size: Tokens.\n    """', "got ['lengths', 'size']"),
        ('"""Pack.\n\n    Example:\n        >>> 1 + 1\n        3\n    """', "its example fails"),
        ('"""Pack\n    samples."""', "expected a summary of one line, got 'Pack'"),
        ("pass", "expected a summary of one line, got ''"),
    ],
)
def test_a_faulty_docstring_is_found(text: str, said: str) -> None:
    scope: dict[str, Any] = {}
    exec(f"def pack(lengths, budget):\n    {text}", scope)
    assert said in "\n".join(faults("pack", scope["pack"], {}))


if __name__ == "__main__":
    for module in sys.argv[1:]:
        print("\n".join([*faults_of(module), f"checked {module}"]))
