"""Check the versions of policies that a program gives, in trainers and in programs that push samples."""

from __future__ import annotations

import operator
from typing import SupportsIndex

from streampack.core.model.bounded import MOST_VERSION
from streampack.errors import UserError


def checked_version(value: SupportsIndex, name: str) -> int:
    """Return a policy version as an int.

    Args:
        value: The value that the program gave as ``name``.
        name: Name of the argument.

    Raises:
        UserError: The value is not an integer from 0 to 2**53.
    """
    try:
        version = operator.index(value)
    except TypeError:
        version = -1
    if not 0 <= version <= MOST_VERSION:
        raise UserError(f"got {name}={value!r}, expected an integer of at least 0 and at most 2**53")
    return version
