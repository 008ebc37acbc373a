"""Times of steps: those that all ranks returned one by one, without a wait for samples."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from streampack_services.broker.serving.step_times import StepTimer
from streampack_services.ledger.run_hours import MOST_TIMES, StepTimes

from streampack.core.model.mesh import DynamicCp, Mesh


def feed(returned: int, formed: int, layout: str = "zigzag") -> Any:
    """Return the values of a feed that the timer reads; all ranks are there."""
    steps = SimpleNamespace(released_upto=returned, formed_upto=formed, joined=True)
    registry = SimpleNamespace(held={0: SimpleNamespace(mesh=Mesh(dp=4, pp=2))})
    readers, plan = SimpleNamespace(steps=steps, registry=registry), SimpleNamespace(layout=layout)
    return SimpleNamespace(name="train", readers=readers, plan=plan)


def test_a_step_is_timed_if_the_next_was_formed_and_it_was_returned_alone() -> None:
    timer = StepTimer()
    seen = [(0.0, 0, 0), (1.0, 1, 3), (3.0, 2, 4), (3.5, 2, 4), (4.0, 4, 5), (9.0, 5, 5), (20.0, 6, 9)]
    for now, returned, formed in seen:
        timer.look(now, [feed(returned, formed)])
    # Step 0 waited for samples, steps 2 and 3 came back in one turn, and step 5 was not formed when step 4 came back.
    assert timer.times == {"train": StepTimes(dp=4, pp=2, seconds={1: 2.0, 4: 5.0})}


def test_steps_of_groups_of_ranks_are_not_timed_because_the_fit_deals_packs() -> None:
    timer, layout = StepTimer(), DynamicCp(rank_tokens=64, max_group=8).layout
    for now in range(6):
        timer.look(float(now), [feed(now, now + 2, layout)])
    assert timer.times == {}


def test_times_of_another_mesh_and_of_steps_that_are_read_again_are_dropped() -> None:
    old = StepTimes(dp=4, pp=1, seconds=dict.fromkeys(range(10), 1.0))
    assert old.plus(StepTimes()) == old
    assert old.plus(StepTimes(dp=8, pp=1, seconds={3: 2.0})).seconds == {3: 2.0}
    assert old.plus(StepTimes(dp=4, pp=1, seconds={3: 2.0})).seconds == {0: 1.0, 1: 1.0, 2: 1.0, 3: 2.0}
    many = StepTimes(dp=4, pp=1, seconds=dict.fromkeys(range(10, 10 + MOST_TIMES), 1.0))
    assert len(old.plus(many).seconds) == MOST_TIMES
