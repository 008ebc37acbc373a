"""A new packer is one file and one entry of the registry: everything else follows from the packer's own facts."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from subprocess import run

import pytest

ROOT = Path(__file__).parents[3]
TOY = '''
from dataclasses import dataclass
from streampack.core.packers.packer import I64, Capped, Choice, choice_of

@dataclass(frozen=True, slots=True)
class Toy(Capped):
    """Each sample in a pack of its own."""

    max_budget = 4096
    name: str = "toy"

    def max_wait(self, window: int, held: int) -> int:
        return held

    def choose(self, lengths, ages, budget, count, closed, *, window, sizes=None, extra=None) -> Choice:
        return choice_of([[i] for i in range(len(lengths))], ages)
'''
USE = """
import numpy as np

import streampack
from streampack.config.daemon_settings import RulesSettings
from streampack.config.typed_yaml import convert
from streampack.core.form.waits import Waits
from streampack.core.model.rules import Rules
from streampack.errors import ConfigError

assert streampack.pack_lengths([3, 1, 2], 4, "toy") == [[0], [1], [2]]
rules = Rules(packer="toy", budget=1024, packs=2)
assert rules.new_packer().name == "toy"
waits = Waits(rules.new_packer(), 2)
waits.chosen(np.zeros(5, int), 5)
assert waits.bound == 3
for work, said in [
    (lambda: Rules(packer="toy", budget=8192), "expected less than 4096 times with `packer: toy`"),
    (lambda: streampack.pack_lengths([1], 4, "no"), "none, toy"),
    (lambda: convert({"packer": "no"}, RulesSettings), "none, toy"),
]:
    try:
        work()
    except (ValueError, ConfigError) as error:
        assert said in str(error), error
    else:
        raise AssertionError(said)
"""


@pytest.fixture(scope="module")
def with_toy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of processes whose streampack has one packer more: a file, an import and an entry."""
    root = tmp_path_factory.mktemp("with_toy")
    for name in ("streampack", "services/streampack_services"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    packers = root / "streampack/core/packers"
    (packers / "toy.py").write_text(TOY)
    registry = (packers / "registry.py").read_text()
    entry = "    Unpacked(),\n"
    assert registry.count(entry) == 1
    registry = registry.replace(entry, f"{entry}    Toy(),\n")
    registry = registry.replace("\n_EVERY", "\nfrom streampack.core.packers.toy import Toy\n\n_EVERY", 1)
    (packers / "registry.py").write_text(registry)
    return {
        **os.environ,
        "PYTHONPATH": f"{root}:{root}/services",
        "COLUMNS": "200",
        "TERM": "dumb",
        "PYTHONSAFEPATH": "1",
    }


def test_a_packer_of_one_file_and_one_entry_packs_and_is_validated(with_toy: dict[str, str]) -> None:
    done = run([sys.executable, "-c", USE], env=with_toy, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")


def test_help_lists_every_packer_of_the_registry(with_toy: dict[str, str]) -> None:
    command = [sys.executable, "-m", "streampack", "demo", "--help"]
    done = run(command, env=with_toy, capture_output=True, text=True, timeout=100)
    assert "none, toy" in " ".join(done.stdout.replace("│", " ").split()), done.stdout + done.stderr
