"""Megatron-Bridge on a processor without a GPU: import this module before it.

Bridge's loop, configuration, checkpoints, optimizer and model are its own. Stand-ins: calls of CUDA, TransformerEngine
and other packages that are not installed, a version of nvidia-resiliency-ext that pip does not have, and attention,
which computes one sample after another.
"""

from __future__ import annotations

import os
import queue
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from tests.integration.frameworks.cuda_stand_ins import replace_cuda_calls

ABSENT = ("transformer_engine", "megatron.energon")
BEFORE = (
    "transformers", "accelerate", "peft", "modelopt.torch.distill", "modelopt.torch.quantization",
    "megatron.core.extensions.transformer_engine", "megatron.core.models.gpt", "megatron.core.optimizer",
    "megatron.core.distributed", "megatron.core.transformer.moe.moe_layer", "megatron.core.dist_checkpointing",
)  # fmt: skip
"""Modules that do without TransformerEngine if they are imported before its stand-in."""


class Nameless(type):
    """A class whose every name is another such class."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(cls, name, Nameless(name, (), {}))
        return cls.__dict__[name]


class AbsentPackage(ModuleType):
    """A module whose every name is an empty class."""

    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, Nameless(name, (), {}))
        return self.__dict__[name]


class Absent(MetaPathFinder, Loader):
    """Finds packages that are not installed."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        missing = any(name == package or name.startswith(f"{package}.") for package in ABSENT)
        return ModuleSpec(name, self, is_package=True) if missing else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return AbsentPackage(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


def import_bridge() -> None:
    """Import Bridge, and all that its loop imports."""
    warnings.simplefilter("ignore")
    resiliency: Any = import_module("nvidia_resiliency_ext")
    resiliency.__version__ = "0.6.0"
    for name in BEFORE:
        import_module(name)
    sys.meta_path.append(Absent())
    import_module("megatron.bridge.training.finetune")
    import_module("megatron.bridge.training.gpt_step")
    sys.path.insert(0, str(Path(__file__).parents[4] / "examples"))
    import_module("megatron_without_gpu")  # creates tensors on the CPU from here on


def replace_cuda() -> None:
    """Put the stand-ins for calls of CUDA in place, in the process of a rank."""
    replace_cuda_calls()
    optimizer: Any = torch.optim.Optimizer
    optimizer._accelerator_graph_capture_health_check = lambda *_: None
    for module, names in (
        ("megatron.core.tensor_parallel.random", {
            "_get_cuda_rng_state": lambda *_, **__: torch.get_rng_state(),
            "_set_cuda_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
        }),
        ("megatron.bridge.training.initialize", {"compile_helpers": lambda: None}),  # for datasets that are not built
        ("megatron.core.dist_checkpointing.strategies.filesystem_async", {
            "_results_queue": queue.Queue(),  # of a process that is spawned, and outlives a kill
        }),
    ):  # fmt: skip
        for name, value in names.items():
            setattr(import_module(module), name, value)


os.environ |= {"TORCH_COMPILE_DISABLE": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
