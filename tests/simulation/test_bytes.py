"""Messages and the log have the same bytes as before, for the same runs."""

from __future__ import annotations

import json

import pytest

from tests.simulation.recorded_bytes import RECORDED, RUNS, digest

EXPECTED = json.loads(RECORDED.read_text())


@pytest.mark.parametrize("kind", sorted({name.split()[0] for name in RUNS}))
def test_the_same_run_has_the_same_bytes(kind: str) -> None:
    names = [name for name in RUNS if name.startswith(kind)]
    assert {name: digest(name) for name in names} == {name: EXPECTED[name] for name in names}
