"""streampack as users run it, with the bare pipe's shape: two producers, a broker, one client.

Real processes and sockets, checksums, credits, merge, exact_fill, steps, and packs built as a
trainer gets them. Samples come out of the producers' memory, as the bare pipe's frames do, so that
no tokenizer or disk is measured; their lengths are drawn from the same distribution.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import numpy as np
from streampack_services.broker import BrokerService
from streampack_services.memory_plan import keep_freed_memory

import streampack
from benchmarks.bare_pipe import (
    MEAN_SAMPLE_TOKENS,
    NUM_PRODUCERS,
    PACK_TOKENS,
    SAMPLE_SIGMA,
    START_TIMEOUT_S,
    WARM_UP_S,
    PipeResult,
    Processes,
)
from streampack.chunks import Batch
from streampack.config import BrokerConfig
from streampack.config_check import checked
from streampack.core.messages import Lease
from streampack.producer import ProducerLoop
from streampack.sources import Cursor
from streampack.typed_tree import convert

POOL_TOKENS = 4 << 20
PACKS_PER_STEP = 32


class MemorySource:
    """Batches out of a pool of tokens made at the start: endless, the same for every reader."""

    digest = "benchmark"

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        mu = np.log(MEAN_SAMPLE_TOKENS) - SAMPLE_SIGMA**2 / 2
        drawn = rng.lognormal(mu, SAMPLE_SIGMA, 2 * POOL_TOKENS // MEAN_SAMPLE_TOKENS)
        self._lengths = drawn.astype(np.uint32).clip(1, PACK_TOKENS)
        self._tokens = rng.integers(0, 50_000, int(self._lengths.sum()), np.int32)

    def batches(self, lease: Lease) -> Iterator[Batch]:
        """Chunks of nearly the size that the lease allows, for ever."""
        ends = np.cumsum(self._lengths.astype(np.int64))
        room = lease.max_chunk_bytes // 4
        sample = lease.cursor[2] if lease.cursor else 0
        while True:
            begin = int(ends[sample - 1]) if sample else 0
            stop = int(np.searchsorted(ends, begin + room, side="right"))
            tokens, lengths = self._tokens[begin : int(ends[stop - 1])], self._lengths[sample:stop]
            sample = stop % len(ends)
            yield Batch(tokens, lengths, Cursor(0, 0, sample), {})


def run_streampack(seconds: float, endpoint_kind: str = "ipc", state_dir: str | None = None) -> PipeResult:
    """Run the service and time what its client gets, as ``run_bare_pipe`` does; same arguments and errors.

    The broker keeps its log in ``state_dir``, where one is given.
    """
    with tempfile.TemporaryDirectory(prefix="streampack-") as folder, Processes() as processes:
        tcp = endpoint_kind == "tcp"
        listen = {side: "tcp://127.0.0.1:*" if tcp else f"ipc://{folder}/{side}" for side in ("producers", "trainers")}
        broker = processes.start("broker", _broker, listen, state_dir)
        endpoints = processes.receive(broker, START_TIMEOUT_S)
        client = processes.start("client", _client, endpoints["trainers"], seconds)
        for i in range(NUM_PRODUCERS):
            processes.start(f"producer-{i}", _produce, endpoints["producers"])
        processes.receive(client, START_TIMEOUT_S)
        before = processes.cpu_seconds()
        tokens, elapsed = processes.receive(client, seconds + START_TIMEOUT_S)
        after = processes.cpu_seconds()
    cpu = {name: round(after[name] - before[name], 2) for name in after}
    return PipeResult(tokens, elapsed, tokens / elapsed, cpu)


def _broker(report: Connection, listen: dict[str, str], state_dir: str | None) -> None:
    keep_freed_memory()
    tree = {
        "listen": listen,
        "state_dir": state_dir,
        "memory": "256MiB",
        "rules": {"budget": PACK_TOKENS, "step": {"packs": PACKS_PER_STEP}},
        "streams": {"web": {"repeat": True, "partitions": NUM_PRODUCERS}},
    }
    service = BrokerService(checked(convert(tree, BrokerConfig)))
    report.send(service.endpoints)
    service.run()


def _produce(report: Connection, endpoint: str) -> None:
    ProducerLoop(endpoint, {"web": MemorySource()}).run()


def _client(report: Connection, endpoint: str, seconds: float) -> None:
    with streampack.connect(endpoint, format="numpy") as client:
        packs = iter(client)
        next(packs)
        warm_at = time.perf_counter() + WARM_UP_S
        while time.perf_counter() < warm_at:
            next(packs)
        report.send("warm")
        start = now = time.perf_counter()
        tokens = 0
        while now - start < seconds:
            pack = next(packs)
            tokens += int(pack.cu_seqlens[-1])
            now = time.perf_counter()
        report.send((tokens, now - start))
        threading.Event().wait()
