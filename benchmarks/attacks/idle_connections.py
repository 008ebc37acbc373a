"""Open idle connections to a broker from several processes, and measure what others notice.

Real processes on loopback: `streampack broker` with a limit of open files (`ulimit -n`), `streampack produce`, a rank
that takes a step every 20 ms, and attackers that open TCP connections to one port, say nothing, and hold them. Each
attacker is a process with at most 4,000 connections. A connection that the broker ends is not opened again.

For each limit, with keys and without, one broker takes the attacks on its ports one after another. Columns:

    opened     connections that the broker's machine accepted, of those that the attackers tried
    steps/s    of the rank, in the second before the attack and during it
    livez      answers of `GET /livez` within 5 s, of those asked, one each second
    newcomer   seconds until a newcomer gets in during the attack: a rank of another feed has attached (trainers), a
               handshake is complete (producers), `/livez` answers (http)
    lived      the broker still runs
"""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import zmq

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import streampack
from benchmarks.attacks.attack import SETTLED, Rank, Service
from benchmarks.report import arguments, head, say
from streampack.transport.curve import show_key
from streampack.transport.keys import load_key

OF_A_PROCESS = 4000
"""Most connections of one attacker."""
SIDES = ("producers", "trainers", "http")
FILES = (64, 256, 1024, 20_000)
CONNECTIONS = (100, 20_000)
NEWCOMER_S = 10.0
"""A newcomer gets in within this time."""
SETTINGS = {
    "streams": {"web": {"repeat": True, "partitions": 2}, "more": {"partitions": 1}},
    "feeds": {"train": {"streams": ["web"]}, "late": {"streams": ["more"]}},
}
ATTACKER = """
import socket, sys, time
host, port, count, seconds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
began, held = time.monotonic(), []
for number in range(count):
    if time.monotonic() - began > seconds:
        break
    held.append(socket.socket())
    held[-1].setblocking(False)
    held[-1].connect_ex((host, port))
    time.sleep(0.0002)
time.sleep(max(seconds - (time.monotonic() - began), 0.0))
opened = 0
for each in held:
    opened += each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != 2  # 2: no answer to SYN yet
print(opened)
"""


class Livez:
    """Asks `/livez` once a second, in a thread; ``close`` returns the numbers of answers and of questions."""

    def __init__(self, http: str) -> None:
        self._http, self._over = http, threading.Event()
        self._answers = self._questions = 0
        self._thread = threading.Thread(target=self._ask)
        self._thread.start()

    def _ask(self) -> None:
        while not self._over.wait(1.0):
            self._questions += 1
            self._answers += is_alive(self._http)

    def close(self) -> tuple[int, int]:
        self._over.set()
        self._thread.join()
        return self._answers, self._questions


def is_alive(http: str, timeout_s: float = 5.0) -> bool:
    """Return whether `/livez` answers in time."""
    try:
        with urllib.request.urlopen(f"{http}/livez", timeout=timeout_s) as answer:
            return bool(answer.read() == b"alive\n")
    except OSError:
        return False


def newcomer_s(service: Service, side: str, timeout_s: float = 30.0) -> float:
    """Return the seconds until a newcomer gets in; infinity if that takes longer than ``timeout_s``."""
    began = time.monotonic()
    try:
        if side == "trainers":
            streampack.connect(service.where[side], feed="late", format="numpy", timeout_s=timeout_s).close()
            return time.monotonic() - began
        got_in = _shakes_hands(service, timeout_s) if side == "producers" else is_alive(service.where[side])
        while side == "http" and not got_in and time.monotonic() - began < timeout_s:  # as a probe does
            time.sleep(0.5)
            got_in = is_alive(service.where[side])
    except streampack.StreampackError:
        got_in = False
    return time.monotonic() - began if got_in else float("inf")


