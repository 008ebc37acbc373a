"""Meshes, from sizes and ranks, RANK with an order, or a torch DeviceMesh; and the words for what is missing."""

from __future__ import annotations

import json
import subprocess
import sys
from math import prod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.client.ranks import AXES, mesh_of, of_dims
from streampack.core.model.mesh import Mesh
from streampack.errors import MeshError

sizes = st.fixed_dictionaries(dict.fromkeys(AXES, st.integers(1, 4)))


def environ(rank: int, world: int) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": str(world)}


@given(sizes, st.permutations(AXES), st.booleans())
def test_the_first_axis_of_an_order_varies_fastest(size: dict[str, int], axes: list[str], infer: bool) -> None:
    world = prod(size.values())
    given = {axis: n for axis, n in size.items() if axis != "dp"} if infer else size
    meshes = [mesh_of(given, "-".join(axes), environ(rank, world)) for rank in range(world)]
    assert all(mesh.sizes == tuple(size[axis] for axis in AXES) for mesh in meshes)
    for rank, mesh in enumerate(meshes):
        places = dict(zip(AXES, mesh.ranks, strict=True))
        stride = [prod(size[axis] for axis in axes[:i]) for i in range(len(axes))]
        assert rank == sum(places[axis] * step for axis, step in zip(axes, stride, strict=True))


def test_megatrons_own_order_is_taken_as_it_is() -> None:
    mesh = mesh_of({"tp": 2, "pp": 2}, "tp-cp-ep-dp-pp", environ(5, 8))
    assert (mesh.sizes, mesh.ranks) == ((2, 1, 2, 2), (0, 0, 1, 1))


def test_one_axis_needs_no_sizes() -> None:
    assert mesh_of(None, "dp", environ(3, 8)) == Mesh(dp=8, dp_rank=3)


@given(sizes, st.data())
def test_dimensions_of_one_axis_are_combined_in_their_order(size: dict[str, int], data: st.DataObject) -> None:
    names = data.draw(st.permutations(["dp_replicate", "data_parallel", "cp", "sp", "tensor_parallel", "pp"]))
    extents = [data.draw(st.integers(1, 3)) for _ in names]
    axis_of = {"dp_replicate": "dp", "data_parallel": "dp", "sp": "cp", "tensor_parallel": "tp"}
    seen = set()
    for rank in range(prod(extents)):
        rest, place = rank, list[int]()
        for extent in reversed(extents):
            rest, at = divmod(rest, extent)
            place.insert(0, at)
        mesh = of_dims(names, extents, place)
        seen.add(mesh.ranks)
        for axis, found, total in zip(AXES, mesh.ranks, mesh.sizes, strict=True):
            mine = [(p, n) for name, p, n in zip(names, place, extents, strict=True) if axis_of.get(name, name) == axis]
            assert total == prod(n for _, n in mine)
            assert found == sum(p * prod(n for _, n in mine[i + 1 :]) for i, (p, _) in enumerate(mine))
    assert len(seen) == prod(extents), "no two ranks share a place"


