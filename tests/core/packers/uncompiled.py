"""Kernels as a machine without numba has them."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from unittest import mock

KERNELS = (
    "streampack.core.jit",
    "streampack.core.packers.packer_kernels",
    "streampack.core.packers.exact_fill.exact_fill_cases",
    "streampack.core.packers.exact_fill.exact_fill_kernels",
    "streampack.core.packers.joint.joint_kernels",
)


def uncompiled(name: str) -> ModuleType:
    """Return another copy of a module of the packers' kernels, which stay plain."""
    compiled = {each: importlib.import_module(each) for each in KERNELS}
    with mock.patch.dict(sys.modules):
        for each in KERNELS:
            del sys.modules[each]
        found = importlib.import_module(name)
        for each in KERNELS:
            for value in vars(importlib.import_module(each)).values():
                if hasattr(value, "stay_plain") and not isinstance(value, type):
                    value.stay_plain()
    for each, module in compiled.items():  # the import has put the copies into the packages
        package, _, last = each.rpartition(".")
        setattr(sys.modules[package], last, module)
    return found
