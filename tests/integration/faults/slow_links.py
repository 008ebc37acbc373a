"""Trainers behind slow links, and what that costs the broker: memory, and bytes that are sent more than once."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import psutil

import streampack
from streampack.core.protocol.producer_messages import Lease
from streampack.errors import StreampackError
from streampack.producer.chunk import TokenChunk
from streampack.producer.loop import ProducerLoop
from streampack.sources import Cursor
from tests.integration.proxy import Proxy, Weather
from tests.integration.running import running_broker, until

BUDGET = 8192
TOKEN_BYTES = 4
DRAIN_S = 60.0
WARM_S = 60.0


class Endless:
    """Samples of 1 to 999 tokens, for ever."""

    digest = "endless"

    def batches(self, lease: Lease) -> Iterator[TokenChunk]:
        lengths = 1 + (np.arange(999, dtype=np.uint32) * 7919) % 999
        tokens = np.full(int(lengths.sum()), 7, np.int32)
        at = lease.cursor[2] if lease.cursor else 0
        while True:
            at += 1
            yield TokenChunk(tokens, lengths, Cursor(0, 0, at), {})


def produce(endpoint: str) -> None:
    ProducerLoop(endpoint, {"text": Endless()}).run()


@dataclass(frozen=True)
class Figures:
    """Of some ranks that read over links of ``bytes_per_s`` each; bytes are those of all ranks together."""

    ranks: int
    bytes_per_s: float
    seconds: float
    memory_bytes: int
    """The broker's ``memory``."""
    before_bytes: int
    """Its resident memory when the first step was there."""
    most_bytes: int
    """And at its peak, from then on."""
    carried_bytes: int
    """What the links have passed on while the ranks read."""
    useful_bytes: int
    """Packs that the ranks have in the end."""
    sent_bytes: int
    """Packs that the broker has sent for them."""

    @property
    def useful(self) -> float:
        """Share of what was sent."""
        return self.useful_bytes / max(self.sent_bytes, 1)

    @property
    def link_use(self) -> float:
        """Share of the links' rate at which useful bytes came."""
        return self.useful * self.carried_bytes / (self.ranks * self.bytes_per_s * self.seconds)


def read_slowly(
    ranks: int, bytes_per_s: float, seconds: float, memory: str = "256MiB", packs: int = 256, drain_s: float = DRAIN_S
) -> Figures:
    """Have ``ranks`` read for so long over links of ``bytes_per_s`` each, and then let what is on its way arrive."""
    settings = {
        "memory": memory,
        "limits": {},
        "rules": {"budget": BUDGET, "step": {"packs": packs}},
        "streams": {"text": {"partitions": 2, "repeat": True}},
    }
    spawn = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        broker = stack.enter_context(running_broker(settings))
        producer = spawn.Process(target=produce, args=(broker.producers,), daemon=True)
        producer.start()
        stack.callback(producer.join)
        stack.callback(producer.kill)
        links = [stack.enter_context(Proxy(broker.trainers, down=Weather())) for _ in range(ranks)]
        stopped = threading.Event()
        loaders = [
            streampack.connect(link.endpoint, mesh={"dp": ranks, "dp_rank": rank}, format="numpy")
            for rank, link in enumerate(links)
        ]
        for loader in loaders:
            stack.callback(loader.close)
        for link in links:
            link.down.bytes_per_s = bytes_per_s

        def read(loader: streampack.Client) -> None:
            try:
                for _ in loader.steps():
                    if stopped.is_set():
                        return
            except StreampackError:
                pass  # closed while it waited

        threads = [threading.Thread(target=read, args=(loader,), daemon=True) for loader in loaders]
        for thread in threads:
            thread.start()
        until(lambda: broker.status()["sent_tokens"] > 0, WARM_S)
        process = psutil.Process(broker.process.pid)
        before = most = process.memory_info().rss
        carried, began = sum(link.down.carried for link in links), time.monotonic()
        while time.monotonic() - began < seconds:
            time.sleep(0.2)
            most = max(most, process.memory_info().rss)
        took, carried = time.monotonic() - began, sum(link.down.carried for link in links) - carried
        stopped.set()
        step_bytes, useful, sent = packs * BUDGET * TOKEN_BYTES // ranks, -1, 0
        deadline = time.monotonic() + drain_s
        while useful < sent and time.monotonic() < deadline:
            time.sleep(1.0)
            most = max(most, process.memory_info().rss)
            status = broker.status()
            useful = sum(reader["have_upto"] * step_bytes for reader in status["feeds"]["train"]["readers"])
            sent = status["sent_tokens"] * TOKEN_BYTES
        size = int(memory.removesuffix("MiB")) << 20
        return Figures(ranks, bytes_per_s, took, size, before, most, carried, useful, sent)
