"""A network that loses, repeats, delays and reorders messages, as its seed says; time is a number.

``Clock`` runs callbacks in the order of their virtual times. ``Network`` carries encoded frames, so
that every message of a simulation goes through the real codec and nobody shares an object.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from streampack.core.protocol.message import Envelope
from streampack.wire import frames as wire


class Clock:
    """Virtual time, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._order = 0
        self._due: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []

    def after(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        """Call ``call(*args)`` in ``delay_s``."""
        self._order += 1
        heapq.heappush(self._due, (self.now + delay_s, self._order, call, args))

    def step(self) -> None:
        """Go on to what is due next, and do it."""
        self.now, _, call, args = heapq.heappop(self._due)
        call(*args)


@dataclass
class Weather:
    """How bad the links are: shares of messages, and a mean delay in seconds."""

    lost: float = 0.0
    repeated: float = 0.0
    reordered: float = 0.0
    delay_s: float = 0.005
    late_s: float = 1.0
    """Mean delay of repeats: those that come long after are the messages of sessions and brokers that are over."""


class Network:
    """Links named by bytes; a link keeps the order of its messages but for those that are reordered."""

    def __init__(self, clock: Clock, rng: random.Random, weather: Weather) -> None:
        self._clock, self._rng, self.weather = clock, rng, weather
        self._last: dict[bytes, float] = {}
        self._free_at: dict[bytes, float] = {}  # when a slow link has passed on what it was given
        self.rates: dict[bytes, float] = {}
        """Bytes a second that a link carries; the others carry any number."""
        self.waiting: dict[bytes, int] = {}
        """Bytes that a slow link was given and has not passed on."""
        self.cut: set[bytes] = set()
        """Links that carry nothing."""

    def carry(self, link: bytes, envelope: Envelope, arrive: Callable[[Envelope], None]) -> None:
        """Send a message over ``link``; ``arrive`` gets what comes out, if anything, now or later."""
        frames = [memoryview(frame).tobytes() for frame in wire.encode(envelope)]
        weather, rng = self.weather, self._rng
        if link in self.cut or rng.random() < weather.lost:
            return
        if rng.random() < weather.repeated:
            self._clock.after(rng.expovariate(1 / weather.late_s), lambda: arrive(wire.decode(frames)))
        due = self._passed_on(link, sum(map(len, frames))) + rng.expovariate(1 / weather.delay_s)
        if rng.random() < weather.reordered:
            due += rng.expovariate(1 / 0.4)
        else:
            due = self._last[link] = max(due, self._last.get(link, 0.0))
        self._clock.after(due - self._clock.now, lambda: arrive(wire.decode(frames)))

    def _passed_on(self, link: bytes, size: int) -> float:
        """When a link has passed on so many bytes behind all that it was given before."""
        if link not in self.rates:
            return self._clock.now
        begin = max(self._clock.now, self._free_at.get(link, 0.0))
        end = self._free_at[link] = begin + size / self.rates[link]
        self.waiting[link] = self.waiting.get(link, 0) + size
        self._clock.after(end - self._clock.now, self._take_off, link, size)
        return end

    def _take_off(self, link: bytes, size: int) -> None:
        self.waiting[link] -= size
