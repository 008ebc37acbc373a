"""A program that pushes its own samples to one partition, under fire: what it was told is safe, it writes down.

``python -m tests.soak.pusher SETTINGS``, a JSON file: ``endpoint``, ``partition``, ``partitions``, ``total``, ``seed``,
``folder``, ``trees``, ``late``, ``media``. Sample n of a partition is a function of (seed, partition, n); one that is
started again goes on where the broker stands, which must not be before what it was told is safe. With ``trees``, groups
of ``GROUP`` samples begin alike and are sent as trees. With ``late``, each sample carries its number, with ``media``,
its images.
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
from streampack.errors import DataStall, PeerError
from tests.soak import sample_media

STREAM = "rollouts"
FLUSH_EVERY = GROUP = 8


def prompt_of(seed: int, partition: int, seq: int) -> list[int]:
    """The ids with which all samples of a group begin."""
    draw = random.Random(f"{seed} {partition} group {seq // GROUP}")
    return [draw.randint(1, 60_000) for _ in range(draw.randint(0, 30))]


def tokens_of(seed: int, partition: int, seq: int, trees: bool = False) -> list[int]:
    """The ids of one sample, never 0. With ``trees``, the first one after the prompt tells the samples apart."""
    draw = random.Random(f"{seed} {partition} {seq}")
    first = draw.randrange(60_000)
    own = [1 + (first + 7 * i) % 60_000 for i in range(draw.randint(1, 64))]
    return [*prompt_of(seed, partition, seq), 60_001 + seq % GROUP, *own] if trees else own


class Diary:
    """``pusher-<partition>.jsonl``: each line is written at once, and so is whole."""

    def __init__(self, folder: Path, partition: int) -> None:
        self.path = folder / f"pusher-{partition}.jsonl"
        self._out = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, **line: Any) -> None:
        os.write(self._out, (json.dumps(line) + "\n").encode())

    @property
    def safe_upto(self) -> int:
        """Samples below were said to be safe."""
        return max((json.loads(line).get("safe", 0) for line in self.path.read_text().splitlines()), default=0)


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    partition, total, folder = settings["partition"], settings["total"], Path(settings["folder"])
    diary = Diary(folder, partition)
    known = diary.safe_upto
    try:
        rollouts = streampack.Producer(settings["endpoint"], stream=STREAM, partition=partition, timeout_s=60.0)
    except PeerError as error:
        diary.write(error=f"{type(error).__name__}: {error}")
        sys.exit(0 if known == total and isinstance(error, DataStall) else error.exit_code)  # it had ended
    try:
        begun = int(rollouts.stats()["next_seq"])
        diary.write(begun=begun, known=known)
        trees, step = settings["trees"], GROUP if settings["trees"] else 1
        for seq in range(begun, total, step):
            of_group = range(seq, min(seq + step, total))
            group = [tokens_of(settings["seed"], partition, each, trees) for each in of_group]
            one: Any = {"input_ids": group[0], "number": seq} if settings["late"] else group[0]
            if settings["media"]:
                one = {"input_ids": group[0]} | sample_media.given(settings["seed"], folder, group[0])
            sent = list(rollouts.send_group(group, share="prefix")) if trees else [rollouts.send(one)]
            if sent != [*of_group]:
                raise RuntimeError(f"got the numbers {sent}, expected {[*of_group]}")
            if (folder / "fire").exists():
                time.sleep(0.02 * step)
            if seq % FLUSH_EVERY == 0:
                rollouts.flush()
                diary.write(safe=int(rollouts.stats()["durable_seq"]))
        rollouts.flush()
        diary.write(safe=total)
        rollouts.close(end=True)
    except PeerError as error:
        diary.write(error=f"{type(error).__name__}: {error}")
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
