"""Compiles kernels with numba, cached on disk if possible.

When a function is decorated, numba looks for a cache folder. It raises an error if it can write neither to the folder
of the source nor to the user's cache. That happens in a container with a read-only installation and no home. Then each
process compiles the kernels again.

Without numba, ``njit`` returns the function unchanged, and a kernel runs as plain Python, so that a trainer's machine
does not need numba. A kernel that is too slow in Python also has a numpy form, which ``COMPILES`` chooses. Importing
this module imports numba, which takes most of a second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

try:
    import numba as _installed

    numba: Any = _installed
except ImportError:
    numba = None

COMPILES = numba is not None and not numba.config.DISABLE_JIT
"""True if ``njit`` compiles: numba is installed, and NUMBA_DISABLE_JIT is not set."""


def njit(*types: Any, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Return ``numba.njit`` with these arguments, without ``cache`` if there is no folder for it.

    Without numba, return a decorator that leaves the function unchanged.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        """Return the compiled function, or the function itself without numba."""
        if numba is None:
            return function
        try:
            return numba.njit(*types, **options)(function)
        except RuntimeError as error:
            if "no locator available" not in str(error):
                raise
            return numba.njit(*types, **{**options, "cache": False})(function)

    return decorate
