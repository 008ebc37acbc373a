"""Adapters name the version that was tried, warn of another one, and reject one without the internals that they use."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from streampack import integrations
from streampack.errors import UserError
from streampack.integrations.checks.tried_versions import Tried

ADAPTERS = Path(str(integrations.__file__)).parent
ROOT = ADAPTERS.parent.parent


def test_the_tried_versions_are_those_that_tests_run_with() -> None:
    texts = {path.stem: path.read_text() for path in ADAPTERS.rglob("*.py")}
    tried = {
        name: re.findall(r'^TRIED = Tried\("(.*?)", "(.*?)"[,)].*$', text, re.MULTILINE) for name, text in texts.items()
    }
    declared = {name: found for name, found in tried.items() if found}
    assert declared.keys() >= {
        "verl",
        "trl",
        "trl_grpo",
        "hf_checks",
        "lightning",
        "megatron_lm",
        "torchtitan",
        "automodel",
        "veomni",
        "jax",
        "bridge",
    }
    apart = {}
    for package in ("veomni", "megatron-bridge"):
        pinned = re.search(rf"\b{package}==([\d.]+)", (ROOT / f"requirements-{package}.txt").read_text())
        assert pinned
        apart[package] = pinned[1]
    for name, ((package, version),) in declared.items():
        assert version == (apart.get(package) or metadata.version(package)).partition("+")[0], name
        assert "TRIED.check(" in texts[name] or "TRIED.warn()" in texts[name], name


def test_missing_internals_are_named_with_the_tried_version() -> None:
    theirs = SimpleNamespace(prepare=None)
    tried = Tried("numpy", metadata.version("numpy"))
    tried.check(theirs, "prepare")
    with pytest.raises(
        UserError, match=r"got numpy [\d.]+, whose SimpleNamespace has no split, join, expected numpy .*Install it: pip"
    ):
        tried.check(theirs, "split", "prepare", "join")


def test_a_function_with_other_parameters_is_rejected() -> None:
    def split(batch: int, limit: int) -> None: ...

    def other(batch: int, group: int, limit: int) -> None: ...

    tried = Tried("numpy", metadata.version("numpy"))
    tried.check_parameters(split, split)
    with pytest.raises(UserError, match=r"whose .*other takes batch, group, limit in place of batch, limit, expected"):
        tried.check_parameters(other, split)


@pytest.mark.parametrize(("package", "installed"), [("numpy", metadata.version("numpy")), ("no-such", "of an unknown")])
def test_another_version_is_warned_of_once(package: str, installed: str, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        Tried(package, "0.0.7").check("text", "split")
    Tried("pytest", metadata.version("pytest")).check("text", "split")
    (line,) = caplog.messages
    assert line.startswith(f"{package} {installed}")
    assert line.endswith(f"pip install '{package}==0.0.7'")
