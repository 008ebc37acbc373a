"""Parts of the Ray test and the Ray benchmark: a cluster on this machine, its data, service, trainers and kills."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # Ray then listens on loopback alone
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # a call after the end must not start another cluster

import pyarrow as pa
import ray
import ray.data
import ray.train
from ray.cluster_utils import Cluster
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

import streampack
from streampack.errors import StreampackError
from streampack.integrations import ray as packs

__all__ = ["pa", "packs", "ray"]
NAME = "tried"
MB = 2**20


@contextlib.contextmanager
def cluster(cpus: float = 2, workers: int = 2) -> Iterator[RayNodes]:
    """A cluster of a head and ``workers`` nodes with addresses of their own, 127.0.0.2 and so on."""
    found = RayNodes(cpus)
    try:
        for _ in range(workers):
            found.add()
        ray.init(address=found.cluster.address, log_to_driver=False, logging_level="ERROR")
        yield found
    finally:
        with contextlib.suppress(Exception):
            packs.shutdown(NAME)
        ray.shutdown()
        found.cluster.shutdown()


def begun(start: Any, times: int = 5) -> Any:
    """What ``start`` starts. Ray gives a node 30 s, of which a busy machine may take more."""
    for left in range(times, -1, -1):
        try:
            return start()
        except Exception as error:
            if "timed out during startup" not in str(error) or not left:
                raise
    raise AssertionError


class RayNodes:
    """The nodes of a cluster; each has ``cpus`` CPUs and 100 MB for objects."""

    def __init__(self, cpus: float) -> None:
        self.options = {"num_cpus": cpus, "object_store_memory": 100 * MB, "include_dashboard": False}
        head = self.options | {"node_ip_address": "127.0.0.1"}
        self.cluster = Cluster()
        begun(lambda: self.cluster.add_node(**head))
        self.added: dict[str, Any] = {}
        self._next = 2

    def add(self) -> None:
        """One more node."""
        options = {name: value for name, value in self.options.items() if name != "include_dashboard"}
        node = begun(lambda: self.cluster.add_node(node_ip_address=f"127.0.0.{self._next}", **options))
        self._next += 1
        self.added[node.node_id] = node

    def lose(self, node_id: str) -> None:
        """Lose a node with all that runs there, and get another."""
        self.cluster.remove_node(self.added.pop(node_id), allow_graceful=False)
        with mock.patch.object(ray._private.utils, "set_sigterm_handler"):  # only the main thread may set it
            self.add()


def row(number: int) -> dict[str, Any]:
    """A row whose tokens say which it is."""
    return {"doc_id": f"doc-{number}", "input_ids": [number] * (1 + 7 * number % 60)}


def slowed(batch: Any) -> Any:
    """A step of a dataset that takes as long as tokenizing would."""
    time.sleep(0.3)
    return batch


def write(numbers: range, blocks: int, end: bool) -> None:
    """Write rows to the pushed stream, as a job of Ray Data does."""
    size = -(-len(numbers) // blocks)
    parts = [numbers[at : at + size] for at in range(0, len(numbers), size)]
    data = ray.data.from_arrow([pa.Table.from_pylist([row(number) for number in part]) for part in parts])
    ready = data.map_batches(slowed, batch_format="pyarrow", num_cpus=0.1)
    sink = packs.Datasink(NAME, stream="docs", key="doc_id", end=end)
    ready.write_datasink(sink, ray_remote_args={"num_cpus": 0.1, "max_retries": -1}, concurrency=3)


def delivered() -> list[tuple[int, int]]:
    """(number, length) of each sample of the pushed feed, in all its steps."""
    found = []
    with packs.connect(NAME, feed="docs", format="numpy", stall_timeout_s=300) as loader:
        for step in loader.steps():
            for pack in step:
                starts, lengths = pack.cu_seqlens_padded.tolist(), (pack.cu_seqlens[1:] - pack.cu_seqlens[:-1]).tolist()
                found += [(int(pack.input_ids[starts[i]]), lengths[i]) for i in range(pack.num_samples)]
    return found


def expected(numbers: range) -> list[tuple[int, int]]:
    """(number, length) of each row that was written."""
    return [(number, 1 + 7 * number % 60) for number in numbers]


def calm(folder: Path, steps: int) -> dict[int, str]:
    """The digests of the first steps of the feed of files, read by one rank without Ray and without a kill."""
    broker, producers = settings(folder)
    rules = broker["rules"]
    text = {"source": "jsonl", "shards": producers["streams"]["text"]["shards"], **broker["streams"]["text"]}
    with streampack.local(
        {"text": text}, budget=rules["budget"], window=rules["window"]["samples"], packs=rules["step"]["packs"],
        tokens=broker["tokens"], format="numpy",
    ) as loader:  # fmt: skip
        return {step.index: step.digest for step, _ in zip(loader.steps(), range(steps), strict=False)}


def settings(folder: Path, partitions: int = 4, standby: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """broker.yaml and producer.yaml: a feed of files in order, and a feed of what is pushed."""
    file = folder / "text.jsonl"
    file.write_text("".join(json.dumps({"text": f"{i} " * (1 + i % 9)}) + "\n" for i in range(2000)))
    broker = {
        "state_dir": str(folder / "state"),
        "tokens": "uint16",
        "rules": {"budget": 128, "window": {"samples": 32}, "step": {"packs": 4}},
        "streams": {"text": {"repeat": True}, "docs": {"pushed": True, "partitions": partitions}},
        "feeds": {"train": {"streams": ["text"]}, "docs": {"streams": ["docs"], "merge": "arrival"}},
    }
    if standby:
        broker["standby"] = {"arbiter": str(folder / "arbiter"), "on_loss": "go_on"}
    return broker, {"streams": {"text": {"source": "jsonl", "shards": str(file)}}}


def start(broker: dict[str, Any], producers: dict[str, Any]) -> packs.Service:
    few = {"num_cpus": 0.1}
    return packs.start(NAME, broker, producers, broker_options=few, producer_options=few)


def train_fn(config: dict[str, Any]) -> None:
    """Train to the step ``stop``, with a checkpoint every ``every`` steps; note each step that this rank has had."""
    rank = ray.train.get_context().get_world_rank()
    with packs.connect(NAME, format="numpy", join_timeout_s=600) as loader:
        packs.restore(loader, ray.train.get_checkpoint())
        for step in loader.steps():
            with Path(config["notes"]).open("a") as notes:
                notes.write(json.dumps([rank, step.index, step.digest, loader.mesh.dp]) + "\n")
            time.sleep(config["pause_s"])
            assert all(pack.step == step.index for pack in step)
            if (step.index + 1) % config["every"] == 0:
                with tempfile.TemporaryDirectory() as folder:
                    packs.report({"step": step.index}, loader, folder)
            if step.index + 1 == config["stop"]:
                break


def train(workers: int, folder: Path, stop: int, every: int = 10, pause_s: float = 0.0) -> None:
    """One run of Ray Train over ``workers`` CPU workers, from the last checkpoint in the folder."""
    trainer = DataParallelTrainer(
        train_fn,
        train_loop_config={"notes": str(folder / "notes"), "stop": stop, "every": every, "pause_s": pause_s},
        scaling_config=ray.train.ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 0.1}),
        run_config=ray.train.RunConfig(
            name="run", storage_path=str(folder / "runs"), failure_config=ray.train.FailureConfig(max_failures=-1)
        ),
    )  # fmt: skip
    trainer.fit()


def notes(folder: Path) -> dict[int, set[str]]:
    """The digests of each step, as the ranks have had it."""
    found: dict[int, set[str]] = {}
    for line in (folder / "notes").read_text().splitlines():
        _, step, digest, _ = json.loads(line)
        found.setdefault(step, set()).add(digest)
    return found


class Killer:
    """A thread that kills something every ``every_s`` seconds, until ``count`` kills were made or it is stopped.

    A broker's, producer's or relay's actor; its daemon; a worker that writes or trains; a node with all of these.
    """

    def __init__(self, nodes: RayNodes, service: packs.Service, count: int, every_s: float, seed: int) -> None:
        self.nodes, self.service, self.count, self.every_s = nodes, service, count, every_s
        self.rng, self.killed = random.Random(seed), list[str]()
        self._stop = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def stop(self) -> None:
        self._stop.set()
        self.thread.join()

    def _run(self) -> None:
        kinds, turn = ["actor", "task", "daemon", "write", "node"], -1
        while len(self.killed) < self.count and not self._stop.wait(self.every_s):
            turn += 1
            kind = kinds[turn % len(kinds)]
            with contextlib.suppress(ProcessLookupError, StreampackError):  # it has ended, or is not there now
                if kind == "node":
                    self.nodes.lose(self.rng.choice(list(self.nodes.added)))
                elif kind in ("task", "write"):
                    pid = self.rng.choice(workers(("Write",) if kind == "write" else ("RayTrainWorker",)) or [0])
                    if not pid:  # none runs now
                        continue
                    os.kill(pid, signal.SIGKILL)
                else:
                    state = self.rng.choice(list(self.service.states().values()) or [{}])
                    os.kill(state.get("actor_pid" if kind == "actor" else "pid") or 2**22, signal.SIGKILL)
                self.killed.append(kind)


def workers(names: tuple[str, ...]) -> list[int]:
    """Process ids of Ray's workers that run a task or an actor with one of these names."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            title = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if re.match(rf"ray::({'|'.join(names)})\b", title):
                found.append(int(path.parent.name))
    return found


def until_killed(names: tuple[str, ...], is_over: Any) -> None:
    """Kill a worker with one of these words in its name as soon as there is one, unless it ``is_over``."""
    while not is_over():
        for pid in workers(names)[:1]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                return
        time.sleep(0.05)
    raise AssertionError("no worker was there to be killed")
