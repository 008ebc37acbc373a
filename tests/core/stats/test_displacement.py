"""How far samples are from their turn: figures by hand, and those of the definition for whatever a packer chooses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.core.form.former import Former
from streampack.core.model.rules import Batch, Rules
from streampack.core.model.samples import I64, SampleTable
from streampack.core.model.steps import PlannedStep
from streampack.core.packers.packer import Choice
from streampack.core.stats.displacement import Displacement, Displacements, displacement_of
from streampack.core.stats.trained_samples import LAST_STEPS

LENGTHS = st.lists(st.integers(1, 32), min_size=1, max_size=200)


def formed(
    lengths: list[int], rules: Rules, figures: Displacements | None = None, table: SampleTable | None = None
) -> tuple[Displacements, list[PlannedStep]]:
    """Form the steps of all samples; each is merged before it is formed."""
    table = table or SampleTable(4)
    figures = figures or Displacements(table)
    handles = table.take(len(lengths))
    table.length[handles] = lengths
    former, steps = Former(rules, table), list[PlannedStep]()
    former.admit(handles, np.array(lengths, np.int64))
    figures.merged(handles, np.array(lengths, np.int64))
    former.closed = True
    while (request := former.request()) is not None:
        new = former.apply(request.choose())
        figures.formed(new)
        steps += new
    last = former.cut()
    figures.formed(last)
    figures.dropped(former.dropped)
    return figures, steps + last


def by_definition(lengths: list[int], steps: list[PlannedStep]) -> list[int]:
    """The displacement of each sample, whose handles are their places in merge order."""
    at, left, moved = np.cumsum([0, *lengths]).tolist(), 0, []
    mean = max(sum(int(step.packs.tokens.sum()) for step in steps) / len(steps), 1.0)
    for step in steps:
        begin, end = left, left + int(step.packs.tokens.sum())
        for handle in step.packs.handles.tolist():
            if at[handle] < begin:
                moved.append(int(np.ceil((begin - at[handle]) / mean)))
            else:
                moved.append(-int(np.ceil(max(at[handle] - end + 1, 0) / mean)))
        left = end
    return moved


@given(LENGTHS, st.sampled_from(["exact_fill", "first_fit_decreasing", "sliding_ffd"]), st.integers(2, 40))
def test_figures_are_those_of_the_definition(lengths: list[int], packer: str, window: int) -> None:
    figures, steps = formed(lengths, Rules(budget=32, packs=2, window=window, packer=packer))
    if len(steps) <= LAST_STEPS:
        assert figures.latest == displacement_of(np.array(by_definition(lengths, steps)))


@given(LENGTHS, st.booleans())
def test_samples_that_leave_in_merge_order_are_in_their_turn(lengths: list[int], batched: bool) -> None:
    """Also behind samples that the end of a pass dropped."""
    more = {"batch": Batch(samples=3)} if batched else {"packer": "concatenative", "packs": 2}
    rules = Rules(budget=32, tail="drop", **more)
    figures, steps = formed(lengths, rules)
    table = figures.table
    _, again = formed(lengths, rules, figures, table)
    assert figures.latest == (Displacement() if steps or again else None)


def test_a_sample_that_others_overtake_is_late_and_they_are_early() -> None:
    table = SampleTable(8)
    handles = table.take(5)
    table.length[handles] = 10
    figures, former = Displacements(table), Former(Rules(budget=10, packs=1, window=5), table)
    tens: I64 = np.full(5, 10)
    former.admit(handles, tens)
    figures.merged(handles, tens)
    assert figures.latest is None
    former.closed = True
    for place in (1, 1, 1, 0, 0):
        request = former.request()
        assert request is not None
        none_seen = np.full(len(request.lengths), -1)
        figures.formed(former.apply(Choice(np.array([place]), np.array([0, 1]), none_seen)))
    assert figures.latest == Displacement(p50=1, p99=3, early=1, late=3)


def test_only_the_last_steps_count() -> None:
    rules = Rules(budget=10, packs=1, window=8, packer="first_fit_decreasing")
    figures, _ = formed([4, 3, 9, 8, 7, 6] * 4, rules)
    before = figures.latest
    assert before is not None
    assert before.late > 0
    in_order = Rules(budget=10, packs=1, packer="concatenative")
    formed([10] * LAST_STEPS, in_order, figures, figures.table)
    assert figures.latest == Displacement()


@pytest.mark.parametrize("steps", [[], [0], [70, -3]])
def test_figures_of_any_number_of_samples_are_given(steps: list[int]) -> None:
    found = displacement_of(np.array(steps, np.int64))
    assert (found.early, found.late) == (max([0, *(-step for step in steps)]), max([0, *steps]))
