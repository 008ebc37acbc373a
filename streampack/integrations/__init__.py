"""Integrations: how trainers' frameworks take a loader. A module is imported when it is asked for.

- ``hf``: the Trainer of transformers, and TRL. ``hf_checks``: settings that it refuses. ``hf_isolation``: whether a
  model keeps the samples of a pack apart.
- ``lightning``: Lightning's Trainer.
- ``megatron``: Megatron-LM.
- ``torchtitan``: torchtitan.

Each is thin. It translates what a framework calls to what a loader has (``steps``, ``state_dict``, ``commit``), and
refuses what the framework would do wrong with packs, with a line that says what to set instead.
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
