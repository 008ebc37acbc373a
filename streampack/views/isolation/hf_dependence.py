"""Test whether samples of a pack affect each other in a model of transformers.

The first call of a model with a pack tests the model, since no attribute tells whether it keeps samples apart. Many
models attend over the whole row whatever ``position_ids`` are (OPT, Bloom, MPT, gpt-oss with eager attention). Others
carry a state along the row unless kernels for boundaries are installed (Mamba and its hybrids). The test runs a pack of
two short samples through the model. The gradient of the second sample's outputs with respect to the first sample's
embeddings must be 0, which masked attention gives exactly in any precision.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

import torch

from streampack.errors import UserError

_FIRST, _SECOND = 5, 6
_NOISE = 1e-6
"""Largest gradient that rounding may leave, as a share of the second sample's own gradient."""
_passed: WeakKeyDictionary[Any, tuple[str | None, int]] = WeakKeyDictionary()
"""Models that have passed the test: model -> its attention and the dimensions of its positions then."""
is_inside: ContextVar[bool] = ContextVar("streampack_inside_a_call", default=False)


@contextmanager
def inside() -> Iterator[None]:
    """Mark calls of models as parts of a call that is checked already: a model calls the models that it consists of."""
    token = is_inside.set(True)
    try:
        yield
    finally:
        is_inside.reset(token)


def attention_of(model: Any) -> str | None:
    """Return the attention implementation of a model's text, such as ``sdpa``; None if the model names none."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    implementation: str | None = getattr(text, "_attn_implementation", None)
    return implementation


def check_once(model: Any, ndim: int) -> Exception | None:
    """Test a model unless it has passed already, with this attention and positions of ``ndim`` dimensions.

    Args:
        model: A model of transformers. One whose parameters are sharded over ranks is not tested.
        ndim: Dimensions of ``position_ids``, as for ``check``.

    Returns:
        The error of a model that cannot run the test, such as one that wants other inputs; else None.

    Raises:
        UserError: Samples of a pack affect each other in the model.
    """
    if _passed.get(model) == (attention_of(model), ndim):
        return None
    failure = None
    try:
        if not _is_sharded(model):
            check(model, ndim)
    except UserError:
        raise
    except Exception as error:  # whatever a model raises
        failure = error
    _passed[model] = (attention_of(model), ndim)
    return failure


def check(model: Any, ndim: int = 2) -> None:
    """Raise UserError if samples of a pack affect each other in the model.

    The check makes one short forward and backward pass and leaves gradients of parameters unchanged. A model without
    ``get_input_embeddings`` or without outputs for each token is not checked; models of transformers have both.

    Args:
        model: A model of transformers.
        ndim: Dimensions of ``position_ids``: 2 for [1, T], 3 for [4, 1, T].
    """
    if not hasattr(model, "get_input_embeddings"):
        return
    modes = {module: module.training for module in model.modules()}
    model.eval()  # draws no random numbers and checkpoints no layers, which some models do not support here
    try:
        with inside():
            first, second = _dependence(model, ndim)
    finally:
        for module, mode in modes.items():
            module.training = mode
    if not first <= _NOISE * second:
        three = "If its positions are M-RoPE, declare position_ids with shape [3] in broker.yaml. " * (ndim == 2)
        raise UserError(
            f"got {type(model).__name__} with attn_implementation={attention_of(model)!r}, in which samples of a pack "
            f"affect each other, expected a model that keeps samples apart. {three}Use flash attention or sdpa if the "
            f"model supports them, the kernels of a state space model, or padded rows (rules.padded)"
        )


def _is_sharded(model: Any) -> bool:
    """Return True if parameters are sharded over ranks, by FSDP, tensor parallelism or DeepSpeed."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return False
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

    sharded = any(isinstance(parameter, DTensor) or hasattr(parameter, "ds_id") for parameter in model.parameters())
    return sharded or any(isinstance(module, FullyShardedDataParallel) for module in model.modules())


def _dependence(model: Any, ndim: int) -> tuple[float, float]:
    """Return the largest gradients of the second sample's outputs: by the first sample's embeddings, and by its own."""
    embeddings: list[torch.Tensor] = []

    def require_gradients(module: Any, arguments: Any, output: torch.Tensor) -> torch.Tensor:
        """Hook of the embedding: detach the output and keep it in ``embeddings``, so that it gets gradients."""
        embeddings.append(output.detach().requires_grad_())
        return embeddings[-1]

    embedding = model.get_input_embeddings()
    hook = embedding.register_forward_hook(require_gradients)
    try:
        with torch.compiler.set_stance("force_eager"), torch.inference_mode(False), torch.enable_grad():
            outputs = _outputs(model(**_pack(embedding.weight, ndim)))
            if outputs is None:
                return 0.0, 0.0
            (gradient,) = torch.autograd.grad(outputs[0, _FIRST:].float().square().sum(), embeddings[0])
    finally:
        hook.remove()
    sizes = gradient[0].float().abs()
    return float(sizes[:_FIRST].max()), float(sizes[_FIRST:].max())


def _outputs(outputs: Any) -> torch.Tensor | None:
    """Return a model's outputs [1, tokens, ...], by name or as the first of a tuple; None if there are none."""
    output = outputs[0] if isinstance(outputs, tuple) else None
    if isinstance(outputs, Mapping):
        output = next((outputs[name] for name in ("logits", "last_hidden_state") if name in outputs), None)
    return output if isinstance(output, torch.Tensor) and output.shape[:2] == (1, _FIRST + _SECOND) else None


def _pack(weight: torch.Tensor, ndim: int) -> dict[str, Any]:
    """Return a pack of two samples in the format ``hf``, on the device of ``weight`` [vocabulary, hidden]."""
    length, device = _FIRST + _SECOND, weight.device
    boundaries = torch.tensor([0, _FIRST, length], dtype=torch.int32, device=device)
    places = torch.arange(length, device=device)
    positions = torch.where(places < _FIRST, places, places - _FIRST)[None]
    return {
        "input_ids": ((places + 1) % len(weight))[None],
        "position_ids": positions if ndim == 2 else positions.expand(4, 1, length),
        "seq_idx": (places >= _FIRST).to(torch.int32)[None],
        "cu_seq_lens_q": boundaries,
        "cu_seq_lens_k": boundaries,
        "max_length_q": _SECOND,
        "max_length_k": _SECOND,
    }
