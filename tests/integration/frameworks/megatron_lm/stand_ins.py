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
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
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

from streampack.core.layout.shards import shard_slices
from tests.integration.frameworks.cuda_stand_ins import OnProcessor, replace_cuda_calls


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
    replace_cuda_calls()
    OnProcessor().__enter__()  # type: ignore[no-untyped-call]
