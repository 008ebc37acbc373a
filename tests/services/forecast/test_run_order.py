"""The order of a run's samples from its log: what the broker has counted, for whatever was merged and chosen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from streampack_services.forecast.run_order import RunOrder
from streampack_services.plan.savings import _show_order
from streampack_services.terminal import new_console

from streampack.core.journal.log_records import Record
from streampack.core.model.rule_changes import Reweigh
from streampack.core.model.rules import Batch, Rules, StreamRules
from streampack.core.model.steps import PlannedStep
from streampack.core.stats.displacement import Displacement, Displacements
from tests.services.recorded import FEED, TWO_STREAMS, Run, ledger_of
from tests.world.live import Live

IN_TURN = Displacement()._asdict()


class CountedRun(Run):
    """A run that counts displacement as a broker does."""

    def _start(self) -> None:
        super()._start()
        self.figures = Displacements(self.table)

    def _form(self) -> None:
        taken = self.merge.take(1 << 40)
        self.figures.merged(taken.handles, taken.lengths)
        self.former.admit(taken.handles, taken.lengths)
        super()._form()

    def _write(self, steps: list[PlannedStep]) -> None:
        self.figures.formed(steps)
        super()._write(steps)


def rows_of(records: list[Record], feed: str = FEED) -> list[dict[str, Any]]:
    with ledger_of(records) as ledger:
        of = ledger.history.feeds[feed]
        order = RunOrder(of)
        for step in ledger.steps(feed):
            if of.effective(step.step) == step.lineage:
                order.add(step)
        return order.rows()


def counted_run(rules: Rules, seed: int = 4, samples: int = 200) -> CountedRun:
    rng = np.random.default_rng(seed)
    run = CountedRun(rules, [rng.integers(0, 300, samples).tolist() for _ in range(4)])
    run.finish()
    return run


@pytest.mark.parametrize("packer", ["exact_fill", "first_fit_decreasing", "concatenative"])
@pytest.mark.parametrize("unit", ["tokens", "samples"])
def test_the_log_has_the_displacement_that_the_broker_counts(packer: str, unit: str) -> None:
    run = counted_run(replace(TWO_STREAMS, packer=packer, weight_unit=unit))
    moved = [row["displacement"] for row in rows_of(run.records)]
    latest = run.figures.latest
    assert latest is not None
    assert (latest.late > 0) == (packer != "concatenative")
    assert (max(each["early"] for each in moved), max(each["late"] for each in moved)) == (latest.early, latest.late)
    assert min(each["p99"] for each in moved) <= latest.p99 <= max(each["p99"] for each in moved)


def test_shares_and_lengths_change_over_the_steps() -> None:
    """The weight of a stream that has ended goes to the other."""
    rows = rows_of(counted_run(TWO_STREAMS).records)
    assert [row["steps"][0] for row in rows[1:]] == [row["steps"][1] + 1 for row in rows[:-1]]
    assert [row["streams"]["web"]["weight_share"] for row in rows] == pytest.approx([0.7] * len(rows))
    assert abs(rows[0]["streams"]["web"]["share"] - 0.7) < 0.1
    assert rows[-1]["streams"]["code"]["share"] == 0.0


def test_a_change_of_weights_moves_no_sample_from_its_turn() -> None:
    data = {"web": [[30, 28, 31, 29] * 12, [32, 27, 30] * 12], "code": [[2, 1, 3, 2, 4] * 60]}
    streams = StreamRules("web", 0.3, 2), StreamRules("code", 0.7, 1)
    live = Live(Rules(budget=32, packs=2, window=6, seed=3, packer="concatenative", streams=streams), data)
    live.read(3)
    live.ask(Reweigh({"code": 0.1}))
    live.until(lambda: live.feed.steps.released_upto == live.ended)
    rows = rows_of(live.records(), "train")
    assert [row["displacement"] for row in rows] == [IN_TURN] * len(rows)
    first, last = rows[0]["streams"]["code"], rows[-1]["streams"]["code"]
    assert (first["weight_share"], last["weight_share"]) == (pytest.approx((3 * 0.7 + 4 * 0.25) / 7), 0.25)


def test_displacement_is_not_known_for_arrival_and_zero_for_batches() -> None:
    records = counted_run(replace(TWO_STREAMS, merge="arrival"), samples=40).records
    row = rows_of(records)[0]
    assert row["displacement"] is None
    assert row["streams"]["web"]["weight_share"] is None
    batched = replace(TWO_STREAMS, batch=Batch(samples=8))
    assert rows_of(counted_run(batched, samples=40).records)[0]["displacement"] == IN_TURN


def test_the_table_names_streams_that_are_far_from_their_weights(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    shares = {f"s{n}": {"share": 0.1 + n / 100, "weight_share": 0.1} for n in range(8)}
    row = {"steps": [0, 9], "mean_length": 512.4, "displacement": None, "streams": shares}
    _show_order(new_console(), [row, row | {"displacement": {"p50": 0, "p99": 3, "early": 2, "late": 12}}])
    shown = capsys.readouterr().out
    assert "s7" in shown
    assert "17.0% of 10.0%" in shown
    assert "s1 " not in shown
    assert "2 more streams are nearer to their weights" in shown
