"""Prefetched steps change under one lock alone, and none is lost before the trainer takes it."""

from __future__ import annotations

from collections import deque
from threading import Condition
from typing import Any

import streampack
from tests.integration.running import until


class Guarded(deque[Any]):
    """A queue that notes each change made without the lock of ``changed``."""

    def __init__(self, changed: Condition, unguarded: list[str]) -> None:
        super().__init__()
        self._changed, self._unguarded = changed, unguarded

    def _note(self, what: str) -> None:
        if not self._changed._is_owned():  # type: ignore[attr-defined]
            self._unguarded.append(what)

    def append(self, value: Any) -> None:
        self._note("append")
        super().append(value)

    def popleft(self) -> Any:
        self._note("popleft")
        return super().popleft()

    def clear(self) -> None:
        self._note("clear")
        super().clear()


def test_steps_and_answers_are_taken_under_the_lock_that_guards_them() -> None:
    with streampack.local([[1, 2, 3]] * 40, budget=16, format="numpy") as loader:
        prefetching = loader._reading._prefetching
        unguarded: list[str] = []
        prefetching.ready = Guarded(prefetching._changed, unguarded)
        prefetching.answers = Guarded(prefetching._changed, unguarded)
        steps = [step.index for step in loader.steps()]
        state = loader.state_dict()
        loader.commit(steps[-1])
        loader.load_state_dict(state)
    assert steps == [*range(8)]
    assert unguarded == []


def test_iterating_twice_loses_no_step_even_if_the_rest_of_the_feed_was_prefetched() -> None:
    """Lightning asks for an iterator twice before it takes the first step."""
    with streampack.local([[1, 2, 3]] * 40, budget=16, format="numpy") as loader:
        assert [step.index for step in loader.steps()] == [*range(8)]
        loader.load_state_dict(loader.state_dict(5))
        loader.steps()
        until(lambda: loader._reading._prefetching.ended)
        assert [step.index for step in loader.steps()] == [6, 7]
        loader.load_state_dict(loader.state_dict())
        loader.steps()
        until(lambda: loader._reading._prefetching.ended)
        assert [*loader.steps()] == [], "nobody was given the end of this iteration"
        assert [step.index for step in loader.steps()] == [*range(8)]
