"""Computes the multiples that samples and packs are padded to, from the planned mesh, the precision and the settings.

The layout ``zigzag`` cuts each sample into 2 * cp chunks, and tp sequence-parallel ranks share a shard. NeMo-RL and
ROLL pad each sample for both. The attention kernels need only the chunks, so ``tight`` leaves tp to the pack's padding.
Layouts that cut the pack as a whole need no alignment of samples. Matrix products in FP8 work on groups of 128 tokens
(scaled in blocks), 32 (MXFP8) or 16, on each rank. As in NeMo-RL, the pack's multiple is multiplied by that number.
"""

from __future__ import annotations

from math import lcm
from typing import Annotated, Literal

from msgspec import Meta, Struct

from streampack.core.model.rules import Align

Precision = Literal["fp8_blockwise", "mxfp8", "fp8"]
PRECISION_TOKENS: dict[Precision | None, int] = {None: 1, "fp8_blockwise": 128, "mxfp8": 32, "fp8": 16}
"""Precision to the multiple of tokens per rank that its matrix products need."""
_Multiple = Annotated[int, Meta(ge=1)]


class AlignSettings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Multiples, in tokens, that samples and packs are padded to. Keys that are not set follow from the mesh.

    With ``sample: tight``, samples get only the padding that attention kernels need. ROLL uses ``lcm: 16``.
    """

    sample: Annotated[
        _Multiple | Literal["tight"] | None,
        Meta(
            description="Pad each sample to a multiple of this many tokens. With `tight`, padding for tensor "
            "parallelism goes to the end of the pack instead of each sample. Default: derived from `planned_mesh`"
        ),
    ] = None
    pack: Annotated[
        _Multiple | None,
        Meta(
            description="Pad each pack to a multiple of this many tokens, which must divide the budget. Default: "
            "derived from `planned_mesh` and `precision`"
        ),
    ] = None
    lcm: Annotated[_Multiple, Meta(description="Number that must divide the multiple that samples are padded to")] = 1


def derived_align(
    cp: int, tp: int, layout: str, precision: Precision | None = None, settings: AlignSettings | None = None
) -> Align:
    """Return the alignment for a mesh of ``cp`` and ``tp`` ranks whose packs are cut by ``layout``.

    ``settings``: settings that replace derived multiples.

    >>> derived_align(2, 4, "zigzag")
    Align(sample=16, pack=16)
    >>> derived_align(2, 4, "zigzag", "mxfp8", AlignSettings(sample="tight"))
    Align(sample=4, pack=256)
    """
    settings = settings or AlignSettings()
    if layout.startswith("dynamic"):  # a group of ranks pads its own samples
        cp = 1
    tight = settings.sample == "tight"
    chunks = (cp if layout == "contiguous" else 2 * cp) if cp > 1 else 1
    pack = lcm(chunks, cp * tp) if tight else chunks * tp
    if isinstance(settings.sample, int):
        sample = lcm(settings.sample, settings.lcm)
    else:
        sample = lcm((chunks if tight else chunks * tp) if layout in ("zigzag", "whole") else 1, settings.lcm)
    return Align(sample=sample, pack=settings.pack or lcm(pack * PRECISION_TOKENS[precision], sample))
