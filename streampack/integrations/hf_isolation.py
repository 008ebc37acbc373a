"""Whether a model keeps the samples of a pack apart, tried on the model itself.

Nothing in a model says so: many of transformers' attend over the whole row whatever ``position_ids`` say (OPT, Bloom,
MPT, gpt-oss where its attention is eager), others carry a state along it unless kernels that know of boundaries are
installed (Mamba and its hybrids), and none raises an error: the loss is only another. So a pack of two short samples
goes through, and the gradient of the second one's logits by the first one's embeddings must be 0: masked attention
gives exactly that, in any precision.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from streampack.errors import UserError

_FIRST, _SECOND = 5, 6
_NOISE = 1e-6
"""Of the second sample's own gradient: what rounding may leave."""


def check(model: Any) -> None:
    """One short forward and backward pass; gradients of parameters are left alone. Raises UserError.

    A model that does not say which are its input embeddings, or gives no logits, as all of transformers' do, is not
    checked.
    """
    if not hasattr(model, "get_input_embeddings"):
        return
    modes = {module: module.training for module in model.modules()}
    model.eval()  # no random numbers are drawn, and layers are not checkpointed, as some cannot be here
    try:
        first, second = _dependence(model)
    finally:
        for module, mode in modes.items():
            module.training = mode
    if not first <= _NOISE * second:
        kind = getattr(getattr(model, "config", None), "_attn_implementation", None)
        raise UserError(
            f"got {type(model).__name__} with attn_implementation={kind!r}, in which samples of a pack see each other, "
            f"expected one that keeps them apart: take flash attention or sdpa where it has them, the kernels of a "
            f"state space model, or padded rows (rules.padded)"
        )


def _dependence(model: Any) -> tuple[float, float]:
    """Of the second sample's logits: how much they change with the embeddings of the first, and with its own."""
    held: list[torch.Tensor] = []

    def hold(module: Any, arguments: Any, output: torch.Tensor) -> torch.Tensor:
        held.append(output.detach().requires_grad_())
        return held[-1]

    embedding = model.get_input_embeddings()
    hook = embedding.register_forward_hook(hold)
    try:
        with torch.enable_grad():
            logits = _logits(model(**_pack(embedding.weight)))
            if logits is None:
                return 0.0, 0.0
            (found,) = torch.autograd.grad(logits[0, _FIRST:].float().square().sum(), held[0])
    finally:
        hook.remove()
    sizes = found[0].float().abs()
    return float(sizes[:_FIRST].max()), float(sizes[_FIRST:].max())


def _logits(outputs: Any) -> torch.Tensor | None:
    """[1, tokens, ...], by name or as the first of a tuple; None where there are none."""
    first = outputs[0] if isinstance(outputs, tuple) else None
    found = outputs.get("logits") if isinstance(outputs, Mapping) else first
    return found if isinstance(found, torch.Tensor) and found.shape[:2] == (1, _FIRST + _SECOND) else None


def _pack(weight: torch.Tensor) -> dict[str, Any]:
    """As ``format="hf"`` has one, on the device of ``weight`` [vocabulary, hidden]."""
    length, device = _FIRST + _SECOND, weight.device
    boundaries = torch.tensor([0, _FIRST, length], dtype=torch.int32, device=device)
    places = torch.arange(length, device=device)
    positions = torch.where(places < _FIRST, places, places - _FIRST)
    return {
        "input_ids": ((places + 1) % len(weight))[None],
        "position_ids": positions[None],
        "seq_idx": (places >= _FIRST).to(torch.int32)[None],
        "cu_seq_lens_q": boundaries,
        "cu_seq_lens_k": boundaries,
        "max_length_q": _SECOND,
        "max_length_k": _SECOND,
        "use_cache": False,
    }
