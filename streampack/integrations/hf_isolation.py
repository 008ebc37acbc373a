"""Test on the model itself that samples of a pack do not attend to each other.

No attribute of a model tells whether its samples are kept apart. Many models of transformers attend over the whole row
whatever ``position_ids`` are (OPT, Bloom, MPT, gpt-oss with eager attention). Others carry a state along the row unless
kernels for boundaries are installed (Mamba and its hybrids). None of them raises an error; only the loss differs.

The test runs a pack of two short samples through the model. The gradient of the second sample's logits with respect to
the first sample's embeddings must be 0, which masked attention gives exactly in any precision.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from streampack.errors import UserError

_FIRST, _SECOND = 5, 6
_NOISE = 1e-6
"""Largest gradient that rounding may leave, as a share of the second sample's own gradient."""


def check(model: Any) -> None:
    """Raise UserError if samples of a pack attend to each other in the model.

    The check makes one short forward and backward pass and leaves gradients of parameters unchanged. A model without
    ``get_input_embeddings`` or without logits is not checked; all models of transformers have both.
    """
    if not hasattr(model, "get_input_embeddings"):
        return
    modes = {module: module.training for module in model.modules()}
    model.eval()  # draws no random numbers and checkpoints no layers, which some models do not support here
    try:
        first, second = _dependence(model)
    finally:
        for module, mode in modes.items():
            module.training = mode
    if not first <= _NOISE * second:
        kind = getattr(getattr(model, "config", None), "_attn_implementation", None)
        raise UserError(
            f"got {type(model).__name__} with attn_implementation={kind!r}, in which samples of a pack affect each "
            f"other, expected a model that keeps samples apart. Use flash attention or sdpa if the model supports "
            f"them, the kernels of a state space model, or padded rows (rules.padded)"
        )


def _dependence(model: Any) -> tuple[float, float]:
    """Return the largest gradients of the second sample's logits: by the first sample's embeddings, and by its own."""
    held: list[torch.Tensor] = []

    def require_gradients(module: Any, arguments: Any, output: torch.Tensor) -> torch.Tensor:
        """Hook of the embedding: detach the output and keep it in ``held``, so that it gets gradients."""
        held.append(output.detach().requires_grad_())
        return held[-1]

    embedding = model.get_input_embeddings()
    hook = embedding.register_forward_hook(require_gradients)
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
    """Return a model's logits [1, tokens, ...], by name or as the first of a tuple; None if there are none."""
    first = outputs[0] if isinstance(outputs, tuple) else None
    found = outputs.get("logits") if isinstance(outputs, Mapping) else first
    return found if isinstance(found, torch.Tensor) and found.shape[:2] == (1, _FIRST + _SECOND) else None


def _pack(weight: torch.Tensor) -> dict[str, Any]:
    """Return a pack of two samples in the format ``hf``, on the device of ``weight`` [vocabulary, hidden]."""
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
