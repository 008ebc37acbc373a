"""Crashes in an RL loop: seconds of generation that are lost, beside a buffer in memory.

    python -m benchmarks.rl.rl_crash [--kills 30] [--seed 1] [--json]

Workers generate samples; each sample stands for seconds of generation, which come later, as the value of a late field.
They send each to the broker and to a buffer in the memory of another process. A trainer reads steps from both, and
reports the values back to a subscriber. Then a worker, the trainer, or both broker and buffer
are killed with SIGKILL, at random. At the end, each sample that was reported as stored must have been trained. Samples
that a killed worker was still generating, or had not got stored, are counted nowhere: no buffer can have them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import numpy as np

import streampack
from streampack.errors import Unreachable
from tests.integration.running import RunningBroker

WORKERS, STEP = 2, 32
MEAN_S = 90.0
"""Mean seconds of generation that a sample stands for."""
SAMPLE_S = 0.004
"""Seconds that a worker really takes."""


def seconds_of(worker: int, number: int) -> float:
    """Seconds of generation that a sample stands for."""
    return float(np.random.default_rng([worker, number]).lognormal(np.log(MEAN_S), 0.8))


def work(worker: int, endpoint: str, buffer: str, journal: str, upto: int) -> None:
    """Generate samples from where the broker stands; give their late values, and note those that are stored."""
    done = Path(journal)
    with streampack.Producer(endpoint, stream="rollouts", partition=worker, timeout_s=120.0) as rollouts:
        number, noted = int(rollouts.stats()["next_seq"]), sum(1 for _ in rows(done))
        with done.open("a") as notes:

            def score(stored: int) -> int:
                """Give values to the samples that are stored, and note these samples."""
                seqs = list(range(noted, stored))
                for at in range(0, len(seqs), 64):
                    rollouts.amend(seqs[at : at + 64], seconds=[seconds_of(worker, seq) for seq in seqs[at : at + 64]])
                notes.writelines(f"{seq}\n" for seq in seqs)
                notes.flush()
                return max(stored, noted)

            noted = score(number)
            while number < upto:
                time.sleep(SAMPLE_S)
                seq = rollouts.send(np.full(16, 1 + worker, np.int32))
                put(buffer, ("put", worker, seq))
                number += 1
                if number % 8 == 0 or number == upto:
                    rollouts.flush()
                    noted = score(int(rollouts.stats()["durable_seq"]))
        rollouts.close(end=True)


def put(address: str, message: tuple[Any, ...]) -> Any:
    """Send a message to the buffer; None if the buffer is not there."""
    with suppress(OSError, EOFError):
        connection = Client(address)
        connection.send(message)
        return connection.recv()
    return None


def hold(address: str) -> None:
    """A buffer in memory: first in, first out."""
    kept: list[tuple[int, int]] = []
    with suppress(FileNotFoundError):
        os.unlink(address)
    with Listener(address) as listener:
        while True:
            connection = listener.accept()
            with connection, suppress(OSError, EOFError):
                kept = _serve(connection, kept)


def _serve(connection: Connection, kept: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Handle one request of a worker or the trainer; return what is kept then."""
    what, *rest = connection.recv()
    if what == "put":
        kept.append((rest[0], rest[1]))
        connection.send(True)
        return kept
    connection.send(kept[: rest[0]])
    return kept[rest[0] :]


def train(endpoint: str, buffer: str, folder: str) -> None:
    """Train steps of both, and note what is trained in checkpoints."""
    state, notes = Path(folder) / "state.json", Path(folder) / "trained"
    with streampack.connect(endpoint, format="numpy", timeout_s=120.0) as loader:
        if state.exists():
            loader.load_state_dict(json.loads(state.read_text()))
        for step in loader.steps():
            lines = [f"{step.index} {index % WORKERS} {index // WORKERS}\n" for _, index, _ in step.sample_ids.tolist()]
            with (Path(folder) / "buffered").open("a") as out:
                for worker, seq in put(buffer, ("get", STEP)) or []:
                    out.write(f"{worker} {seq}\n")
            with notes.open("a") as out:
                out.writelines(lines)
            step.report({"seconds": [float(each) for pack in step for each in pack["seconds"][: pack.num_samples]]})
            state.with_suffix(".new").write_text(json.dumps(loader.state_dict()))
            os.replace(state.with_suffix(".new"), state)
            loader.commit(step.index)


def rows(path: Path) -> Iterator[list[int]]:
    """The whole lines of a file of numbers; the last one may be cut by a kill."""
    text = path.read_text() if path.exists() else ""
    for line in text.splitlines(keepends=True):
        if line.endswith("\n"):
            yield [int(each) for each in line.split()]


