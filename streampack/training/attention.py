"""Attention that keeps packed samples apart: one call for the kernels there are, and the same on the CPU.

Kernels of variable length take packed queries and boundaries. With alignment padding those of real tokens would
misindex, so all get the padded ones: padding stands behind its sample, where causal attention never looks, and a tail
attends to itself alone. flash-attn's is taken where it is installed, else PyTorch's ``torch.nn.attention.varlen`` (2.10
and later); both run on CUDA, in half precision. All else is ``scaled_dot_product_attention`` of one sample after
another: what the others are tested against, slow, in any dtype and on any device.

What the ranks of context parallelism share is not computed here: that takes a ring or an exchange of heads, which is
the framework's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from inspect import signature
from typing import Any, Literal, get_args

import torch

from streampack.errors import UserError
from streampack.packs.pack import Pack
from streampack.views.view import View, canonical

Backend = Literal["flash_attn", "torch", "sdpa"]
Kernel = Callable[..., Any]


def varlen_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pack: Pack | View, *,
    scale: float | None = None, window: int | None = None, backend: Backend | None = None,
) -> torch.Tensor:  # fmt: skip
    """Compute causal attention within each sample of a pack.

    Args:
        q: Queries [T, Hq, D].
        k: Keys [T, Hkv, D], where Hkv divides Hq (grouped queries).
        v: Values [T, Hkv, D].
        pack: The pack that the tokens belong to; this rank must hold the whole pack.
        scale: Factor of the scores. Default: 1 / sqrt(D).
        window: Number of tokens that each token attends to, itself included. Default: all earlier tokens.
        backend: ``"flash_attn"``, ``"torch"`` (``torch.nn.attention.varlen``) or ``"sdpa"`` (one sample after another,
            any device and dtype). Default: the first of these that is installed and supports the tensors.

    Returns:
        Tensor [T, Hq, D].

    Raises:
        UserError: Context-parallel ranks share the pack, the shapes do not fit, or the backend is not installed or does
            not support ``window``.

    Example:
        >>> out = varlen_attention(q, k, v, batch)  # doctest: +SKIP
    """
    held = canonical(pack)
    if held.cp > 1 and held.layout != "whole":
        raise UserError(
            f"got a pack of which this rank holds 1/{held.cp} ({held.layout}), expected the whole of it: take a ring "
            f"attention or one that exchanges heads (Ulysses), or a smaller budget with cp=1"
        )
    _check(q, k, v, len(held.padding_mask), window)
    chosen = backend or first_that_takes(q)
    if chosen not in get_args(Backend):
        raise UserError(f"got backend={chosen!r}, expected one of: {', '.join(get_args(Backend))}, or None")
    if chosen == "sdpa":
        return one_by_one(q, k, v, held.cu_seqlens_padded, held.max_seqlen, scale, window)
    attend, kernel = (by_flash, _flash_attn()) if chosen == "flash_attn" else (by_torch, _torch())
    if kernel is None:
        raise UserError(f"got backend={chosen!r}, which is not installed here, expected another, or None")
    bounds = torch.as_tensor(pack.cu_seqlens_padded).reshape(-1).to(q.device)  # [1, n] in Megatron's form
    return attend(kernel, q, k, v, bounds, held.max_seqlen, scale, window)


def by_flash(
    kernel: Kernel, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: torch.Tensor, widest: int,
    scale: float | None, window: int | None,
) -> torch.Tensor:  # fmt: skip
    """By ``flash_attn_varlen_func``, by keywords alone: the order of its arguments differs by version."""
    options: dict[str, Any] = {} if window is None else {"window_size": (window - 1, 0)}  # to the left, itself not
    found: torch.Tensor = kernel(
        q, k, v, cu_seqlens_q=bounds, cu_seqlens_k=bounds, max_seqlen_q=widest, max_seqlen_k=widest,
        softmax_scale=scale, causal=True, **options,
    )  # fmt: skip
    return found


def by_torch(
    kernel: Kernel, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: torch.Tensor, widest: int,
    scale: float | None, window: int | None,
) -> torch.Tensor:  # fmt: skip
    """By ``varlen_attn``, as its signature says: causal is ``is_causal`` in 2.10 and ``window_size=(-1, 0)`` from 2.11
    on, which has ``scale``, too; ``enable_gqa`` is there from 2.12 on.
    """
    knows, options = signature(kernel).parameters, dict[str, Any]()
    if "window_size" in knows:
        options["window_size"] = (-1 if window is None else window - 1, 0)
    elif window is None:
        options["is_causal"] = True
    else:
        raise UserError(f"got window={window} with torch {torch.__version__}, expected 2.11 or later, or flash-attn")
    if scale is not None and "scale" in knows:
        options["scale"] = scale
    elif scale is not None:
        q = q * (scale * q.shape[-1] ** 0.5)
    if q.shape[1] != k.shape[1] and "enable_gqa" in knows:
        options["enable_gqa"] = True
    elif q.shape[1] != k.shape[1]:
        k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
    found: torch.Tensor = kernel(q, k, v, bounds, bounds, widest, widest, **options)
    return found


def one_by_one(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: Any, widest: int, scale: float | None, window: int | None
) -> torch.Tensor:
    """The oracle: ``scaled_dot_product_attention`` of each slot by itself. ``bounds`` int32 [segments + 1], of an array
    or a tensor.
    """
    before = torch.arange(widest, device=q.device)
    seen = None if window is None else (before <= before[:, None]) & (before > before[:, None] - window)
    sizes = (bounds[1:] - bounds[:-1]).tolist()
    slots = (torch.split_with_sizes(each.transpose(0, 1), sizes, 1) for each in (q, k, v))
    found = [
        torch.nn.functional.scaled_dot_product_attention(
            queries, keys, values, None if seen is None else seen[:size, :size], is_causal=seen is None, scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        for size, queries, keys, values in zip(sizes, *slots, strict=True)
    ]  # fmt: skip
    return torch.cat(found, 1).transpose(0, 1)


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, num_tokens: int, window: int | None) -> None:
    shapes = " ".join(str(list(each.shape)) for each in (q, k, v))
    if any(each.dim() != 3 or len(each) != num_tokens for each in (q, k, v)):
        raise UserError(f"got q, k, v of shapes {shapes}, expected [{num_tokens}, heads, size of a head] of each")
    if k.shape[1] != v.shape[1] or k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise UserError(f"got q, k, v of shapes {shapes}, expected as many heads of k as of v, a divisor of q's")
    if window is not None and window < 1:
        raise UserError(f"got window={window}, expected at least 1: the token itself")


def first_that_takes(q: torch.Tensor) -> Backend:
    """Kernels of variable length want CUDA, half precision, and heads of up to 256, a multiple of 8."""
    half = q.dtype in (torch.float16, torch.bfloat16)
    if not q.is_cuda or not half or q.shape[-1] % 8 or q.shape[-1] > 256:
        return "sdpa"
    if _flash_attn():
        return "flash_attn"
    return "torch" if _torch() else "sdpa"


@cache
def _flash_attn() -> Kernel | None:
    """Where its distribution is installed: others bring a module of its name."""
    try:
        version("flash-attn")
    except PackageNotFoundError:
        return None
    found: Kernel = import_module("flash_attn").flash_attn_varlen_func
    return found


@cache
def _torch() -> Kernel | None:
    if find_spec("torch.nn.attention.varlen") is None:
        return None
    found: Kernel = import_module("torch.nn.attention.varlen").varlen_attn
    return found
