"""The order of a run's samples by tenths of its steps: shares of streams, mean length and displacement.

The log has the samples of each step, but not the order of the merge. The order within a stream is that of the indices.
Across streams it follows from the weights, so the broker's merge runs again over the recorded samples. Samples that are
in no step are missing there: rejected ones, and those in the window at the end. So displacement is exact up to these.

A log does not have the order in which partitions arrived, or where streams waited for the next pass. Displacement is
then not known.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from streampack.core.merge.queues import NOWHERE
from streampack.core.merge.schedule import change_merge, merge_of
from streampack.core.model.rules import Rules
from streampack.core.model.samples import I64
from streampack.core.stats.displacement import displaced, displacement_of, missed
from streampack.core.stats.trained_samples import LAST_STEPS
from streampack_services.broker.status import FeedStatus, StreamStatus
from streampack_services.ledger.run_history import NEVER, FeedHistory
from streampack_services.ledger.step_rows import StepRows

Tree = dict[str, Any]
PARTS = 10
"""Parts of the steps that are compared."""
MOST_SAMPLES = 500_000
"""Samples at the end of a run whose displacement is counted."""


class RunOrder:
    """Collects the steps of a feed that count, in their order."""

    def __init__(self, history: FeedHistory) -> None:
        self._history = history
        self._rules = history.rules_at(NEVER)
        self._names = [stream.name for stream in self._rules.streams]
        self._numbers: list[int] = []
        self._sums: list[I64] = []  # of each step, int64 [2, streams]: its samples and tokens by stream
        self._last: deque[I64] = deque()  # of the last steps, int64 [4, n]: stream, index, part and length of samples
        self._num_last = 0

    def add(self, step: StepRows) -> None:
        """Add the next step."""
        columns = np.stack([step.rows[name].astype(np.int64) for name in ("stream", "index", "part", "length")])
        streams, width = columns[0], len(self._names)
        sums = [np.bincount(streams, minlength=width), np.bincount(streams, columns[3], width)]
        self._numbers.append(step.step)
        self._sums.append(np.stack(sums).astype(np.int64))
        self._last.append(columns)
        self._num_last += len(streams)
        while self._num_last > MOST_SAMPLES and len(self._last) > 1:
            self._num_last -= self._last.popleft().shape[1]

    def rows(self) -> list[Tree]:
        """Return the figures of each part of the steps, for JSON."""
        moved = self._displacement()
        return [self._row(part.tolist(), moved) for part in np.array_split(np.arange(len(self._numbers)), PARTS)
                if len(part)]  # fmt: skip

    def _row(self, part: list[int], moved: list[I64] | None) -> Tree:
        """Return the figures of the steps in the places ``part``; ``moved``: displacement in the last steps."""
        samples, tokens = np.sum([self._sums[place] for place in part], axis=0)
        shares = samples if self._rules.weight_unit == "samples" else tokens
        by_weight: list[float | None] = [None] * len(self._names)
        if self._rules.merge != "arrival":
            by_weight = np.mean([self._weight_shares(self._numbers[place]) for place in part], axis=0).tolist()
        first = len(self._numbers) - len(moved) if moved is not None else len(self._numbers)
        displacement = None
        if moved is not None and part[0] >= first:
            displacement = displacement_of(np.concatenate([moved[place - first] for place in part]))._asdict()
        return {
            "steps": [self._numbers[part[0]], self._numbers[part[-1]]],
            "mean_length": int(tokens.sum()) / max(int(samples.sum()), 1),
            "displacement": displacement,
            "streams": {
                name: {
                    "share": count / max(int(shares.sum()), 1),
                    "weight_share": by_weight[number],
                }
                for number, (name, count) in enumerate(zip(self._names, shares.tolist(), strict=True))
            },
        }

    def _weight_shares(self, step: int) -> NDArray[np.float64]:
        """Return the share of each stream by the weights of a step, float64 [streams]."""
        weights = np.zeros(len(self._names))
        own = self._history.rules_at(step).shares_at(step)
        weights[: len(own)] = own
        shares: NDArray[np.float64] = weights / weights.sum()
        return shares

    def _displacement(self) -> list[I64] | None:
        """Return the displacement of the samples of each of the last steps, in steps; None if it is not known."""
        stream, index, part, lengths = np.concatenate(list(self._last), axis=1)
        sizes = np.array([columns.shape[1] for columns in self._last])
        rules = self._rules
        if rules.batch is not None:  # each batch has the samples whose turn it is
            return np.split(np.zeros(len(stream), np.int64), np.cumsum(sizes)[:-1])
        if any(change.rules.weights_ramp is not None for change in self._history.rules):
            return None
        in_turn = np.lexsort((part, index, stream))
        if rules.merge != "arrival" and rules.between_passes == "continue":
            in_turn = self._merged(in_turn, stream, lengths, part)
        elif sum(stream.partitions for stream in rules.streams) > 1:
            return None
        if len(in_turn) < len(stream):
            return None
        at = np.empty(len(stream), np.int64)
        at[in_turn] = np.cumsum(lengths[in_turn]) - lengths[in_turn]
        step_tokens = np.array([int(columns[3].sum()) for columns in self._last])
        tokens = missed(at, sizes, step_tokens)
        return np.split(displaced(tokens, float(step_tokens.mean())), np.cumsum(sizes)[:-1])

    def _merged(self, by_stream: I64, stream: I64, lengths: I64, parts: I64) -> I64:
        """Return the places of samples in merge order, int64 [n]; ``by_stream``: their places stream after stream."""
        before = sum(int(sums[0].sum()) for sums in self._sums) - len(stream)
        changes = [change for change in self._history.rules if change.position >= 0]
        first = max((n for n, change in enumerate(changes) if change.position <= before), default=0)
        merge, taken, num_known = merge_of(_alone(changes[first].rules)), [], 0
        for at, change in enumerate(changes[first:], first):
            if at > first:
                taken.append(merge.take(NOWHERE, change.position - before).handles)
                change_merge(merge, _alone(change.rules))
            for number in range(num_known, len(change.rules.streams)):
                own = by_stream[stream[by_stream] == number]
                merge.push(number, own, lengths[own], parts[own])
                merge.end(number)
            num_known = len(change.rules.streams)
        return np.concatenate([*taken, merge.take(NOWHERE).handles])


def _alone(rules: Rules) -> Rules:
    """Return the rules of the same merge with one partition for each stream, where no stream stops the others."""
    streams = [msgspec.structs.replace(stream, partitions=1, on_exhaust="renormalise") for stream in rules.streams]
    return msgspec.structs.replace(rules, streams=tuple(streams))


def latest_rows(feed: FeedStatus, streams: list[StreamStatus]) -> list[Tree]:
    """Return the figures of the last steps of a running feed with these streams, as ``RunOrder.rows`` does."""
    if feed.mean_length is None:
        return []
    return [
        {
            "steps": [max(feed.steps.formed - LAST_STEPS, 0), max(feed.steps.formed - 1, 0)],
            "mean_length": feed.mean_length.recent,
            "displacement": None if feed.displacement is None else msgspec.to_builtins(feed.displacement),
            "streams": {row.stream: {"share": row.recent_share, "weight_share": row.share} for row in streams},
        }
    ]
