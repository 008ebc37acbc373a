"""Take a rule out of the real code, and expect some seed to fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from streampack.core.protocol.handlers import Handlers

MAX_SEEDS = 150
Patch = pytest.MonkeyPatch


def expect_failure(mutant: str, first: int, run_seed: Callable[[int], Any], seeds: int = MAX_SEEDS) -> None:
    """Fail the test unless one of ``seeds`` seeds, from seed ``first`` on, fails with the mutant."""
    for seed in range(first, first + seeds):
        try:
            run_seed(seed)
        except AssertionError as error:
            if isinstance(error.__cause__, TypeError | AttributeError | NameError):
                raise  # the mutant does not fit the code any more, so it says nothing about the rule
            print(f"{mutant}: seed {seed}: {str(error)[:160]}")
            return
    pytest.fail(f"{seeds} seeds passed without the rule")


def wrap(patch: Patch, kind: type, name: str, around: Callable[..., Any]) -> None:
    """Replace a method by ``around(original, self, *args)``."""
    original = getattr(kind, name)

    def replaced(self: Any, *args: Any, **more: Any) -> Any:
        return around(original, self, *args, **more)

    patch.setattr(kind, name, replaced)
    for table in [each for base in kind.__mro__ for each in vars(base).values() if isinstance(each, Handlers)]:
        for handled in [handled for handled, method in table.items() if method is original]:
            patch.setitem(table, handled, replaced)


def registry(mutants: list[Any]) -> Callable[..., Callable[[Callable[[Patch], None]], Callable[[Patch], None]]]:
    """Return a decorator that adds a mutant to a list. The search begins at seed ``first``, one that showed it."""

    def mutant(first: int = 0) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
        def register(patch: Callable[[Patch], None]) -> Callable[[Patch], None]:
            mutants.append(pytest.param(patch, first, id=patch.__name__))
            return patch

        return register

    return mutant
