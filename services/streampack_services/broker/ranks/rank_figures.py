"""The ranks of a feed as a snapshot shows them: all of a few, of many the worst ranks and nodes, the rest on request.

``RankTable`` makes ``RankFigures`` from one pass over all ranks. Any thread may read them.

The lists are worst first. Missing ranks of a node count first, then silence of several pings, then data wait that
other ranks do not cause. If these are equal, the fewest steps returned count, then data wait. In lock step, a slow rank
makes all others wait for ``peers``. So a wait for ``peers`` or ``join`` is a sign of trouble elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streampack.core.feed.feed import Feed
from streampack.core.serve.served_steps import RankProgress
from streampack.core.stats.data_wait import CAUSES, Starvation
from streampack_services.broker.ranks.rank_status import (
    MeshExtent,
    NodeStatus,
    RankPage,
    RankStatus,
    SlowRank,
    name_of,
)
from streampack_services.broker.ranks.recent_waits import RecentWaits
from streampack_services.broker.ranks.slow_ranks import slow_ranks, work_s
from streampack_services.figure import filled

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]

MOST_RANKS = 1024
"""Most ranks of a feed that ``/status`` and ``/metrics`` list one by one."""
WORST_RANKS = 64
"""Ranks that ``/status`` lists of a feed with more ranks."""
WORST_NODES = 64
"""Nodes that ``/status`` lists of a feed."""
_LINKS = [CAUSES.index("network"), CAUSES.index("relay")]
LATE = 0.1
"""A rank is named if it waits for messages for at least this share of its time, and twice as long as most."""
PAGE_RANKS = 256
"""Most ranks of an answer to ``/status?node=`` and ``/status?ranks=``."""


@dataclass(frozen=True, slots=True)
class RankColumns:
    """The figures of the ranks that are or were attached, a column for each figure and an element for each rank."""

    ranks: I64
    """Numbers of the rank along dp, cp, tp and pp, int64 [4, n]."""
    host: I64
    """Index of the host."""
    attached: NDArray[np.bool_]
    """True if the rank is attached."""
    done: I64
    """Steps returned."""
    have: I64
    """Steps received."""
    queued: I64
    """Bytes sent to the rank and not confirmed; the bytes of a relay count for the first of its ranks."""
    silent_s: F64
    """Seconds since the rank's last message."""
    step_s: F64
    """Seconds from one step to the next; NaN if not known."""
    returned: I64
    """Steps returned since the rank attached to this broker."""
    lately: RecentWaits
    """Data waits over the last seconds."""
    long: RecentWaits
    """Data waits over the last minutes."""

    @classmethod
    def joined(cls, parts: Sequence[RankColumns]) -> RankColumns:
        """Return the figures of the ranks of all parts."""
        if not parts:
            none, whole, waits = np.zeros(0), np.zeros(0, np.int64), RecentWaits.joined([])
            return cls(
                np.zeros((4, 0), np.int64), whole, whole > 0, whole, whole, whole, none, none, whole, waits, waits
            )  # fmt: skip
        if len(parts) == 1:
            return parts[0]
        arrays = [name for name in cls.__dataclass_fields__ if name not in ("lately", "long")]
        columns = {name: np.concatenate([getattr(part, name) for part in parts], axis=-1) for name in arrays}
        lately, long = (RecentWaits.joined([getattr(part, name) for part in parts]) for name in ("lately", "long"))
        return cls(**columns, lately=lately, long=long)


