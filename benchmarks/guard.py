"""Run the quick benchmarks, and check that ratios of two measurements of one run stay above their bounds.

``bounds.yaml`` names the least that each may be, far enough below what was measured that a busy machine does not break
it. What fell is named and the exit code is 1; so is a benchmark that fails, and a figure that is not in its report.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
BOUNDS = HERE / "bounds.yaml"
SEPARATOR = " > "
"""Between the keys of a figure's path in a report."""
Bounds = dict[str, dict[str, float]]


def main() -> None:
    args = _arguments()
    bounds: Bounds = yaml.safe_load(args.bounds.read_text(encoding="utf-8"))
    fallen: list[str] = []
    for benchmark in args.only or bounds:
        print(f"\n{benchmark}.py --quick\n", flush=True)
        fallen += held(benchmark, _report(benchmark), bounds[benchmark])
    print(*(f"fell: {each}" for each in fallen), sep="\n", file=sys.stderr)
    sys.exit(1 if fallen else 0)


def _report(benchmark: str) -> dict[str, Any] | None:
    """What it says of itself in its last line; None where it failed. All lines before are passed on."""
    command = [sys.executable, str(next(HERE.glob(f"*/{benchmark}.py"), HERE / f"{benchmark}.py")), "--quick", "--json"]
    last = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if not line.startswith("{"):
                print(line, end="", flush=True)
            last = line
    return json.loads(last) if process.returncode == 0 else None


def held(benchmark: str, report: dict[str, Any] | None, bounds: dict[str, float]) -> list[str]:
    """A line for each bound that does not hold; all are printed."""
    if report is None:
        return [f"{benchmark}: failed, expected its report"]
    fallen = []
    print()
    for path, least in bounds.items():
        found = _figure(report, path)
        holds = found is not None and found >= least
        print(f"{'held' if holds else 'fell'}  {path}: {found}, at least {least}")
        if not holds:
            fallen.append(f"{benchmark}: {path}: got {found}, expected at least {least}")
    return fallen


def _figure(report: Any, path: str) -> float | None:
    for key in path.split(SEPARATOR):
        if not isinstance(report, dict) or key not in report:
            return None
        report = report[key]
    return round(float(report), 3)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bounds", type=Path, default=BOUNDS, metavar="FILE", help="others than bounds.yaml")
    parser.add_argument("--only", action="append", metavar="BENCHMARK", help="one benchmark; may be repeated")
    return parser.parse_args()


if __name__ == "__main__":
    main()
