"""Read the figures of all ranks of a feed into columns: a limited number of ranks at a time.

The broker's thread calls ``RankTable.turn`` with each snapshot. A turn reads at most ``RANKS_A_TURN`` ranks, so
that 30,000 ranks do not hold up the broker. When all ranks were read, their figures are replaced whole
(``RankFigures``), and the next pass begins.

A rank keeps its index as long as the trainers' mesh is the same. So figures of two times are compared by column.
"""

from __future__ import annotations

import math

import numpy as np

from streampack.core.feed.feed import Feed
from streampack.core.serve.rank_reader import Reader, Receiver
from streampack.core.serve.served_steps import RankProgress
from streampack.core.stats.data_wait import CAUSES, Starvation
from streampack_services.broker.ranks.rank_figures import MOST_RANKS, RankColumns, RankFigures
from streampack_services.broker.ranks.recent_waits import (
    COLUMNS,
    STEPS,
    TIMED,
    TRAINER,
    UNHEARD,
    USEFUL,
    RankTotals,
    WaitWindow,
)

RANKS_A_TURN = 1024
"""Most ranks that a turn reads, at about 4 us each."""
ROW_S = 0.002
"""Least time between two passes over ranks that are all listed, in seconds per rank: a row takes about 10 us."""
LATELY_S = 30.0
"""Least time over which the data wait of a rank is a share of its time, in seconds; the most is twice as long."""
LONG_S = 150.0
"""The same for the data wait that alerts use, in seconds."""
LATELY_PINGS = 2
"""The same for both, in pings of a rank."""


class RankTable:
    """The figures of all ranks of one feed; ``figures`` has those of the last whole pass."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._readers: list[Reader] = []
        self._next = 0
        self._mesh: tuple[object, ...] = ()
        self._progress: list[RankProgress | None] = []
        self._columns: list[RankColumns] = []
        self._hosts: dict[str, int] = {}
        self._relays: set[Receiver] = set()
        self._began = -math.inf
        self._lately, self._long = WaitWindow(), WaitWindow()
        self._totals = RankTotals()
        self.figures = RankFigures.none(feed)

    @property
    def waited_s(self) -> dict[str, float]:
        """Seconds that ranks have waited for data since this broker began, by cause, ranks that left included."""
        return dict(zip(CAUSES, self._totals.sums.tolist(), strict=False))

    @property
    def trainer_s(self) -> float:
        """Seconds that the trainers of ranks have worked on steps since this broker began, as in ``waited_s``."""
        return float(self._totals.sums[TRAINER])

    @property
    def useful_s(self) -> float:
        """Seconds that the useful FLOPs of ranks need at their peak, as in ``waited_s``."""
        return float(self._totals.sums[USEFUL])

    @property
    def timed_s(self) -> float:
        """Seconds of the ranks that count useful FLOPs, as in ``waited_s``."""
        return float(self._totals.sums[TIMED])

    def turn(self, now: float) -> None:
        """Read the next ranks, and replace ``figures`` if all were read; ``now``: monotonic clock, in seconds."""
        if self._next == len(self._readers):
            listed = len(self._readers) if len(self._readers) <= MOST_RANKS else 0
            if now - self._began < listed * ROW_S:
                return
            self._begin(now)
            if not self._readers and not self.figures.num_nodes:
                return  # no rank has attached: the figures are those of no rank
        if self._next < len(self._readers):
            self._columns.append(self._read(now, self._readers[self._next : self._next + RANKS_A_TURN]))
            self._next += len(self._columns[-1].host)
        if self._next == len(self._readers):
            columns = RankColumns.joined(self._columns)
            self.figures = RankFigures(self._feed, self._began, list(self._hosts), columns, self._progress)

    def _begin(self, now: float) -> None:
        """Begin a pass over all ranks that are or were attached."""
        self._readers = self._feed.readers.registry.last_holders()
        self._next, self._columns, self._hosts, self._relays, self._began = 0, [], {}, set(), now
        mesh = tuple((reader.mesh.sizes, reader.readers) for reader in self._readers[:1])
        if mesh != self._mesh:  # other ranks have the indices now
            self._mesh, self._progress = mesh, []
        self._progress += [None] * (len(self._readers) - len(self._progress))
        pings_s = LATELY_PINGS * self._feed.readers.attempts.ping_s
        self._lately.begin(now, max(LATELY_S, pings_s), len(self._readers))
        self._long.begin(now, max(LONG_S, pings_s), len(self._readers))

    def _read(self, now: float, readers: list[Reader]) -> RankColumns:
        """Return the figures of the next ranks."""
        first, steps, hosts = self._next, self._feed.readers.steps, self._hosts
        rows, host, reported = [], [], []
        streams: list[dict[str, float]] = []
        for at, reader in enumerate(readers, first):
            where, ranks = reader.where, reader.mesh.ranks
            host.append(hosts.setdefault(where.rpartition(":")[0], len(hosts)))
            reported.append(reader.holds and bool(reader.stats))
            if not reader.holds:
                self._progress[at] = None
                streams.append({})
                rows.append((UNHEARD, *ranks, *_NOTHING))
                continue
            self._progress[at] = row = steps.progress_of(reader)
            wait = row.starvation or _NOT_STARVED
            causes, step_s = wait.causes_s, wait.step_s
            streams.append(wait.streams_s)
            queued, receiver = row.queued_bytes, reader.receiver
            if receiver.is_relay and receiver not in self._relays:  # its bytes are for all ranks of the host
                self._relays.add(receiver)
                queued = receiver.flow.queued_bytes
            rows.append((
                hash((where, ranks)) & _KEY, *ranks, row.done_upto, row.have_upto, queued, row.silent_s,
                math.nan if step_s is None else step_s, *[causes.get(cause, 0.0) for cause in CAUSES], wait.trainer_s,
                row.done_upto, wait.useful_s or 0.0,
                0.0 if wait.useful_s is None else sum(causes.values()) + wait.trainer_s,
            ))  # fmt: skip
        table = np.array(rows, np.float64).T
        keys, *whole = table[:8].astype(np.int64)
        turns, totals = self._totals.add(now, first, keys, np.array(reported), table[10:].T)
        return RankColumns(
            ranks=np.stack(whole[:4]), host=np.array(host), attached=keys != UNHEARD, done=whole[4], have=whole[5],
            queued=whole[6], silent_s=table[8], step_s=table[9], returned=totals[:, STEPS].astype(np.int64),
            lately=self._lately.since(first, turns, totals, streams),
            long=self._long.since(first, turns, totals, streams),
        )  # fmt: skip


_KEY = (1 << 48) - 1
"""Bits of the number of a process, so that it is exact as a float64."""
_NOTHING = (0, 0, 0, 0.0, math.nan, *[0.0] * COLUMNS)
_NOT_STARVED = Starvation()
