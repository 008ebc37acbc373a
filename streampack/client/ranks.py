"""Find this process's rank in the trainers' mesh.

A rank number alone is ambiguous: 8 ranks are dp 8, or dp 4 and cp 2 in either order. A user therefore gives sizes and
ranks, a DeviceMesh, or sizes and the order of the axes in RANK. A process with WORLD_SIZE above 1 and none of these is
rejected, because every rank would read all data.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import msgspec

from streampack.core.model.mesh import Mesh
from streampack.errors import MeshError

AXES = ("dp", "cp", "tp", "pp")
_DIMS = {
    "dp": ("dp", "dp_replicate", "dp_shard", "replicate", "shard", "fsdp", "hsdp", "ddp", "data", "data_parallel"),
    "cp": ("cp", "sp", "ulysses", "context"),
    "tp": ("tp", "tensor", "tensor_parallel", "model"),
    "pp": ("pp", "pipe", "pipeline"),
}
_AXIS = {dim: axis for axis, dims in _DIMS.items() for dim in dims}
"""Axis by name of a DeviceMesh's dimension. ``sp`` (Ulysses) splits samples as ``cp`` does; sequence parallelism within
tensor parallelism has no dimension of its own."""
_WAYS = (
    'Pass order="dp" (torchrun, only data parallelism), mesh=device_mesh (a torch DeviceMesh), or '
    'mesh={"dp": 8, "dp_rank": rank}. With mesh={"tp": 2}, also pass order="tp-cp-dp-pp", whose first axis varies '
    "fastest with RANK"
)


def mesh_of(mesh: Any = None, order: str | None = None, environ: Mapping[str, str] | None = None) -> Mesh:
    """Return the trainers' mesh and this process's ranks in the mesh.

    ``mesh``: a Mesh, a dict of sizes and ranks, or a torch DeviceMesh; with ``order``, a dict of sizes alone. If dp is
    missing there, its size follows from WORLD_SIZE. The axes of ``order`` are joined by ``-``, as Megatron does: first
    the axis that varies fastest with RANK. Without both arguments, the mesh has one rank. Raises MeshError.

    >>> mesh_of({"tp": 2}, "tp-cp-dp-pp", {"RANK": "5", "WORLD_SIZE": "8"}).ranks
    (2, 0, 1, 0)
    """
    environ = os.environ if environ is None else environ
    if order is not None:
        if not (mesh is None or isinstance(mesh, Mapping)):
            raise MeshError(
                f"got order {order!r} with a {type(mesh).__name__}, expected a dict of sizes such as {{'tp': 2}}"
            )
        return _from_order(dict(mesh or {}), order, environ)
    if isinstance(mesh, Mesh):
        return mesh
    if hasattr(mesh, "mesh_dim_names"):
        return _of_device_mesh(mesh)
    if not (mesh is None or isinstance(mesh, Mapping)):
        raise MeshError(f"mesh: got {mesh!r:.80}, expected sizes and ranks by name. {_WAYS}")
    sizes = dict(mesh or {})
    if unknown := [key for key in sizes if key not in Mesh.__struct_fields__]:
        raise MeshError(
            f"mesh: got the key {unknown[0]!r}, expected the sizes dp, cp, tp, pp and the ranks dp_rank, cp_rank, "
            f"tp_rank, pp_rank. {_WAYS}"
        )
    try:
        place = msgspec.convert(sizes, Mesh)
    except (msgspec.ValidationError, ValueError, TypeError) as error:
        raise MeshError(
            f"mesh: {error}. Pass the sizes dp, cp, tp, pp and the ranks dp_rank, cp_rank, tp_rank, pp_rank"
        ) from None
    world = _number(environ, "WORLD_SIZE", 1)
    if world > 1 and not any(key.endswith("_rank") for key in sizes):
        raise MeshError(f"got WORLD_SIZE={world} and no ranks, expected the rank of this process. {_WAYS}")
    for axis in AXES:
        if getattr(place, axis) > 1 and f"{axis}_rank" not in sizes:
            size = getattr(place, axis)
            raise MeshError(f"mesh: got {axis}={size} without {axis}_rank, expected the rank of this process. {_WAYS}")
    return place


def _of_device_mesh(mesh: Any) -> Mesh:
    """Return the mesh of a torch DeviceMesh. Raises MeshError for dimensions without names."""
    if not mesh.mesh_dim_names:
        raise MeshError(
            "got a DeviceMesh without mesh_dim_names, expected names such as dp, cp, tp, pp. Name the dimensions"
        )
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise MeshError(
            "got a DeviceMesh that does not contain this rank, expected a DeviceMesh with this rank. Connect only on "
            "ranks of the mesh"
        )
    return of_dims(mesh.mesh_dim_names, tuple(mesh.shape), coordinate)


def of_dims(names: Sequence[str], sizes: Sequence[int], coordinate: Sequence[int]) -> Mesh:
    """Return the mesh of named dimensions; ``coordinate`` is this rank's index in each dimension.

    Several dimensions of one axis are combined; the first of them varies slowest. Raises MeshError for unknown names.

    >>> str(of_dims(("dp_replicate", "dp_shard", "cp"), (2, 4, 2), (1, 2, 0)))
    'dp=6/8 cp=0/2 tp=0/1 pp=0/1'
    """
    unknown = [name for name in names if name not in _AXIS]
    if unknown:
        raise MeshError(
            f"got a DeviceMesh with the dimensions {', '.join(unknown)}, expected only names from {', '.join(_AXIS)}. "
            "Pass the submesh with these names, or pass sizes and ranks by name"
        )
    size, rank = dict.fromkeys(AXES, 1), dict.fromkeys(AXES, 0)
    for name, extent, place in zip(names, sizes, coordinate, strict=True):
        axis = _AXIS[name]
        size[axis], rank[axis] = size[axis] * extent, rank[axis] * extent + place
    return _mesh(size, rank)


def _from_order(sizes: dict[str, Any], order: str, environ: Mapping[str, str]) -> Mesh:
    """Return the mesh whose ranks follow from RANK in ``environ`` and the order of the axes. Raises MeshError."""
    names = [name for name in order.split("-") if name != "ep"]  # Megatron's order may name ep, which shares dp's ranks
    if len(set(names)) < len(names) or not set(names) <= set(AXES):
        raise MeshError(
            f"got order {order!r}, expected each of the axes dp, cp, tp and pp at most once, such as 'tp-cp-dp-pp'"
        )
    wrong = [key for key, size in sizes.items() if key not in AXES or not isinstance(size, int) or size < 1]
    if wrong:
        raise MeshError(
            f"got {wrong[0]}={sizes[wrong[0]]!r} with an order, expected only sizes of dp, cp, tp and pp that are at "
            "least 1"
        )
    missing = [axis for axis in AXES if sizes.get(axis, 1) > 1 and axis not in names]
    if missing:
        raise MeshError(
            f"got order {order!r} without {', '.join(missing)}, expected every axis that has more than one rank. Add "
            "the missing axes"
        )
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        raise MeshError(
            "got an order without RANK and WORLD_SIZE in the environment, expected both variables. Start with "
            'torchrun, or pass the ranks, such as mesh={"dp": 8, "dp_rank": rank}'
        )
    rank, world = _number(environ, "RANK", 0), _number(environ, "WORLD_SIZE", 1)
    num_known = prod(sizes.get(axis, 1) for axis in names)
    if "dp" in names and "dp" not in sizes and world % num_known == 0:
        sizes["dp"] = world // num_known
        num_known = world
    if num_known != world or not 0 <= rank < world:
        got = ", ".join(f"{axis}={sizes[axis]}" for axis in names if axis in sizes) or "no sizes"
        raise MeshError(
            f"got {got} with RANK={rank} and WORLD_SIZE={world}, expected sizes whose product is {world}. Correct "
            "the sizes, or leave out dp, which is then inferred from WORLD_SIZE"
        )
    size, ranks = dict.fromkeys(AXES, 1), dict.fromkeys(AXES, 0)
    for axis in names:
        size[axis] = sizes.get(axis, 1)
        rank, ranks[axis] = divmod(rank, size[axis])
    return _mesh(size, ranks)


def _mesh(size: dict[str, int], rank: dict[str, int]) -> Mesh:
    """Return the Mesh of sizes and ranks by axis. Raises ValidationError for values out of range."""
    return msgspec.convert({**size, **{f"{axis}_rank": rank[axis] for axis in AXES}}, Mesh)


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    """Return an environment variable as an integer. Raises MeshError for other text."""
    try:
        return int(environ.get(name, default))
    except ValueError:
        raise MeshError(
            f"got {name}={environ[name]!r} in the environment, expected a number. Correct or unset the variable"
        ) from None