class RankFigures:
    """The figures of all ranks of a feed at one time.

    Args:
        feed: The feed. It is read only here, in the broker's thread.
        began: When the first rank was read, by the monotonic clock, in seconds.
        hosts: Names of the hosts.
        columns: The figures of the ranks that are or were attached.
        progress: The progress of each of these ranks; None if the rank is not attached. The table replaces its
            elements, one at a time, so that a row may be newer than the columns.
    """

    def __init__(
        self, feed: Feed, began: float, hosts: list[str], columns: RankColumns, progress: list[RankProgress | None]
    ) -> None:
        self.began, self._hosts, self._columns, self._progress = began, hosts, columns, progress
        self._streams = {stream.name for stream in feed.latest_rules.streams}
        self._costs = feed.readers.steps.dealt.latest_costs
        self._silent_after_s = feed.readers.registry.silent_after_s
        self._work_s = work_s(columns.lately, columns.long)
        self.attached = int(columns.attached.sum())
        """Number of ranks that were attached."""
        self._nodes = self._of_nodes()
        at = self._in_order if self.attached <= MOST_RANKS else self._worst_ranks(WORST_RANKS)
        self.readers: list[RankStatus] = self._rows(at)
        """All attached ranks in order; of more than ``MOST_RANKS``, the worst."""
        self.nodes: list[NodeStatus] = [self._node(at) for at in self._nodes.worst_first[:WORST_NODES].tolist()]
        """The worst nodes, worst first."""
        self.num_nodes = len(hosts)
        """Number of nodes."""
        self.longest_waits: dict[str, float] = dict(zip(CAUSES, columns.long.longest.round(4).tolist(), strict=True))
        """Longest data wait of a rank over the last minutes as a share of its time, by cause."""
        self.recent_waits, streams = columns.lately.of_all()
        """Data wait of all ranks over the last seconds as a share of their time, by cause."""
        self.recent_streams = {name: share for name, share in streams.items() if name in self._streams}
        """The part of the cause ``stream``, by stream."""
        self.mfu = columns.lately.mfu_of_all()
        """Useful FLOPs of all ranks over the last seconds as a share of their peak; None if not known."""
        self.recent_s = round(columns.lately.mean_s, 1)
        """Seconds that these cover."""
        self.late: str = self._late()
        """The rank that waits much longer for the network or its relay than most; empty without one."""
        self.slow: SlowRank | None = self._slow()
        """The ranks for which all others wait; None if there are none."""
        there = columns.silent_s[columns.attached]
        self.longest_silence_s = float(there.max()) if len(there) else 0.0
        """Longest time since the last message of an attached rank, in seconds."""
        self.mesh = self._extent()
        """The mesh of the attached ranks; None without one."""

    @classmethod
    def none(cls, feed: Feed) -> RankFigures:
        """Return the figures of a feed without ranks."""
        return cls(feed, math.inf, [], RankColumns.joined([]), [])

    def page(self, name: str, node: str | None, first: int) -> RankPage | None:
        """Return some ranks in their order, at most ``PAGE_RANKS``; None if no rank was on the node.

        Args:
            name: Name of the feed.
            node: Host whose ranks are listed, or a part of its name: then the worst such host. None for all ranks.
            first: Number of ranks to leave out before the first that is listed.
        """
        at, host = self._in_order, None
        if node is not None:
            host = self._find(node)
            if host is None:
                return None
            at = [rank for rank in at if self._columns.host[rank] == host]
        return RankPage(
            feed=name, node=None if host is None else self._node(host), first=first, attached=len(at),
            readers=self._rows(at[first : first + PAGE_RANKS]),
        )  # fmt: skip

    def _find(self, node: str) -> int | None:
        """Return the index of the host of this name, else of the worst host with ``node`` in its name, else None."""
        if node in self._hosts:
            return self._hosts.index(node)
        return next((at for at in self._nodes.worst_first.tolist() if node in self._hosts[at]), None)

    @cached_property
    def _in_order(self) -> list[int]:
        """Indices of the attached ranks, in the order of the ranks."""
        ranks = self._columns.ranks
        order = np.lexsort(ranks[::-1])
        ordered: list[int] = order[self._columns.attached[order]].tolist()
        return ordered

    def _worst_ranks(self, most: int) -> list[int]:
        """Return the indices of the worst attached ranks, worst first."""
        columns = self._columns
        there = np.flatnonzero(columns.attached)
        silent = np.where(columns.silent_s >= self._silent_after_s, columns.silent_s, 0.0)[there]
        waits, done = columns.lately, columns.done[there]
        badness = _badness(
            np.zeros(len(there)), silent, waits.own[there], done.max(initial=0) - done, waits.share[there]
        )
        worst: list[int] = there[np.argsort(-badness, kind="stable")[:most]].tolist()
        return worst

    def _of_nodes(self) -> _Nodes:
        """Return the figures of all nodes."""
        columns, nodes = self._columns, len(self._hosts)
        order = np.argsort(columns.host, kind="stable")
        order = order[columns.attached[order]]
        host, waits = columns.host[order], columns.lately
        ranks = np.bincount(columns.host, minlength=nodes)
        attached = np.bincount(host, minlength=nodes)
        named = np.flatnonzero(attached)
        starts = np.flatnonzero(np.diff(host, prepend=-1))

        def by_node(values: NDArray[np.generic], reduce: np.ufunc, nothing: float) -> F64:
            """Return the sum, least or greatest value of each node; ``nothing`` for a node without a rank."""
            reduced = np.full(nodes, nothing)
            if len(starts):
                reduced[named] = reduce.reduceat(np.nan_to_num(values[order], nan=nothing), starts)
            return reduced

        # The worst wait of a node: the first of its ranks when sorted by node and falling wait.
        falling = np.lexsort((-np.nan_to_num(waits.share[order], nan=-1.0), host))
        worst = np.zeros(nodes, np.int64)
        worst[named] = order[falling[starts]]
        silent_s, done = (
            by_node(columns.silent_s, np.maximum, 0.0),
            by_node(columns.done, np.minimum, 0.0).astype(np.int64),
        )
        share = by_node(waits.share, np.maximum, -1.0)
        lag = np.where(attached > 0, columns.done[order].max(initial=0) - done, 0)
        silent = np.where(silent_s >= self._silent_after_s, silent_s, 0.0)
        costs = np.zeros(len(columns.host))
        if self._costs is not None and len(order):
            means = self._costs.means()
            dp = columns.ranks[0]
            costs = np.where(dp < len(means), means[np.minimum(dp, len(means) - 1)], 0.0)
        badness = _badness(ranks - attached, silent, by_node(waits.own, np.maximum, 0.0), lag, share)
        return _Nodes(
            ranks, attached, worst, silent_s, done,
            by_node(columns.have - columns.done, np.minimum, 0.0).astype(np.int64),
            by_node(columns.queued, np.add, 0.0).astype(np.int64), by_node(columns.step_s, np.maximum, -1.0),
            by_node(costs, np.maximum, 0.0), np.argsort(-badness, kind="stable"),
        )  # fmt: skip

    def _node(self, at: int) -> NodeStatus:
        """Return the status of one node."""
        nodes, waits = self._nodes, self._columns.lately
        row = self._progress[nodes.worst[at]] if nodes.attached[at] else None
        share = _share(waits.share[nodes.worst[at]]) if row is not None else None
        waiting = share is not None and share > 0
        return NodeStatus(
            host=self._hosts[at], ranks=int(nodes.ranks[at]), attached=int(nodes.attached[at]),
            data_wait=share,
            cause=CAUSES[waits.cause[nodes.worst[at]]] if waiting else "",
            stream=self._stream(nodes.worst[at]) if waiting else None,
            worst_rank=list(row.ranks) if row is not None and waiting else None,
            silent_s=float(nodes.silent_s[at]) if row is not None else None,
            done_upto=int(nodes.done[at]) if row is not None else None,
            ahead=max(int(nodes.ahead[at]), 0) if row is not None else None,
            step_s=round(float(nodes.step_s[at]), 6) if nodes.step_s[at] > 0 else None,
            cost=round(float(nodes.cost[at]), 3) if nodes.cost[at] > 0 else None,
            queued_bytes=int(nodes.queued[at]),
        )  # fmt: skip

    def _stream(self, at: int) -> str | None:
        """Return the stream that a rank has waited for longest over the last seconds; None if it waited for none."""
        streams = self._columns.lately.streams[at]
        return max(streams.keys() & self._streams, key=streams.__getitem__, default=None)

    def _rows(self, at: Sequence[int]) -> list[RankStatus]:
        """Return the rows of some attached ranks."""
        rows = [(n, row) for n in at if (row := self._progress[n]) is not None]
        costs = [] if self._costs is None else self._costs.of([row.ranks[0] for _, row in rows])
        return [
            _rank_status(row, self._recent(at), costs[n] if costs else [], self._streams)
            for n, (at, row) in enumerate(rows)
        ]

    def _recent(self, at: int) -> dict[str, Any]:
        """Return the fields of a rank's row about the last seconds."""
        waits, work = self._columns.lately, float(self._work_s[at])
        share = _share(waits.share[at])
        return {
            "data_wait": share, "cause": CAUSES[waits.cause[at]] if share else "",
            "stream": self._stream(at) if share else None, "work_s": round(work, 4) if math.isfinite(work) else None,
            "mfu": _share(waits.mfu[at]),
        }  # fmt: skip

    def _late(self) -> str:
        """Return the name and host of the rank whose messages come late; empty if there is none."""
        columns = self._columns
        there = np.flatnonzero(columns.attached)
        waits = columns.lately.shares[there][:, _LINKS].sum(axis=1)
        if len(there) < 2:
            return ""
        latest = int(waits.argmax())
        if waits[latest] < max(2 * float(np.median(np.delete(waits, latest))), LATE):
            return ""
        at = there[latest]
        name = name_of(columns.ranks[:, at].tolist(), [bool(axis.any()) for axis in columns.ranks[:, there]])
        return f"rank {name} on {self._hosts[columns.host[at]]}"

    def _slow(self) -> SlowRank | None:
        """Return the rank for which all others wait; None if there is none."""
        columns = self._columns
        there = np.flatnonzero(columns.attached)
        lately, long = (
            RecentWaits(column.figures[there], [column.streams[at] for at in there.tolist()])
            for column in (columns.lately, columns.long)
        )
        slow = slow_ranks(lately, long, columns.returned[there])
        if slow is None:
            return None
        dp_rank, cp_rank, tp_rank, pp_rank = ranks = columns.ranks[:, there[slow.rank]].tolist()
        return SlowRank(
            name=name_of(ranks, [bool(axis.any()) for axis in columns.ranks[:, there]]),
            dp_rank=dp_rank, cp_rank=cp_rank, tp_rank=tp_rank, pp_rank=pp_rank,
            host=self._hosts[columns.host[there[slow.rank]]], count=slow.num_slow, step_s=round(slow.step_s, 4),
            others_step_s=round(slow.others_step_s, 4),
        )  # fmt: skip

    def _extent(self) -> MeshExtent | None:
        """Return the mesh of the attached ranks."""
        there = self._columns.ranks[:, self._columns.attached]
        if not there.size:
            return None
        dp, cp, tp, pp = (there.max(axis=1) + 1).tolist()
        return MeshExtent(dp=dp, cp=cp, tp=tp, pp=pp)


