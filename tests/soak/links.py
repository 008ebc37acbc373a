"""Slow links of a run over TCP: each process reaches the broker through a proxy of its own, whose rate may be bounded.

A relay and the ranks of its host share a proxy, as they share a network.

The proxies hold little, so that a slow link is felt by whoever sends and not stored in sockets' buffers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from tests.integration.proxy import Proxy
from tests.soak.job import Job
from tests.soak.members import Member

HELD_BYTES = 64 << 10


@dataclass(eq=False)
class Link:
    """Between the broker and one process, of a ``kind``."""

    kind: str
    proxy: Proxy
    slow_until: float | None = None

    def slow(self, bytes_per_s: float, until: float) -> None:
        """Pass so many bytes a second in each direction, until then."""
        self.proxy.up.bytes_per_s = self.proxy.down.bytes_per_s = bytes_per_s
        self.slow_until = until

    def look(self, now: float) -> None:
        """End what is over."""
        if self.slow_until is not None and now >= self.slow_until:
            self.proxy.up.bytes_per_s = self.proxy.down.bytes_per_s = 0.0
            self.slow_until = None


@contextmanager
def links_of(job: Job, members: list[Member]) -> Iterator[dict[str, Link]]:
    """By the member's name; none where the run is not over TCP."""
    found: dict[str, Link] = {}
    with ExitStack() as stack:
        for member in members if job.over_tcp else []:
            if member.kind == "trainer" and job.relays:
                rank = int(member.name.rpartition("-")[2])
                found[member.name] = found[f"relay-{job.host_of(rank)}"]
            elif member.kind not in ("broker", "flood"):
                side = "trainers" if member.kind in ("trainer", "relay", "subscriber") else "producers"
                proxy = stack.enter_context(Proxy(job.settings["listen"][side], held_bytes=HELD_BYTES))
                found[member.name] = Link(member.kind, proxy)
        yield found
