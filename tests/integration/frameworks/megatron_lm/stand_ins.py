"""Megatron-LM on a processor without a GPU: import this module before Megatron.

``pretrain``, its arguments, its schedules, DDP, the optimizer, checkpoints and the model are Megatron's. Stand-ins:
calls of CUDA, triton, a name of Python 3.12, and attention, since Megatron's own rejects context parallelism without
TransformerEngine. Numbers stay float64. Weights depend on their names alone, so that all meshes have the same ones.
"""

from __future__ import annotations

import itertools
import os
import sys
import typing
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock
from zlib import crc32

os.environ |= {"NO_VCS_VERSION": "1", "TORCH_COMPILE_DISABLE": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
import torch
import torch._dynamo
import torch._inductor.compile_fx
import torch._inductor.runtime.triton_heuristics
import torch.distributed as dist
import torch.utils.flop_counter
import typing_extensions
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from streampack.core.layout.shards import shard_slices


class Absent(MetaPathFinder, Loader):
    """Triton, in place of which an object stands that takes any call."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == "triton" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module: Any = MagicMock(name=spec.name)
        module.__path__, module.__spec__, module.__name__, module.__version__ = [], spec, spec.name, "0"
        stands_in: ModuleType = module
        return stands_in

    def exec_module(self, module: ModuleType) -> None:
        pass


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


class Gathered(torch.autograd.Function):
    """The parts of all context-parallel ranks, [ranks, T / ranks, heads, D]; the gradient of this rank's part."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        grad = grads[0].contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad[ctx.group.rank()], None


class AttentionBySample(torch.nn.Module):
    """Causal attention of each sample by itself, whose tokens lie on ranks as TransformerEngine expects them."""

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def forward(self, q: Any, k: Any, v: Any, *_: Any, packed_seq_params: Any, **__: Any) -> torch.Tensor:
        """[T, heads, D] each -> [T, heads * D]; T is this rank's part."""
        from megatron.core import parallel_state

        group, bounds = parallel_state.get_context_parallel_group(), packed_seq_params.cu_seqlens_q.cpu()
        cp = group.size()
        places = [
            torch.cat(
                [torch.arange(a, b) for a, b in zip(*shard_slices(bounds.numpy(), cp, rank, "zigzag"), strict=True)]
            )
            for rank in range(cp)
        ]
        order = torch.argsort(torch.cat(places))
        whole = [Gathered.apply(each, group).flatten(0, 1)[order] if cp > 1 else each for each in (q, k, v)]  # type: ignore[no-untyped-call]
        parts = []
        for a, b in itertools.pairwise(bounds.tolist()):
            query, key, value = (each[a:b].transpose(0, 1) for each in whole)
            parts.append(scaled_dot_product_attention(query, key, value, is_causal=True).transpose(0, 1))
        return torch.cat(parts).flatten(1)[places[group.rank()]]


class Waiting:
    """An event or a stream, for which nothing waits."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def nothing(self, *_: Any) -> None:
        """Return at once."""

    record = wait = synchronize = wait_stream = wait_event = record_event = nothing

    def query(self) -> bool:
        return True


def draw_weights(model: Any) -> None:
    """Draw each weight by its name in the whole model, and keep this tensor-parallel rank's part."""
    from megatron.core import parallel_state

    tp, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    numbers = {f"decoder.layers.{i}.": layer.layer_number for i, layer in enumerate(model.decoder.layers)}
    for name, parameter in model.named_parameters():
        whole = name
        for local, number in numbers.items():
            whole = whole.replace(local, f"layer {number}.") if whole.startswith(local) else whole
        if name == "output_layer.weight" and model.share_embeddings_and_output_weights:
            whole = "embedding.word_embeddings.weight"
        shape, cut = list(parameter.shape), tp > 1 and getattr(parameter, "tensor_model_parallel", False)
        if cut:
            shape[parameter.partition_dim] *= tp
        generator = torch.Generator().manual_seed(crc32(whole.encode()))
        drawn = torch.randn(shape, dtype=torch.float64, generator=generator) * 0.1
        if cut:
            drawn = drawn.chunk(tp, parameter.partition_dim)[rank]
        with torch.no_grad():
            parameter.copy_(drawn + ("norm" in name and name.endswith("weight")))


def prepare() -> None:
    """Put the stand-ins in place."""
    warnings.simplefilter("ignore")
    typing.override = typing_extensions.override  # type: ignore[attr-defined] # of Python 3.12
    sys.meta_path.insert(0, Absent())
    torch.set_num_threads(1)
    properties = SimpleNamespace(major=9, minor=0, name="a processor", multi_processor_count=1, total_memory=1 << 30)
    stream = Waiting()
    nothing: dict[str, Any] = {
        "is_available": True, "current_device": "cpu", "synchronize": None, "memory_allocated": 0, "empty_cache": None,
        "max_memory_allocated": 0, "memory_reserved": 0, "max_memory_reserved": 0, "reset_peak_memory_stats": None,
        "current_stream": stream, "default_stream": stream, "set_device": None, "get_device_properties": properties,
        "get_device_capability": (9, 0), "device_count": 1, "memory_stats": {},
    }  # fmt: skip
    for name, value in nothing.items():
        setattr(torch.cuda, name, lambda *_, value=value, **__: value)
    torch.cuda.Event = torch.cuda.Stream = Waiting  # type: ignore[assignment, misc]
    torch.cuda.get_rng_state = lambda *_: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda state, *_: torch.set_rng_state(state)
    torch.cuda.manual_seed = torch.manual_seed  # type: ignore[assignment]
    torch.cuda.stream = lambda *_: nullcontext()  # type: ignore[assignment]
    OnProcessor().__enter__()  # type: ignore[no-untyped-call]
