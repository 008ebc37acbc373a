"""How every kernel is compiled: by numba, cached on disk where there is a place to write to.

numba looks for one when a function is decorated, and raises where neither the folder of the source nor the user's
cache can be written to: a container with a read-only installation and no home. There kernels are compiled anew by
each process.

Where numba is missing, ``njit`` returns the function unchanged, so a kernel runs as plain Python: a trainer's machine
packs and plans without numba. A kernel that would be too slow so has a numpy form, which ``COMPILES`` chooses.
Importing this module imports numba, which takes most of a second.
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
"""Whether ``njit`` compiles: False without numba, and where NUMBA_DISABLE_JIT is set."""


def njit(*types: Any, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """``numba.njit`` of the same arguments, without ``cache`` where nothing can be kept; nothing without numba."""

    def compiled(function: Callable[..., Any]) -> Any:
        if numba is None:
            return function
        try:
            return numba.njit(*types, **options)(function)
        except RuntimeError as error:
            if "no locator available" not in str(error):
                raise
            return numba.njit(*types, **{**options, "cache": False})(function)

    return compiled
