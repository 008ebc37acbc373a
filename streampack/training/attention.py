"""Attention that keeps packed samples apart: one call for whichever kernel is installed, and the same on the CPU.

Variable-length kernels take packed queries and boundaries. They get the padded boundaries (``cu_seqlens_padded``),
because those of real tokens give wrong offsets if samples have alignment padding. Padding follows its sample, where
causal attention does not look, and the pack's tail attends only to itself. The kernel of flash-attn is used if
installed, else PyTorch's ``torch.nn.attention.varlen`` (2.10 and later). Both run on CUDA in half precision. In all
other cases ``scaled_dot_product_attention`` runs on one sample after another. That is slow, but works in any dtype on
any device, and tests compare the kernels with it. A pack of one sample that fills it goes there, too. On an H100,
PyTorch's kernel for whole rows needs 0.6 of the time of those for packed sequences.

Packs that context-parallel ranks share are not supported: they need a ring or an exchange of heads, which frameworks
provide.
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
from streampack.packs.trees.pack_paths import has_paths
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
            any device and dtype). Default: the first of these that is installed and supports the tensors, and
            ``"sdpa"`` for a pack of one sample that fills it.

    Returns:
        Tensor [T, Hq, D].

    Raises:
        UserError: Context-parallel ranks share the pack, the shapes do not fit, or the backend is not installed or does
            not support ``window``.

    Example:
        >>> out = varlen_attention(q, k, v, batch)  # doctest: +SKIP
    """
    numpy_pack = canonical(pack)
    if has_paths(numpy_pack):
        raise UserError(
            "got a pack whose samples may share tokens, expected a pack without `rules.share`, because boundaries do "
            "not say which tokens are shared. Use flex_attention with block_mask(batch)"
        )
    if numpy_pack.cp > 1 and numpy_pack.layout != "whole":
        raise UserError(
            f"got 1/{numpy_pack.cp} of a pack on this rank ({numpy_pack.layout}), expected the whole pack. Use ring "
            f"attention or Ulysses, or a smaller budget with cp=1"
        )
    _check(q, k, v, len(numpy_pack.padding_mask), window)
    chosen = backend or ("sdpa" if window is None and _is_one_row(numpy_pack) else first_that_takes(q))
    if chosen not in get_args(Backend):
        raise UserError(f"got backend={chosen!r}, expected one of: {', '.join(get_args(Backend))}, or None")
    if chosen == "sdpa":
        return one_by_one(q, k, v, numpy_pack.cu_seqlens_padded, numpy_pack.max_seqlen, scale, window)
    attend, kernel = (by_flash, _flash_attn()) if chosen == "flash_attn" else (by_torch, _torch())
    if kernel is None:
        raise UserError(f"got backend={chosen!r}, which is not installed here. Install it, or pass backend=None")
    bounds = torch.as_tensor(pack.cu_seqlens_padded).reshape(-1).to(q.device)  # [1, n] in Megatron's form
    return attend(kernel, q, k, v, bounds, numpy_pack.max_seqlen, scale, window)


def by_flash(
    kernel: Kernel, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: torch.Tensor, widest: int,
    scale: float | None, window: int | None,
) -> torch.Tensor:  # fmt: skip
    """Compute attention with ``flash_attn_varlen_func``. All arguments are keywords: their order differs by version."""
    options: dict[str, Any] = (
        {} if window is None else {"window_size": (window - 1, 0)}
    )  # tokens to the left, without the token itself
    out: torch.Tensor = kernel(
        q, k, v, cu_seqlens_q=bounds, cu_seqlens_k=bounds, max_seqlen_q=widest, max_seqlen_k=widest,
        softmax_scale=scale, causal=True, **options,
    )  # fmt: skip
    return out