def _shakes_hands(service: Service, timeout_s: float) -> bool:
    """Return whether a producer's handshake is complete in time."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        if service.keys:
            key = load_key(service.folder / "keys" / "producer.key")
            show_key(dealer, key.secret, key.broker)
        watch = dealer.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        dealer.connect(service.where["producers"])
        got_in = bool(watch.poll(int(1e3 * timeout_s)))
        dealer.disable_monitor()
        watch.close()
    return got_in


def measured(service: Service, rank: Rank, side: str, connections: int, seconds: float) -> dict[str, Any]:
    """Return the figures of one attack on the port ``side``."""
    where = urlsplit(service.where[side])
    rank.take()
    time.sleep(1.0)
    before = len(rank.take())
    counts = [min(OF_A_PROCESS, connections - at) for at in range(0, connections, OF_A_PROCESS)]
    command = [sys.executable, "-I", "-S", "-c", ATTACKER, str(where.hostname), str(where.port)]
    attackers = [
        subprocess.Popen([*command, str(count), str(seconds)], stdout=subprocess.PIPE, text=True) for count in counts
    ]
    livez, began = Livez(service.where["http"]), time.monotonic()
    time.sleep(seconds / 2)
    waited = newcomer_s(service, side)
    time.sleep(max(seconds - (time.monotonic() - began), 0.0))
    steps, took = len(rank.take()), time.monotonic() - began
    opened = sum(int(attacker.communicate()[0] or 0) for attacker in attackers)
    answers, questions = livez.close()
    return {
        "port": side, "connections": connections, "opened": opened, "attackers": len(counts),
        "steps_per_s_before": before, "steps_per_s": round(steps / took, 1), "livez": f"{answers}/{questions}",
        "newcomer_s": round(waited, 2), "lived": service.broker.poll() is None,
        "good": service.broker.poll() is None and steps > 0 and answers == questions and waited < NEWCOMER_S,
    }  # fmt: skip


def attacks_on(files: int, keys: bool, counts: list[int], seconds: float) -> list[dict[str, Any]]:
    """Return the figures of all attacks on one broker that may open ``files`` files."""
    with tempfile.TemporaryDirectory(prefix="sp") as folder:
        os.environ.pop("STREAMPACK_KEY_FILE", None)
        with (
            contextlib.closing(Service(Path(folder), keys, settings=SETTINGS, files=files)) as service,
            contextlib.closing(Rank(service)) as rank,
        ):
            while len(rank.waits) < SETTLED:
                time.sleep(0.1)
            return [measured(service, rank, side, count, seconds) for side in SIDES for count in counts]


def _line(files: int, keys: bool, row: dict[str, Any]) -> str:
    """Return the figures of an attack as a line of text."""
    return (
        f"ulimit {files:6}, {'with' if keys else 'without':>7} keys, {row['port']:>9}: {row['opened']:6,} of "
        f"{row['connections']:6,} opened; steps/s {row['steps_per_s_before']} -> {row['steps_per_s']}; livez "
        f"{row['livez']}; newcomer {row['newcomer_s']} s; lived {row['lived']}{'' if row['good'] else '   BAD'}"
    )


def main() -> None:
    parser = arguments(__doc__, quick="1,500 connections, limits of 64 and 1,024 files")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each attack (default 4)")
    parser.add_argument("--connections", type=int, nargs="*", default=list(CONNECTIONS))
    parser.add_argument("--files", type=int, nargs="*", default=list(FILES))
    options = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    report = head("idle_connections", hard_limit_files=most, attacks=[])
    for files in [64, 1024] if options.quick else options.files:
        if files > most:
            print(f"left out: ulimit -n {files}, because the machine allows at most {most}", flush=True)
            continue
        for keys in (False, True):
            for row in attacks_on(files, keys, [1500] if options.quick else options.connections, options.seconds):
                report["attacks"].append({"files": files, "keys": keys} | row)
                print(_line(files, keys, row), flush=True)
    say(report, options.json)
    sys.exit(not all(row["good"] for row in report["attacks"]))


if __name__ == "__main__":
    main()
