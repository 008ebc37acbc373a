"""Run torchtitan 0.3 on a CPU: import this module before torchtitan.

It replaces what torchtitan has for CUDA alone: the device, its memory statistics, attention over samples of different
lengths, and the experts' Triton kernels. Models without experts never call these kernels. The module also adds a
function of torch.distributed that torch 2.13 lacks.
"""

import itertools
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

KERNELS = ("copy_full_counts_to_peers", "copy_rows_to_peers", "expand_topk_grad", "fill_combine_metadata",
           "fill_dispatch_metadata", "invert_flat_indices", "reduce_topk_slots", "topk_scores_grad")  # fmt: skip


class Processor:
    """The functions of ``torch.cuda`` that torchtitan calls, for the CPU."""

    set_device, synchronize = staticmethod(torch.cpu.set_device), staticmethod(torch.cpu.synchronize)
    device_count, current_device = staticmethod(lambda: 1), staticmethod(lambda: 0)
    get_device_name = staticmethod(lambda device: "a processor")
    get_device_properties = staticmethod(lambda device: SimpleNamespace(total_memory=1))
    memory_stats: Any = staticmethod(lambda device: {})
    reset_peak_memory_stats = empty_cache = staticmethod(lambda: None)


def attention_by_sample(q: Any, k: Any, v: Any, cu_seq_q: Any, *_: Any, **__: Any) -> torch.Tensor:
    """Return causal attention of each sample by itself, [T, heads, D]."""
    cuts = itertools.pairwise(cu_seq_q.tolist())
    samples = [(q[a:b].transpose(0, 1), k[a:b].transpose(0, 1), v[a:b].transpose(0, 1)) for a, b in cuts]
    return torch.cat([scaled_dot_product_attention(*qkv, is_causal=True).transpose(0, 1) for qkv in samples])


def replace() -> None:
    torch.set_num_threads(1)
    kernels = ModuleType("torchtitan.distributed.minimal_async_ep.kernels")
    kernels.__dict__.update({f"{name}_kernel": None for name in KERNELS})
    sys.modules[kernels.__name__] = kernels
    if not hasattr(torch.distributed, "set_timeout"):
        torch.distributed.set_timeout = torch.distributed.distributed_c10d._set_pg_timeout  # type: ignore[attr-defined]
    from torchtitan.tools import utils

    utils.device_type, utils.device_module = "cpu", Processor()
    from torchtitan.models.common import attention

    attention.varlen_attn = attention_by_sample


if not torch.cuda.is_available():
    replace()
