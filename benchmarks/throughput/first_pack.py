"""Measure the time from the start of `streampack broker` to a trainer's first pack, with two producers.

``waiting``: producers and trainer are there first and wait for the broker, as they do when one is started again or
when nodes are slower than each other to come up. ``together``: all four are started at one moment, and import what they
need on the same cores. Kernels are in their cache: the first start on a machine compiles them, and is not timed.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import streampack
from benchmarks.processes import START_TIMEOUT_S, Processes
from benchmarks.throughput.streampack_pipe import DISK, MemorySource, Service, broker_command
from benchmarks.traffic import NUM_PRODUCERS, Traffic
from streampack.producer.loop import ProducerLoop
from streampack.transport.rendezvous import read_rendezvous


def first_pack(how: str, traffic: Traffic, service: Service) -> dict[str, float]:
    """Seconds from the start of the broker's process until the client is ``connected``, and has its ``first_pack``."""
    with tempfile.TemporaryDirectory(prefix="sp-first-") as folder, tempfile.TemporaryDirectory(dir=DISK) as disk:
        settings, rendezvous = Path(folder) / "broker.yaml", Path(folder) / "rendezvous.json"
        settings.write_text(json.dumps(service.tree(traffic, folder, disk)))
        with Processes() as processes:
            reports = [processes.start("client", _client, rendezvous, service.format)]
            reports += [processes.start(f"producer-{i}", _produce, rendezvous, traffic) for i in range(NUM_PRODUCERS)]
            if how == "waiting":
                for report in reports:
                    processes.receive(report, START_TIMEOUT_S)
            began = time.perf_counter()
            processes.command("broker", broker_command(settings), Path(folder) / "broker.log")
            if how == "together":
                for report in reports:
                    processes.receive(report, START_TIMEOUT_S)
            connected, had = processes.receive(reports[0], START_TIMEOUT_S)
    return {"connected": round(connected - began, 3), "first_pack": round(had - began, 3)}


def _client(report: Connection, rendezvous: Path, format: str) -> None:
    report.send("here")
    with streampack.connect(f"file://{rendezvous}", format=format, timeout_s=START_TIMEOUT_S) as client:
        connected = time.perf_counter()
        next(iter(client))
        report.send((connected, time.perf_counter()))
        threading.Event().wait()


def _produce(report: Connection, rendezvous: Path, traffic: Traffic) -> None:
    source = MemorySource(traffic)
    report.send("here")
    ProducerLoop(read_rendezvous(rendezvous, "producers", START_TIMEOUT_S), {"web": source}).run()
