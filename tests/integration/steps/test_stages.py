"""Trainers of a run whose rules change: each step comes as its own rules say, or ends the trainer with a reason."""

from __future__ import annotations

import itertools
import json
import logging
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest

import streampack
from streampack.errors import MeshError, UserError
from tests.integration.relay.relayed import SETTINGS as SMALL
from tests.integration.relay.relayed import Ranks, job, meshes, source_in
from tests.integration.running import PATIENCE_S, RunningBroker, folder, producing_here, running_broker

STAGES = [
    {"name": "long", "at": {"step": 3}, "rules": {"budget": 512, "align": {"sample": 8, "pack": 8}}},
    {"name": "wide", "at": {"step": 6}, "rules": {"step": {"packs": 6}}},
]
"""Longer packs from step 3 on; from step 6 on, more of them."""
SETTINGS: dict[str, Any] = SMALL | {"stages": STAGES}
EXPECTED = [("0", 256, 4)] * 3 + [("long", 512, 4)] * 3 + [("wide", 512, 6)] * 3
"""(stage, budget, packs) of each step."""


@pytest.fixture(scope="module")
def broker() -> Iterator[RunningBroker]:
    """A broker for all tests, one after another: a trainer without a checkpoint begins at step 0."""
    with folder() as path, running_broker(SETTINGS) as found, producing_here(found.producers, source_in(path)):
        yield found


def connect(broker: RunningBroker, mesh: Any = None, **more: Any) -> streampack.Client[Any]:
    return streampack.connect(
        broker.trainers, mesh=mesh, timeout_s=PATIENCE_S, stall_timeout_s=60, **{"format": "numpy", **more}
    )


@contextmanager
def all_ranks(broker: RunningBroker, dp: int, state: Any = None, **more: Any) -> Iterator[list[Any]]:
    with ExitStack() as stack:
        loaders = [stack.enter_context(connect(broker, mesh, **more)) for mesh in meshes(dp=dp)]
        for loader in loaders if state is not None else ():
            loader.load_state_dict(state)
        yield loaders


def digests(loader: Any, upto: int | None = None) -> tuple[dict[int, str], streampack.StageEnds | None]:
    """Digests of the steps that a rank gets, and the error with which it ends."""
    found: dict[int, str] = {}
    try:
        for step in itertools.islice(loader.steps(), upto):
            assert len(tuple(step)) == len(step)
            found[step.index] = step.digest
    except streampack.StageEnds as error:
        return found, error
    return found, None


def at_once(loaders: list[Any], upto: int | None = None) -> list[tuple[dict[int, str], streampack.StageEnds | None]]:
    with ThreadPoolExecutor(len(loaders)) as pool:
        return list(pool.map(lambda loader: digests(loader, upto), loaders))


def test_each_step_has_the_budget_the_packs_and_the_boundaries_of_its_stage(broker: RunningBroker) -> None:
    with connect(broker, verify=True) as loader:
        assert [stage.name for stage in loader.rules.stages] == ["long", "wide"]
        steps = loader.steps()
        for expected in EXPECTED:
            step = next(steps)
            assert (step.stage, step.budget, len(step)) == expected
            assert loader.rules is step.rules
            assert loader.rules.packs == len(step)
            assert {len(pack.input_ids) for pack in step} == {step.budget}
            align = 4 if step.stage == "0" else 8
            assert all((np.asarray(pack.cu_seqlens_padded) % align == 0).all() for pack in step)
            assert step.regroup(budget=1024)
        assert "packs=6, budget=512" in repr(loader)
        state = loader.state_dict()
    with connect(broker) as loader:
        loader.load_state_dict(json.loads(json.dumps(state)))
        assert next(loader.steps()).index == len(EXPECTED)


