"""The actor that runs a broker, a producer or a relay: the same command as without Ray, in a child process.

Ray runs the constructor again when it restarts the actor, perhaps on another node. The actor keeps nothing that it
would need then. A broker's settings without addresses get the address of the node. Their ports follow from the
service's name, below Linux's range of ephemeral ports, and so are the same after a restart. If another process has
such a port, the next free one is taken. Clients therefore ask the actor for the addresses when the broker is silent.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import socket
import tempfile
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ray

from streampack.integrations.ray.daemon_child import SupervisedChild, write_config
from streampack.integrations.ray.repeated_metrics import EVERY_S, RepeatedMetrics
from streampack.integrations.ray.service_actors import STANDBY, active_broker
from streampack.transport.relay_socket import default_relay, is_served

log = logging.getLogger("streampack.ray")

FIRST_PORT, NUM_PORTS = 20_000, 12_000
"""Ports of brokers, which end below Linux's first ephemeral port, 32,768."""
OVER = "all delivered: "
"""Text with which a producer says that no sample will be needed again."""
HEALTH = "health"
"""Group of calls that Ray answers in threads of their own, also while the daemon is being stopped."""
SIDES = ("producers", "trainers", "http")
BETWEEN = "standby"
"""Name of the address at which the active broker sends its log to the standby."""
FOLLOW_S = 2.0
"""Seconds between two looks of a producer or a relay at the broker's address."""


class DaemonActor:
    """One daemon of a service.

    Args:
        service: Name of the service.
        part: Name of this actor in the service.
        command: ``broker``, ``produce`` or ``relay``.
        settings: Contents of broker.yaml or producer.yaml as JSON; empty for a relay.
        folder: Working folder of the daemon, to which relative paths refer.
    """

    def __init__(self, service: str, part: str, command: str, settings: str, folder: str) -> None:
        logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
        self._service, self._part, self._command, self._settings = service, part, command, settings
        self._near = Path(tempfile.mkdtemp(prefix="streampack-ray-"))
        self._address = ""
        """The broker's address that a producer or a relay was started with."""
        self._stopped = threading.Event()
        self._child = SupervisedChild(self._words, Path(folder), OVER)
        target = self._repeat_metrics if command == "broker" else self._follow
        threading.Thread(target=target, name="streampack-follow", daemon=True).start()

    # Called by others; Ray repeats a call whose answer was lost

    @ray.method(concurrency_group=HEALTH)
    def settings(self) -> str:
        """Return the settings with which the service was started, as JSON."""
        return self._settings

    @ray.method(concurrency_group=HEALTH)
    def where(self) -> dict[str, Any]:
        """Return the state of the daemon.

        Returns:
            ``part``: name of this actor in the service. ``failures`` and ``failure``: number of ends, and the last one
            in words. ``pid``, ``node``: place of the process. ``done``: True if the daemon has delivered everything,
            or was stopped. For a broker that is active also ``producers``, ``trainers`` and ``http``, its addresses,
            and ``epoch``. For a relay that is ready ``trainers``, the broker's address with which readers find it.
        """
        child = self._child
        state: dict[str, Any] = {
            "part": self._part,
            "failures": child.failures,
            "failure": child.last_failure,
            "pid": child.pid,
            "actor_pid": os.getpid(),
            "node": ray.get_runtime_context().get_node_id(),
            "done": child.is_done,
        }
        if self._command == "broker" and child.pid is not None:
            state |= self._own_addresses()
        if self._command == "relay" and self._address and is_served(default_relay(self._address)):
            state["trainers"] = self._address
        return state

    def stop(self) -> None:
        """End the daemon as SIGTERM does: a broker first delivers the steps that are formed."""
        self._stopped.set()
        self._child.stop()

    # Arguments of the daemon

    def _words(self) -> list[str]:
        """Return the arguments of the daemon's command, with the addresses that hold now."""
        if self._command == "broker":
            return self._broker_words()
        side = "producers" if self._command == "produce" else "trainers"
        self._address = self._wait_for_broker(side)
        if self._command == "relay":
            return ["relay", "--broker", self._address]
        tree = json.loads(self._settings) | {"broker": self._address}
        return ["produce", "-c", str(write_config(tree, self._near / "producer.yaml"))]

    def _broker_words(self) -> list[str]:
        """Return the arguments of the broker, with addresses on this node and, for one with a standby, its own log."""
        tree = json.loads(self._settings)
        self._file = Path(tree.setdefault("rendezvous", str(self._near / "rendezvous.json")))
        self._file.unlink(missing_ok=True)
        free = addresses(self._service if self._part != STANDBY else f"{self._service}/{STANDBY}")
        between = free.pop(BETWEEN)
        tree["listen"] = free | (tree.get("listen") or {})
        if tree.get("standby"):
            tree["standby"] = {"name": self._part, "listen": between} | tree["standby"]
            tree["state_dir"] = str(Path(tree["state_dir"]) / self._part)
        words = ["broker", "-c", str(write_config(tree, self._near / "broker.yaml"))]
        return [*words, "--standby"] if self._part == STANDBY else words

    def _own_addresses(self) -> dict[str, Any]:
        """Return the addresses that this broker has written once it was active, and its epoch; empty before."""
        try:
            written = json.loads(self._file.read_text())
            return {name: written[name] for name in (*SIDES, "epoch")}
        except (OSError, ValueError, KeyError, AttributeError):
            return {}

    def _repeat_metrics(self) -> None:
        """Repeat the broker's metrics through Ray while the actor lives."""
        metrics = RepeatedMetrics(self._service)
        while not self._stopped.wait(EVERY_S):
            if (url := self._own_addresses().get("http")) is not None:
                metrics.repeat(url)

    # Following the broker

    def _wait_for_broker(self, side: str) -> str:
        """Wait until the service's broker is ready, and return its address for ``side``."""
        while not self._stopped.is_set():
            if (address := self._broker_address(side)) is not None:
                return address
            self._stopped.wait(FOLLOW_S / 4)
        raise RuntimeError("the service is stopping")

    def _broker_address(self, side: str) -> str | None:
        """Return the address of the active broker for ``side``, with that of its standby; None if none is ready."""
        broker = active_broker(self._service)
        return None if broker is None else broker[side]

    def _follow(self) -> None:
        """Start the daemon again when its broker listens at another address."""
        side = "producers" if self._command == "produce" else "trainers"
        while not self._stopped.wait(FOLLOW_S):
            if self._child.is_done:
                return
            address = self._broker_address(side)
            if address is not None and self._address and address.split(",")[0] not in self._address.split(","):
                log.warning("the broker of service %r listens at %s now", self._service, address)
                self._child.restart()


def addresses(service: str) -> dict[str, str]:
    """Return addresses on this node for a broker: the same ports each time, if they are free."""
    host = ray.util.get_node_ip_address()
    literal = f"[{host}]" if ":" in host else host
    start = int.from_bytes(hashlib.blake2b(service.encode(), digest_size=4).digest(), "little")
    ports: list[int] = []
    with ExitStack() as held:
        for i in range(NUM_PORTS):
            port = FIRST_PORT + (start + i) % NUM_PORTS
            sock = held.enter_context(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind((host, port))
            except OSError:
                continue
            ports.append(port)
            if len(ports) == len(SIDES) + 1:
                break
    producers, trainers, http, standby = ports
    return {
        "producers": f"tcp://{literal}:{producers}",
        "trainers": f"tcp://{literal}:{trainers}",
        "http": f"{literal}:{http}",
        BETWEEN: f"tcp://{literal}:{standby}",
    }
