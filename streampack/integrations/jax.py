"""JAX: this process's place among the readers of a mesh, and a step's packs as global arrays.

Each process reads the rows that its devices hold, and JAX joins them to arrays over all processes. A row is a pack.
Processes that hold the same rows, as with tensor parallelism over hosts, read the same packs. Which rows a process
holds follows from the sharding alone, so both functions take the same one.

Attention for packs needs ``segment_ids``: tokens attend to earlier tokens of their own segment. Segments count from 1
in each row, and 0 is padding. These are the conventions of MaxText and of JAX's own attention kernels.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from streampack.core.model.rules import Rules
from streampack.errors import MeshError, UserError
from streampack.integrations.checks.tried_versions import Tried
from streampack.packs.pack import Pack
from streampack.packs.step import Step

__all__ = ["arrays", "mesh_of"]

TRIED = Tried("jax", "0.10.2")
TRIED.check(jax, "make_array_from_process_local_data", "process_index")


def mesh_of(sharding: Any) -> dict[str, int]:
    """Return the mesh for ``connect``: which of a step's packs this process reads.

    Processes whose devices hold the same rows count as tensor-parallel ranks of one data-parallel rank.

    Args:
        sharding: The jax ``Sharding`` of a batch [rows, tokens].

    Returns:
        A dict with ``dp``, ``dp_rank``, ``tp`` and ``tp_rank``.

    Raises:
        MeshError: A process holds parts of rows, or shares only some of its rows with another process.

    Example:
        >>> sharding = NamedSharding(jax.make_mesh((8,), ("data",)), PartitionSpec("data"))  # doctest: +SKIP
        >>> loader = streampack.connect(format="numpy", mesh=mesh_of(sharding))  # doctest: +SKIP
    """
    rows, columns, _ = _places(sharding)
    size = sharding.num_devices
    if any(len(each) < size for each in columns.values()):
        raise MeshError(
            f"got {sharding}, which splits the tokens of a pack over processes, expected whole packs in each process. "
            f"Shard only the first axis here, and the tokens inside jit"
        )
    readers = defaultdict[tuple[int, ...], list[int]](list)
    for process, numbers in sorted(rows.items()):
        readers[tuple(sorted(numbers))].append(process)
    if sum(map(len, readers)) != size or len({(len(key), len(each)) for key, each in readers.items()}) != 1:
        raise MeshError(
            f"got {sharding}, whose processes hold the rows {dict(rows)} of {size}. Expected equal numbers of "
            f"processes with the same rows, and no other row in two processes. Order the devices by process"
        )
    here = jax.process_index()
    for number, key in enumerate(sorted(readers)):
        if here in readers[key]:
            place = readers[key].index(here)
            return {"dp": len(readers), "dp_rank": number, "tp": len(readers[key]), "tp_rank": place}
    raise MeshError(f"got {sharding} without a device of process {here}, expected one. Connect on its processes only")


def arrays(step: Step[Pack], sharding: Any, part: slice = slice(None)) -> dict[str, Any]:
    """Return packs of a step as global jax arrays [rows, T]; a row is a pack.

    Args:
        step: A step of a loader with ``format="numpy"`` and the mesh of ``mesh_of(sharding)``.
        sharding: The jax ``Sharding`` of the rows.
        part: Which of this process's packs to take, if a step is several micro-batches; equal on all processes.

    Returns:
        A dict by name:

        - ``input_ids``, ``labels``: int32; labels are -100 where there is no loss.
        - ``position_ids``: int32 [rows, T] or [rows, 3, T], from 0 in each sample; or as sent with the samples.
        - ``segment_ids``: int32, from 1 in each row; 0 at padding.
        - The declared fields of axis ``token``, in the dtypes that jax allows. Other fields stay in the packs.

    Raises:
        UserError: Packs may have different lengths or share tokens, they do not fit the devices, or jax cannot hold the
            values of a field.

    Example:
        >>> for step in loader.steps():  # doctest: +SKIP
        ...     state, loss = update(state, arrays(step, sharding), step.num_loss_tokens)
    """
    packs, rules = step.packs[part], step.rules
    if rules is None:
        raise UserError("got a step that was not made by a loader, expected a step from loader.steps()")
    if not all(isinstance(pack, Pack) for pack in packs):
        raise UserError(f"got packs as {type(packs[0]).__name__}, expected Pack. Pass format='numpy' to connect()")
    if any(pack.shared is not None or pack.cp > 1 for pack in packs):
        raise UserError(
            "got packs whose samples share tokens or are split over context-parallel ranks, expected whole samples. "
            "Remove rules.share, and pass mesh=mesh_of(sharding) to connect()"
        )
    if rules.shape != "fixed" or rules.padded:
        raise UserError(
            f"got packs of `shape: {rules.shape}`{' and `padded: true`' * rules.padded}, expected packs of one length. "
            f"Set `rules.shape: fixed` in broker.yaml, without `padded`"
        )
    shards = _places(sharding)[2]
    if len(packs) * mesh_of(sharding)["dp"] % shards:
        raise UserError(
            f"got {len(packs)} packs on each of {mesh_of(sharding)['dp']} readers, expected a multiple of {shards} in "
            f"all, because {sharding} has so many shards of rows. Set rules.step.packs in broker.yaml to a multiple"
        )
    rows = [_row_of(pack, rules) for pack in packs]
    columns = {name: _in_jax(name, np.stack([row[name] for row in rows])) for name in rows[0]}
    return {
        name: jax.make_array_from_process_local_data(_sharding_of(name, values, sharding), values)
        for name, values in columns.items()
    }


def _in_jax(name: str, values: NDArray[Any]) -> NDArray[Any]:
    """Return values in the dtype that jax allows. Raises UserError for integers that it cannot hold."""
    allowed = values.astype(jax.dtypes.canonicalize_dtype(values.dtype), copy=False)
    if values.dtype.kind in "ui" and not np.array_equal(allowed, values):
        raise UserError(
            f"got values of the field {name!r} that {allowed.dtype} cannot hold, and jax makes {allowed.dtype} of "
            f"{values.dtype}. Set JAX_ENABLE_X64=1, or send smaller values"
        )
    return allowed


def _sharding_of(name: str, values: NDArray[Any], sharding: Any) -> Any:
    """Return the sharding of an array: that of rows and tokens, also for position ids [rows, 3, T]."""
    if name == "position_ids" and values.ndim == 3 and len(getattr(sharding, "spec", ())) > 1:
        rows, *tokens = sharding.spec
        spec = jax.sharding.PartitionSpec(rows, None, *tokens)
        return jax.sharding.NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
    return sharding


def _row_of(pack: Pack, rules: Rules) -> dict[str, NDArray[Any]]:
    """Return the arrays of a pack, [T] each, or more axes."""
    segments = np.repeat(np.arange(1, pack.num_segments + 1, dtype=np.int32), np.diff(pack.cu_seqlens_padded))
    return {
        **{
            field.name: pack.fields[field.name]
            for field in rules.fields
            if field.axis == "token" and field.name in pack.fields
        },
        "input_ids": pack.input_ids.astype(np.int32), "labels": pack.labels.astype(np.int32),
        "position_ids": pack.position_ids.astype(np.int32), "segment_ids": np.where(pack.padding_mask, 0, segments),
    }  # fmt: skip


@functools.cache
def _places(sharding: Any) -> tuple[dict[int, set[int]], dict[int, set[int]], int]:
    """Return the rows and the columns that each process holds, and the number of shards of rows.

    They are those of an array that has as many rows and columns as the sharding has devices.
    """
    size = sharding.num_devices
    rows, columns = defaultdict[int, set[int]](set), defaultdict[int, set[int]](set)
    try:
        places = sharding.devices_indices_map((size, size))
    except (IndexError, ValueError) as error:
        raise MeshError(f"got {sharding}, expected a sharding of arrays [rows, tokens]: {error}") from None
    for device, (down, across) in places.items():
        rows[device.process_index].update(range(size)[down])
        columns[device.process_index].update(range(size)[across])
    return dict(rows), dict(columns), len({down.indices(size) for down, _ in places.values()})
