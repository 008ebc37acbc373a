"""The mesh of the trainers: sizes, the ranks of one process, and the ranks that read."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from streampack.core.model.bounded import Small


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
    def rank(self) -> str:
        """This rank as text, such as ``dp=3 cp=1``: its number along dp and each other axis with several ranks."""
        names = zip(("dp", "cp", "tp", "pp"), self.ranks, self.sizes, strict=True)
        return " ".join(f"{name}={rank}" for name, rank, size in names if size > 1 or name == "dp")

    def __str__(self) -> str:
        names = ("dp", "cp", "tp", "pp")
        return " ".join(f"{n}={r}/{s}" for n, r, s in zip(names, self.ranks, self.sizes, strict=True))


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
