"""Two hosts on one machine: network namespaces with a link between them, whose bytes the kernel counts.

One namespace has the broker and a producer, the other has the ranks of one node, with a relay or without. All are
processes as users start them. ``node_bytes`` lets every rank read the same steps and returns what crossed the link.
Namespaces need root (CAP_SYS_ADMIN and CAP_NET_ADMIN) and the program ``ip`` of iproute2.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.processes import START_TIMEOUT_S, Processes

BUDGET, PACKS, TOKEN_BYTES = 8192, 8, 4
QUIET_S = 1.0
"""Seconds after which nothing more is in flight between two hosts whose ranks stand still."""
BROKER, NODE = "10.254.77.1", "10.254.77.2"
WARM_STEPS = 4


class NoNamespaces(Exception):
    """This machine does not let this process make network namespaces; the text has the reason."""


@dataclass(frozen=True)
class TwoHosts:
    """Names of the namespaces of the broker's host and of the ranks' host."""

    broker: str
    node: str

    def command(self, host: str, *arguments: str) -> list[str]:
        """Return a command that runs ``arguments`` on a host."""
        return ["ip", "netns", "exec", host, *arguments]

    def sent_bytes(self, host: str) -> int:
        """Return the bytes that a host has sent over the link."""
        text = _ip("-json", "-statistics", "-netns", host, "link", "show", "link0")
        return int(json.loads(text)[0]["stats64"]["tx"]["bytes"])


@contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    """Make two namespaces and the link between them, and remove them at the end. Raises NoNamespaces."""
    hosts = TwoHosts(f"sp{os.getpid()}a", f"sp{os.getpid()}b")
    made: list[str] = []
    try:
        for host in (hosts.broker, hosts.node):
            _ip("netns", "add", host)
            made.append(host)
        _ip("-netns", hosts.broker, "link", "add", "link0", "type", "veth", "peer", "link0", "netns", hosts.node)
        for host, address in ((hosts.broker, BROKER), (hosts.node, NODE)):
            _ip("-netns", host, "address", "add", f"{address}/24", "dev", "link0")
            _ip("-netns", host, "link", "set", "link0", "up")
            _ip("-netns", host, "link", "set", "lo", "up")
        yield hosts
    finally:
        for host in made:  # the link goes with them
            _ip("netns", "delete", host)


def _ip(*arguments: str) -> str:
    """Run ``ip`` and return its output. Raises NoNamespaces if it is not there or may not do this."""
    try:
        done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise NoNamespaces("got no program 'ip', expected iproute2: run make tools") from None
    if done.returncode:
        raise NoNamespaces(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


@dataclass(frozen=True)
class NodeBytes:
    """What the ranks of one node got, and what it took.

    Attributes:
        steps: Steps that every rank read.
        unique_bytes: Bytes of the tokens of these steps, each counted once.
        broker_bytes, node_bytes: Bytes that the broker's host and the ranks' host sent over the link.
        digests: CRC of the tokens that each rank got.
        cpu_ms: CPU milliseconds a step of the broker, the relay and all ranks.
    """

    steps: int
    unique_bytes: int
    broker_bytes: int
    node_bytes: int
    digests: list[int]
    cpu_ms: dict[str, float]

    @property
    def ratio(self) -> float:
        """Bytes that the broker's host sent, by unique byte."""
        return self.broker_bytes / self.unique_bytes


