"""JAX: a step's packs on 8, 4 and 2 devices, killed between; each process's place; segments; what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from textwrap import indent
from typing import Any, NamedTuple

import numpy as np
import pytest

import streampack
from streampack import integrations
from streampack.errors import MeshError, UserError
from tests.docs.pages import BLOCKS
from tests.integration.frameworks.example_runs import Line, serving

ROOT = Path(__file__).parents[4]
STEPS = 12
PACKS = {"step": {"packs": 8}}
FAST = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
"""XLA compiles faster, and slower code."""
RUNS = {
    "whole": (None, 1, 8),
    "8 devices": (4, 2, 4),
    "4 devices": (8, 1, 4),
    "2 devices": (None, 1, 2),
}
"""The step at which a run is killed, its processes, and the devices of each. All but the first share a folder."""


def run(endpoint: str, folder: Path) -> dict[str, list[Line]]:
    """The lines of each run, one after another."""
    jobs = [
        [str(folder / ("whole" if name == "whole" else "killed")), STEPS, *places, str(folder / f"{name}.txt")]
        for name, places in RUNS.items()
    ]
    environment = os.environ | {"STREAMPACK_ENDPOINT": endpoint, "PYTHONPATH": str(ROOT), "XLA_FLAGS": FAST}
    command = [sys.executable, "-m", "tests.integration.frameworks.jax.jax_processes", json.dumps(jobs)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    texts = {name: (folder / f"{name}.txt").read_text() for name in RUNS}
    assert done.stdout.splitlines()[-1:] == ["[0, -9, -9, 0]"], (done.stdout, done.stderr, texts)
    return {
        name: [json.loads(line) for line in text.splitlines() if line.startswith('{"step"')]
        for name, text in texts.items()
    }


def test_8_4_and_2_devices_have_the_steps_and_losses_of_a_run_that_was_not_killed(tmp_path: Path) -> None:
    with serving(PACKS) as broker:
        lines = run(broker.trainers, tmp_path)
    steps = {name: (of_run[0]["step"], of_run[-1]["step"]) for name, of_run in lines.items()}
    assert steps == {"whole": (0, STEPS - 1), "8 devices": (0, 4), "4 devices": (4, 8), "2 devices": (8, STEPS - 1)}
    whole = lines["whole"]
    assert whole[-1]["loss"] < 0.5 * whole[0]["loss"]
    for line in (line for of_run in lines.values() for line in of_run):
        expected = whole[line["step"]]
        assert line == expected | {"loss": pytest.approx(expected["loss"], rel=1e-12)}


def test_the_code_of_the_page_is_that_of_the_example() -> None:
    example = (ROOT / "examples/jax_train.py").read_text()
    blocks = [block.code for block in BLOCKS if block.page == "docs/how-to/jax.md" and block.language == "python"]
    assert len(blocks) == 6
    for code in blocks:
        assert any(indent(code, " " * spaces) in example for spaces in (0, 4, 8)), code


@pytest.fixture(scope="module")
def alone() -> Any:
    """The sharding of rows over one device. jax is imported here: tests of other files do without."""
    import jax

    return jax.sharding.NamedSharding(jax.make_mesh((1,), ("data",)), jax.sharding.PartitionSpec("data"))


@contextmanager
def first_step(**options: Any) -> Iterator[tuple[Any, Any]]:
    """A loader and its first step: 4 packs with a declared field, of samples padded to multiples of 4 tokens."""
    rows = [{"tokens": [1 + i % 9] * (1 + i % 9), "weight": [i / 7] * (1 + i % 9)} for i in range(64)]
    fields = {"weight": {"dtype": "float32"}}
    chosen: dict[str, Any] = {"budget": 32, "packs": 4, "align": 4, "fields": fields, "format": "numpy"} | options
    with streampack.local(rows, **chosen) as loader:
        yield loader, next(loader.steps())


def test_rows_are_the_packs_with_segments_from_1_and_0_at_padding(alone: Any) -> None:
    with first_step() as (loader, step):
        batch = integrations.jax.arrays(step, alone)
        assert loader.state_dict()["next_step"] == 1, "all packs are taken"
    assert {name: str(values.dtype) for name, values in batch.items()} == {
        "weight": "float32", "input_ids": "int32", "labels": "int32", "position_ids": "int32", "segment_ids": "int32"
    }  # fmt: skip
    for row, pack in enumerate(step):
        for name in ("weight", "input_ids", "labels", "position_ids"):
            assert np.array_equal(batch[name][row], pack[name])
        segments = np.asarray(batch["segment_ids"][row])
        assert np.array_equal(segments == 0, pack.padding_mask)
        for number in range(pack.num_samples):
            first, stop = pack.cu_seqlens_padded[number], pack.cu_seqlens_padded[number + 1]
            real = pack.cu_seqlens[number + 1] - pack.cu_seqlens[number]
            assert segments[first:stop].tolist() == [number + 1] * real + [0] * (stop - first - real)


def test_declared_positions_and_labels_are_those_of_the_packs(alone: Any) -> None:
    rows = [{"tokens": [1] * n, "position_ids": [[j, 2 * j, 0] for j in range(n)], "labels": [j % 3 for j in range(n)]}
            for n in range(2, 20)]  # fmt: skip
    import jax

    mesh = jax.make_mesh((1, 1), ("data", "seq"))
    by_tokens = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data", "seq"))
    fields: dict[str, Any] = {"position_ids": {"dtype": "int32", "shape": [3]}, "labels": {"dtype": "int32"}}
    with streampack.local(rows, budget=32, packs=2, fields=fields, format="numpy") as loader:
        step = next(loader.steps())
        for sharding in (alone, by_tokens):
            batch = integrations.jax.arrays(step, sharding)
            for row, pack in enumerate(step):
                assert np.array_equal(batch["position_ids"][row], pack.position_ids)
                assert np.array_equal(batch["labels"][row], pack.labels)
    assert batch["position_ids"].sharding.spec == jax.sharding.PartitionSpec("data", None, "seq")


def test_a_field_that_jax_cannot_hold_is_rejected(alone: Any) -> None:
    for value in (5, 2**40):
        rows = [{"tokens": [1, 2], "id": [value, value]}] * 8
        with streampack.local(rows, budget=8, packs=2, fields={"id": {"dtype": "int64"}}, format="numpy") as loader:
            step = next(loader.steps())
            if value == 5:
                assert np.asarray(integrations.jax.arrays(step, alone)["id"]).max() == 5
                continue
            with pytest.raises(UserError, match=r"the field 'id' that int32 cannot hold.*Set JAX_ENABLE_X64=1"):
                integrations.jax.arrays(step, alone)


def test_a_part_of_a_step_is_a_micro_batch(alone: Any) -> None:
    with first_step() as (_, step):
        parts = [integrations.jax.arrays(step, alone, slice(first, first + 2))["input_ids"] for first in (0, 2)]
        assert np.array_equal(np.concatenate(parts), integrations.jax.arrays(step, alone)["input_ids"])


class Device(NamedTuple):
    """A device of jax, as far as the adapter looks at it."""

    process_index: int
    shard: int
    number: int


class Over:
    """A sharding over devices, which are (process, shard of the rows), with ``columns`` parts of each row in turn."""

    def __init__(self, *devices: tuple[int, int], columns: int = 1) -> None:
        self.num_devices, self.columns = len(devices), columns
        self.devices = [Device(*device, number) for number, device in enumerate(devices)]

    def devices_indices_map(self, _: Any) -> dict[Device, tuple[slice, slice]]:
        shards = 1 + max(device.shard for device in self.devices)

        def part(number: int, of: int) -> slice:
            return slice(number * self.num_devices // of, (number + 1) * self.num_devices // of)

        return {
            device: (part(device.shard, shards), part(device.number % self.columns, self.columns))
            for device in self.devices
        }


class OfThree(Over):
    """A sharding of arrays with three axes, as jax answers for one on several devices."""

    def devices_indices_map(self, _: Any) -> dict[Device, tuple[slice, slice]]:
        return [][2]


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ([(0, 0), (0, 1), (1, 2), (1, 3)], {0: (0, 0), 1: (1, 0)}),
        ([(1, 0), (1, 1), (0, 2), (0, 3)], {0: (1, 0), 1: (0, 0)}),
        ([(0, 0), (1, 0), (2, 1), (3, 1)], {0: (0, 0), 1: (0, 1), 2: (1, 0), 3: (1, 1)}),
        ([(0, 0), (0, 0)], {0: (0, 0)}),
        ([(0, 0), (0, 1), (1, 0), (1, 1)], {0: (0, 0), 1: (0, 1)}),
    ],
    ids=["data", "another order of processes", "rows held twice", "one process", "data within, copies over processes"],
)
def test_processes_that_hold_the_same_rows_read_the_same_packs(
    devices: list[tuple[int, int]], expected: dict[int, tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for process, (dp_rank, tp_rank) in expected.items():
        monkeypatch.setattr("jax.process_index", lambda process=process: process)
        sizes = {"dp": 1 + max(dp for dp, _ in expected.values()), "tp": 1 + max(tp for _, tp in expected.values())}
        assert integrations.jax.mesh_of(Over(*devices)) == sizes | {"dp_rank": dp_rank, "tp_rank": tp_rank}


def test_meshes_whose_processes_do_not_hold_whole_packs_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MeshError, match=r"splits the tokens of a pack over processes, expected whole packs"):
        integrations.jax.mesh_of(Over((0, 0), (1, 0), columns=2))
    with pytest.raises(MeshError, match=r"processes hold the rows .*Order the devices by process"):
        integrations.jax.mesh_of(Over((0, 0), (0, 1), (1, 1), (1, 2), (2, 3), (2, 3)))
    with pytest.raises(MeshError, match=r"expected a sharding of arrays \[rows, tokens\]: list index out of range"):
        integrations.jax.mesh_of(OfThree((0, 0), (0, 1)))
    monkeypatch.setattr("jax.process_index", lambda: 7)
    with pytest.raises(MeshError, match=r"without a device of process 7, expected one"):
        integrations.jax.mesh_of(Over((0, 0), (1, 1)))


def test_packs_that_make_no_rows_are_rejected_with_the_key_to_set(alone: Any) -> None:
    with first_step(shape="exact") as (_, step), pytest.raises(UserError, match=r"`shape: exact`.*rules.shape: fixed"):
        integrations.jax.arrays(step, alone)
    with first_step(format="thd") as (_, step), pytest.raises(UserError, match=r"got packs as View.*format='numpy'"):
        integrations.jax.arrays(step, alone)
    with first_step() as (_, step):
        with pytest.raises(UserError, match=r"got 4 packs on each of 1 readers, expected a multiple of 3 in all"):
            integrations.jax.arrays(step, Over((0, 0), (0, 1), (0, 2)))
        shared = [replace(pack, shared=np.zeros(pack.num_samples, np.int32)) for pack in step]
        with pytest.raises(UserError, match=r"share tokens .*Remove rules.share"):
            integrations.jax.arrays(replace(step, packs=shared), alone)
        with pytest.raises(UserError, match=r"not made by a loader"):
            integrations.jax.arrays(replace(step, rules=None), alone)
