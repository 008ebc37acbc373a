"""The fit of a cost to step times finds the factors that made the times."""

from __future__ import annotations

import numpy as np
import pytest

from streampack.core.flops.cost_fit import StepLoad, fit_cost

A, DP, BUDGET = 1e-6, 8, 16384


def loads(rng: np.random.Generator, steps: int, fixed: bool) -> list[StepLoad]:
    """Steps of four micro-batches of packs of one to many samples, of one length or of several."""
    result = []
    for _ in range(steps):
        parts = [np.diff([0, *np.sort(rng.integers(0, BUDGET, rng.geometric(0.3))), BUDGET]) for _ in range(4 * DP)]
        attention = np.array([float((part.astype(np.float64) ** 2).sum()) for part in parts]).reshape(4, DP)
        share = 1.0 if fixed else rng.uniform(0.3, 1.0)
        result.append(StepLoad(np.full((4, DP), BUDGET * share), attention * share**2))
    return result


@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize("ratio", [1 / 8000, 1 / 24576, 1 / 50_000])
@pytest.mark.parametrize("seed", range(3))
def test_a_planted_b_is_found_within_10_percent_after_200_steps(fixed: bool, seed: int, ratio: float) -> None:
    """Times vary by 0.2%. With 0.5%, a b of 1 / 100,000 is up to 21% off: attention is then 5% of the time."""
    rng = np.random.default_rng(seed)
    steps, b = loads(rng, 200, fixed), A * ratio
    times = np.array([(A * step.tokens + b * step.attention).max(axis=1).sum() for step in steps]) + 0.02
    times *= rng.normal(1.0, 0.002, len(times))
    times[rng.integers(0, 200, 4)] += 30.0  # a checkpoint was written
    fit = fit_cost(steps, times, 24576, 1)
    assert fit.b == pytest.approx(b, rel=0.1)
    assert 1 <= fit.left_out <= 20
    assert fit.r2 >= fit.r2_before - 1e-6
    assert fit.r2 > 0.9


def test_a_cost_that_is_right_cannot_be_bettered() -> None:
    steps = loads(np.random.default_rng(0), 200, True)
    times = np.array([(24576 * step.tokens + step.attention).max(axis=1).sum() for step in steps]) * 1e-10
    fit = fit_cost(steps, times, 24576, 1)
    assert fit.r2_before == pytest.approx(1.0)
    assert fit.a / fit.b == pytest.approx(24576, rel=1e-3)
    assert fit.seconds(steps[0]) == pytest.approx(times[0], rel=1e-6)