def measure(hosts: TwoHosts, ranks: int, steps: int, relay: bool) -> NodeBytes:
    """Let ``ranks`` tensor-parallel ranks of one node read ``steps`` steps, through a relay or directly."""
    with tempfile.TemporaryDirectory(prefix="sp", dir="/tmp") as path, Processes() as processes:
        folder = Path(path)
        _start_broker(hosts, processes, folder)
        endpoint, socket = f"tcp://{BROKER}:7402", f"ipc://{folder}/relay.sock"
        if relay:
            _start(hosts, processes, folder, "relay", hosts.node, "-m", "streampack", "relay", "--broker", endpoint,
                   "--listen", socket)  # fmt: skip
            _until(lambda: Path(socket.removeprefix("ipc://")).exists(), processes, folder)
        for rank in range(ranks):
            _start(hosts, processes, folder, f"rank-{rank}", hosts.node, __file__, "read", endpoint, str(rank),
                   str(ranks), str(steps), str(folder), socket if relay else "off")  # fmt: skip
        everybody = [folder / f"warm-{rank}" for rank in range(ranks)]
        _until(lambda: all(each.exists() for each in everybody), processes, folder)
        time.sleep(QUIET_S)
        sent = {host: hosts.sent_bytes(host) for host in (hosts.broker, hosts.node)}
        cpu = processes.cpu_seconds()
        (folder / "go").touch()
        everybody = [folder / f"read-{rank}" for rank in range(ranks)]
        _until(lambda: all(each.exists() for each in everybody), processes, folder)
        used = {name: seconds - cpu[name] for name, seconds in processes.cpu_seconds().items()}
        time.sleep(QUIET_S)
        sent = {host: hosts.sent_bytes(host) - before for host, before in sent.items()}
        found = [json.loads(each.read_text()) for each in everybody]
    by_role = {"broker": used["broker"], "relay": used.get("relay", 0.0)}
    by_role["ranks"] = sum(seconds for name, seconds in used.items() if name.startswith("rank-"))
    return NodeBytes(
        steps, found[0]["bytes"], sent[hosts.broker], sent[hosts.node], [each["crc"] for each in found],
        {name: round(1000 * seconds / steps, 3) for name, seconds in by_role.items()},
    )  # fmt: skip


def _start_broker(hosts: TwoHosts, processes: Processes, folder: Path) -> None:
    """Start the broker and a producer on the broker's host."""
    tree = {
        "listen": {"producers": f"ipc://{folder}/producers", "trainers": f"tcp://{BROKER}:7402", "http": "127.0.0.1:0"},
        "rendezvous": f"{folder}/rendezvous.json",
        "memory": "256MiB",
        "rules": {"budget": BUDGET, "step": {"packs": PACKS}},
        "streams": {"web": {"repeat": True, "partitions": 1}},
    }
    (folder / "broker.yaml").write_text(json.dumps(tree))  # JSON is YAML
    _start(hosts, processes, folder, "broker", hosts.broker, "-m", "streampack", "broker", "-c",
           str(folder / "broker.yaml"))  # fmt: skip
    _until((folder / "rendezvous.json").exists, processes, folder)
    _start(hosts, processes, folder, "producer", hosts.broker, __file__, "produce", str(folder / "rendezvous.json"))


def _start(hosts: TwoHosts, processes: Processes, folder: Path, name: str, host: str, *arguments: str) -> None:
    """Start a Python process on a host."""
    processes.command(name, hosts.command(host, sys.executable, *arguments), folder / f"{name}.log")


def _until(condition: Any, processes: Processes, folder: Path) -> None:
    """Wait for a condition. Raises RuntimeError if a process ends before, or if it takes too long."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while not condition():
        processes.check_alive()
        if time.monotonic() > deadline:
            raise RuntimeError(f"nothing came in {START_TIMEOUT_S:.0f} s")
        time.sleep(0.02)


def _read(endpoint: str, rank: int, ranks: int, steps: int, folder: Path, relay: str) -> None:
    """One rank: read some steps, wait for the word to go on, read ``steps`` more, and write what came."""
    os.environ["STREAMPACK_RELAY"] = relay
    import streampack

    with streampack.connect(
        endpoint, mesh={"dp": 1, "tp": ranks, "tp_rank": rank}, format="numpy", timeout_s=START_TIMEOUT_S
    ) as loader:
        found = loader.steps()
        for _ in range(WARM_STEPS):
            next(found)
        (folder / f"warm-{rank}").touch()
        while not (folder / "go").exists():
            time.sleep(0.01)
        crc = num_bytes = 0
        for _ in range(steps):
            for pack in next(found):
                crc = zlib.crc32(pack.input_ids.tobytes(), crc)
                num_bytes += TOKEN_BYTES * pack.input_ids.size
        file = folder / f"read-{rank}.new"
        file.write_text(json.dumps({"crc": crc, "bytes": num_bytes}))
        file.rename(folder / f"read-{rank}")
        time.sleep(START_TIMEOUT_S)


def main() -> None:
    """A process of ``measure``, on one of the hosts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", choices=("produce", "read"))
    parser.add_argument("given", nargs="+")
    args = parser.parse_args()
    if args.role == "produce":
        from benchmarks.throughput.streampack_pipe import produce
        from benchmarks.traffic import Traffic

        produce(None, Path(args.given[0]), Traffic())  # type: ignore[arg-type]  # it reports nothing
    else:
        endpoint, rank, ranks, steps, folder, relay = args.given
        _read(endpoint, int(rank), int(ranks), int(steps), Path(folder), relay)


if __name__ == "__main__":
    main()
