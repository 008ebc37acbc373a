"""How every kernel is compiled: by numba, cached on disk where there is a place to write to.

numba looks for one when a function is decorated, and raises where neither the folder of the source nor the user's
cache can be written to: a container with a read-only installation and no home. There kernels are compiled anew by
each process. Importing this module imports numba; who can do without it catches the ImportError.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba


def njit(*types: Any, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """``numba.njit`` of the same arguments, without ``cache`` where nothing can be kept."""

    def compiled(function: Callable[..., Any]) -> Any:
        try:
            return numba.njit(*types, **options)(function)
        except RuntimeError as error:
            if "no locator available" not in str(error):
                raise
            return numba.njit(*types, **{**options, "cache": False})(function)

    return compiled
