"""A broker with simulated ranks: the real core receives ``Attach`` and ``ReaderPing``, but no rank has a socket.

Tests, screenshots and ``benchmarks/scale/scrape.py`` use it to look at 30,000 ranks. All figures of a rank follow from
its number and the time, so that two runs show the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import numpy as np
from msgspec.structs import replace
from streampack_services.broker.ranks.rank_table import RANKS_A_TURN
from streampack_services.broker.service import BrokerService
from streampack_services.broker.status import BrokerStatus
from streampack_services.http.server import HttpServer

from streampack.client.reading_stats import ReadingFigures
from streampack.config.daemon_settings import BrokerConfig
from streampack.config.typed_yaml import convert
from streampack.core.broker import Broker
from streampack.core.feed.feed import Feed
from streampack.core.model.mesh import Mesh
from streampack.core.protocol.effects import FromTrainer
from streampack.core.protocol.events import Tick
from streampack.core.protocol.message import Envelope, Message
from streampack.core.protocol.trainer_messages import Attach, ReaderPing
from streampack.core.stats.data_wait import CAUSES, WAIT_BOUNDS_S, Starvation

STREAMS = ("web", "code", "math")
MICRO_BATCHES = 8
NODE_RANKS = 8
Waits = Callable[[int, float], dict[str, float]]
"""(number of the rank, seconds since it attached) -> seconds of data wait by cause."""


class SimulatedRanks:
    """A broker and ``ranks`` ranks, 8 on each node: tensor-parallel ranks of one data-parallel rank.

    The broker's service makes memory and a reporter, but its loop does not run: ``ping`` drives the core.
    """

    def __init__(self, ranks: int, waits: Waits | None = None, host: str = "node{:04d}.cluster") -> None:
        tp = NODE_RANKS if ranks % NODE_RANKS == 0 else 1
        self.ranks, self._dp, self._tp, self._host = ranks, ranks // tp, tp, host
        tree = {
            "run": "simulated",
            "listen": {"producers": "tcp://127.0.0.1:*", "trainers": "tcp://127.0.0.1:*"},
            "memory": "1GiB", "limits": {"sample_tokens": 256, "chunk": "64KiB", "peers": max(ranks, 1024)},
            "rules": {"budget": 64, "step": {"packs": self._dp}, "overlong": "truncate"},
            "streams": {name: {"weight": 1 / len(STREAMS), "partitions": 1} for name in STREAMS},
        }  # fmt: skip
        self.service = BrokerService(convert(tree, BrokerConfig))
        self.waits = waits or few_wait
        self.second = 0.0
        """Time since the ranks attached, in seconds."""
        self.now = time.monotonic()
        """The broker's time, in seconds of the monotonic clock."""
        self._stats = ReadingFigures().counts(0) | {"starved_fraction": 0.01, "next_p99_ms": 1.5}

    @property
    def core(self) -> Broker:
        """The broker's state machine."""
        return self.service.core

    @property
    def feed(self) -> Feed:
        """The only feed."""
        return self.core.feeds["train"]

    def close(self) -> None:
        """Close the service's sockets and free its memory."""
        self.service.close()

    def host(self, rank: int) -> str:
        """Return the host of a rank."""
        return self._host.format(rank // NODE_RANKS)

    def mesh(self, rank: int) -> Mesh:
        """Return the place of a rank in the mesh."""
        return Mesh(dp=self._dp, dp_rank=rank // self._tp, tp=self._tp, tp_rank=rank % self._tp)

    def attach(self, ranks: Iterable[int] | None = None) -> None:
        """Attach all ranks, or some of them."""
        for rank in range(self.ranks) if ranks is None else ranks:
            mesh = self.mesh(rank)
            self._send(
                rank, Attach(feed="train", reader=f"r{rank}", host=self.host(rank), pid=1000 + rank, mesh=mesh,
                             next_step=0, knows_stages=True),
            )  # fmt: skip
        self.tick(0.0)
        self.snapshot()  # as in the broker's loop, which sees ranks before their first report

    def deal(self) -> None:
        """Deal a step whose packs have costs of their own."""
        costs = np.random.default_rng(1).integers(90, 110, self._dp * MICRO_BATCHES)
        self.feed.readers.steps.dealt.add(costs, costs, np.arange(len(costs)).reshape(-1, self._dp))

    def ping(self, seconds: float, ranks: Iterable[int] | None = None) -> None:
        """Let time pass, and let all ranks report their figures, or some of them."""
        self.tick(seconds)
        for rank in range(self.ranks) if ranks is None else ranks:
            waits = dict.fromkeys(CAUSES, 0.0) | self.waits(rank, self.second)
            starvation = Starvation(
                causes_s=waits, streams_s={"web": waits["stream"]}, waits=[5] * (len(WAIT_BOUNDS_S) + 1),
                trainer_s=max(self.second - sum(waits.values()), 0.0), step_s=0.5 + 0.001 * (rank % 101),
            )  # fmt: skip
            self.report(rank, dict(self._stats), starvation)

    def report(self, rank: int, stats: dict[str, float], starvation: Starvation) -> None:
        """Let a rank report these figures."""
        message = ReaderPing(
            feed="train", reader=f"r{rank}", done_upto=0, have_upto=0, stats=stats, starvation=starvation
        )
        self._send(rank, message)

    def tick(self, seconds: float) -> None:
        """Let time pass for the broker."""
        self.second += seconds
        self.now += seconds
        self.core.handle(Tick(self.second))

    def snapshot(self) -> BrokerStatus:
        """Return a snapshot after at least one whole pass over the ranks."""
        for _ in range(2 + 2 * -(-self.ranks // RANKS_A_TURN)):
            self.now += 1.0
            found = self.service._reporter.take(self.now)
        self.service.snapshot = found
        return found

    def leave(self, ranks: Iterable[int]) -> None:
        """Let ranks leave without a word."""
        for rank in ranks:
            self.feed.readers.registry.remove(self.feed.readers.registry.held[self.mesh(rank).ranks])

    def _send(self, rank: int, message: Message) -> None:
        """Hand the core a message of a rank; its answers are dropped."""
        reader = self.feed.readers.registry.named(f"r{rank}")
        envelope = Envelope(
            run=self.core.run, epoch=self.core.epoch, fence=reader.fence if reader is not None else 0, message=message
        )
        self.core.handle(FromTrainer(b"%d" % rank, envelope))


@contextmanager
def simulated(ranks: int, gone: Iterable[int] = ()) -> Iterator[str]:
    """Yield the address of a broker whose ranks have read for half a minute, and of which some are ``gone``.

    Its figures stay as they are, but its time goes on.
    """
    found = SimulatedRanks(ranks)
    try:
        found.attach()
        found.deal()
        for _ in range(3):
            found.ping(10.0)
        found.leave(gone)
        last = found.snapshot()
        began = time.monotonic()

        def shown() -> BrokerStatus:
            """Return the snapshot, as taken now."""
            passed = time.monotonic() - began
            return replace(last, taken_at=time.time(), uptime_s=found.second + passed, ready=True, state="serving")

        server = HttpServer("127.0.0.1:0", shown, rank_page=found.service.rank_page)
        server.start()
        try:
            yield server.url
        finally:
            server.close()
    finally:
        found.close()


def few_wait(rank: int, second: float) -> dict[str, float]:
    """Return the waits of a run in which every 97th rank waits for a stream, and all others a little for peers."""
    if rank % 97 == 3:
        return {"stream": second * (0.05 + 0.001 * (rank // 97 % 200)), "peers": 0.01 * second}
    return {"peers": second * 0.002 * (rank % 11)}
