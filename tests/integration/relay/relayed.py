"""A small job whose ranks read through a relay: a broker, a producer, a relay as a process, and ranks in threads."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, product
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

import streampack
from streampack.client import prefetch
from streampack.core.sessions import route
from streampack.sources import Source, SourceSettings, open_source
from tests.integration.running import PATIENCE_S, Daemon, RunningBroker, folder, producing_here, until, write_jsonl
from tests.soak.checksum import crc_of
from tests.soak.job import fixed_listen
from tests.soak.trainer import ARRAYS

SETTINGS: dict[str, Any] = {
    "seed": 5,
    "rules": {
        "budget": 256, "window": {"samples": 64}, "step": {"packs": 4}, "overlong": "split",
        "align": {"sample": 4, "pack": 4},
    },
    "streams": {"web": {"partitions": 2}},
}  # fmt: skip
Read = list[tuple[str, tuple[int, ...]]]
"""(digest of the step, checksums of its arrays) of each step that a rank got."""


def source_in(path: Path) -> dict[str, Source]:
    """600 samples of the stream ``web``."""
    for number in range(2):
        rows = [{"tokens": [1 + number * 7 + i % 11] * (1 + 31 * i % 297)} for i in range(300)]
        write_jsonl(path / f"{number}.jsonl", rows)
    return {"web": open_source(SourceSettings("jsonl", str(path / "?.jsonl"), tokens_key="tokens"))}


def meshes(**sizes: int) -> list[dict[str, int]]:
    """The mesh of each rank."""
    places = product(*(range(size) for size in sizes.values()))
    return [sizes | {f"{axis}_rank": rank for axis, rank in zip(sizes, place, strict=True)} for place in places]


@dataclass
class Rank:
    """One rank: it reads in a thread, as far as it may."""

    mesh: dict[str, int]
    loader: streampack.Client[Any]
    read: Read = field(default_factory=list)
    error: Exception | None = None

    @property
    def by_relay(self) -> bool:
        return self.loader._reading._prefetching.by_relay

    @property
    def attempt(self) -> int:
        """Number of the attempt in which it takes part: it rises where a rank was restarted."""
        return self.loader._reading._prefetching.session.attempt


class Ranks:
    """Ranks that read until the end of the feed, or until the ``with`` ends, but at most ``most`` steps until
    more are allowed. They begin at ``state``, and iterate ``iterations`` times. With several ``relays``, as many ranks
    read through each; some groups of ranks have members behind both.
    """

    def __init__(
        self, trainers: str, sizes: dict[str, int], most: float = math.inf, iterations: int = 1, state: Any = None,
        prefetch: int = 2, relays: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self._iterations = iterations
        self._may, self._changed, self._over = most, threading.Condition(), False
        self._connections = ExitStack()
        self.ranks: list[Rank] = []
        places = meshes(**sizes)
        for number, mesh in enumerate(places):
            if relays:
                os.environ["STREAMPACK_RELAY"] = relays[number * len(relays) // len(places)]
            self.ranks.append(Rank(mesh, self._connections.enter_context(
                streampack.connect(trainers, mesh=mesh, format="numpy", prefetch=prefetch, timeout_s=PATIENCE_S)
            )))  # fmt: skip
        if state is not None:
            for rank in self.ranks:
                rank.loader.load_state_dict(state)
        self._threads = [threading.Thread(target=self._read, args=(rank,)) for rank in self.ranks]

    def __enter__(self) -> Ranks:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()
        self._connections.close()
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()

    def allow(self, steps: float) -> None:
        """Let every rank read so many steps in all, and wait until each has them, unless the feed has ended."""
        with self._changed:
            self._may = steps
            self._changed.notify_all()
        threads = dict(zip(map(id, self.ranks), self._threads, strict=True))
        until(lambda: all(len(rank.read) >= steps or not threads[id(rank)].is_alive() for rank in self.ranks))
        for rank in self.ranks:
            if rank.error is not None:
                raise rank.error

    def all_by_relay(self) -> bool:
        return all(rank.by_relay for rank in self.ranks)

    def none_by_relay(self) -> bool:
        return not any(rank.by_relay for rank in self.ranks)

    def _read(self, rank: Rank) -> None:
        try:
            for step in chain.from_iterable(rank.loader.steps() for _ in range(self._iterations)):
                crcs = tuple(crc_of(pack[name]) for pack in step for name in ARRAYS)
                rank.read.append((step.digest, crcs))
                with self._changed:
                    self._changed.wait_for(lambda: self._over or len(rank.read) < self._may)
                if self._over:
                    return
        except Exception as error:
            if not self._over:
                rank.error = error


@dataclass
class Job:
    """A job that runs; ``relay`` is the address that ranks of this process look for."""

    path: Path
    settings: dict[str, Any]
    broker: RunningBroker
    relay: str

    def start_relay(self, *arguments: str, name: str = "relay", listen: str = "") -> Daemon:
        """Start a relay and wait until it listens; the caller ends it."""
        found = Daemon(
            self.path, name, "relay", "--broker", self.broker.trainers, "--listen", listen or self.relay, "--log-level",
            "debug", *arguments,
        )  # fmt: skip
        found.wait_for("ranks connect to")
        return found

    @contextmanager
    def relaying(self, *arguments: str) -> Iterator[Daemon]:
        """The same, ended with the block."""
        relay = self.start_relay(*arguments)
        try:
            yield relay
        finally:
            relay.kill()


@contextmanager
def job(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any] = SETTINGS, state_dir: Path | None = None,
    produces: bool = True,
) -> Iterator[Job]:  # fmt: skip
    """A broker on TCP, a producer, and the address of a relay that is not there yet in STREAMPACK_RELAY.

    With a ``state_dir``, another broker may be started with the same settings. ``produces``: with a producer.
    """
    with folder() as path:
        if state_dir is not None:
            settings = settings | {"listen": fixed_listen(path), "state_dir": str(state_dir)}
        broker = RunningBroker(path, settings)
        found = Job(path, settings, broker, f"ipc://{path}/relay")
        monkeypatch.setenv("STREAMPACK_RELAY", found.relay)
        try:
            with producing_here(broker.producers, source_in(path)) if produces else nullcontext():
                yield found
        finally:
            found.broker.kill()


def return_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let clients return to a relay soon after it works again."""
    monkeypatch.setattr(prefetch, "Route", partial(route.Route, healthy_s=0.5))
    monkeypatch.setattr(route, "PROBE_S", 0.2)


def directly(
    monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int], settings: dict[str, Any] = SETTINGS, most: float = math.inf
) -> list[Read]:  # fmt: skip
    """What each rank reads without a relay."""
    with job(monkeypatch, settings) as found:
        monkeypatch.setenv("STREAMPACK_RELAY", "off")
        with Ranks(found.broker.trainers, sizes, most) as ranks:
            ranks.allow(most)
        return [rank.read for rank in ranks.ranks]