class Subscriber:
    """Reads the values that come back, in a thread of its own, and checks them."""

    def __init__(self, endpoint: str) -> None:
        self.found: dict[int, int] = {}
        """Samples of each step."""
        self.twice = self.wrong = 0
        self._results = streampack.results(endpoint, start="oldest", timeout_s=2.0)
        self._stop = False
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        """Read steps until ``stop``, and then until none has come for a while."""
        while True:
            last = self._stop
            with suppress(Unreachable):  # a broker that starts
                for step in self._results:
                    self.twice += step.step in self.found
                    self.found[step.step] = len(step)
                    ids = zip(step.partitions.tolist(), step.seqs.tolist(), strict=True)
                    values = step.values["seconds"].tolist()
                    self.wrong += sum(seconds_of(*one) != value for one, value in zip(ids, values, strict=True))
            if last:
                return

    def stop(self) -> None:
        """Read what is left."""
        self._stop = True
        self._thread.join(60)
        self._results.close()


def measure(kills: int, seed: int, samples: int) -> dict[str, Any]:
    """Run the loop to its end with so many kills."""
    rng, context = np.random.default_rng(seed), multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="streampack-") as folder:
        path = Path(folder)
        sides = {side: f"ipc://{path}/{side}" for side in ("producers", "trainers")}
        settings = {
            "run": "crash", "merge": "arrival", "state_dir": f"{path}/state",
            "listen": {**sides, "http": "127.0.0.1:0"},
            "rules": {"budget": 256, "window": {"samples": 32}, "step": {"samples": STEP}},
            "streams": {"rollouts": {"pushed": True, "partitions": WORKERS}},
            "fields": {"seconds": {"dtype": "float64", "axis": "sample", "late": True}},
        }  # fmt: skip
        buffer = f"{path}/buffer"
        broker = RunningBroker(path, settings)
        targets: dict[str, tuple[Any, tuple[Any, ...]]] = {
            f"worker {n}": (work, (n, sides["producers"], buffer, f"{path}/stored{n}", samples)) for n in range(WORKERS)
        }
        targets |= {"trainer": (train, (sides["trainers"], buffer, folder)), "buffer": (hold, (buffer,))}
        running: dict[str, Any] = {}

        def start(name: str) -> None:
            """Start a process."""
            target, arguments = targets[name]
            running[name] = context.Process(target=target, args=arguments, daemon=True)
            running[name].start()

        def kill(name: str) -> None:
            """End a process at once, and start it again."""
            running[name].kill()
            running[name].join()
            start(name)

        counts: dict[str, int] = {}
        subscriber = Subscriber(sides["trainers"])
        try:
            for name in ("buffer", *[each for each in targets if each != "buffer"]):
                start(name)
            done = 0
            while any(running[name].exitcode != 0 for name in running if name != "buffer"):
                time.sleep(rng.uniform(0.5, 1.5) if done < kills else 0.2)
                if done >= kills:
                    continue
                victim = str(rng.choice(["broker", "trainer", *(f"worker {n}" for n in range(WORKERS))]))
                if victim != "broker" and running[victim].exitcode == 0:
                    continue
                done += 1
                counts[victim.split()[0]] = counts.get(victim.split()[0], 0) + 1
                if victim == "broker":
                    broker.kill()
                    kill("buffer")
                    broker = RunningBroker(path, settings)
                else:
                    kill(victim)
            subscriber.stop()
        finally:
            for process in running.values():
                process.kill()
            broker.kill()
        stored = {(n, seq) for n in range(WORKERS) for (seq,) in rows(path / f"stored{n}")}
        trained = [(worker, seq) for _, worker, seq in rows(path / "trained")]
        steps = {(step, worker, seq) for step, worker, seq in rows(path / "trained")}
        buffered = {(worker, seq) for worker, seq in rows(path / "buffered")}
        once = {(worker, seq) for _, worker, seq in steps}
        lost, lost_beside = stored - set(trained), stored - buffered
        return {
            "kills": counts, "samples": len(stored), "generation_s": round(sum(seconds_of(*each) for each in stored)),
            "lost_s": round(sum(seconds_of(*each) for each in lost)), "lost_samples": len(lost),
            "twice_samples": len(steps) - len(once),
            "steps": len({step for step, *_ in steps}), "steps_reported": len(subscriber.found),
            "reported_twice": subscriber.twice, "wrong_values": subscriber.wrong,
            "lost_s_in_memory": round(sum(seconds_of(*each) for each in lost_beside)),
            "lost_samples_in_memory": len(lost_beside),
        }  # fmt: skip


def main() -> None:
    """Print what was lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30, help="processes to kill (default: 30)")
    parser.add_argument("--seed", type=int, default=1, help="seed of who is killed when (default: 1)")
    parser.add_argument("--samples", type=int, default=4000, help="samples of each worker (default: 4000)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    found = measure(arguments.kills, arguments.seed, arguments.samples)
    if arguments.json:
        print(json.dumps(found))
        return
    for key, value in found.items():
        print(f"{key:24} {value}")


if __name__ == "__main__":
    main()
