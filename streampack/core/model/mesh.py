"""The mesh of the trainers: sizes, the ranks of one process, the ranks that read, and groups of context parallelism."""

from __future__ import annotations

from functools import lru_cache
from math import lcm
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta, Struct

from streampack.core.model.bounded import Small
from streampack.core.model.samples import I64
from streampack.core.model.shapes import Shape, check_shape, check_widths, own_widths


class Mesh(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes of the trainers' mesh, and the place of one rank in the mesh.

    Raises:
        ValueError: A rank is not below the size of its axis.

    Example:
        >>> mesh = Mesh(dp=8, dp_rank=3, tp=2)
        >>> mesh.sizes
        (8, 1, 2, 1)
        >>> str(mesh)
        'dp=3/8 cp=0/1 tp=0/2 pp=0/1'
    """

    dp: Annotated[int, Meta(ge=1, le=65_536)] = 1
    """Number of data-parallel ranks."""
    cp: Annotated[int, Meta(ge=1, le=4096)] = 1
    """Number of context-parallel ranks, which share each pack."""
    tp: Annotated[int, Meta(ge=1, le=4096)] = 1
    """Number of tensor-parallel ranks, which read the same packs."""
    pp: Annotated[int, Meta(ge=1, le=4096)] = 1
    """Number of pipeline stages."""
    dp_rank: Small = 0
    """This rank's number along dp, from 0."""
    cp_rank: Small = 0
    """This rank's number along cp, from 0."""
    tp_rank: Small = 0
    """This rank's number along tp, from 0."""
    pp_rank: Small = 0
    """This rank's number along pp, from 0."""

    def __post_init__(self) -> None:
        for size, rank, name in zip(self.sizes, self.ranks, ("dp", "cp", "tp", "pp"), strict=True):
            if rank >= size:
                raise ValueError(f"got {name}_rank={rank} with {name}={size}, expected {name}_rank < {name}")

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Sizes of the axes: (dp, cp, tp, pp)."""
        return self.dp, self.cp, self.tp, self.pp

    @property
    def ranks(self) -> tuple[int, int, int, int]:
        """This rank's number along each axis: (dp_rank, cp_rank, tp_rank, pp_rank)."""
        return self.dp_rank, self.cp_rank, self.tp_rank, self.pp_rank

    @property
    def dp_cp_rank(self) -> int:
        """This rank's number among the dp x cp ranks, neighbors along cp first."""
        return self.dp_rank * self.cp + self.cp_rank

    @property
    def rank(self) -> str:
        """This rank as text, such as ``dp=3 cp=1``: its number along dp and each other axis with several ranks."""
        names = zip(("dp", "cp", "tp", "pp"), self.ranks, self.sizes, strict=True)
        return " ".join(f"{name}={rank}" for name, rank, size in names if size > 1 or name == "dp")

    def __str__(self) -> str:
        names = ("dp", "cp", "tp", "pp")
        return " ".join(f"{n}={r}/{s}" for n, r, s in zip(names, self.ranks, self.sizes, strict=True))


PLANNER = 4
"""Version of the planner of groups: another version makes other plans."""


class DynamicCp(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of dynamic context parallelism: each sample gets as many ranks as it needs.

    DEAL plans groups of 1, 2, 4 or more consecutive ranks of the dp x cp ranks. The settings are no recorded rules.
    They are the ``layout`` of the feed, which every reader gets when it attaches.
    """

    rank_tokens: Annotated[int, Meta(ge=2, lt=2**31)]
    """Most tokens of a rank in a micro-batch."""
    max_group: Annotated[int, Meta(ge=1, le=4096)]
    """Most ranks of a group."""
    node: Annotated[float, Meta(ge=0, le=64)] = 0.0
    """Cost of the exchange of a token within a node, over the cost of its computation."""
    across: Annotated[float, Meta(ge=0, le=64)] = 0.0
    """The same across nodes."""
    node_ranks: Annotated[int, Meta(ge=1, le=4096)] = 8
    """Ranks of a node."""
    planner: Annotated[int, Meta(ge=1)] = PLANNER
    """Version of the planner."""

    @property
    def layout(self) -> str:
        """The settings as the name of a layout."""
        values = (f"{name}={value}" for name, value in msgspec.structs.asdict(self).items())
        return " ".join(("dynamic", *values))

    @staticmethod
    def recorded(layout: str) -> DynamicCp | None:
        """Return the settings that a layout names, also of another planner; None for a layout that is not dynamic.

        Raises ValueError for settings that this version does not know.
        """
        kind, *values = layout.split()
        if kind != "dynamic":
            return None
        return msgspec.convert(dict(value.partition("=")[::2] for value in values), DynamicCp, strict=False)

    @staticmethod
    @lru_cache
    def of(layout: str) -> DynamicCp | None:
        """Return the settings that a layout names; None for a layout that is not dynamic.

        Raises ValueError for settings that this version does not know, and for another planner.

        >>> DynamicCp.of(DynamicCp(rank_tokens=8192, max_group=64).layout).rank_tokens
        8192
        """
        dynamic = DynamicCp.recorded(layout)
        if dynamic is not None and dynamic.planner != PLANNER:
            raise ValueError(
                f"got groups of ranks by version {dynamic.planner} of the planner, expected version {PLANNER}, which "
                f"makes other groups. Use the streampack version that dealt these steps"
            )
        return dynamic

    def largest_group(self, ranks: int) -> int:
        """Return the ranks of the largest group of a mesh of ``ranks`` dp x cp ranks, a power of two."""
        return 1 << (min(self.max_group, ranks).bit_length() - 1)

    def least_group(self, tokens: int, ranks: int, align: int) -> int:
        """Return the ranks of the smallest group with room for a sample; of the largest if none has.

        ``align`` is ``align.sample``.

        >>> DynamicCp(rank_tokens=64, max_group=8).least_group(100, 8, 1)
        2
        """
        sizes = [1 << level for level in range(self.largest_group(ranks).bit_length())]
        units = [lcm(align, 2 * size) if size > 1 else align for size in sizes]
        fits = (-(-tokens // unit) * unit <= size * self.rank_tokens for size, unit in zip(sizes, units, strict=True))
        return next((size for size, has_room in zip(sizes, fits, strict=True) if has_room), sizes[-1])

    def aligns(self, sizes: I64, align: int) -> I64:
        """Return the multiple to which samples are padded in groups of ``sizes`` ranks, int64 [groups].

        ``align`` is ``align.sample``; each sample of a group of several ranks is cut into two chunks for each of them.
        """
        return np.where(sizes > 1, np.lcm(align, 2 * sizes), align)

    def widths(self, slots: I64, sizes: I64, shape: Shape, align: int) -> I64:
        """Return the tokens T of packs for groups of ``sizes`` ranks, int64 [packs]; each rank has T / size.

        ``slots`` int64 [packs] are the aligned tokens of a pack. ``align`` is ``align.pack``.
        """
        return sizes * own_widths(-(-slots // sizes), shape, self.rank_tokens, lcm(2, align))

    def check_widths(self, widths: I64, sizes: I64, shape: Shape, align: int) -> None:
        """Raise ValueError for tokens T of a pack that ``widths`` does not return, or for a group of another size."""
        if ((sizes < 1) | (sizes > self.max_group) | (sizes & (sizes - 1) != 0)).any() or (widths % sizes).any():
            raise ValueError(
                f"got packs of {widths.tolist()[:8]} tokens for groups of {sizes.tolist()[:8]} ranks, expected powers "
                f"of two up to {self.max_group}, which divide the tokens"
            )
        check_widths(widths // sizes, shape, self.rank_tokens, lcm(2, align))

    def refusal(self, ranks: int, budget: int, shape: Shape, align: int) -> str:
        """Return why a mesh of ``ranks`` dp x cp ranks cannot read packs of the ``budget``; empty if it can.

        ``align`` is ``align.pack``.
        """
        unit, most = lcm(2, align), self.rank_tokens * self.largest_group(ranks)
        if self.rank_tokens % unit:
            return f"got rank_tokens={self.rank_tokens}, expected a multiple of {unit}: of 2, and of align.pack={align}"
        if budget > most:
            return (
                f"got a budget of {budget} tokens with {ranks} dp x cp ranks, expected at most {most}: a group of "
                f"{self.largest_group(ranks)} ranks with rank_tokens={self.rank_tokens}. Raise rank_tokens or "
                f"max_group, lower `rules.budget`, or use more ranks"
            )
        try:
            check_shape(shape, self.rank_tokens, unit)
        except ValueError as error:
            return f"{error}, where the budget is rank_tokens"
        return ""


class ReadBy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The tensor-parallel and pipeline ranks that read steps. All ranks must set the same values.

    Negative ranks count from the last rank; None means that every rank reads.
    """

    tp: Annotated[tuple[int, ...], Meta(min_length=1, max_length=4096)] | None = None
    pp: Annotated[tuple[int, ...], Meta(min_length=1, max_length=4096)] | None = None

    def ranks(self, mesh: Mesh) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the tp ranks and the pp ranks that read, sorted. Raises ValueError for a rank outside the mesh."""
        return _named_ranks("tp", self.tp, mesh.tp), _named_ranks("pp", self.pp, mesh.pp)

    def __str__(self) -> str:
        parts = [f"{name}={list(ranks)}" for name, ranks in (("tp", self.tp), ("pp", self.pp)) if ranks is not None]
        return " ".join(parts) or "all"


def _named_ranks(name: str, ranks: tuple[int, ...] | None, size: int) -> tuple[int, ...]:
    """Return ``ranks`` of a dimension of ``size`` ranks as non-negative ranks, sorted; all of them for None."""
    for rank in ranks or ():
        if not -size <= rank < size:
            raise ValueError(
                f"got readers with {name} ranks {list(ranks or ())}, expected {name} ranks from {-size} to {size - 1}"
            )
    return tuple(range(size)) if ranks is None else tuple(sorted({rank % size for rank in ranks}))
