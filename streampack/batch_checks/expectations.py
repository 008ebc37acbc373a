"""Raises errors of failed checks: the invariant, the place, the value found and the value expected."""

from __future__ import annotations

from typing import Any

import numpy as np

from streampack.errors import InvariantError


def equal(name: str, subject: str, got: Any, expected: Any) -> None:
    """Raise InvariantError unless ``got`` equals ``expected``; both are values or arrays.

    ``name``: the invariant. ``subject``: the place, such as a step and pack.
    """
    same = np.array_equal(got, expected) if isinstance(expected, np.ndarray) else got == expected
    if not same:
        shown = [value.tolist() if isinstance(value, np.ndarray) else value for value in (got, expected)]
        raise InvariantError(f"{name}: {subject}: got {shown[0]}, expected {shown[1]}")


def expect_once(ids: Any, subject: str) -> None:
    """Raise InvariantError if a sample occurs twice in ``ids``, int64 [n, 3]. ``subject``: the place."""
    samples, counts = np.unique(ids, axis=0, return_counts=True)
    twice = tuple(samples[counts.argmax()].tolist()) if len(samples) else ()
    expect(bool((counts == 1).all()), "sample_ids", f"{subject}: got sample {twice} more than once")


def expect(holds: bool, name: str, message: str) -> None:
    """Raise InvariantError with ``message`` unless ``holds`` is True. ``name``: the invariant."""
    if not holds:
        raise InvariantError(f"{name}: {message}")
