"""What a check of a batch says when it fails: the invariant, where, what was got and what was expected."""

from __future__ import annotations

from typing import Any

import numpy as np

from streampack.errors import InvariantError


def equal(name: str, what: str, got: Any, expected: Any) -> None:
    """Raises InvariantError where ``got``, a value or an array, is another than ``expected``."""
    same = np.array_equal(got, expected) if isinstance(expected, np.ndarray) else got == expected
    if not same:
        shown = [value.tolist() if isinstance(value, np.ndarray) else value for value in (got, expected)]
        raise InvariantError(f"{name}: {what}: got {shown[0]}, expected {shown[1]}")


def expect(holds: bool, name: str, message: str) -> None:
    """Raises InvariantError with ``message`` unless it ``holds``."""
    if not holds:
        raise InvariantError(f"{name}: {message}")
