"""Many real clients of one real broker on one machine: sockets, threads and processes as users have them, tiny packs.

What ``scale.py`` leaves out: does a broker hold with as many connections, and what does one more cost it. A few
processes have some ranks each, which take every step in turn: all are in lock step, as trainers are.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from streampack_services.broker.memory_plan import keep_freed_memory
from streampack_services.broker.service import BrokerService

import streampack
from benchmarks.processes import START_TIMEOUT_S, Processes
from benchmarks.traffic import WARM_UP_S
from streampack.config.config_validation import checked
from streampack.config.daemon_settings import BrokerConfig
from streampack.config.typed_yaml import convert
from streampack.core.protocol.producer_messages import Lease
from streampack.producer.chunk import TokenChunk
from streampack.producer.loop import ProducerLoop
from streampack.sources import Cursor

BUDGET = 256
CLIENTS_A_PROCESS = 16
CHUNK_SAMPLES = 4096


class TinySamples:
    """Samples of 1 to 128 tokens, for ever."""

    digest = "tiny"

    def batches(self, lease: Lease) -> Iterator[TokenChunk]:
        """The same chunk again and again."""
        lengths = np.random.default_rng(0).integers(1, 129, CHUNK_SAMPLES).astype(np.uint32)
        lengths = lengths[: np.searchsorted(np.cumsum(lengths), lease.max_chunk_bytes // 4)]
        tokens = np.arange(int(lengths.sum()), dtype=np.int32)
        while True:
            yield TokenChunk(tokens, lengths, Cursor(0, 0, 0), {})


def run_sockets(ranks: int, seconds: float) -> dict[str, Any]:
    """Steps/s of ``ranks`` data-parallel clients, and CPU time a step of the broker, a producer and all clients."""
    with tempfile.TemporaryDirectory(prefix="streampack-") as folder, Processes() as processes:
        broker = processes.start("broker", _broker, folder, ranks)
        endpoints = processes.receive(broker, START_TIMEOUT_S)
        processes.start("producer", _produce, endpoints["producers"])
        each = [range(ranks)[first : first + CLIENTS_A_PROCESS] for first in range(0, ranks, CLIENTS_A_PROCESS)]
        at = endpoints["trainers"]
        clients = [processes.start(f"clients-{mine[0]}", _clients, at, ranks, mine) for mine in each]
        begun = [processes.receive(client, START_TIMEOUT_S + ranks) for client in clients]
        first, before = max(begun), processes.cpu_seconds()
        time.sleep(seconds)
        after = processes.cpu_seconds()
        for client in clients:
            client.send("how far")
        last = min(processes.receive(client, START_TIMEOUT_S) for client in clients)
    steps = last - first
    used = {name: after[name] - before[name] for name in after}
    of_clients = sum(took for name, took in used.items() if name.startswith("clients"))
    cpu = {"broker": used["broker"], "producer": used["producer"], "clients": of_clients}
    return {
        "ranks": ranks, "budget": BUDGET, "steps_per_s": round(steps / seconds, 1),
        "cpu_ms": {name: round(1000 * took / max(steps, 1), 2) for name, took in cpu.items()},
    }  # fmt: skip


def _broker(report: Connection, folder: str, ranks: int) -> None:
    keep_freed_memory()
    tree = {
        "listen": {side: f"ipc://{folder}/{side}" for side in ("producers", "trainers")},
        "memory": "64MiB",
        "limits": {"chunk": "256KiB"},
        "rules": {"budget": BUDGET, "step": {"packs": ranks}},
        "streams": {"tiny": {"repeat": True, "partitions": 2}},
    }
    service = BrokerService(checked(convert(tree, BrokerConfig)))
    report.send(service.endpoints)
    service.run()


def _produce(report: Connection, endpoint: str) -> None:
    ProducerLoop(endpoint, {"tiny": TinySamples()}).run()


def _clients(report: Connection, endpoint: str, ranks: int, mine: range) -> None:
    """Some ranks, each with a client of its own; says how many steps all have taken: warm, and when it is asked."""
    with ExitStack() as stack:
        loaders = [
            stack.enter_context(streampack.connect(endpoint, mesh={"dp": ranks, "dp_rank": rank}, format="numpy"))
            for rank in mine
        ]
        rank_steps = [loader.steps() for loader in loaders]
        steps, warm_at = 0, 0.0
        while not report.poll():
            for each in rank_steps:
                next(each)
            steps += 1
            warm_at = warm_at or time.perf_counter() + WARM_UP_S
            if warm_at > 0 and time.perf_counter() >= warm_at:
                report.send(steps)
                warm_at = -1.0
        report.recv()
        report.send(steps)
        threading.Event().wait()
