"""A program that changes the rules of a run under fire, by the commands that people type.

``python -m tests.soak.changer SETTINGS``, a JSON file: ``config`` (broker.yaml), ``folder``, ``seed``, ``packs``. It
asks for other packs, budgets, packers and mixtures, some at a later step and some evenly over steps. It cancels some
changes that have not begun. Each command is a line of ``changes.jsonl``: the command, and its exit code.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

from streampack_services.ledger.run_history import LATEST
from streampack_services.ledger.state_dir import read_ledger

from streampack.core.model.rules import RulesChange
from tests.integration.running import streampack, write
from tests.soak.job import BUDGET, PACKERS, Job


def commands_of(job: Job) -> list[dict[str, Any]]:
    """The commands of a run that the broker has answered, in order."""
    path = job.folder / "changes.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def changes_of(job: Job) -> list[RulesChange]:
    """The changes that took effect, as the log has them; the stages of broker.yaml are among them."""
    with read_ledger(Path(job.settings["state_dir"])) as ledger:
        every = ledger.history.feeds["train"].changes_at(LATEST)[1:]
    return [RulesChange(step=each.step, position=each.position, rules=each.rules) for each in every]


def command(draw: random.Random, folder: Path, packs: int, formed: int) -> list[str]:
    """One command, of a run that has formed ``formed`` steps."""
    mixture = {name: str(draw.choice((0.2, 0.5, 1.0))) for name in ("web", "code")}
    rules = draw.choice((
        [f"packs={packs * draw.randint(1, 3)}"],
        [f"packs={{from: {packs}, to: {3 * packs}, over: {draw.randint(2, 9)}}}"],
        [f"budget={draw.choice((BUDGET // 2, BUDGET, 2 * BUDGET, 4 * BUDGET))}", f"packs={packs}"],
        [f"packer={draw.choice(PACKERS)}"],
        [f"window={draw.choice((8, 32, 128, 'auto'))}"],
    ))  # fmt: skip
    at = [] if draw.random() < 0.4 else ["--at-step", str(formed + draw.randint(0, 40))]
    match draw.choice(("rules", "rules", "weights", "stage", "cancel")):
        case "rules":
            return ["rules", *rules, *at]
        case "weights":
            return ["weights", *(f"{name}={weight}" for name, weight in mixture.items()), *at]
        case "stage":
            over = {"over": draw.randint(1, 9)} if draw.random() < 0.5 else {}
            stage = {"weights": {name: float(weight) for name, weight in mixture.items()}} | over
            return ["stage", str(write(folder / "live-stage.yaml", stage)), *at]
        case _:
            return ["--cancel", str(draw.randint(0, 12))]


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    folder, draw = Path(settings["folder"]), random.Random(f"{settings['seed']} {os.getpid()}")
    steps = folder / "trainer-0.jsonl"
    while (folder / "fire").exists():
        time.sleep(draw.uniform(1.0, 5.0))
        formed = sum('"step"' in line for line in steps.open()) if steps.exists() else 0
        words = command(draw, folder, settings["packs"], formed)
        yes = ["-c", settings["config"], "--yes"]
        done = streampack("set", *words, *yes, timeout_s=60.0)
        line = {"command": words, "code": done.returncode, "said": (done.stdout + done.stderr)[-400:]}
        with (folder / "changes.jsonl").open("a") as diary:
            diary.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
