"""Programs of a run with late fields: a scorer that gives rewards, and a subscriber that reads losses.

``python -m tests.soak.values scorer|subscriber SETTINGS``, a JSON file: ``endpoint``, ``partitions``, ``total``,
``seed``, ``folder``. The reward of a sample is a function of (seed, partition, n), and its loss one of its id. Either
program may be killed at any time. The scorer goes on after the values that it knows to be safe, or begins again. The
subscriber goes on from its last cursor.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import streampack
from streampack.errors import PeerError

AT_ONCE = 16
STREAM = "rollouts"


def reward_of(seed: int, partition: int, seq: int) -> float:
    """The reward of a sample."""
    return random.Random(f"{seed} {partition} reward {seq}").uniform(-1.0, 1.0)


def loss_of(stream: int, index: int, part: int) -> float:
    """The loss that trainers report for a sample."""
    return stream * 1e6 + index + part / 8


def diary_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _write(path: Path, **line: Any) -> None:
    """Append a line at once, so that it is whole."""
    out = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(out, (json.dumps(line) + "\n").encode())
    os.close(out)


def score(settings: dict[str, Any]) -> None:
    """Give rewards to all samples that are safe, until all of them have one."""
    folder, total = Path(settings["folder"]), settings["total"]
    diary = folder / "scorer.jsonl"
    done = dict.fromkeys(range(settings["partitions"]), 0)
    for line in diary_of(diary) if time.time_ns() % 2 else ():  # values that are given again do no harm
        done[line["partition"]] = max(done[line["partition"]], line["given"])
    with streampack.Producer(settings["endpoint"], stream=STREAM, partition=None, timeout_s=120.0) as scorer:
        while min(done.values()) < total:
            for partition, given in done.items():
                safe = max((line.get("safe", 0) for line in diary_of(folder / f"pusher-{partition}.jsonl")), default=0)
                seqs = list(range(given, min(safe, given + AT_ONCE)))
                if seqs:
                    rewards = [reward_of(settings["seed"], partition, seq) for seq in seqs]
                    scorer.amend([(partition, seq, 0) for seq in seqs], reward=rewards)
                    done[partition] = seqs[-1] + 1
                    _write(diary, partition=partition, given=done[partition])
            time.sleep(0.02)


def subscribe(settings: dict[str, Any]) -> None:
    """Read the values of all steps, until the first rank has come to the end and there are no more."""
    folder = Path(settings["folder"])
    diary = folder / "subscriber.jsonl"
    had = diary_of(diary)
    start: Any = had[-1]["cursor"] if had else "oldest"
    steps = {line["step"] for line in had}
    while not _all_read(folder, steps):
        with streampack.results(settings["endpoint"], start=start, timeout_s=2.0) as results:
            for found in results:
                loss = [
                    [*row, value] for row, value in zip(found.sample_ids.tolist(), found.values["loss"], strict=True)
                ]
                sent = list(zip(found.streams, found.partitions.tolist(), found.seqs.tolist(), strict=True))
                _write(diary, step=found.step, lineage=found.lineage, cursor=found.cursor, loss=loss, sent=sent)
                steps.add(found.step)
                start = found.cursor


def _all_read(folder: Path, steps: set[int]) -> bool:
    lines = diary_of(folder / "trainer-0.jsonl")
    if not lines or lines[-1]["kind"] != "end":
        return False
    return steps >= {line["index"] for line in lines if line["kind"] == "step"}


def main() -> None:
    what, path = sys.argv[1:]
    try:
        {"scorer": score, "subscriber": subscribe}[what](json.loads(Path(path).read_text()))
    except PeerError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
