"""How trainers' frameworks take a loader: one module a framework, which is imported when it is asked for.

Each is thin: what a framework calls is translated to what a loader has (``steps``, ``state_dict``, ``commit``), and
what it would do wrong with packs is refused with a line that says what to set instead.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

__all__: list[str] = []


def __getattr__(name: str) -> ModuleType:
    """``streampack.integrations.hf`` and the others, with no import of their own."""
    if name.startswith("_") or find_spec(f"{__name__}.{name}") is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.{name}")
