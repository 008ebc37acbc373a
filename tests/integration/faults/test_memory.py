"""A producer faster than its trainers waits: a million samples through two slow clients, in bounded memory; and in as
much of it as ``streampack check`` says.
"""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
from streampack_services.broker.memory_peak import PROCESS_BYTES

import streampack
from streampack.core.intake.intake import MAX_UNMERGED
from streampack.core.protocol.producer_messages import Lease
from streampack.producer.chunk import TokenChunk
from streampack.producer.loop import ProducerLoop
from streampack.sources import Cursor
from tests.integration.running import PATIENCE_S, executed, folder, in_process, running_broker, until

SAMPLES = 1_000_000
MEAN_TOKENS = 100


class Counted:
    """A million samples over two partitions, of 1 to 199 tokens, made as they are read."""

    digest = "a million"

    def batches(self, lease: Lease) -> Iterator[TokenChunk]:
        done = lease.cursor[2] if lease.cursor else 0
        total = SAMPLES // lease.partitions
        while done < total:
            count = min(2000, total - done)
            lengths = 1 + (np.arange(done, done + count, dtype=np.uint32) * 7919) % (2 * MEAN_TOKENS - 1)
            done += count
            yield TokenChunk(np.full(int(lengths.sum()), 7, np.uint16), lengths, Cursor(0, 0, done), {})


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
    with executed(), running_broker(settings) as broker:
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


MIB = 2**20
MEAN_LENGTH = 500


class Endless:
    """Samples of 1 to 999 tokens, for ever."""

    digest = "endless"

    def batches(self, lease: Lease) -> Iterator[TokenChunk]:
        lengths = 1 + (np.arange(999, dtype=np.uint32) * 7919) % 999
        chunks = np.array_split(lengths, 3)
        tokens = np.full(int(lengths.sum()), 7, np.int32)
        at = lease.cursor[2] if lease.cursor else 0
        while True:
            chunk = chunks[at % 3]
            at += 1
            yield TokenChunk(tokens[: int(chunk.sum())], chunk, Cursor(0, 0, at), {})


def produce_endlessly(endpoint: str) -> None:
    ProducerLoop(endpoint, {"text": Endless()}).run()


def status_bytes(pid: int) -> dict[str, int]:
    """Return the sizes in a process's ``/proc/PID/status``, in bytes by name."""
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {words[0].rstrip(":"): 1024 * int(words[1]) for words in lines if words[-1] == "kB"}


def test_a_broker_at_full_load_takes_the_memory_that_check_says() -> None:
    """At most a tenth more or less, with trainers that are slower than producers, the log and the metrics on.

    Pages of libraries in files are not counted: the kernel maps few or many of them, and takes them back when it needs
    memory. libllvmlite alone was seen with 55 and with 91 MiB.
    """
    settings = {
        "memory": "512MiB",
        "limits": {},
        "rules": {"budget": 8192, "step": {"packs": 256}},
        "streams": {"text": {"partitions": 2, "repeat": True}},
    }
    spawn = multiprocessing.get_context("spawn")
    with folder() as state, executed(), running_broker(settings | {"state_dir": str(state / "log")}) as broker:
        said = json.loads(in_process("check", broker.rendezvous.with_name("broker.yaml"), "--json").stdout)["follows"]
        peak = next(row["value"] for row in said if row["path"] == "process.peak_bytes")
        until(lambda: status_bytes(broker.process.pid)["RssAnon"] <= 100 * MIB)  # loading kernels took more
        idle = status_bytes(broker.process.pid)
        producers = [spawn.Process(target=produce_endlessly, args=(broker.producers,), daemon=True) for _ in range(2)]
        for process in producers:
            process.start()

        def full() -> bool:
            """As many steps are formed as may be, and as many samples wait."""
            status = json.loads(broker.get("/status"))
            feed, steps = status["feeds"]["train"], status["feeds"]["train"]["steps"]
            waiting = status["memory"]["live_tokens"] - feed["held_tokens"]
            return bool(steps["formed"] - steps["returned"] >= 8 and waiting > 0.9 * 2 * MAX_UNMERGED * MEAN_LENGTH)

        with streampack.connect(broker.trainers, format="numpy") as loader:
            steps = loader.steps()
            for _ in range(6):
                next(steps)
                until(full)
                broker.get("/metrics")
                for _ in range(4):
                    next(steps)
        most = status_bytes(broker.process.pid)["VmHWM"]
        for process in producers:
            process.kill()
            process.join()
    most += PROCESS_BYTES - idle["VmRSS"]
    print(f"peak {most / MIB:.0f} MiB, check says {peak / MIB:.0f}: {most / peak:.3f}; idle {idle}")
    assert 0.9 * peak <= most <= 1.1 * peak
