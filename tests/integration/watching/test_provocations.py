"""Faults of many kinds, each in a run of its own: everybody is told the same cause, by its name, and none without one.

All runs go on at once, beside a real Prometheus with the alerts, whose times are short.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.running import until
from tests.soak.provocations import CASES, Provocations, broken_promises, provoked


@pytest.fixture(scope="module")
def told() -> Iterator[Provocations]:
    with provoked() as found:
        yield found


NAMES = [case.__name__.replace("_", "-") for case in CASES]


@pytest.mark.parametrize("name", [*NAMES[1:], NAMES[0]])  # the healthy run is looked at last
def test_the_right_cause_is_named_by_status_top_page_metrics_and_alerts(told: Provocations, name: str) -> None:
    wrong: list[str] = []

    def is_told() -> bool:
        wrong[:] = broken_promises(told.runs[name], told)
        return not wrong

    try:
        until(is_told)
    except AssertionError:
        pytest.fail("\n".join(wrong))
