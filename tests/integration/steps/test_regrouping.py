"""Forward packs over a real mesh: every rank has as many with no word between them, and values find their tokens."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import streampack
from streampack.config.typed_yaml import convert
from streampack.packs.forward_packs import ForwardPacks
from streampack.packs.step import Step
from streampack.sources import SourceSettings, open_source
from tests.integration.running import PATIENCE_S, producing_here, running_broker, write_jsonl

BUDGET, DP, CP = 512, 2, 2
Read = list[tuple[Step, ForwardPacks, ForwardPacks]]


def value_of(batch: Any) -> NDArray[Any]:
    """Of each token something that only it has: of its sample, its place there and its id."""
    bounds = np.asarray(batch["cu_seqlens_padded"])[: batch["num_samples"] + 1]
    sample = np.searchsorted(bounds, batch.positions(), side="right") - 1
    numbers = np.append(batch["sample_ids"][:, 1], -1)[np.minimum(sample, batch["num_samples"])]
    found: NDArray[Any] = np.stack([numbers, batch["position_ids"], batch["input_ids"]], axis=1) + 1
    return found


@pytest.mark.parametrize("shape", ["fixed", "exact"])
def test_ranks_have_as_many_forward_packs_and_values_come_back_to_their_tokens(shape: str, tmp_path: Any) -> None:
    for shard in range(4):
        rows = [{"tokens": [1 + i % 99] * (60 + (shard * 53 + i * 97) % 260)} for i in range(60)]
        write_jsonl(tmp_path / f"{shard}.jsonl", rows)
    settings = {
        "tokens": "uint16",
        "rules": {"budget": BUDGET, "window": {"samples": 32}, "step": {"packs": 10}, "shape": shape,
                  "align": {"sample": 4, "pack": 8}},
        "streams": {"web": {}},
    }  # fmt: skip
    source = open_source(convert({"source": "jsonl", "shards": str(tmp_path / "*.jsonl")}, SourceSettings))
    found: dict[int, Read] = {}

    def run(rank: int) -> None:
        mesh = {"dp": DP, "cp": CP, "dp_rank": rank % DP, "cp_rank": rank // DP}
        with streampack.connect(broker.trainers, mesh=mesh, format="numpy", verify=True) as loader:
            found[rank] = [(step, step.regroup(2 * BUDGET), step.regroup(336)) for step in loader.steps()]

    with running_broker(settings) as broker, producing_here(broker.producers, {"web": source}):
        ranks = [threading.Thread(target=run, args=(rank,)) for rank in range(DP * CP)]
        for thread in ranks:
            thread.start()
        for thread in ranks:
            thread.join(PATIENCE_S)
    assert len(found) == DP * CP
    assert len(found[0]) > 3
    for number in range(len(found[0])):
        check_step([found[rank][number] for rank in range(DP * CP)], shape)
    assert any(len(mine[2]) != len(other[2]) for mine, other in zip(found[0], found[1], strict=True)), "its own number"


def check_step(ranks: list[tuple[Step, ForwardPacks, ForwardPacks]], shape: str) -> None:
    """One step of all ranks."""
    assert {len(larger) for _, larger, _ in ranks} == {3}, "five micro-batches, joined by two"
    if shape == "fixed":
        lengths = [[int(pack.cu_seqlens_padded[-1]) for pack in larger] for _, larger, _ in ranks]
        assert lengths == [[2 * BUDGET, 2 * BUDGET, BUDGET]] * len(ranks)
    for step, *regrouped in ranks:
        for forward in regrouped:
            old = forward.tokens_back({pack: value_of(pack) for pack in forward})
            for batch, values in zip(step, old, strict=True):
                expected = np.where(batch.padding_mask[:, None], 0, value_of(batch))
                assert np.array_equal(values, expected)
    for first in range(DP):
        shards = [ranks[first + DP * cp_rank] for cp_rank in range(CP)]
        for packs in zip(*(larger for _, larger, _ in shards), strict=True):
            streampack.verify(list(packs))
        assert len({len(smaller) for _, _, smaller in shards}) == 1, "context-parallel ranks cut alike"
        for packs in zip(*(smaller for _, _, smaller in shards), strict=True):
            assert np.array_equal(packs[0].cu_seqlens_padded, packs[1].cu_seqlens_padded)
