"""Attack a broker, and measure its memory and how long a rank beside the attacker waits for steps.

Real processes on loopback: `streampack broker`, `streampack produce`, a rank in this process that takes a step every
20 ms, and one attacker that repeats one attack as fast as it can, on the producers' and the trainers' port in turn:

    endless    frames that never end their message, over connections that have shaken hands where that is possible
    knocking   handshakes that are broken off, or that lie
    wrong key  (with keys) peers whose key is not allowed
    broken off 3,500 empty messages, 20 heartbeats, 400 empty messages, then a reset: this ended brokers that had a
               receive high-water mark
    crowd      100 connections at once, 4,000 messages of one byte each, then a reset

Each runs without keys and with keys (`streampack keys new`). With keys, the attacker of "broken off" and "crowd" has a
valid key. memory: the most that the broker's process held in the attack, less what it held before. p99: of next(), in
milliseconds, before and in the attack.
"""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import os
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from zmq.utils.monitor import recv_monitor_message

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import streampack
from benchmarks.report import arguments, head, say
from streampack.transport.curve import show_key
from streampack.transport.keys import load_key
from streampack.transport.unread import Connection
from tests.integration.transport.raw_peer import COMMAND, GREETING, MORE, RawPeer, frame

STEP_S = 0.02
SETTLED = 100
"""Steps before anything is measured."""
QUIET_S = 10.0
ENDLESS = frame(b"x", MORE) * 20_000
PING = frame(b"\x04PING\0\0", COMMAND)
BROKEN_OFF = (3500, 20, 400)
CROWD, CROWD_MESSAGES = 100, 4000
KINDS = ("endless", "knocking", "wrong key", "broken off", "crowd")