def by_torch(
    kernel: Kernel, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: torch.Tensor, widest: int,
    scale: float | None, window: int | None,
) -> torch.Tensor:  # fmt: skip
    """Compute attention with PyTorch's ``varlen_attn``, with the options that its signature has.

    PyTorch 2.10 has ``is_causal``. From 2.11 on there are ``window_size`` and ``scale``, and from 2.12 on
    ``enable_gqa``.
    """
    knows, options = signature(kernel).parameters, dict[str, Any]()
    if "window_size" in knows:
        options["window_size"] = (-1 if window is None else window - 1, 0)
    elif window is None:
        options["is_causal"] = True
    else:
        raise UserError(
            f"got window={window} with torch {torch.__version__}, expected torch 2.11 or later, or an installed "
            f"flash-attn"
        )
    if scale is not None and "scale" in knows:
        options["scale"] = scale
    elif scale is not None:
        q = q * (scale * q.shape[-1] ** 0.5)
    if q.shape[1] != k.shape[1] and "enable_gqa" in knows:
        options["enable_gqa"] = True
    elif q.shape[1] != k.shape[1]:
        k, v = (heads.repeat_interleave(q.shape[1] // k.shape[1], 1) for heads in (k, v))
    out: torch.Tensor = kernel(q, k, v, bounds, bounds, widest, widest, **options)
    return out


def one_by_one(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: Any, widest: int, scale: float | None, window: int | None
) -> torch.Tensor:
    """Compute attention with ``scaled_dot_product_attention``, one segment of the pack after another.

    ``bounds`` int32 [segments + 1]: padded boundaries, an array or a tensor. ``widest``: tokens of the longest segment.
    """
    before = torch.arange(widest, device=q.device)
    seen = None if window is None else (before <= before[:, None]) & (before > before[:, None] - window)
    sizes = (bounds[1:] - bounds[:-1]).tolist()
    # Rows of a batch of one: PyTorch's fast kernels take nothing else.
    slots = (torch.split_with_sizes(tensor.transpose(0, 1)[None], sizes, 2) for tensor in (q, k, v))
    outputs = [
        torch.nn.functional.scaled_dot_product_attention(
            queries, keys, values, None if seen is None else seen[:size, :size], is_causal=seen is None, scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        for size, queries, keys, values in zip(sizes, *slots, strict=True)
    ]  # fmt: skip
    return torch.cat(outputs, 2)[0].transpose(0, 1)


def _is_one_row(pack: Pack) -> bool:
    """Return True if one sample fills the pack, so that the kernels for whole rows can take it."""
    return bool(pack.cu_seqlens_padded[1] == len(pack.padding_mask)) and not torch.compiler.is_compiling()


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, num_tokens: int, window: int | None) -> None:
    """Raise UserError for tensors that do not fit a pack of ``num_tokens`` tokens, or a window below 1."""
    shapes = " ".join(str(list(tensor.shape)) for tensor in (q, k, v))
    if any(tensor.dim() != 3 or len(tensor) != num_tokens for tensor in (q, k, v)):
        raise UserError(
            f"got q, k, v of shapes {shapes}, expected shape [{num_tokens}, heads, head size] for each tensor"
        )
    if k.shape[1] != v.shape[1] or k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise UserError(
            f"got q, k, v of shapes {shapes}, expected k and v with the same number of heads, and q with a multiple "
            f"of this number"
        )
    if window is not None and window < 1:
        raise UserError(f"got window={window}, expected at least 1, because each token attends to itself")


def first_that_takes(q: torch.Tensor) -> Backend:
    """Return the first backend that is installed and accepts ``q``; ``sdpa`` if there is none.

    The variable-length kernels need CUDA, half precision, and a head size of at most 256 that is a multiple of 8.
    """
    half = q.dtype in (torch.float16, torch.bfloat16)
    if not q.is_cuda or not half or q.shape[-1] % 8 or q.shape[-1] > 256:
        return "sdpa"
    if _flash_attn():
        return "flash_attn"
    return "torch" if _torch() else "sdpa"


@cache
def _flash_attn() -> Kernel | None:
    """Return the kernel of flash-attn, or None. The distribution is checked, since others have a module of its name."""
    try:
        version("flash-attn")
    except PackageNotFoundError:
        return None
    kernel: Kernel = import_module("flash_attn").flash_attn_varlen_func
    return kernel


@cache
def _torch() -> Kernel | None:
    """Return PyTorch's variable-length kernel; None before 2.10."""
    if find_spec("torch.nn.attention.varlen") is None:
        return None
    kernel: Kernel = import_module("torch.nn.attention.varlen").varlen_attn
    return kernel
