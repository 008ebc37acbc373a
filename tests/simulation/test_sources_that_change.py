"""A source that gives other data the second time: the run stops, and says which sample it was."""

from __future__ import annotations

import pytest

from streampack.core.intake import chunk_check
from tests.simulation.data import Case
from tests.simulation.world import World

SEEDS = (2, 4, 14, 18)
"""Of runs with a log and samples in their window when the broker is killed; they go back to no snapshot before."""

BY_THEN_S = 60.0
"""Virtual seconds, by which such a run has come to that place."""


def _run_on_a_source_that_changes(seed: int, patch: pytest.MonkeyPatch) -> None:
    """A broker is killed once the log has it that all before a snapshot is returned; then every token is another."""
    world = World(seed)
    assert world.disk is not None
    snapshot = step = 0
    while True:
        world.clock.step()
        assert world.clock.now < BY_THEN_S, "this seed's run never comes to such a place: take another"
        core = world.broker.core
        history, readers = core.feeds["train"].history, core.feeds["train"].readers
        if step and snapshot == history.last_snapshot and 0 <= history.lsn_of(step) < core.journal.safe_upto:
            break
        if snapshot != history.last_snapshot:
            snapshot = step = 0
        if not step and 0 < history.last_snapshot <= readers.steps.released_upto:
            snapshot, step = history.last_snapshot, history.num_steps  # it says with this step what was returned
    original = Case.tokens
    patch.setattr(Case, "tokens", lambda self, *sample: original(self, *sample) + 1)
    world.faults.kill_broker()
    world.run()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_source_that_gives_other_data_the_second_time_stops_the_run_and_is_named(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(AssertionError, match=r"sample s\d:\d+: got \d+ tokens with checksum .* as in the first read"):
        _run_on_a_source_that_changes(seed, monkeypatch)


@pytest.mark.parametrize("seed", SEEDS)
def test_without_the_comparison_no_sample_could_be_named(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_check, "_changed", lambda *_: "")
    with pytest.raises(AssertionError, match="differs from the recorded step"):
        _run_on_a_source_that_changes(seed, monkeypatch)