class Service:
    """A broker, with keys or without, and a producer, in ``folder``; ``close`` ends both.

    ``settings`` are added to those of broker.yaml, and ``roles`` to the keys: role of each, by name. The broker runs on
    ``cores``, if there are any, with at most ``files`` open files, unless that is 0.
    """

    def __init__(
        self, folder: Path, keys: bool, transport: str = "tcp", planned_mesh: dict[str, int] | None = None,
        settings: Mapping[str, Any] | None = None, roles: Mapping[str, str] | None = None,
        cores: Collection[int] = (), files: int = 0,
    ) -> None:  # fmt: skip
        self.folder, self.keys, self._files = folder, keys, files
        self._running: list[subprocess.Popen[bytes]] = []
        listen: dict[str, Any] = {
            side: "tcp://127.0.0.1:*" if transport == "tcp" else f"ipc://{folder}/{side}"
            for side in ("producers", "trainers")
        } | {
            "http": "127.0.0.1:0",
        }
        if keys:
            listen["keys"] = str(folder / "keys")
            for name, role in {"producer": "producer", "trainer": "trainer", **(roles or {})}.items():
                self._call("keys", "new", str(folder / "keys"), name, "--role", role)
        rows = [json.dumps({"tokens": [7] * (1 + row * 7919 % 400)}) for row in range(4000)]
        (folder / "a.jsonl").write_text("\n".join(rows) + "\n")
        tree: dict[str, Any] = {
            "listen": listen, "rendezvous": str(folder / "where.json"), "memory": "64MiB", "tokens": "uint16",
            "planned_mesh": planned_mesh or {},
            "rules": {"budget": 2048, "window": {"samples": 256}, "step": {"packs": 8}},
            "streams": {"web": {"repeat": True, "partitions": 2}},
        } | dict(settings or {})  # fmt: skip
        self._write("broker", tree)
        data = {"source": "jsonl", "shards": str(folder / "a.jsonl")}
        self._write("produce", {
            "broker": f"file://{folder}/where.json", "streams": dict.fromkeys(tree["streams"], data),
        })  # fmt: skip
        every = os.sched_getaffinity(0)
        os.sched_setaffinity(0, cores or every)
        self.broker = self._start("broker")
        os.sched_setaffinity(0, every)
        while not (folder / "where.json").exists():
            time.sleep(0.05)
        self._start("produce", STREAMPACK_KEY_FILE=str(folder / "keys" / "producer.key") if keys else "")
        self.where: dict[str, str] = json.loads((folder / "where.json").read_text())

    @property
    def resident_bytes(self) -> int:
        return int(Path(f"/proc/{self.broker.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def _write(self, name: str, tree: dict[str, Any]) -> None:
        (self.folder / f"{name}.yaml").write_text(json.dumps(tree))

    def _call(self, *arguments: str) -> None:
        subprocess.run([sys.executable, "-m", "streampack", *arguments], check=True, capture_output=True)

    def _start(self, command: str, **more: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{command}.log").open("ab") as log:
            environment = os.environ | {name: value for name, value in more.items() if value}
            arguments = [sys.executable, "-m", "streampack", command, "-c", str(self.folder / f"{command}.yaml")]
            if self._files and command == "broker":
                arguments = ["sh", "-c", f'ulimit -n {self._files} && exec "$@"', "sh", *arguments]
            self._running.append(subprocess.Popen(arguments, stdout=log, stderr=log, env=environment))
        return self._running[-1]

    def close(self) -> None:
        for process in self._running:
            process.kill()
            process.wait()


@contextlib.contextmanager
def serving(keys: bool) -> Iterator[Service]:
    with tempfile.TemporaryDirectory(prefix="sp") as folder:
        service = Service(Path(folder), keys)
        try:
            yield service
        finally:
            service.close()


class Rank:
    """Takes a step every ``step_s`` in a thread; ``waits`` are those of next(), in seconds, since the last ``take``."""

    def __init__(self, service: Service, step_s: float = STEP_S, mesh: Mapping[str, int] | None = None) -> None:
        if service.keys:
            os.environ["STREAMPACK_KEY_FILE"] = str(service.folder / "keys" / "trainer.key")
        self._step_s = step_s
        self._loader: Any = streampack.connect(service.where["trainers"], format="numpy", prefetch=4, mesh=mesh)
        self.waits: list[float] = []
        self.over = False
        self._since = math.inf
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        steps = self._loader.steps()
        while not self.over:
            began = self._since = time.perf_counter()
            next(steps)
            self._since = math.inf
            self.waits.append(time.perf_counter() - began)
            time.sleep(self._step_s)

    @property
    def waiting_s(self) -> float:
        """Seconds of the wait that goes on; 0 between two waits."""
        return max(time.perf_counter() - self._since, 0.0)

    def take(self) -> list[float]:
        """Waits so far, in seconds; from now on others."""
        found, self.waits = self.waits, []
        return found

    def close(self) -> None:
        self.over = True
        self._thread.join()
        self._loader.close()


# The attacker


def attack(kind: str, where: dict[str, str], keys: str, seconds: float, done: Any) -> None:
    """A process: attacks of one kind until the time is up; ``done`` gets their number and their bytes.

    Args:
        kind: One of ``KINDS``.
        where: The broker's addresses.
        keys: The folder of keys; empty for none.
        seconds: How long.
        done: A queue.
    """
    end, number, sent = time.monotonic() + seconds, 0, 0
    while time.monotonic() < end:
        side = ("producers", "trainers")[number % 2]
        with contextlib.suppress(OSError):
            if kind == "endless":
                sent += _endless(where[side], bool(keys), end)
            elif kind == "knocking":
                sent += _knock(where[side], number)
            elif kind == "wrong key":
                _wrong_key(where[side])
            elif keys:
                sent += _with_key(where[side], f"{keys}/{side[:-1]}.key", 1 if kind == "broken off" else CROWD)
            elif kind == "broken off":
                sent += _broken_off(where[side])
            else:
                sent += _crowd(where[side])
        number += 1
    done.put((number, sent))


def _endless(address: str, keys: bool, end: float) -> int:
    """Bytes that went out before the other side closed, or the time was up."""
    with RawPeer(address, shake=not keys, timeout_s=5.0) as peer:
        if keys:  # it does not get to shake hands: so without
            peer.send(GREETING)
        sent = 0
        while time.monotonic() < end and peer.send(ENDLESS):
            sent += len(ENDLESS)
        return sent


def _reset(peer: RawPeer) -> None:
    """Close a connection with a reset."""
    peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.close()


def _broken_off(address: str) -> int:
    first, pings, last = BROKEN_OFF
    data = frame(b"") * first + PING * pings + frame(b"") * last
    peer = RawPeer(address, timeout_s=5.0)
    peer.send(data)
    _reset(peer)
    return len(data)


def _crowd(address: str) -> int:
    data, peers = frame(b"x") * CROWD_MESSAGES, list[RawPeer]()
    try:
        for _ in range(CROWD):
            peers.append(RawPeer(address, timeout_s=5.0))
            peers[-1].send(data)
    finally:
        for peer in peers:
            _reset(peer)
    return CROWD * len(data)


def _with_key(address: str, key_file: str, connections: int) -> int:
    """The same by holders of a valid key: ZeroMQ's own sockets, with a heartbeat every millisecond."""
    import zmq

    key, context, held = load_key(Path(key_file)), zmq.Context(), list[tuple[Any, Any]]()
    context.max_sockets = 4 * CROWD
    for _ in range(connections):
        plain = context.socket(zmq.DEALER)
        plain.linger, plain.sndhwm, plain.heartbeat_ivl, plain.reconnect_ivl = 0, 0, 1, -1
        show_key(plain, key.secret, key.broker)
        held.append((plain, plain.get_monitor_socket(zmq.EVENT_CONNECTED)))
        plain.connect(address)
    fds = []
    for plain, monitor in held:
        with contextlib.suppress(zmq.Again):  # the broker has not let it in
            for _ in range(CROWD_MESSAGES):
                plain.send(b"", zmq.NOBLOCK)
        if monitor.poll(1000):
            fds.append(int(recv_monitor_message(monitor)["value"]))
    time.sleep(0.02)
    for fd in fds:
        Connection(fd, 0.0).cut()
    context.destroy(0)
    return connections * CROWD_MESSAGES * 35


def _knock(address: str, number: int) -> int:
    curve = GREETING.replace(b"NULL\0", b"CURVE")
    lies = (curve, curve + frame(b"\x05HELLO" + b"\1\0" + bytes(192), COMMAND), curve + ENDLESS[:6000], b"\0" * 64, b"")
    with RawPeer(address, shake=False, timeout_s=5.0) as peer:
        lie = lies[number % len(lies)]
        peer.send(lie)
        return len(lie)


def _wrong_key(address: str) -> None:
    import zmq

    public, secret = zmq.curve_keypair()
    context = zmq.Context()
    for _ in range(8):
        plain = context.socket(zmq.DEALER)
        plain.linger = 0
        plain.curve_publickey, plain.curve_secretkey, plain.curve_serverkey = public, secret, public
        plain.connect(address)
    time.sleep(0.05)
    context.destroy(0)


def measured(keys: bool, kind: str, seconds: float, quiet: float) -> dict[str, Any]:
    """One kind of attack."""
    context = multiprocessing.get_context("spawn")
    with serving(keys) as service:
        rank = Rank(service)
        while len(rank.waits) < SETTLED:
            time.sleep(0.05)
        rank.take()
        time.sleep(quiet)
        before, calm, done = service.resident_bytes, rank.take(), context.SimpleQueue()
        folder = str(service.folder / "keys") if keys else ""
        attacker = context.Process(target=attack, args=(kind, service.where, folder, seconds, done))
        attacker.start()
        most = before
        while attacker.is_alive() and service.broker.poll() is None:
            most = max(most, service.resident_bytes)
            time.sleep(0.05)
        under = rank.take()
        if service.broker.poll() is not None:
            attacker.kill()
            print(f"{kind}: the broker ended with {service.broker.poll()}", flush=True)
            os._exit(1)  # the rank's thread would wait for another broker
        number, sent = done.get()
        rank.close()
        return {
            "keys": keys, "kind": kind, "attacks": number, "sent_mb": round(sent / 2**20, 1),
            "memory_moved_mb": round((most - before) / 2**20, 1),
            "next_p99_ms_before": _p99(calm), "next_p99_ms": _p99(under), "next_max_ms": round(1e3 * max(under), 2),
            "steps": len(under),
        }  # fmt: skip


def _p99(waits: list[float]) -> float:
    return round(1e3 * float(np.percentile(waits, 99)), 3)


def main() -> None:
    parser = arguments(__doc__, quick="3 s of each attack")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each attack (default 15)")
    parser.add_argument("--kind", choices=KINDS, help="one attack (default: all)")
    parser.add_argument("--keys", choices=("both", "with", "without"), default="both")
    given = parser.parse_args()
    report = head("attack")
    seconds, quiet = (3.0, 2.0) if given.quick else (given.seconds, QUIET_S)
    sides = {"both": (False, True), "with": (True,), "without": (False,)}[given.keys]
    kinds = [given.kind] if given.kind else KINDS
    cases = [(keys, kind) for keys in sides for kind in kinds if keys or kind != "wrong key"]
    report["attacks"] = []
    for keys, kind in cases:
        found = measured(keys, kind, seconds, quiet)
        report["attacks"].append(found)
        print(
            f"{'with' if keys else 'without'} keys, {kind:>9}: {found['attacks']:6,} attacks, {found['sent_mb']:8} MB; "
            f"memory {found['memory_moved_mb']:+7.1f} MB; next() p99 {found['next_p99_ms_before']} -> "
            f"{found['next_p99_ms']} ms, at most {found['next_max_ms']} ms over {found['steps']} steps",
            flush=True,
        )
    say(report, given.json)


if __name__ == "__main__":
    main()
