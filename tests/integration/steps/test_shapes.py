"""Packs of every shape over a real mesh: samples and digests of those of fixed length, every invariant verified."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import streampack
from streampack.config.typed_yaml import convert
from streampack.packs.step import Step
from streampack.sources import SourceSettings, open_source
from tests.integration.running import PATIENCE_S, producing_here, running_broker, write_jsonl

BUDGET = 512
SHAPES = ["fixed", "exact", {"multiple": 128}, {"buckets": [256, 384]}]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("data")
    for shard in range(4):
        rows = [{"tokens": [1 + i % 99] * (60 + (shard * 53 + i * 97) % 260)} for i in range(60)]
        write_jsonl(folder / f"{shard}.jsonl", rows)
    return str(folder / "*.jsonl")


def read(files: str, shape: Any, pp: int) -> list[list[Step]]:
    """Every step of each rank of a mesh with dp = 2, cp = 2 and ``pp`` stages."""
    settings = {
        "tokens": "uint16",
        "rules": {"budget": BUDGET, "window": {"samples": 32}, "step": {"packs": 4}, "packer": "concatenative",
                  "shape": shape, "align": {"sample": 4, "pack": 8}},
        "streams": {"web": {}},
    }  # fmt: skip
    source = open_source(convert({"source": "jsonl", "shards": files}, SourceSettings))
    found: dict[int, list[Step]] = {}

    def run(rank: int) -> None:
        mesh = {"dp": 2, "cp": 2, "pp": pp, "dp_rank": rank % 2, "cp_rank": rank // 2 % 2, "pp_rank": rank // 4}
        with streampack.connect(broker.trainers, mesh=mesh, format="numpy", verify=True) as loader:
            found[rank] = list(loader.steps())

    with running_broker(settings) as broker, producing_here(broker.producers, {"web": source}):
        ranks = [threading.Thread(target=run, args=(rank,)) for rank in range(4 * pp)]
        for thread in ranks:
            thread.start()
        for thread in ranks:
            thread.join(PATIENCE_S)
    assert len(found) == 4 * pp
    return [found[rank] for rank in range(4 * pp)]


@pytest.fixture(scope="module")
def fixed(files: str) -> list[list[Step]]:
    return read(files, "fixed", 1)


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_packs_of_every_shape_hold_the_samples_of_fixed_ones(
    shape: Any, pp: int, files: str, fixed: list[list[Step]]
) -> None:
    ranks = read(files, shape, pp)
    lengths = set()
    for number, steps in enumerate(zip(*ranks, strict=True)):
        assert len({step.chain for step in steps} | {fixed[0][number].chain}) == 1, "FORM knows no shape"
        streampack.verify(list(steps))
        of_step = {int(pack.cu_seqlens_padded[-1]) for step in steps for pack in step}
        assert len(of_step) == 1 or pp == 1, "a pipeline's stages exchange one shape"
        lengths |= of_step
        for step, same in zip(steps, fixed * pp, strict=False):
            for pack, whole in zip(step, same[number], strict=True):
                real, of_fixed = pack.num_samples, whole.cu_seqlens_padded
                assert np.array_equal(pack.sample_ids, whole.sample_ids)
                assert np.array_equal(pack.cu_seqlens_padded[: real + 1], of_fixed[: real + 1])
                held = int(of_fixed[real]) // 2
                assert np.array_equal(pack.input_ids[:held], whole.input_ids[:held])
    assert len(fixed[0]) == len(ranks[0]) > 10
    expected = {"fixed": {BUDGET}, str(SHAPES[2]): {256, 384, 512}, str(SHAPES[3]): {256, 384, 512}}
    assert lengths <= expected.get(str(shape), set(range(8, BUDGET + 1, 8)))
    assert shape == "fixed" or len(lengths) > 1
