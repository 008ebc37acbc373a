"""The displacement of samples: how many steps before or after its turn a sample leaves. It decides nothing.

The *turn* of a sample is the step that it would be in if samples left in merge order, by the tokens merged before it.
The *displacement* is the sample's own step minus its turn: 3 for a sample that leaves three steps late, -2 for one that
leaves two steps early. Steps other than the sample's own count with the mean tokens of the last steps.

The figures are of the last ``LAST_STEPS`` steps. In steps of more than ``2 * MOST`` samples, samples at equal distances
count for the others. The figures begin anew with a broker, and with a feed that goes to another step. The samples of
the snapshot then count as merged one after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from streampack.core.model.samples import I64, SampleTable
from streampack.core.model.steps import PlannedStep
from streampack.core.stats.length_histogram import bucket_of, least_of
from streampack.core.stats.trained_samples import LAST_STEPS

MOST = 256
"""Samples of a step that count; fewer than twice as many."""
AT_ONCE = 1 << 14
"""Samples gathered before they are counted."""


class Displacement(NamedTuple):
    """Steps between samples and their turns.

    Attributes:
        p50: Median of the absolute displacement.
        p99: Its 99th percentile.
        early: Most steps that a sample leaves before its turn.
        late: Most steps that a sample leaves after its turn.
    """

    p50: int = 0
    p99: int = 0
    early: int = 0
    late: int = 0


def missed(at: I64, sizes: I64, step_tokens: I64, left: int = 0) -> I64:
    """Return how many tokens early or late samples are in consecutive steps.

    Args:
        at: Tokens merged before each sample, step after step, int64 [n].
        sizes: Samples of each step, int64 [steps].
        step_tokens: Tokens of each step, int64 [steps].
        left: Tokens that left before these steps.

    Returns:
        The tokens, int64 [n]: 0 for a sample in its turn, positive for a late one, negative for an early one.

    >>> missed(np.array([10, 40, 0, 20]), np.array([2, 2]), np.array([20, 30])).tolist()
    [0, -21, 20, 0]
    """
    ends = left + np.cumsum(step_tokens)
    begin, last = np.repeat(ends - step_tokens, sizes), np.repeat(ends - 1, sizes)
    tokens: I64 = np.minimum(np.maximum(at, begin), last) - at
    return tokens


def displaced(tokens: I64, step_tokens: float) -> I64:
    """Return the displacement in steps, int64 [n], of samples that ``missed`` their turn by ``tokens``.

    ``step_tokens``: mean tokens of a step.

    >>> displaced(np.array([1, 40, 41, 0, -1]), 40.0).tolist()
    [1, 1, 2, 0, -1]
    """
    steps: NDArray[np.float64] = np.copysign(np.ceil(np.abs(tokens) / max(step_tokens, 1.0)), tokens)
    return steps.astype(np.int64)


def displacement_of(steps: I64) -> Displacement:
    """Return the figures of samples that are displaced by ``steps``, int64 [n].

    >>> displacement_of(np.array([0, 0, -2, 5]))
    Displacement(p50=0, p99=5, early=2, late=5)
    """
    if not len(steps):
        return Displacement()
    p50, p99 = np.quantile(np.abs(steps), (0.5, 0.99), method="inverted_cdf").astype(int).tolist()
    return Displacement(p50, p99, max(-int(steps.min()), 0), max(int(steps.max()), 0))


class Displacements:
    """The displacement of the samples of one feed, whose merged samples are in ``table``.

    Steps are collected, and counted on request or when there are many samples, as ``FormedFigures`` does.
    """

    def __init__(self, table: SampleTable) -> None:
        self.table = table
        self._at: I64 = np.zeros(0, np.int64)  # tokens merged before each sample, by handle
        self._merged = self._left = 0  # tokens merged, and tokens that left
        self._waiting: list[tuple[int, I64]] = []  # (tokens, at of the samples) of steps that are not counted yet
        self._num_waiting = 0
        self._tokens: I64 = np.zeros(0, np.int64)  # of each of the last steps
        self._counts: I64 = np.zeros((0, 0), np.int64)
        """Samples of each of the last steps, by the bucket of their displacement, late and early ones in turn."""

    def merged(self, handles: I64, lengths: I64) -> None:
        """Note samples that follow in merge order; ``handles`` and ``lengths`` (all tokens) are int64 [n]."""
        if len(self._at) < self.table.capacity:
            self._at = np.append(self._at, np.zeros(self.table.capacity - len(self._at), np.int64))
        ends = lengths.cumsum()
        ends += self._merged
        self._at[handles] = ends - lengths
        self._merged = int(ends[-1]) if len(ends) else self._merged

    def formed(self, steps: Sequence[PlannedStep]) -> None:
        """Count steps that were formed."""
        for step in steps:
            handles, tokens = step.packs.handles, int(step.packs.tokens.sum())
            if step.rules.share is not None:  # shared tokens were merged, too
                tokens = int(self.table.length[handles].sum())
            at = self._at[handles[:: max(len(handles) // MOST, 1)]]
            self._waiting.append((tokens, at))
            self._num_waiting += 1 + len(at)
        if self._num_waiting > AT_ONCE:
            self._count()

    def dropped(self, handles: I64) -> None:
        """Count samples that left in no step: ``tail: drop`` dropped them."""
        self._count()
        self._left += int(self.table.length[handles].sum())

    @property
    def latest(self) -> Displacement | None:
        """The displacement in the last steps, exact up to 64 steps, and within 1/32 above. None before a step."""
        self._count()
        by_bucket = self._counts.sum(axis=0).reshape(-1, 2)
        upto = np.cumsum(by_bucket.sum(axis=1))
        if not len(upto) or not upto[-1]:
            return None
        buckets = [int(np.searchsorted(upto, part * upto[-1])) for part in (0.5, 0.99)]
        buckets += [int(np.flatnonzero(by_bucket[:, way]).max(initial=0)) for way in (1, 0)]
        return Displacement(*map(least_of, buckets))

    def _count(self) -> None:
        """Count the steps that wait; keep those of the last ``LAST_STEPS`` steps."""
        if not self._waiting:
            return
        sizes = np.array([len(at) for _, at in self._waiting])
        step_tokens = np.array([number for number, _ in self._waiting])
        tokens = missed(np.concatenate([at for _, at in self._waiting]), sizes, step_tokens, self._left)
        self._waiting, self._num_waiting = [], 0
        self._left += int(step_tokens.sum())
        self._tokens = np.append(self._tokens, step_tokens)[-LAST_STEPS:]
        moved = np.flatnonzero(tokens)
        steps = displaced(tokens[moved], float(self._tokens.mean()))
        ways = 2 * bucket_of(np.abs(steps)) + (steps < 0)
        width = max(int(ways.max(initial=0)) // 2 * 2 + 2, self._counts.shape[1])
        which = np.repeat(np.arange(len(sizes)), sizes)[moved]
        counts = np.bincount(which * width + ways, minlength=len(sizes) * width).reshape(len(sizes), width)
        counts[:, 0] += sizes - counts.sum(axis=1)
        before = np.pad(self._counts, ((0, 0), (0, width - self._counts.shape[1])))
        self._counts = np.concatenate([before, counts])[-LAST_STEPS:]
