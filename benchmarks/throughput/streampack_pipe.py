"""Measure streampack as users run it, in the setup of the bare pipe: two producers, a broker, one client.

The broker is the command itself, its log on a disk, its metrics read once a second; checksums, credits, merge,
exact_fill, steps, and packs built as a trainer gets them. Samples come out of the producers' memory, as the bare
pipe's frames do, so that no tokenizer or disk is measured; their lengths are drawn from the same distribution.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import threading
import time
import urllib.request
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from streampack_services.broker.authorization import new_key

import streampack
from benchmarks.processes import START_TIMEOUT_S, Processes
from benchmarks.traffic import NUM_PRODUCERS, PACK_TOKENS, WARM_UP_S, PipeResult, Traffic
from streampack.core.protocol.producer_messages import Lease
from streampack.packs.kernel_loader import kernels
from streampack.producer.chunk import CHUNK_SAMPLES, TokenChunk
from streampack.producer.loop import ProducerLoop
from streampack.sources import Cursor
from streampack.transport.keys import find_key
from streampack.transport.rendezvous import read_rendezvous

POOL_TOKENS = 4 << 20
DISK = "/var/tmp"
"""Where the log is: no memory that looks like a disk, as /tmp may be."""
SCRAPE_S = 1.0


@dataclass(frozen=True)
class Service:
    """Settings of the broker, and the seconds ``work_s`` that the trainer works on each pack.

    With ``standby``, a second broker on this machine copies the log.

    256 packs of 8,192 tokens are 2M tokens a step, a usual batch of an 8B model on hundreds of ranks.
    """

    packs: int = 256
    memory: str = "256MiB"
    log: bool = True
    scraped: bool = True
    format: str = "numpy"
    work_s: float = 0.0
    keys: bool = False
    standby: bool = False

    def tree(self, traffic: Traffic, folder: str, disk: str) -> dict[str, Any]:
        """broker.yaml."""
        tcp = traffic.transport == "tcp"
        listen = {side: "tcp://127.0.0.1:*" if tcp else f"ipc://{folder}/{side}" for side in ("producers", "trainers")}
        return {
            "listen": listen | {"http": "127.0.0.1:0", "keys": f"{folder}/keys" if self.keys else None},
            "rendezvous": f"{folder}/rendezvous.json",
            "state_dir": f"{disk}/state" if self.log else None,
            "memory": self.memory,
            "tokens": traffic.tokens,
            "rules": {"budget": PACK_TOKENS, "step": {"packs": self.packs}},
            "streams": {"web": {"repeat": True, "partitions": NUM_PRODUCERS}},
        }

    def with_standby(self, tree: dict[str, Any], folder: str, disk: str, name: str) -> dict[str, Any]:
        """broker.yaml of one of two brokers."""
        listen = f"ipc://{folder}/ship-{name}"
        standby = {"arbiter": f"{disk}/arbiter", "listen": listen, "address": listen, "name": name}
        own: dict[str, Any] = {"standby": standby, "state_dir": f"{disk}/{name}"}
        if name == "b":
            own["listen"] = tree["listen"] | {side: f"ipc://{folder}/b-{side}" for side in ("producers", "trainers")}
            own["rendezvous"] = None
        return tree | own


class MemorySource:
    """Batches out of a pool of tokens made at the start: endless, the same for every reader."""

    digest = "benchmark"

    def __init__(self, traffic: Traffic) -> None:
        self._lengths = traffic.draw(0, POOL_TOKENS).astype(np.uint32)
        self._tokens = np.random.default_rng(0).integers(0, 50_000, int(self._lengths.sum())).astype(traffic.tokens)

    def batches(self, lease: Lease) -> Iterator[TokenChunk]:
        """Chunks of nearly the size that the lease allows, for ever."""
        ends = np.cumsum(self._lengths.astype(np.int64))
        room = lease.max_chunk_bytes // self._tokens.itemsize
        sample = lease.cursor[2] if lease.cursor else 0
        while True:
            begin = int(ends[sample - 1]) if sample else 0
            stop = min(int(np.searchsorted(ends, begin + room, side="right")), sample + CHUNK_SAMPLES)
            tokens, lengths = self._tokens[begin : int(ends[stop - 1])], self._lengths[sample:stop]
            sample = stop % len(ends)
            yield TokenChunk(tokens, lengths, Cursor(0, 0, sample), {})


def run_streampack(seconds: float, traffic: Traffic, service: Service = Service()) -> PipeResult:
    """Run the service and time what its client gets, as ``run_bare_pipe`` does; same errors."""
    with _folders() as (folder, disk), Processes() as processes:
        settings, rendezvous = Path(folder) / "broker.yaml", Path(folder) / "rendezvous.json"
        key_file = ""
        if service.keys:
            new_key(Path(folder) / "keys", "trainers", "trainer", {})
            key_file = f"{folder}/keys/broker.key"
        tree = service.tree(traffic, folder, disk)
        if service.standby:
            other = Path(folder) / "standby.yaml"
            other.write_text(json.dumps(service.with_standby(tree, folder, disk, "b")))
            tree = service.with_standby(tree, folder, disk, "a")
        settings.write_text(json.dumps(tree))  # JSON is YAML
        processes.command("broker", broker_command(settings), Path(folder) / "broker.log")
        if service.standby:
            processes.command("standby", [*broker_command(other), "--standby"], Path(folder) / "standby.log")
        client = processes.start("client", _client, rendezvous, service, seconds, key_file)
        for i in range(NUM_PRODUCERS):
            processes.start(f"producer-{i}", produce, rendezvous, traffic, key_file)
        processes.receive(client, START_TIMEOUT_S)
        with _scraped(rendezvous) if service.scraped else contextlib.nullcontext():
            before = processes.cpu_seconds()
            tokens, elapsed, waits_ms = processes.receive(client, seconds + START_TIMEOUT_S)
            after, peaks = processes.cpu_seconds(), processes.peak_bytes()
    cpu = {name: round(after[name] - before[name], 2) for name in after}
    return PipeResult(tokens, elapsed, tokens / elapsed, cpu, peaks, waits_ms)


def broker_command(settings: Path) -> list[str]:
    """As a user types it."""
    return [sys.executable, "-m", "streampack", "broker", "-c", str(settings)]


@contextlib.contextmanager
def _folders() -> Iterator[tuple[str, str]]:
    """For sockets, whose paths have to be short, and for what is to be on a disk."""
    with (
        tempfile.TemporaryDirectory(prefix="streampack-") as folder,
        tempfile.TemporaryDirectory(prefix="streampack-", dir=DISK) as disk,
    ):
        yield folder, disk


@contextlib.contextmanager
def _scraped(rendezvous: Path) -> Iterator[None]:
    """Read the broker's metrics once a second, as Prometheus would more seldom. Raises OSError if they cannot be."""
    stop, failed = threading.Event(), list[OSError]()
    url = read_rendezvous(rendezvous, "http", START_TIMEOUT_S)

    def scrape() -> None:
        while not stop.wait(SCRAPE_S):
            try:
                with urllib.request.urlopen(f"{url}/metrics", timeout=START_TIMEOUT_S) as answer:
                    answer.read()
            except OSError as error:
                failed.append(error)

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    if failed:
        raise failed[0]


