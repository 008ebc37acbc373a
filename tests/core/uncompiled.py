"""Kernels as a machine without numba has them."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from unittest import mock

PACKERS = "streampack.core.packers"
KERNELS = (
    "streampack.core.jit",
    *(f"{PACKERS}.{name}" for name in ("kernels", "exact_fill_cases", "exact_fill_kernel", "joint_kernel")),
)


def uncompiled(name: str) -> ModuleType:
    """Another copy of a kernels' module of the packers, imported with numba blocked."""
    importlib.import_module(f"{PACKERS}.{name}")
    package = sys.modules[PACKERS]
    attributes = dict(vars(package))
    with mock.patch.dict(sys.modules, {"numba": None}):
        for each in KERNELS:
            sys.modules.pop(each, None)
        found = importlib.import_module(f"{PACKERS}.{name}")
    vars(package).update(attributes)  # the import has put the copies there
    sys.modules["streampack.core"].jit = sys.modules["streampack.core.jit"]  # type: ignore[attr-defined]
    return found
