"""Ray under kills: Ray Data writes, Ray Train reads with 4, 2 and 4 workers, and actors, tasks and nodes are killed.

    python -m benchmarks.recovery.on_ray --kills 30 [--standby]

Three nodes on this machine, 100 MB for objects each, fractional CPUs. The digests must be those of a run without kills,
and each written row must be in exactly one step. Then: the rows that a resume reads again, beside a Ray Data loader,
which begins its dataset again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.recovery import counted_rows
from tests.integration.frameworks import ray_programs as programs

packs = programs.packs
STEPS, ROWS, BLOCKS = 20, 240, 6
"""Steps of each run of Ray Train; rows and blocks of each write."""
READ_ROWS, READ_STEPS = 100_000, 35
"""Rows to read, and the steps after which all but the trainers' checkpoint is lost."""


def under_kills(nodes: programs.RayNodes, folder: Path, kills: int, every_s: float, standby: bool) -> None:
    """Train and write while things are killed, and check every step and every row."""
    calm = programs.calm(folder, 3 * STEPS)
    broker, producers = programs.settings(folder, standby=standby)
    service = programs.start(broker, producers)
    began = time.monotonic()
    killer = programs.Killer(nodes, service, kills, every_s, seed=7)
    written, trained = 0, threading.Event()

    def write() -> None:
        nonlocal written
        over = False
        while not over:
            over = len(killer.killed) >= kills and trained.is_set()
            programs.write(range(written, written + ROWS), BLOCKS, end=over)
            written += ROWS
            print(f"{time.monotonic() - began:6.0f} s: {written} rows written, {len(killer.killed)} kills", flush=True)

    writer = threading.Thread(target=write)
    writer.start()
    for number, workers in enumerate((4, 2, 4), 1):
        programs.train(workers, folder, number * STEPS, pause_s=0.25)
        print(f"{time.monotonic() - began:6.0f} s: {workers} workers to step {number * STEPS}", flush=True)
    trained.set()
    writer.join()
    killer.stop()
    seconds = time.monotonic() - began
    notes, rows = programs.notes(folder), programs.delivered()
    twice = [number for number, times in Counter(number for number, _ in rows).items() if times > 1]
    differ = [step for step in range(3 * STEPS) if notes.get(step) != {calm[step]}]
    states = service.states()
    print(json.dumps({
        "kills": Counter(killer.killed), "seconds": round(seconds), "steps": len(notes), "steps_that_differ": differ,
        "rows_written": written, "rows_delivered": len(rows), "rows_lost": written - len({n for n, _ in rows}),
        "rows_twice": len(twice), "daemon_failures_of_the_last_actors": sum(s["failures"] for s in states.values()),
    }))  # fmt: skip
    assert sorted(rows) == programs.expected(range(written))
    assert not differ
    packs.shutdown(programs.NAME)


def read_again(folder: Path) -> None:
    """The rows that a resume reads again, after a loss of everything but the trainers' checkpoint."""
    broker, producers = programs.settings(folder)
    broker["streams"]["text"] = {}
    broker["rules"] |= {"budget": 8192, "window": {"samples": 1024}}
    rows = "".join(json.dumps({"text": f"{i} " * (1 + i % 9)}) + "\n" for i in range(READ_ROWS))
    Path(producers["streams"]["text"]["shards"]).write_text(rows)
    producers["tokenizer"] = {"name": "benchmarks.recovery.counted_rows:tokenized"}
    counted_rows.COUNTED.write_bytes(b"")
    few = {"num_cpus": 0.1}

    def start() -> Any:
        return packs.start("resumed", broker, producers, broker_options=few, producer_options=few)

    start()
    with packs.connect("resumed", format="numpy") as loader:
        used = sum(step.num_samples for _, step in zip(range(READ_STEPS), loader.steps(), strict=False))
        state = loader.state_dict(step=READ_STEPS - 1)
    packs.shutdown("resumed")
    shutil.rmtree(broker["state_dir"])
    before = counted_rows.count()
    start()
    with packs.connect("resumed", format="numpy") as loader:
        loader.load_state_dict(state)
        rest = sum(step.num_samples for step in loader.steps())
    packs.shutdown("resumed")
    again = counted_rows.count() - before - rest
    file = producers["streams"]["text"]["shards"]
    counter = folder / "counted"

    def counted(batch: dict[str, list[str]]) -> dict[str, list[str]]:
        with counter.open("a") as out:
            out.write(f"{len(batch['text'])}\n")
        return batch

    data = programs.ray.data.read_json(file, lines=True).map_batches(counted, batch_size=50, num_cpus=0.1)
    for position in (used, 2 * used):  # a loader that is made again begins again, and skips
        taken = 0
        for batch in data.iter_batches(batch_size=50):
            taken += len(batch["text"])
            if taken >= position:
                break
    print(json.dumps({
        "rows": used + rest, "rows_used_before": used, "rows_read_again": again,
        "rows_read_again_by_ray_data": used,
        "rows_that_ray_data_read_in_all": sum(map(int, counter.read_text().split())),
    }))  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--every", type=float, default=8.0, help="seconds between kills")
    parser.add_argument("--standby", action="store_true", help="run a standby of the broker on another node")
    parser.add_argument("--only", choices=["kills", "resume"], help="the kills, or the rows that a resume reads again")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other, programs.cluster() as nodes:
        if asked.only != "resume":
            under_kills(nodes, Path(one), asked.kills, asked.every, asked.standby)
        if asked.only != "kills":
            read_again(Path(other))


if __name__ == "__main__":
    main()
