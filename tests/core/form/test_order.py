"""Packing keeps shares of streams and lengths over time near those of the merge."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.packing import order
from streampack.core.form.auto_window import auto_window


@pytest.mark.parametrize("kind", order.KINDS)
def test_over_any_20_steps_each_stream_is_off_its_weight_by_no_more_than_0_05_above_packs_in_order(kind: str) -> None:
    lengths, streams, _ = order.merged(kind, seed=7)

    def off(way: str) -> float:
        return order.off(order.shares(order.steps_of(lengths, way), lengths, streams), 10, order.STEPS - 20)

    assert off("now") <= off("in order") + 0.05 < off("before")


@pytest.mark.parametrize("kind", order.ROWS)
def test_lengths_over_time_are_those_of_the_rows_in_order(kind: str) -> None:
    """In earlier versions, the first or the last fifth was off by a sixth and more."""
    lengths = order.rows_of(kind, 2000, seed=7)
    now, before = (order.mean_lengths(order.steps_of(lengths, way), lengths, 5) for way in ("now", "before"))
    assert max(abs(now[0]), abs(now[-1])) < 0.1
    assert max(abs(before[0]), abs(before[-1])) > 0.15


def test_the_automatic_window_is_a_few_steps_deep_and_a_power_of_two() -> None:
    windows = [auto_window([samples] * 4) for samples in range(1, 600)]
    assert windows == sorted(windows)
    assert set(windows) == {128, 256, 512, 1024}
    assert all(window >= 4 * samples for samples, window in enumerate(windows, 1) if window < 1024)
    assert all(window < 8 * samples for samples, window in enumerate(windows, 1) if window > 128)


def test_a_sample_in_its_turn_is_not_displaced_and_others_are_by_steps() -> None:
    lengths, steps = np.array([4, 4, 4, 4]), [np.array([0, 3]), np.array([1, 2])]
    assert order.displacement(steps, lengths).tolist() == [0, 1, 0, 1]
