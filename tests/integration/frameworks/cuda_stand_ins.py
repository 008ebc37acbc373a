"""Stand-ins for calls of CUDA, for frameworks whose training loops ask for a GPU."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class OnProcessor(TorchFunctionMode):
    """Create on the CPU every tensor that the code asks for on a GPU, and keep float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.float and args[0].dtype == torch.float64:
            return args[0].clone()  # what follows writes into it
        if func is torch.Tensor.type and len(args) == 1:
            return "torch.cuda.FloatTensor"
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        args = tuple("cpu" if isinstance(each, str) and each.startswith("cuda") else each for each in args)
        return func(*args, **kwargs)


class Waiting:
    """An event or a stream, for which nothing waits."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def nothing(self, *_: Any) -> None:
        """Return at once."""

    record = wait = synchronize = wait_stream = wait_event = record_event = nothing

    def query(self) -> bool:
        return True


def replace_cuda_calls() -> None:
    """Put the stand-ins for functions of ``torch.cuda`` in place."""
    properties = SimpleNamespace(major=9, minor=0, name="a processor", multi_processor_count=1, total_memory=1 << 30)
    stream = Waiting()
    nothing: dict[str, Any] = {
        "is_available": True, "current_device": "cpu", "synchronize": None, "memory_allocated": 0, "empty_cache": None,
        "max_memory_allocated": 0, "memory_reserved": 0, "max_memory_reserved": 0, "reset_peak_memory_stats": None,
        "current_stream": stream, "default_stream": stream, "set_device": None, "get_device_properties": properties,
        "get_device_capability": (9, 0), "device_count": 1, "memory_stats": {}, "_lazy_init": None,
    }  # fmt: skip
    for name, value in nothing.items():
        setattr(torch.cuda, name, lambda *_, value=value, **__: value)
    torch.cuda.Event = torch.cuda.Stream = Waiting  # type: ignore[assignment, misc]
    torch.cuda.get_rng_state = lambda *_: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda state, *_: torch.set_rng_state(state)
    torch.cuda.manual_seed = torch.manual_seed  # type: ignore[assignment]
    torch.cuda.stream = lambda *_: nullcontext()  # type: ignore[assignment]
