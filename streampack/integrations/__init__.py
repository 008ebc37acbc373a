"""Integrations: adapters that let the trainers of frameworks read from a loader.

- ``automodel``: the recipes of NeMo AutoModel.
- ``hf``: transformers' Trainer and TRL's SFTTrainer.
- ``jax``: JAX, in your own loop.
- ``lightning``: Lightning's Trainer.
- ``megatron``: Megatron-LM and Megatron-Bridge, a folder.
- ``nemo_rl``: the policy workers of NeMo-RL.
- ``roll``: ROLL.
- ``torchtitan``: torchtitan.
- ``trl``: AsyncGRPO of TRL.
- ``trl_grpo``: GRPOTrainer of TRL.
- ``veomni``: VeOmni's text trainer.
- ``verl``: verl.

Each adapter translates a framework's calls to those of a loader: ``steps``, ``state_dict``, ``commit``. Settings with
which a framework would train on other data, or with another loss, are rejected; the error says what to set instead. A
module is imported on first use, since each needs its framework.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

__all__: list[str] = []


def __getattr__(name: str) -> ModuleType:
    """Import a module of this folder on first use, as in ``streampack.integrations.hf``."""
    if name.startswith("_") or find_spec(f"{__name__}.{name}") is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.{name}")
