"""What `make bench` says of ratios that fell."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.guard import BOUNDS, held

REPORT = {"pipes": {"ipc": {"ratio": 0.3}}, "peer": 2}


def test_a_ratio_at_its_bound_holds_and_one_below_is_named() -> None:
    assert held("throughput", REPORT, {"pipes > ipc > ratio": 0.3, "peer": 1.9}) == []
    fell = held("throughput", REPORT, {"pipes > ipc > ratio": 0.31, "peer": 2})
    assert fell == ["throughput: pipes > ipc > ratio: got 0.3, expected at least 0.31"]


def test_a_figure_that_is_not_there_and_a_benchmark_that_failed_have_fallen() -> None:
    assert "got None" in held("throughput", REPORT, {"pipes > tcp > ratio": 0.1})[0]
    assert "got nan" in held("throughput", {"peer": float("nan")}, {"peer": 0.1})[0]
    assert held("throughput", None, {}) == ["throughput: failed, expected its report"]


def test_the_command_ends_with_1_and_says_why(tmp_path: Path) -> None:
    bounds = tmp_path / "bounds.yaml"
    bounds.write_text(json.dumps({"no_such_benchmark": {"ratio": 1}}))
    command = [sys.executable, str(BOUNDS.with_name("guard.py")), "--bounds", str(bounds)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "fell: no_such_benchmark: failed" in done.stderr
