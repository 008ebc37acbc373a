"""A TCP proxy in this process, for what a network does to a connection: delay, throttling, silence, damage, an end.

Two threads a connection copy bytes, one each way; a ``Weather`` says how. It may be changed while bytes flow.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from dataclasses import dataclass, field
from types import TracebackType

from tests.integration.running import PATIENCE_S

_BLOCK = 16 * 1024
_LARGE = 2048
"""Of a message's payload, most likely: a length that is damaged is noticed by heartbeats, much later."""
_TURN_S = 0.05
_LATE_S = 0.5
"""A thread that has its turn so late makes up for it: the rate holds on a busy machine, too."""


@dataclass
class Weather:
    """Of one direction. ``delay_s`` before each block is passed on; ``bytes_per_s`` at most (0: no bound);
    ``held``: nothing is passed on; ``damage``: so many of the next large blocks have a bit flipped in their middle;
    ``kept``: a list that what is passed on is added to.
    """

    delay_s: float = 0.0
    bytes_per_s: float = 0.0
    held: bool = False
    damage: int = 0
    kept: list[bytes] | None = None
    carried: int = 0
    """Bytes that were passed on, over all connections."""


@dataclass
class Proxy:
    """``endpoint`` stands for ``target`` (``tcp://127.0.0.1:port``) until the end of the ``with``. Another target is
    that of connections made from then on.
    """

    target: str
    up: Weather = field(default_factory=Weather)
    """From those that connect to the target."""
    down: Weather = field(default_factory=Weather)
    held_bytes: int | None = None
    """What each of its sockets holds of what it received, about; None: as much as the system likes."""

    def __enter__(self) -> Proxy:
        self._listener = socket.socket()
        self._hold_little(self._listener)
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen()
        self._listener.settimeout(_TURN_S)
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.connections = 0
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self.cut()
        for thread in self._threads:
            thread.join(PATIENCE_S)
        self._listener.close()

    def cut(self) -> None:
        """End all connections at once, as a restarted switch does; new ones are taken."""
        with self._lock:
            for sock in self._open:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def half_close(self) -> None:
        """The target will say no more on the connections that there are; what is said to it still arrives."""
        with self._lock:
            for sock in self._open:
                if sock.getsockname()[1] == int(self.endpoint.rpartition(":")[2]):
                    with contextlib.suppress(OSError):
                        sock.shutdown(socket.SHUT_WR)

    def _hold_little(self, sock: socket.socket) -> None:
        if self.held_bytes is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self.held_bytes)

    def _accept(self) -> None:
        while not self._over.is_set():
            try:
                near, _ = self._listener.accept()
            except TimeoutError:
                continue
            host, _, port = self.target.removeprefix("tcp://").rpartition(":")
            try:
                far = socket.socket()
                self._hold_little(far)
                far.settimeout(5.0)
                far.connect((host, int(port)))
            except OSError:
                near.close()
                far.close()
                continue
            self.connections += 1
            done = threading.Semaphore(0)
            with self._lock:
                self._open |= {near, far}
            pairs = ((near, far, self.up), (far, near, self.down))
            pumps = [threading.Thread(target=self._pump, args=(*pair, done)) for pair in pairs]
            closer = threading.Thread(target=self._close, args=(near, far, done))
            self._threads += [*pumps, closer]
            for thread in (*pumps, closer):
                thread.start()

    def _pump(self, source: socket.socket, sink: socket.socket, weather: Weather, done: threading.Semaphore) -> None:
        source.settimeout(_TURN_S)
        due = time.monotonic()
        try:
            while not self._over.is_set():
                if weather.held:
                    time.sleep(_TURN_S)
                    continue
                try:
                    block = bytearray(source.recv(_BLOCK if not weather.bytes_per_s else 4096))
                except TimeoutError:
                    continue
                if not block:
                    break
                if weather.delay_s:
                    time.sleep(weather.delay_s)
                if weather.bytes_per_s:  # by the clock, so that turns which come late take nothing from the rate
                    due = max(due, time.monotonic() - _LATE_S) + len(block) / weather.bytes_per_s
                    time.sleep(max(due - time.monotonic(), 0.0))
                if weather.damage and len(block) >= _LARGE:
                    weather.damage -= 1
                    block[len(block) // 2] ^= 1 << weather.damage % 8
                if weather.kept is not None:
                    weather.kept.append(bytes(block))
                sink.settimeout(None)
                sink.sendall(block)
                weather.carried += len(block)
        except OSError:
            pass
        finally:
            with contextlib.suppress(OSError):
                sink.shutdown(socket.SHUT_WR)
            done.release()

    def _close(self, near: socket.socket, far: socket.socket, done: threading.Semaphore) -> None:
        """Once both directions have ended."""
        done.acquire()
        done.acquire()
        with self._lock:
            self._open -= {near, far}
        near.close()
        far.close()
