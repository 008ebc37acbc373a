"""A source that gives other data the second time: the run stops, and says which sample it was."""

from __future__ import annotations

import pytest

from streampack.core.admission import Admission
from tests.simulation.data import Case
from tests.simulation.world import World

SEEDS = (4, 7, 12, 14)
"""Of runs with a log and samples in their window when the broker is killed."""


def _run_on_a_source_that_changes(seed: int, patch: pytest.MonkeyPatch) -> None:
    """A broker is killed once a snapshot is safe and all before it is returned; then every token is another."""
    world = World(seed)
    assert world.disk is not None
    while True:
        world.clock.step()
        feed = world.broker.core.feeds["train"]
        if 0 < feed.history.last_snapshot <= feed.readers.released_upto:
            break
    original = Case.tokens
    patch.setattr(Case, "tokens", lambda self, *sample: original(self, *sample) + 1)
    world.faults.kill_broker()
    world.run()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_source_that_gives_other_data_the_second_time_stops_the_run_and_is_named(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(AssertionError, match=r"sample s\d:\d+: got \d+ tokens with checksum .* as the first time"):
        _run_on_a_source_that_changes(seed, monkeypatch)


@pytest.mark.parametrize("seed", SEEDS)
def test_without_the_comparison_no_sample_could_be_named(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Admission, "_changed", lambda self, *more: "")
    with pytest.raises(AssertionError, match="came out otherwise"):
        _run_on_a_source_that_changes(seed, monkeypatch)
