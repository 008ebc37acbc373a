"""A trainer that saves anywhere in a step resumes with exactly the steps that are not in its model."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import streampack
from streampack import Step
from streampack.errors import UserError

MICRO_BATCHES = 3
Pack = Any
Way = Callable[[Any], Iterator[tuple[int, bool]]]
"""A way to read a loader: yields (step, True once the optimizer has made its update), wherever a trainer may save."""


@pytest.fixture(scope="module")
def loader() -> Iterator[Any]:
    rows = [[1 + number % 50] * (5 + number % 7) for number in range(60)]
    with streampack.local(rows, budget=24, packs=MICRO_BATCHES, window=8, format="numpy") as found:
        yield found


@pytest.fixture(scope="module")
def begin(loader: Any) -> dict[str, Any]:
    found: dict[str, Any] = loader.state_dict()
    return found


@pytest.fixture(scope="module")
def steps(loader: Any, begin: dict[str, Any]) -> list[list[Any]]:
    """The samples of each step."""
    return read_on(loader, begin)


def read_on(loader: Any, state: dict[str, Any]) -> list[list[Any]]:
    """The samples of all steps from a state on, micro-batch by micro-batch."""
    loader.load_state_dict(json.loads(json.dumps(state)))
    found: dict[int, list[Any]] = {}
    for pack in loader:
        found.setdefault(pack.step, []).append(pack.sample_ids.tolist())
    assert all(len(packs) == MICRO_BATCHES for packs in found.values()), "a step resumes as a whole"
    return list(found.values())


# Ways to take the micro-batches of a step. Each stops wherever a micro-batch is learned, and the step is not over.


def plainly(step: Step[Pack]) -> Iterator[Pack]:
    yield from step


def with_numbers(step: Step[Pack]) -> Iterator[Pack]:
    for _, pack in enumerate(step):
        yield pack


def until_the_last(step: Step[Pack]) -> Iterator[Pack]:
    """As a loop does that synchronizes gradients with the last one."""
    for pack in step:
        assert (pack is step[-1]) == (pack.micro_batch == MICRO_BATCHES - 1)
        yield pack


def by_index(step: Step[Pack]) -> Iterator[Pack]:
    for number in range(len(step)):
        yield step[number]


def backwards(step: Step[Pack]) -> Iterator[Pack]:
    yield from reversed(step)


def last_apart(step: Step[Pack]) -> Iterator[Pack]:
    for pack in step.packs[:-1]:
        yield pack
        break  # the slice has all the others
    yield step.packs[-1]


def packs_of_it(step: Step[Pack]) -> Iterator[Pack]:
    yield from step.packs


def after_a_look(step: Step[Pack]) -> Iterator[Pack]:
    assert next(iter(step)).step == step.index
    assert step[0].micro_batch == 0
    yield from step


def after_a_pass(step: Step[Pack]) -> Iterator[Pack]:
    """Old log-probs, then the loss."""
    streampack.verify(step)
    forward = step.regroup(48)
    assert sum(pack.num_samples for pack in forward) == len(step.sample_ids) == step.num_samples
    yield from step


def in_epochs(step: Step[Pack]) -> Iterator[Pack]:
    """Two passes, as PPO makes them. A save between the passes is not in this test: nothing tells it from the end."""
    for epoch in range(2):
        for pack in step:
            if (epoch, pack.micro_batch) != (0, MICRO_BATCHES - 1):
                yield pack


def in_pairs(step: Step[Pack]) -> Iterator[Pack]:
    for pack in step:
        for other in step:
            assert other.step == pack.step
        yield pack


def by_iterator(step: Step[Pack]) -> Iterator[Pack]:
    iterator = iter(step)
    for _ in range(len(step)):
        yield next(iterator)


def with_zip(step: Step[Pack]) -> Iterator[Pack]:
    for _, pack in zip(range(len(step)), step, strict=True):
        yield pack


def at_once(step: Step[Pack]) -> Iterator[Pack]:
    list(step)
    yield from ()


STYLES = [
    plainly, with_numbers, until_the_last, by_index, backwards, last_apart, packs_of_it, after_a_look, after_a_pass,
    in_epochs, in_pairs, by_iterator, with_zip, at_once,
]  # fmt: skip


def steps_in(style: Callable[[Step[Pack]], Iterator[Pack]]) -> Way:
    def way(loader: Any) -> Iterator[tuple[int, bool]]:
        for step in loader.steps():
            yield step.index, False
            last = 0 if style is backwards else MICRO_BATCHES - 1
            for pack in style(step):
                if pack.micro_batch != last:
                    yield step.index, False
            yield step.index, True

    return way


def packs_in(wrap: Callable[[Any], Any]) -> Way:
    def way(loader: Any) -> Iterator[tuple[int, bool]]:
        for pack in wrap(loader):
            yield pack.step, pack.micro_batch == MICRO_BATCHES - 1

    return way


def next_of(loader: Any) -> Iterator[Pack]:
    while (pack := next(loader, None)) is not None:
        yield pack


def torch_loader(loader: Any) -> Any:
    return DataLoader(loader, batch_size=None, collate_fn=lambda pack: pack)


WAYS = {f"steps {style.__name__}": steps_in(style) for style in STYLES} | {
    f"packs {wrap.__name__}": packs_in(wrap) for wrap in (iter, next_of, torch_loader)
}


@pytest.mark.parametrize("way", WAYS)
def test_a_save_anywhere_resumes_with_exactly_the_steps_that_were_not_learned(
    loader: Any, begin: dict[str, Any], steps: list[list[Any]], way: str
) -> None:
    """Every place of the first steps where a trainer may save."""
    loader.load_state_dict(begin)
    saved = []
    for index, updated in WAYS[way](loader):
        saved.append((index + updated, loader.state_dict()))
        if index == 3:
            break
    assert {learned for learned, _ in saved} >= {1, 2, 3}
    assert [state["next_step"] for _, state in saved] == [learned for learned, _ in saved]
    for learned, state in saved[:: max(len(saved) // 4, 1)]:
        assert read_on(loader, state) == steps[learned:]


@given(data=st.data())
def test_a_trainer_that_changes_its_ways_and_resumes_again_and_again_learns_each_step_once(
    loader: Any, begin: dict[str, Any], steps: list[list[Any]], data: st.DataObject
) -> None:
    """It saves and is killed at random; the model goes back to what it was at the save."""
    learned: list[int] = []
    state: dict[str, Any] = begin
    kept = list(learned)
    for _ in range(data.draw(st.integers(1, 6), label="lives")):
        loader.load_state_dict(json.loads(json.dumps(state)))
        learned = list(kept)
        way = data.draw(st.sampled_from(sorted(WAYS)), label="way")
        places = data.draw(st.integers(1, 12), label="places before the kill")
        for (index, updated), _ in zip(WAYS[way](loader), range(places), strict=False):
            learned += [index] if updated else []
            if data.draw(st.booleans(), label="save"):
                state, kept = loader.state_dict(), list(learned)
    assert kept == [*range(len(kept))]
    assert read_on(loader, state) == steps[len(kept) :]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torch's, of torchdata 0.11.0
@pytest.mark.parametrize("count", range(1, 2 * MICRO_BATCHES + 1))
def test_a_stateful_dataloader_saves_by_the_same_rule(begin: dict[str, Any], count: int) -> None:
    rows = [[1 + number % 50] * (5 + number % 7) for number in range(60)]
    settings: dict[str, Any] = {"budget": 24, "packs": MICRO_BATCHES, "window": 8, "format": "numpy"}
    with streampack.local(rows, **settings) as one:
        batches = StatefulDataLoader(one, batch_size=None)
        taken: Any = iter(batches)
        for _ in range(count):
            next(taken)
        state = batches.state_dict()
    with streampack.local(rows, **settings) as other:
        batches = StatefulDataLoader(other, batch_size=None)
        batches.load_state_dict(state)
        rest: Any = iter(batches)
        first = next(rest)
    assert (first["step"], first["micro_batch"]) == (count // MICRO_BATCHES, 0)


def test_a_step_in_whose_middle_the_trainer_is_has_no_checkpoint_after_it(loader: Any, begin: dict[str, Any]) -> None:
    for way in (lambda: loader, lambda: next(loader.steps())):
        loader.load_state_dict(begin)
        iterator = iter(way())  # type: ignore[no-untyped-call]
        next(iterator)
        for call in (loader.state_dict, loader.commit):
            with pytest.raises(UserError, match=r"got step=0, expected .* The trainer is in the middle of step 0"):
                call(0)
        assert loader.state_dict()["next_step"] == 0
        for _ in range(MICRO_BATCHES - 1):
            next(iterator)
        assert loader.state_dict() == loader.state_dict(0)
        loader.commit(0)


def test_a_step_that_others_train_is_named(loader: Any, begin: dict[str, Any]) -> None:
    loader.load_state_dict(begin)
    step = next(loader.steps())
    assert loader.state_dict()["next_step"] == 0
    assert loader.state_dict(step.index)["next_step"] == 1
    loader.commit(step.index)


def test_a_step_fetched_by_a_loop_that_is_over_comes_again(loader: Any, begin: dict[str, Any]) -> None:
    """Where the steps come first in a zip, one more of them is asked for."""
    loader.load_state_dict(begin)
    learned = []
    for step, _ in zip(loader.steps(), range(2), strict=False):
        learned += [pack.step for pack in step]
    assert learned == [0] * MICRO_BATCHES + [1] * MICRO_BATCHES
    assert loader.state_dict()["next_step"] == 2


def test_a_step_that_is_left_early_is_used_once_the_next_is_asked_for(loader: Any, begin: dict[str, Any]) -> None:
    loader.load_state_dict(begin)
    steps = loader.steps()
    for _ in next(steps):
        break
    assert loader.state_dict()["next_step"] == 0
    next(steps)
    assert loader.state_dict()["next_step"] == 1


def test_the_packs_of_a_step_are_the_sequence_that_they_were(loader: Any, begin: dict[str, Any]) -> None:
    loader.load_state_dict(begin)
    step = next(loader.steps())
    assert repr(step.packs) == f"<{MICRO_BATCHES} packs>"
    assert tuple(step.packs) == step.packs[:] == step.packs
    assert [pack.micro_batch for pack in pickle.loads(pickle.dumps(step.packs))] == [*range(MICRO_BATCHES)]
    assert step.packs == step.packs
    assert step.packs.index(step[1]) == 1
