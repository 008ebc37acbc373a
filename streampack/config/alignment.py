"""Multiples that samples and packs are padded to: what the planned mesh and precision need, and what a user asks for.

A sample is cut into 2 * cp chunks by ``zigzag``, and its sequence-parallel ranks, tp of them, share a shard. The
documents of NeMo-RL and ROLL pad each sample to both; the kernels' split needs the first alone, so ``tight`` leaves
the second to the pack. Layouts that cut the pack as one ask nothing of its samples. Matrix products in FP8 work on
tokens by 128 (scaled in blocks), 32 (MXFP8) or 16, on each rank: NeMo-RL multiplies the pack's multiple by that.
"""

from __future__ import annotations

from math import lcm
from typing import Annotated, Literal

from msgspec import Meta, Struct

from streampack.core.model.rules import Align

Precision = Literal["fp8_blockwise", "mxfp8", "fp8"]
PRECISION_TOKENS: dict[Precision | None, int] = {None: 1, "fp8_blockwise": 128, "mxfp8": 32, "fp8": 16}
"""Tokens of a rank that a product takes at once."""
_Multiple = Annotated[int, Meta(ge=1)]


class AlignSettings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``sample`` and ``pack``: multiples in tokens; what is not given follows from the mesh. ``sample: tight``: as few
    as the kernels' split needs. ``lcm``: the samples' is a multiple of this, too (16 is ROLL's).
    """

    sample: Annotated[
        _Multiple | Literal["tight"] | None,
        Meta(
            description="each sample is padded to a multiple of this; tight: of 2 * cp alone, the pack takes care of tp"
        ),
    ] = None
    pack: Annotated[
        _Multiple | None, Meta(description="packs are padded to a multiple of this, which must divide the budget")
    ] = None
    lcm: Annotated[_Multiple, Meta(description="the samples' multiple is a multiple of this, too")] = 1


def derived_align(
    cp: int, tp: int, layout: str, precision: Precision | None = None, given: AlignSettings | None = None
) -> Align:
    """The alignment for a mesh of ``cp`` and ``tp`` ranks whose packs are cut by ``layout``.

    >>> derived_align(2, 4, "zigzag")
    Align(sample=16, pack=16)
    >>> derived_align(2, 4, "zigzag", "mxfp8", AlignSettings(sample="tight"))
    Align(sample=4, pack=256)
    """
    given = given or AlignSettings()
    tight = given.sample == "tight"
    chunks = (cp if layout == "contiguous" else 2 * cp) if cp > 1 else 1
    pack = lcm(chunks, cp * tp) if tight else chunks * tp
    if isinstance(given.sample, int):
        sample = lcm(given.sample, given.lcm)
    else:
        sample = lcm((chunks if tight else chunks * tp) if layout in ("zigzag", "whole") else 1, given.lcm)
    return Align(sample=sample, pack=given.pack or lcm(pack * PRECISION_TOKENS[precision], sample))
