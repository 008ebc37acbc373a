"""The relay that ``streampack run`` starts for the ranks of its host, and starts again when it has ended.

A relay saves bytes if several ranks of this host read from a broker on another host. So ``wants_relay`` looks for both:
the number of local ranks that the command starts, and the broker's address. The command gets the relay's address in
STREAMPACK_RELAY. While the relay does not run, its ranks read from the broker itself, so its end ends nothing else.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from streampack.transport.relay_socket import ENVIRONMENT, default_relay, is_served
from streampack_services.run.child import Child

log = logging.getLogger("streampack.run")

START_S = 60.0
"""Seconds that a relay may take to start, before the command is started without it."""
AGAIN_S, MOST_AGAIN_S = 1.0, 30.0
"""Seconds before a relay is started again: first, and at most. Each delay is twice the last."""
LASTING_S = 60.0
"""A relay that ran for so many seconds is started again after the first delay."""
_PER_NODE = ("--nproc-per-node", "--nproc_per_node")
_LONGEST_PATH = 100


def local_ranks(command: Sequence[str], env: Mapping[str, str]) -> int | None:
    """Return the number of ranks that the command starts on this host; None if that is not known.

    The number is that of torchrun's ``--nproc-per-node``, or of PET_NPROC_PER_NODE, torchrun's variable for it.

    >>> local_ranks(["torchrun", "--nproc-per-node", "8", "train.py"], {}), local_ranks(["python", "train.py"], {})
    (8, None)
    """
    words = iter(command)
    for word in words:
        name, equals, value = word.partition("=")
        if name in _PER_NODE:
            value = value if equals else next(words, "")
            return int(value) if value.isdigit() else None
    value = env.get("PET_NPROC_PER_NODE", "")
    return int(value) if value.isdigit() else None


def wants_relay(wanted: bool | None, command: Sequence[str], env: Mapping[str, str], rank: int, broker: str) -> bool:
    """Return whether to start a relay on host ``rank`` for the broker at ``broker``.

    ``wanted`` is the user's word; None: start one if several ranks of this host read from a broker on another host. A
    user who has set STREAMPACK_RELAY has decided as well.
    """
    if wanted is not None:
        return wanted
    if env.get(ENVIRONMENT) or rank == 0 or not broker.startswith("tcp://"):
        return False
    host = broker.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    if host in ("localhost", "::1") or host.startswith("127."):
        return False
    return (local_ranks(command, env) or 1) > 1


@dataclass(slots=True)
class HostRelay:
    """The relay of this host; ``start_child(words)`` starts ``streampack WORDS``."""

    broker: str
    folder: Path
    start_child: Callable[[list[str]], Child]
    child: Child | None = None
    listen: str = ""
    _delay_s: float = field(default=AGAIN_S)
    _began: float = 0.0
    _again_at: float | None = None

    def start(self, pause: Callable[[], None]) -> bool:
        """Start the relay, and wait until it listens; return False if it does not. ``pause`` sleeps a little."""
        path = self.folder / "relay"
        self.listen = f"ipc://{path}" if len(str(path)) < _LONGEST_PATH else default_relay(self.broker)
        self._start()
        assert self.child is not None
        while not is_served(self.listen):
            pause()
            if self.child.process.poll() is not None or time.monotonic() - self._began > START_S:
                why = self.child.failure() if self.child.process.poll() is not None else "the relay did not start"
                log.warning("%s; the ranks of this host read from the broker itself", why)
                return False
        return True

    def look(self) -> None:
        """Start the relay again, a little later, if it has ended."""
        now = time.monotonic()
        if self._again_at is not None:
            if now >= self._again_at:
                self._start()
        elif self.child is not None and self.child.process.poll() is not None:
            if now - self._began > LASTING_S:
                self._delay_s = AGAIN_S
            log.warning(
                "%s; starting it again in %.0f s, and its ranks read from the broker meanwhile",
                self.child.failure(), self._delay_s,
            )  # fmt: skip
            self._again_at, self._delay_s = now + self._delay_s, min(2 * self._delay_s, MOST_AGAIN_S)

    def _start(self) -> None:
        """Start the relay's process."""
        self._began, self._again_at = time.monotonic(), None
        self.child = self.start_child(["relay", "--broker", self.broker, "--listen", self.listen])
