"""Seeds of simulated runs, in ranges that are one test each."""

from __future__ import annotations

import os

import pytest


def of_seeds(default: str, chunk: int, variable: str = "SIM_SEEDS") -> pytest.MarkDecorator:
    """Give a test ``seeds``, ranges of ``chunk`` seeds. The variable says how many or which: ``2000``, ``17:18``."""
    first, _, stop = os.environ.get(variable, default).rpartition(":")
    begin, end = int(first or 0), int(stop)
    ranges = [range(at, min(at + chunk, end)) for at in range(begin, end, chunk)]
    return pytest.mark.parametrize("seeds", ranges, ids=lambda seeds: f"{seeds.start}-{seeds.stop - 1}")
