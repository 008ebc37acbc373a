"""Fit the factors of a cost to measured step times.

A step takes as long as the dearest pack of each of its micro-batches, and a constant. A pack takes ``a`` seconds for
each token with padding, and ``b`` for each unit of attention. Which pack is the dearest depends on the factors, so the
fit is repeated with the factors that it found. If all steps have about the same tokens, the constant cannot be told
from ``a``.

Steps that took much longer than the fit says are left out: a checkpoint or an evaluation was between two steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]

ROUNDS = 5
"""Repetitions of the fit."""
OUTLIER = 6.0
"""A step is left out if it is this many times as far from the fit as most."""
VARIES = 0.03
"""Standard deviation / mean of the tokens from which a constant is fitted."""


class StepLoad(NamedTuple):
    """The load of a step: ``tokens`` with padding, and ``attention``, of each pack, float64 [micro_batches, dp]."""

    tokens: F64
    attention: F64


class CostFit(NamedTuple):
    """Factors that explain step times.

    Attributes:
        a: Seconds for each token.
        b: Seconds for each unit of attention.
        constant: Seconds of each step besides.
        r2: Share of the variation of step times that these factors explain.
        r2_before: The same for the factors of the run.
        steps: Steps that the fit used.
        left_out: Steps that took much longer, or less.
    """

    a: float
    b: float
    constant: float
    r2: float
    r2_before: float
    steps: int
    left_out: int

    def seconds(self, load: StepLoad) -> float:
        """Return the seconds that a step with this load takes."""
        times: F64 = self.a * load.tokens + self.b * load.attention
        return self.constant + float(times.max(axis=1).sum())


def fit_cost(loads: Sequence[StepLoad], seconds: F64, a: float, b: float) -> CostFit:
    """Return the factors that fit step times best.

    Args:
        loads: Load of each step.
        seconds: Time of each step, float64 [n].
        a: The run's factor of a token, in any unit.
        b: Its factor of a unit of attention, in the same unit.
    """
    step_tokens = np.array([load.tokens.sum() for load in loads])
    constant = bool(step_tokens.std() > VARIES * step_tokens.mean())
    kept = np.ones(len(loads), np.bool_)
    before = _critical(loads, a, b) @ np.array([a, b])
    best = np.array([a, b, 0.0])
    for _ in range(ROUNDS):
        sums = _critical(loads, best[0], best[1])
        best = _least_squares(sums[kept], seconds[kept], constant)
        away = np.abs(seconds - sums @ best[:2] - best[2])
        kept = away <= OUTLIER * max(float(np.median(away)), 1e-12)
    old = _least_squares(np.stack([before, np.zeros(len(before))], axis=1)[kept], seconds[kept], constant)
    predicted, predicted_before = _critical(loads, *best[:2]) @ best[:2] + best[2], before * old[0] + old[2]
    a, b, besides = best.tolist()
    r2, r2_before = _r2(seconds[kept], predicted[kept]), _r2(seconds[kept], predicted_before[kept])
    return CostFit(a, b, besides, r2, r2_before, int(kept.sum()), int((~kept).sum()))


def _critical(loads: Sequence[StepLoad], a: float, b: float) -> F64:
    """Return tokens and attention of the dearest packs of each step, float64 [n, 2]."""
    rows = []
    for tokens, attention in loads:
        at = (a * tokens + b * attention).argmax(axis=1)[:, np.newaxis]
        rows.append([np.take_along_axis(values, at, axis=1).sum() for values in (tokens, attention)])
    return np.array(rows, np.float64)


def _least_squares(sums: F64, seconds: F64, constant: bool) -> F64:
    """Return factors of at least 0 and a constant, float64 [3]: the best of those without some of them."""
    columns = np.concatenate([sums, np.full((len(sums), 1), float(constant))], axis=1)
    scale = np.maximum(np.abs(columns).max(axis=0), 1e-300)
    best, least = np.zeros(3), np.inf
    for used in ([0, 1, 2], [0, 1], [0, 2], [1, 2], [0], [1]):
        factors = np.zeros(3)
        factors[used] = np.linalg.lstsq(columns[:, used] / scale[used], seconds, rcond=None)[0] / scale[used]
        off = float(((seconds - columns @ factors) ** 2).sum())
        if factors.min() >= 0 and off < least * (1 - 1e-9):
            best, least = factors, off
    return best


def _r2(seconds: F64, predicted: F64) -> float:
    """Return the share of the variation of ``seconds`` that ``predicted`` explains; below 0 if none."""
    varies = float(((seconds - seconds.mean()) ** 2).sum())
    return 1.0 - float(((seconds - predicted) ** 2).sum()) / max(varies, 1e-300)