def test_a_mesh_that_does_not_fit_ends_and_another_goes_on_at_the_same_step(
    broker: RunningBroker, caplog: pytest.LogCaptureFixture
) -> None:
    with connect(broker) as loader:
        golden, _ = digests(loader, 9)
    with all_ranks(broker, 4) as loaders:
        said = [line.getMessage() for line in caplog.records if line.levelno == logging.WARNING]
        assert ["training ends with StageEnds where stage 'wide' begins (step 6)" in line for line in said] == [True]
        for had, error in at_once(loaders):
            assert had == {step: golden[step] for step in range(6)}
            assert error is not None
            assert (error.step, error.stage) == (6, "wide")
            assert "got dp=4, expected a divisor of the 6 packs of a step (1, 2, 3, 6)" in error.detail
        first = loaders[0]
        steps = first.steps()
        for again in (steps, steps, first.steps(), first, first, iter(first)):
            with pytest.raises(streampack.StageEnds):
                next(again)
        states = [loader.state_dict() for loader in loaders]
        assert states == [states[0]] * 4
        assert states[0]["next_step"] == 6
        first.commit(5)
    with connect(broker, {"dp": 4, "dp_rank": 0}) as loader:
        loader.load_state_dict(states[0])
        with pytest.raises(MeshError, match="cannot go on with step 6, which is in stage 'wide': got dp=4, expected"):
            next(loader.steps())
    with all_ranks(broker, 3, states[0]) as loaders:
        assert at_once(loaders, 3) == [({step: golden[step] for step in (6, 7, 8)}, None)] * 3


def test_a_mesh_that_fits_no_stage_is_refused_when_it_comes(broker: RunningBroker) -> None:
    with pytest.raises(MeshError, match="got dp=5, expected a divisor of the 4 packs"):
        connect(broker, {"dp": 5, "dp_rank": 0})


def test_a_loaded_checkpoint_begins_again_after_the_end_of_a_stage(broker: RunningBroker) -> None:
    with all_ranks(broker, 4) as loaders:
        before = [loader.state_dict() for loader in loaders]
        assert all(error is not None for _, error in at_once(loaders))
        for loader, state in zip(loaders, before, strict=True):
            loader.load_state_dict(state)
        assert [sorted(had) for had, _ in at_once(loaders)] == [[*range(6)]] * 4


@pytest.mark.parametrize("cp", [1, 2])
def test_ranks_behind_a_relay_read_each_stage_as_ranks_without_one(monkeypatch: pytest.MonkeyPatch, cp: int) -> None:
    with job(monkeypatch, SETTINGS) as it:
        monkeypatch.setenv("STREAMPACK_RELAY", "off")
        with Ranks(it.broker.trainers, {"dp": 2, "cp": cp}, most=9) as ranks:
            ranks.allow(9)
            expected = [rank.read for rank in ranks.ranks]
        monkeypatch.setenv("STREAMPACK_RELAY", it.relay)
        with it.relaying():
            with Ranks(it.broker.trainers, {"dp": 2, "cp": cp}, most=9) as ranks:
                ranks.allow(9)
                assert ranks.all_by_relay()
                assert [rank.read for rank in ranks.ranks] == expected
            with Ranks(it.broker.trainers, {"dp": 4}) as ranks:
                with pytest.raises(streampack.StageEnds, match="got dp=4"):
                    ranks.allow(math.inf)
                assert ranks.all_by_relay()
                assert [len(rank.read) for rank in ranks.ranks] == [6] * 4
                assert {rank.loader.state_dict()["next_step"] for rank in ranks.ranks} == {6}


def test_static_shapes_have_one_size_for_each_stage_and_end_where_there_is_none(tmp_path: Any) -> None:
    pytest.importorskip("torch")
    stages = [
        {"name": "a", "at": {"step": 2}, "rules": {"budget": 512, "max_samples_per_pack": 16}},
        {"name": "b", "at": {"step": 4}, "rules": {"max_samples_per_pack": None}},
    ]
    settings = SETTINGS | {"rules": SMALL["rules"] | {"max_samples_per_pack": 8}, "stages": stages}
    with (
        running_broker(settings) as broker,
        producing_here(broker.producers, source_in(tmp_path)),
        connect(broker, format="thd", static_shapes=True) as loader,
    ):
        steps = loader.steps()
        for step in itertools.islice(steps, 4):
            size, budget = (8, 256) if step.index < 2 else (16, 512)
            assert all((len(pack.cu_seqlens), pack.max_seqlen) == (size + 2, budget) for pack in step)
        with pytest.raises(streampack.StageEnds, match=r"step 4.*max_samples_per_pack"):
            next(steps)
        with pytest.raises(UserError, match="expected the index of a step that was handed out"):
            loader.commit(4)
        loader.commit(3)
        assert loader.state_dict()["next_step"] == 4
