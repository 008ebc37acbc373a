"""What is imported where: the library stays light, the core pure, and the layers apart."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

HEAVY = ("torch", "numba", "transformers", "datasets", "starlette", "uvicorn", "typer", "rich", "webdataset")


WATCH = """
import sys
class Watch:
    asked = set()
    def find_spec(self, name, path=None, target=None):
        self.asked.add(name.partition(".")[0])
sys.meta_path.insert(0, Watch())
"""


def asked_for(statement: str) -> set[str]:
    """Top-level modules that a fresh Python looks for in ``statement``, installed or not."""
    code = f"{WATCH}\n{statement}\nprint(*Watch.asked)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(done.stdout.split())


def test_the_library_loads_nothing_heavy() -> None:
    found = asked_for("import streampack, streampack.producer.loop, streampack.config.daemon_settings")
    assert "zmq" in found
    assert not found & {*HEAVY, "streampack_services"}


def test_a_pack_of_lengths_needs_no_numba() -> None:
    packs = "assert streampack.pack_lengths([1, 2, 3], 4) == [[0, 2], [1]]"
    assert "torch" not in asked_for(f"sys.modules['numba'] = None\nimport streampack\n{packs}")


def test_a_producer_of_rollouts_loads_nothing_heavy() -> None:
    """The worker has its own torch, or none; trainers do not load what it needs."""
    found = asked_for("import streampack\nassert 'streampack.producer.push' not in sys.modules\nstreampack.Producer")
    assert not found & {*HEAVY, "streampack_services"}


@pytest.mark.parametrize("module", ["broker.service", "broker.arena"])
def test_the_daemons_load_no_torch(module: str) -> None:
    found = asked_for(f"import streampack_services.{module}")
    assert "zmq" in found
    assert not found & {"torch", "numba", "transformers", "datasets"}


def test_the_contracts_between_the_layers_are_kept() -> None:
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([lint, "--no-cache"], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout
