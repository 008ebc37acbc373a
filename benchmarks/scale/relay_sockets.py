"""Relays with real sockets, for ``relays.py``: a crowd of simulated ranks, and real ranks beside a relay.

- ``run_crowd``: a real broker over TCP, as many simulated ranks as wanted. A rank, or a relay with its ranks, is a
  state machine with a socket of its own; some processes have many of them. Packs are tiny. This is the CPU time of the
  broker for a rank and step, with sockets.
- ``run_ranks``: real ranks, a real relay and a real broker, as users start them. A rank reads through the relay or from
  the broker itself, also in one run.
"""

from __future__ import annotations

import os
import tempfile
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal

from streampack_services.broker.memory_plan import keep_freed_memory
from streampack_services.broker.service import BrokerService
from streampack_services.daemons.relay import RelayService

import streampack
from benchmarks.processes import START_TIMEOUT_S, Processes
from benchmarks.scale.scale_job import STATS
from benchmarks.scale.scale_sockets import BUDGET, TinySamples
from benchmarks.throughput.streampack_pipe import MemorySource, quantiles_ms
from benchmarks.traffic import NUM_PRODUCERS, PACK_TOKENS, Traffic
from streampack.config.config_validation import checked
from streampack.config.daemon_settings import BrokerConfig
from streampack.config.typed_yaml import convert
from streampack.core.model.mesh import Mesh
from streampack.core.protocol.events import Effect, Event, FromBroker, Send, Tick
from streampack.core.protocol.message import Envelope
from streampack.core.sessions.client_events import Broken, Deliver, Returned
from streampack.core.sessions.client_session import ClientSession
from streampack.core.sessions.relaying.relay_events import ForReaders, FromReader, SendFor, SendReader
from streampack.core.sessions.relaying.relay_session import RelaySession
from streampack.producer.loop import ProducerLoop
from streampack.transport.sockets import Dealer, Poller, drain
from streampack.wire import bundles
from streampack.wire import frames as wire

RANKS_A_PROCESS = 128
WARM_STEPS = 20
MAX_MESSAGE_BYTES = 1 << 30
TICK_S = 0.2


def run_crowd(ranks: int, node_ranks: int, tp: int, seconds: float) -> dict[str, Any]:
    """Return the broker's CPU time a step, and messages, of simulated ranks over TCP; ``node_ranks`` 0: no relays."""
    with tempfile.TemporaryDirectory(prefix="streampack-") as folder, Processes() as processes:
        broker = processes.start("broker", _broker, folder, ranks // tp)
        endpoints = processes.receive(broker, START_TIMEOUT_S)
        processes.start("producer", _produce_tiny, endpoints["producers"])
        each = [range(first, min(first + RANKS_A_PROCESS, ranks)) for first in range(0, ranks, RANKS_A_PROCESS)]
        at = endpoints["trainers"]
        crowds = [processes.start(f"crowd-{mine[0]}", _crowd, at, ranks, mine, node_ranks, tp) for mine in each]
        for crowd in crowds:
            processes.receive(crowd, START_TIMEOUT_S)
        first, before = _ask(processes, crowds), processes.cpu_seconds()["broker"]
        began = time.perf_counter()
        time.sleep(seconds)
        last, after = _ask(processes, crowds), processes.cpu_seconds()["broker"]
        elapsed = time.perf_counter() - began
    steps = last - first
    us = 1e6 * (after - before) / max(steps, 1) / ranks
    return {
        "ranks": ranks, "relays_of": node_ranks, "tp": tp, "steps": steps, "steps_per_s": round(steps / elapsed, 2),
        "broker_ms_a_step": round(us * ranks / 1000, 2), "broker_us_a_rank": round(us, 2),
        "rank_steps_per_s": round(1e6 / us) if us else 0,
    }  # fmt: skip


def _ask(processes: Processes, crowds: Sequence[Connection]) -> int:
    """Return the steps that all simulated ranks have taken."""
    for crowd in crowds:
        crowd.send("how far")
    steps: list[int] = [processes.receive(crowd, START_TIMEOUT_S) for crowd in crowds]
    return min(steps)


def _broker(report: Connection, folder: str, packs: int) -> None:
    keep_freed_memory()
    tree = {
        "listen": {"producers": f"ipc://{folder}/producers", "trainers": "tcp://127.0.0.1:*"},
        "memory": "128MiB",
        "limits": {"chunk": "256KiB"},
        "rules": {"budget": BUDGET, "step": {"packs": packs}},
        "streams": {"tiny": {"repeat": True, "partitions": 2}},
    }
    service = BrokerService(checked(convert(tree, BrokerConfig)))
    report.send(service.endpoints)
    service.run()


def _produce_tiny(report: Connection, endpoint: str) -> None:
    ProducerLoop(endpoint, {"tiny": TinySamples()}).run()


class _Node:
    """One socket: of a rank, or of a relay with its ranks, all of them state machines."""

    def __init__(self, endpoint: str, ranks: Sequence[int], all_ranks: int, tp: int, by_relay: bool) -> None:
        self.dealer = Dealer(endpoint, MAX_MESSAGE_BYTES, linger_ms=0)
        self._relay = RelaySession(f"relay {ranks[0]}") if by_relay else None
        self._clients = {
            str(n).encode(): ClientSession(
                run=0, feed="train", reader=f"rank {n}", host=f"host{n // 8}", pid=n, stats=STATS,
                mesh=Mesh(dp=all_ranks // tp, tp=tp, dp_rank=n // tp, tp_rank=n % tp),
            )
            for n in ranks
        }  # fmt: skip
        self._taken = dict.fromkeys(self._clients, 0)
        self._bundle: list[tuple[str, Envelope]] = []

    @property
    def taken(self) -> int:
        """Steps that every rank has received."""
        return min(self._taken.values())

    def receive(self) -> None:
        """Handle what has come."""
        for frames in drain(self.dealer, 64):
            if self._relay is None:
                self._handle(FromBroker(wire.decode(frames)))
            elif bundles.is_bundle(frames):
                self._of_relay(self._relay.handle(ForReaders(tuple(bundles.decode_bundle(frames)))))
            else:
                self._of_relay(self._relay.handle(FromBroker(wire.decode(frames))))
        self._flush()

    def tell(self, event: Event) -> None:
        """Let every rank, and the relay, handle an event."""
        if self._relay is not None and isinstance(event, Tick):
            self._of_relay(self._relay.handle(event))
        self._handle(event)
        self._flush()

    def _handle(self, event: Event) -> None:
        for name, client in self._clients.items():
            self._of_client(name, client.handle(event))

    def _of_client(self, name: bytes, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send) and self._relay is not None:
                self._of_relay(self._relay.handle(FromReader(name, effect.envelope)))
            elif isinstance(effect, Send):
                self.dealer.send(wire.encode(effect.envelope))
            elif isinstance(effect, Deliver):
                self._taken[name] += 1
            elif isinstance(effect, Broken):
                raise RuntimeError(effect.detail)

    def _of_relay(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, SendReader):
                self._of_client(effect.peer, self._clients[effect.peer].handle(FromBroker(effect.envelope)))
            elif isinstance(effect, SendFor):
                self._bundle.append((effect.reader, effect.envelope))
            elif isinstance(effect, Send):
                self._flush()
                self.dealer.send(wire.encode(effect.envelope))

    def _flush(self) -> None:
        waiting, self._bundle = self._bundle, []
        for frames in bundles.encode_bundles(waiting):
            self.dealer.send(frames)


def _crowd(report: Connection, endpoint: str, ranks: int, mine: range, node_ranks: int, tp: int) -> None:
    """Some simulated ranks, which take steps together; says when they are warm, and their steps when asked."""
    size = node_ranks or 1
    nodes = [_Node(endpoint, mine[i : i + size], ranks, tp, node_ranks > 0) for i in range(0, len(mine), size)]
    poller = Poller([node.dealer for node in nodes])
    steps, ticked, warm = 0, 0.0, False
    while True:
        poller.wait(0.02)
        for node in nodes:
            node.receive()
        if (now := time.monotonic()) - ticked >= TICK_S:
            ticked = now
            for node in nodes:
                node.tell(Tick(now))
        while min(node.taken for node in nodes) > steps:
            steps += 1
            for node in nodes:
                node.tell(Returned(steps))
        if steps > 5 and not warm:
            warm = True
            report.send("warm")
        if report.poll():
            report.recv()
            report.send(steps)


@dataclass(frozen=True)
class Setup:
    """Real ranks of one host.

    Attributes:
        by_relay: For each rank, whether it reads through the relay.
        tp: Tensor-parallel ranks; the others are data-parallel.
        transport: Transport between the broker and its readers.
        packs: Packs of each data-parallel rank and step.
        work_s: Seconds that a rank works on each pack.
    """

    by_relay: tuple[bool, ...]
    tp: int = 1
    transport: Literal["ipc", "tcp"] = "tcp"
    packs: int = 8
    work_s: float = 0.0


def run_ranks(setup: Setup, seconds: float, memory: str = "256MiB") -> dict[str, Any]:
    """Return the waits of each rank, and CPU milliseconds a million tokens of the broker, the relay and all ranks.

    Tokens are those of the steps, which tensor-parallel ranks share.
    """
    traffic = Traffic(setup.transport)
    with tempfile.TemporaryDirectory(prefix="sp", dir="/tmp") as folder, Processes() as processes:
        broker = processes.start("broker", _real_broker, folder, setup, memory)
        endpoints = processes.receive(broker, START_TIMEOUT_S)
        for i in range(NUM_PRODUCERS):
            processes.start(f"producer-{i}", _produce, endpoints["producers"], traffic)
        socket = f"ipc://{folder}/relay"
        if any(setup.by_relay):
            relay = processes.start("relay", _relay, endpoints["trainers"], socket)
            processes.receive(relay, START_TIMEOUT_S)
        ranks = [
            processes.start(f"rank-{n}", _rank, endpoints["trainers"], socket if by_relay else "off", setup, n, seconds)
            for n, by_relay in enumerate(setup.by_relay)
        ]
        for rank in ranks:
            processes.receive(rank, START_TIMEOUT_S)
        before = processes.cpu_seconds()
        for rank in ranks:
            rank.send("go")
        found = [processes.receive(rank, seconds + START_TIMEOUT_S) for rank in ranks]
        after = processes.cpu_seconds()
    tokens = sum(each for each, _ in found) / setup.tp
    used = {name: after[name] - before[name] for name in after}
    roles = ("broker", "relay", "rank", "producer")
    cpu = {role: sum(took for name, took in used.items() if name.startswith(role)) for role in roles}
    return {
        "million_tokens": round(tokens / 1e6, 1),
        "cpu_ms_per_million_tokens": {role: round(1e9 * took / tokens, 3) for role, took in cpu.items()},
        "next_ms": [waits for _, waits in found],
    }


def _real_broker(report: Connection, folder: str, setup: Setup, memory: str) -> None:
    keep_freed_memory()
    tcp = setup.transport == "tcp"
    tree = {
        "listen": {
            "producers": f"ipc://{folder}/producers",
            "trainers": "tcp://127.0.0.1:*" if tcp else f"ipc://{folder}/trainers",
        },
        "memory": memory,
        "rules": {"budget": PACK_TOKENS, "step": {"packs": setup.packs * len(setup.by_relay) // setup.tp}},
        "streams": {"web": {"repeat": True, "partitions": NUM_PRODUCERS}},
    }
    service = BrokerService(checked(convert(tree, BrokerConfig)))
    report.send(service.endpoints)
    service.run()


def _produce(report: Connection, endpoint: str, traffic: Traffic) -> None:
    ProducerLoop(endpoint, {"web": MemorySource(traffic)}).run()


def _relay(report: Connection, broker: str, socket: str) -> None:
    service = RelayService(broker, socket)
    report.send("listens")
    service.run()


def _rank(report: Connection, endpoint: str, relay: str, setup: Setup, n: int, seconds: float) -> None:
    """One rank, which is warm before it is timed."""
    os.environ["STREAMPACK_RELAY"] = relay
    ranks = len(setup.by_relay)
    mesh = {"dp": ranks // setup.tp, "tp": setup.tp, "dp_rank": n // setup.tp, "tp_rank": n % setup.tp}
    with streampack.connect(endpoint, mesh=mesh, format="numpy", timeout_s=START_TIMEOUT_S) as loader:
        packs = iter(loader)
        for _ in range(WARM_STEPS * setup.packs):  # the same for all: a rank that stands still stops the others
            next(packs)
        report.send("warm")
        report.recv()
        waits, tokens = array("d"), 0
        until = time.perf_counter() + seconds
        while (asked := time.perf_counter()) < until:
            pack = next(packs)
            waits.append(time.perf_counter() - asked)
            tokens += int(pack.input_ids.size)
            if setup.work_s:
                time.sleep(setup.work_s)
        report.send((tokens, quantiles_ms(waits)))
        while True:  # the others must be able to end their step
            next(packs)
