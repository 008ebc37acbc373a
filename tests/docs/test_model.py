"""The model of ``docs/concepts/model.md`` decides as the broker does: merge, packs, steps, and each rank's packs."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import streampack
from streampack.core.deal.step_cache import KeptSteps
from streampack.core.form.former import Former
from streampack.core.merge.schedule import merge_of
from streampack.core.model.mesh import Mesh
from streampack.core.model.rules import Rules, StreamRules
from streampack.core.model.samples import ROW, SampleTable, index_of
from tests.docs.pages import BLOCKS

Ids = list[list[tuple[int, int]]]
"""(stream, index) of the samples of each rank, rank after rank."""
CODE, PRINTED = (block.code for block in BLOCKS if block.page == "docs/concepts/model.md")
model: dict[str, Any] = {"__name__": "model"}
with contextlib.redirect_stdout(io.StringIO()) as printed:
    exec(compile(CODE, "docs/concepts/model.md", "exec", dont_inherit=True), model)


@dataclass(frozen=True)
class Run:
    """``streams[s][p]`` are the lengths in partition p of stream s."""

    streams: list[list[list[int]]]
    weights: list[float]
    budget: int
    window: int
    packs: int
    dp: int
    seed: int


@st.composite
def runs(draw: st.DrawFn) -> Run:
    budget, dp = draw(st.integers(1, 40)), draw(st.integers(1, 4))
    partitions = st.lists(st.lists(st.integers(1, budget), max_size=12), min_size=1, max_size=3)
    streams = draw(st.lists(partitions, min_size=1, max_size=3))
    weights = [draw(st.floats(0.01, 4)) for _ in streams]
    return Run(
        streams, weights, budget, draw(st.integers(1, 12)), dp * draw(st.integers(1, 3)), dp, draw(st.integers(0, 999))
    )


def modeled(run: Run) -> list[Ids]:
    """Return the steps of the model."""
    rules = model["Rules"](run.weights, run.budget, run.packs, run.window, run.seed)
    steps = model["form"](rules, model["pack"](rules, model["merge"](rules, run.streams)))
    return [
        [
            [
                (sample.stream, int(index_of(sample.seq, sample.partition, len(run.streams[sample.stream]))))
                for pack in packs
                for sample in pack
            ]
            for packs in model["deal"](rules, step, run.dp)
        ]
        for step in steps
    ]


def planned(run: Run) -> list[Ids]:
    """Return the steps of the broker's core."""
    rules = Rules(
        budget=run.budget, window=run.window, packs=run.packs, packer="buffer_first_fit", seed=run.seed, tail="pad",
        streams=tuple(
            StreamRules(name=f"s{number}", weight=weight, partitions=len(partitions))
            for number, (weight, partitions) in enumerate(zip(run.weights, run.streams, strict=True))
        ),
    )  # fmt: skip
    table, merge, p = SampleTable(64), merge_of(rules), 0
    for number, partitions in enumerate(run.streams):
        for partition, lengths in enumerate(partitions):
            rows = np.zeros(len(lengths), ROW)
            rows["stream"], rows["length"] = number, lengths
            rows["index"] = index_of(np.arange(len(lengths)), partition, len(partitions))
            merge.push(p, table.enter(rows), np.array(lengths, np.int64), np.zeros(len(lengths), np.int64))
            merge.end(p)
            p += 1
    former, kept = Former(rules, table), KeptSteps("train", rules, "zigzag", table)
    taken = merge.take(1 << 40)
    former.admit(taken.handles, taken.lengths)
    former.closed = True
    steps = []
    while (request := former.request()) is not None:
        steps += former.apply(request.choose())
    steps += former.cut()
    for step in steps:
        kept.add(step)
    return [[ids_of(kept, step, run.dp, rank) for rank in range(run.dp)] for step in steps]


def ids_of(kept: KeptSteps, step: Any, dp: int, rank: int) -> list[tuple[int, int]]:
    mesh = Mesh(dp=dp, dp_rank=rank)
    list(kept.parts(step.number, mesh))
    ids = kept.ids_of(step.number, mesh)
    assert ids is not None
    return [(stream, index) for stream, index, _ in ids.tolist()]


@given(runs())
def test_the_model_decides_as_the_broker_does(run: Run) -> None:
    assert modeled(run) == planned(run)


def test_the_model_decides_as_a_loader_does() -> None:
    lengths = [int(length) for length in np.random.default_rng(7).integers(1, 60, 200)]
    run = Run([[lengths]], [1.0], 64, 16, 3, 1, 0)
    samples = [list(range(length)) for length in lengths]
    with streampack.local(
        samples, budget=64, packs=3, window=16, packer="buffer_first_fit", shuffle=False, seed=0, format="numpy"
    ) as loader:
        steps = [[pack.sample_ids[:, 1].tolist() for pack in step] for step in loader.steps()]
    expected = [[index for _, index in ranks[0]] for ranks in modeled(run)]
    assert [[index for pack in step for index in pack] for step in steps] == expected


def test_the_page_is_short_and_shows_what_it_prints() -> None:
    assert printed.getvalue() == PRINTED
    assert len(CODE.splitlines()) <= 150
