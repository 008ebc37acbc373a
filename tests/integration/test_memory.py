"""A producer faster than its trainers waits: a million samples through two slow clients, in bounded memory."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator

import numpy as np
import psutil

import streampack
from streampack.chunks import Batch
from streampack.core.messages import Lease
from streampack.producer import ProducerLoop
from streampack.sources import Cursor
from tests.integration.running import PATIENCE_S, running_broker, until

SAMPLES = 1_000_000
MEAN_TOKENS = 100


class Counted:
    """A million samples over two partitions, of 1 to 199 tokens, made as they are read."""

    digest = "a million"

    def batches(self, lease: Lease) -> Iterator[Batch]:
        done = lease.cursor[2] if lease.cursor else 0
        total = SAMPLES // lease.partitions
        while done < total:
            count = min(2000, total - done)
            lengths = 1 + (np.arange(done, done + count, dtype=np.uint32) * 7919) % (2 * MEAN_TOKENS - 1)
            done += count
            yield Batch(np.full(int(lengths.sum()), 7, np.uint16), lengths, Cursor(0, 0, done), {})


def produce(endpoint: str) -> None:
    ProducerLoop(endpoint, {"text": Counted()}).run()


def train(endpoint: str, rank: int, pause_s: float) -> None:
    with streampack.connect(endpoint, mesh={"dp": 2, "dp_rank": rank}, format="numpy") as loader:
        for _ in loader.steps():
            time.sleep(pause_s)


def test_a_million_samples_through_slow_clients_leave_the_brokers_memory_alone() -> None:
    settings = {
        "tokens": "uint16",
        "memory": "64MiB",
        "limits": {},
        "rules": {"budget": 8192, "step": {"packs": 64}},
        "streams": {"text": {"partitions": 2}},
    }
    spawn = multiprocessing.get_context("spawn")
    with running_broker(settings) as broker:
        others = [spawn.Process(target=produce, args=(broker.producers,), daemon=True)]
        others += [spawn.Process(target=train, args=(broker.trainers, rank, 0.08), daemon=True) for rank in range(2)]
        for process in others:
            process.start()
        memory = psutil.Process(broker.process.pid)
        early = late = 0
        deadline = time.monotonic() + PATIENCE_S
        while any(process.is_alive() for process in others):
            assert time.monotonic() < deadline
            packed = broker.feed()["totals"]["samples"]
            late = memory.memory_info().rss
            if packed < 100_000:
                early = late
            time.sleep(0.1)
        assert [process.exitcode for process in others] == [0, 0, 0]
        until(lambda: broker.feed()["totals"]["samples"] == SAMPLES)  # what it publishes is half a second old
    print(f"rss at 100k samples {early / 2**20:.1f} MiB, at the end {late / 2**20:.1f} MiB: {late / early:.3f}")
    assert late <= 1.05 * early
