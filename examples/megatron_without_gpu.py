"""Run Megatron-Core on the CPU, to try it without a GPU: import this module before Megatron-Core."""

import itertools
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode


class AttentionBySample(torch.nn.Module):
    """Causal attention of each sample by itself, in place of TransformerEngine's."""

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def forward(self, q: Any, k: Any, v: Any, *_: Any, packed_seq_params: Any, **__: Any) -> torch.Tensor:
        """[T, heads, D] each -> [T, heads * D]."""
        cuts = itertools.pairwise(packed_seq_params.cu_seqlens_q.tolist())
        samples = [(q[a:b].transpose(0, 1), k[a:b].transpose(0, 1), v[a:b].transpose(0, 1)) for a, b in cuts]
        attended = [scaled_dot_product_attention(*qkv, is_causal=True).transpose(0, 1) for qkv in samples]
        return torch.cat(attended).flatten(1)


class OnProcessor(TorchFunctionMode):
    """Create on the CPU every tensor that the code asks for on a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def finalize(models: Any, num_tokens: torch.Tensor, **_: Any) -> None:
    """Sum gradients over all ranks and divide them by the number of tokens, as Megatron does on a GPU."""
    dist.all_reduce(num_tokens)
    for parameter in models[0].parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= num_tokens.clamp(min=1)


def tiny_model(checkpoint: Path) -> tuple[GPTModel, torch.optim.Optimizer]:
    """Return a tiny GPT model and its optimizer, with the state of the checkpoint if there is one."""
    alone = {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    os.environ |= alone | os.environ
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    torch.manual_seed(0)
    layers = get_gpt_layer_local_spec()
    layers.submodules.self_attention.submodules.core_attention = AttentionBySample
    config = TransformerConfig(
        num_layers=1, hidden_size=32, num_attention_heads=2, use_cpu_initialization=True, calculate_per_token_loss=True,
        finalize_model_grads_func=finalize, hidden_dropout=0.0,
    )  # fmt: skip
    model = GPTModel(config, layers, vocab_size=257, max_sequence_length=128)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=False)
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
    return model, optimizer


torch.set_num_threads(1)
OnProcessor().__enter__()