@dataclass(frozen=True, slots=True)
class _Nodes:
    """The figures of the nodes, an element for each host."""

    ranks: I64
    attached: I64
    worst: I64
    silent_s: F64
    done: I64
    ahead: I64
    queued: I64
    step_s: F64
    cost: F64
    worst_first: I64


def _badness(missing: F64 | I64, silent_s: F64, own: F64, lag: I64, share: F64) -> I64:
    """Return numbers that are the larger, the worse a rank or node is: each argument counts only if those before tie.

    Args:
        missing: Missing ranks, up to 8,191.
        silent_s: Seconds of silence, up to 4,095; 0 while it is normal.
        own: Data wait that other ranks do not cause, as a share of time, compared by the percent.
        lag: Steps that others have returned more, up to 2 ** 20.
        share: Data wait, as a share of time, compared by the thousandth.
    """
    badness = np.minimum(missing, (1 << 13) - 1).astype(np.int64)
    for values, bits in (
        (silent_s, 12), (np.round(np.nan_to_num(own) * 100), 7), (lag, 20), (np.round(np.nan_to_num(share) * 1000), 10),
    ):  # fmt: skip
        badness = (badness << bits) + np.clip(values, 0, (1 << bits) - 1).astype(np.int64)
    return badness


def _share(value: float) -> float | None:
    """Return a share of time as a snapshot has it; None for NaN."""
    return None if math.isnan(value) else round(float(value), 4)


def _rank_status(
    row: RankProgress, recent: dict[str, Any], cost: list[float], streams: Iterable[str]
) -> RankStatus:  # fmt: skip
    """Return a rank's row. Leave out figures of the client that are not finite, and unknown causes and streams."""
    dp_rank, cp_rank, tp_rank, pp_rank = row.ranks
    starved = row.starvation or _NOT_STARVED
    return filled(
        RankStatus,
        row,
        starved,
        dp_rank=dp_rank,
        cp_rank=cp_rank,
        tp_rank=tp_rank,
        pp_rank=pp_rank,
        host=row.where.rpartition(":")[0],
        round=row.iteration,
        **recent,
        stats={key: value for key, value in row.stats.items() if math.isfinite(value)},
        cost=cost,
        starved_s={cause: starved.causes_s.get(cause, 0.0) for cause in CAUSES},
        starved_streams={name: seconds for name, seconds in starved.streams_s.items() if name in streams},
    )


_NOT_STARVED = Starvation()