def produce(report: Connection, rendezvous: Path, traffic: Traffic, key_file: str = "") -> None:
    """A producer's process."""
    endpoint = read_rendezvous(rendezvous, "producers", START_TIMEOUT_S)
    ProducerLoop(endpoint, {"web": MemorySource(traffic)}, key=find_key(key_file)).run()


def _client(report: Connection, rendezvous: Path, service: Service, seconds: float, key_file: str) -> None:
    with streampack.connect(
        f"file://{rendezvous}", format=service.format, timeout_s=START_TIMEOUT_S, key_file=key_file
    ) as client:
        packs = iter(client)
        next(packs)
        kernels.load()
        kernels.wait()  # a trainer's first second, of days
        warm_at = time.perf_counter() + WARM_UP_S
        while time.perf_counter() < warm_at:
            next(packs)
            time.sleep(service.work_s) if service.work_s else None
        report.send("warm")
        waits = array("d")
        start = now = time.perf_counter()
        tokens = 0
        while now - start < seconds:
            asked = time.perf_counter()
            pack = next(packs)
            now = time.perf_counter()
            waits.append(now - asked)
            tokens += pack.num_loss_tokens + len(pack.sample_ids)  # no tensor is looked into: that takes 6 us
            if service.work_s:
                time.sleep(service.work_s)
        report.send((tokens, now - start, quantiles_ms(waits)))
        threading.Event().wait()


def quantiles_ms(seconds: array[float]) -> dict[str, float]:
    """p50, p99, p99.9 and the most of how long something took, in ms."""
    values = np.quantile(np.frombuffer(seconds), [0.5, 0.99, 0.999, 1.0]) * 1e3
    return dict(zip(("p50", "p99", "p99.9", "max"), values.round(4).tolist(), strict=True))
