"""The length T of a pack in tokens: its samples' tokens and the padding after them, at most the budget C.

``fixed`` packs all have C tokens. That is one shape for compilers and captured graphs, and for ranks that exchange
tokens (mixture of experts). ``exact`` packs end at the next multiple of ``align.pack`` after their samples: padding is
least, but shapes differ. Two shapes lie between these: multiples of n tokens, and a few buckets. A pipeline's stages
pass activations of one shape, so with pp > 1 every pack of a step is as long as the longest.

T is a function of the step and the mesh alone. FORM does not know it, and no digest depends on it. DEAL computes it
(``step_widths``) and sends it with the pack, since a rank knows only its own packs.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import numpy as np
from msgspec import Meta, Struct

from streampack.core.model.samples import I64

MAX_BUCKETS = 64
_Tokens = Annotated[int, Meta(ge=1)]


class Sizes(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Sizes of packs: T is a multiple of ``multiple`` tokens, or the smallest of ``buckets`` that holds the pack.

    The budget C is always a bucket.
    """

    multiple: Annotated[
        _Tokens | None, Meta(description="Each pack is padded to a multiple of this number of tokens")
    ] = None
    buckets: Annotated[
        Annotated[tuple[_Tokens, ...], Meta(min_length=1, max_length=MAX_BUCKETS)] | None,
        Meta(
            description="Pack sizes in tokens. Each pack is padded to the smallest size that holds it, or to the budget"
        ),
    ] = None

    def __post_init__(self) -> None:
        if (self.multiple is None) == (self.buckets is None):
            got = "neither" if self.multiple is None else "both"
            raise ValueError(f"got {got} of multiple and buckets, expected exactly one of the two keys")


Shape = Literal["fixed", "exact"] | Sizes


def check_shape(shape: Shape, budget: int, align: int) -> None:
    """Raise ValueError for sizes that are not multiples of ``align`` (``align.pack``), or are above the budget."""
    if not isinstance(shape, Sizes):
        return
    if shape.multiple is not None and (shape.multiple % align or budget % shape.multiple):
        raise ValueError(
            f"got shape.multiple {shape.multiple}, expected a multiple of align.pack ({align}) that divides the budget "
            f"({budget})"
        )
    before = 0
    for bucket in shape.buckets or ():
        if bucket % align or not before < bucket <= budget:
            raise ValueError(
                f"got shape.buckets {list(shape.buckets or ())}, expected ascending multiples of align.pack, {align}, "
                f"up to the budget, {budget}"
            )
        before = bucket


def own_widths(slots: I64, shape: Shape, budget: int, align: int) -> I64:
    """Return each pack's own length T, int64 [packs], regardless of the other packs of its step.

    ``slots`` int64 [packs] are the aligned tokens of each pack's samples. ``align`` is ``align.pack``.

    >>> own_widths(np.array([0, 5, 16]), "exact", 32, 4).tolist()
    [4, 8, 16]
    >>> own_widths(np.array([0, 5, 17]), Sizes(buckets=(8, 16)), 32, 4).tolist()
    [8, 8, 32]
    """
    if shape == "fixed":
        return np.full(len(slots), budget, np.int64)
    if isinstance(shape, Sizes) and shape.buckets is not None:
        buckets = np.array([*shape.buckets, budget], np.int64)
        return buckets[np.searchsorted(buckets, slots)]
    multiple = shape.multiple if isinstance(shape, Sizes) and shape.multiple is not None else align
    return -(-np.maximum(slots, 1) // multiple) * multiple


def step_widths(slots: I64, shape: Shape, budget: int, align: int, pp: int) -> I64:
    """Return the length T of each pack of a step, int64 [packs]; with ``pp`` > 1, all have the longest pack's length.

    Arguments are those of ``own_widths``; ``pp`` is the number of pipeline stages.
    """
    widths = own_widths(slots, shape, budget, align)
    return np.full_like(widths, widths.max()) if pp > 1 and len(widths) else widths


def width_unit(shape: Shape, budget: int, align: int) -> int:
    """Return the number of tokens that divides every length T."""
    if isinstance(shape, Sizes):
        return math.gcd(budget, *(shape.buckets or (shape.multiple or budget,)))
    return budget if shape == "fixed" else align


def check_widths(widths: I64, shape: Shape, budget: int, align: int) -> None:
    """Raise ValueError if ``widths`` int64 [packs] contain a length T that no pack of this shape has."""
    wrong = (widths < 1) | (widths > budget)
    wrong |= own_widths(np.where(wrong, budget, widths), shape, budget, align) != widths
    if wrong.any():
        raise ValueError(f"got a pack of {int(widths[wrong][0])} tokens, expected a size of shape {shape_text(shape)}")


def shape_text(shape: Shape) -> str:
    """Return the shape in the form that broker.yaml uses."""
    if not isinstance(shape, Sizes):
        return shape
    return f"{{multiple: {shape.multiple}}}" if shape.buckets is None else f"{{buckets: {list(shape.buckets)}}}"