@pytest.mark.parametrize(
    ("mesh", "order", "env", "message"),
    [
        (
            None,
            None,
            environ(0, 8),
            r'got WORLD_SIZE=8 and no ranks.*device_mesh.*"dp_rank": rank.*order="tp-cp',
        ),
        ({"dp": 8}, None, environ(0, 8), r"got WORLD_SIZE=8 and no ranks"),
        (
            {"tp": 3},
            "tp-dp",
            environ(0, 8),
            r"got tp=3 with RANK=0 and WORLD_SIZE=8, expected sizes whose product is 8",
        ),
        ({"tp": 2, "dp": 2}, "tp-dp", environ(0, 8), r"got tp=2, dp=2 with RANK=0 and WORLD_SIZE=8"),
        ({"tp": 2}, "dp", environ(0, 8), r"got order 'dp' without tp, expected every axis"),
        (
            {"tp": 2},
            "tp-tp-dp",
            environ(0, 8),
            r"got order 'tp-tp-dp', expected each of the axes dp, cp, tp and pp at most once",
        ),
        ({"tp": 2}, "tp,dp", environ(0, 8), r"got order 'tp,dp', expected each of the axes"),
        ({"dp": 8, "dp_rank": 1}, "dp", environ(0, 8), r"got dp_rank=1 with an order, expected only sizes"),
        ({"dp": 0}, "dp", environ(0, 8), r"got dp=0 with an order"),
        ({"dp": 8}, "dp", {}, r"without RANK and WORLD_SIZE .* Start with torchrun"),
        ({"dp": 8}, "dp", environ(8, 8), r"got dp=8 with RANK=8 and WORLD_SIZE=8"),
        (None, "dp", {"RANK": "x", "WORLD_SIZE": "2"}, r"got RANK='x' in the environment, expected a number"),
        (Mesh(dp=2), "dp", environ(0, 2), r"got order 'dp' with a Mesh, expected a dict of sizes"),
        ({"dq": 2}, None, {}, r"mesh: .*dq.*expected the sizes dp, cp, tp, pp and the ranks"),
        ({"dp": 2, "dp_rank": 2}, None, {}, r"got dp_rank=2 with dp=2"),
        (7, None, {}, r"mesh: .*expected sizes"),
        (4, None, {}, r"mesh: got 4, expected sizes and ranks by name. .*mesh=\{\"dp\": 8, \"dp_rank\": rank\}"),
        ({"data": 2}, None, {}, r"mesh: got the key 'data', expected the sizes dp, .*mesh=\{\"dp\": 8"),
    ],
)
def test_missing_and_wrong_ranks_are_named(mesh: Any, order: str | None, env: dict[str, str], message: str) -> None:
    with pytest.raises(MeshError, match=message):
        mesh_of(mesh, order, env)


@pytest.mark.parametrize("env", [{}, {"WORLD_SIZE": "1", "RANK": "0"}])
def test_one_rank_needs_no_mesh(env: dict[str, str]) -> None:
    assert mesh_of(None, None, env) == Mesh()
    assert mesh_of({"dp": 2, "dp_rank": 1}, None, environ(0, 8)) == Mesh(dp=2, dp_rank=1), "said is said"


RANK = """
import json, sys
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from streampack.errors import MeshError
from streampack.client.ranks import mesh_of

rank, rendezvous = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=4)
found = []
for shape, names in [((2, 2), ("dp_replicate", "dp_shard")), ((2, 2), ("cp", "data")), ((1, 2, 2), ("pp", "dp", "tp"))]:
    mesh = mesh_of(init_device_mesh("cpu", shape, mesh_dim_names=names))
    found.append([mesh.sizes, mesh.ranks])
refused = []
for mesh in (init_device_mesh("cpu", (4,), mesh_dim_names=("experts",)), init_device_mesh("cpu", (4,)),
             DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",))):
    try:
        found.append([mesh_of(mesh).sizes, mesh_of(mesh).ranks])
    except MeshError as error:
        refused.append(str(error).split(",")[0])
print(json.dumps([found, refused]))
dist.destroy_process_group()
"""


def test_four_real_processes_have_the_ranks_of_their_device_meshes(tmp_path: Path) -> None:
    commands = [[sys.executable, "-c", RANK, str(rank), str(tmp_path / "rendezvous")] for rank in range(4)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    try:
        said = [json.loads(process.communicate(timeout=200)[0].splitlines()[-1]) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for rank, (found, refused) in enumerate(said):
        hsdp, ring, pipeline, *pair = found
        assert hsdp == [[4, 1, 1, 1], [rank, 0, 0, 0]]
        assert ring == [[2, 2, 1, 1], [rank % 2, rank // 2, 0, 0]]
        assert pipeline == [[2, 1, 2, 1], [rank // 2, 0, rank % 2, 0]]
        assert refused[0] == "got a DeviceMesh with the dimensions experts"
        assert refused[1] == "got a DeviceMesh without mesh_dim_names"
        assert pair == ([[[2, 1, 1, 1], [rank, 0, 0, 0]]] if rank < 2 else [])
        assert refused[2:] == ([] if rank < 2 else ["got a DeviceMesh that does not contain this rank"])
