"""Megatron-Bridge: 50 steps of finetune on a broker's packs, killed at 25; micro-batches, and what is refused.

Without a Python of Bridge (STREAMPACK_BRIDGE), the losses and batches that a run with one has recorded stand for it.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import streampack
from streampack import integrations
from streampack.config.typed_yaml import convert
from streampack.errors import MeshError, StateError, UserError
from streampack.sources import SourceSettings, open_source
from tests.integration.frameworks.megatron_bridge import bridge_samples as samples
from tests.integration.running import RunningBroker, producing_here, running_broker, write_jsonl

PYTHON = os.environ.get("STREAMPACK_BRIDGE")
RECORDED = Path(__file__).parent / "recorded.json"
with_bridge = pytest.mark.skipif(not PYTHON, reason="STREAMPACK_BRIDGE names no Python with Megatron-Bridge")
MESHES = ("dp2", "tp2", "pp2vp2", "pp4")
ALONE = {"dp": 1, "cp": 1, "tp": 1, "pp": 1}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningBroker]:
    file = write_jsonl(tmp_path_factory.mktemp("data") / "a.jsonl", samples.rows())
    source = open_source(convert({"source": "jsonl", "shards": str(file)}, SourceSettings))
    with running_broker(samples.SETTINGS) as running, producing_here(running.producers, {"data": source}):
        yield running


@pytest.fixture(scope="module", autouse=True)
def adapter() -> Any:
    """The adapter, which imports megatron-core."""
    with warnings.catch_warnings():  # without a GPU's libraries, it says so
        warnings.simplefilter("ignore")
        from streampack.integrations.megatron import bridge

        return bridge


@pytest.fixture(autouse=True)
def world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)


def dataset(broker: RunningBroker, **changed: Any) -> Any:
    arguments = {"endpoint": broker.trainers, "feed": "train", "valid_feed": None} | changed
    specs = {"seq_length": samples.BUDGET, "offline_packing_specs": None}
    return integrations.megatron.bridge.BridgeDataset(**(specs | arguments))


def config_of(dataset: Any, folder: Path | None = None, **changed: Any) -> Any:
    """The values of a ``ConfigContainer`` that the adapter reads; ``train__micro_batch_size=2`` changes one."""
    values = SimpleNamespace(
        dataset=dataset,
        train=SimpleNamespace(micro_batch_size=1, global_batch_size=samples.PACKS, iterations_to_skip=[]),
        validation=SimpleNamespace(eval_iters=0, eval_micro_batch_size=None, eval_global_batch_size=None),
        model=SimpleNamespace(
            seq_length=samples.BUDGET, calculate_per_token_loss=True, virtual_pipeline_model_parallel_size=None,
            context_parallel_size=1, tensor_model_parallel_size=1, pipeline_model_parallel_size=1,
        ),
        checkpoint=SimpleNamespace(save=folder, load=folder),
        dist=SimpleNamespace(eval_context_parallel_size=None),
    )  # fmt: skip
    for name, value in changed.items():
        part, _, key = name.partition("__")
        setattr(getattr(values, part), key, value)
    return values


def groups(ranks: dict[str, int] | None = None, **sizes: int) -> Any:
    """The process groups of one rank."""

    def group(axis: str) -> Any:
        return SimpleNamespace(size=lambda: (ALONE | sizes)[axis], rank=lambda: (ranks or {}).get(axis, 0))

    return SimpleNamespace(pg_collection=SimpleNamespace(**{axis: group(axis) for axis in ALONE}))


def built(config: Any, step: int = 0, chunks: int = 1, context: Any = None) -> Any:
    """The training iterator that Bridge would get at a step."""
    config.dataset.begin(SimpleNamespace(cfg=config, train_state=SimpleNamespace(step=step)), chunks)
    return config.dataset.build_datasets(context or groups())[0]


def test_bridge_took_these_micro_batches_and_a_killed_run_had_the_losses_of_a_whole_one(broker: RunningBroker) -> None:
    recorded = json.loads(RECORDED.read_text())
    train = built(config_of(dataset(broker)))
    batches = [samples.number_of(batch) for batch in islice(train, samples.STEPS * samples.PACKS)]
    train.close()
    whole = recorded["whole"]
    assert batches == [number for line in whole for number in line["batches"]]
    assert [line["step"] for line in whole] == list(range(samples.STEPS))
    assert whole[-1]["loss"] < 0.5 * whole[0]["loss"]
    compare(recorded)


def compare(runs: dict[str, list[dict[str, Any]]]) -> None:
    """A run that is killed behind step 25, and goes on after step 19 on any mesh, is a whole one, step by step."""
    whole, killed, resumed = (runs[name] for name in ("whole", "killed", "resumed"))
    assert [line["step"] for line in killed] == list(range(26))
    assert [line["step"] for line in resumed] == list(range(20, samples.STEPS))
    for line in killed + resumed:
        assert line == whole[line["step"]]
    for name in MESHES:
        assert [line["step"] for line in runs[name]] == list(range(20, samples.STEPS))
        for line in runs[name]:
            expected = whole[line["step"]]
            assert line["loss"] == pytest.approx(expected["loss"], rel=5e-5)  # in float32
            assert set(line["batches"]) <= set(expected["batches"])


@with_bridge
def test_finetune_of_bridge_goes_on_where_it_was_killed(broker: RunningBroker, tmp_path: Path) -> None:
    root = Path(streampack.__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": str(root), "STREAMPACK_ENDPOINT": broker.trainers}
    command = [str(PYTHON), "-m", "tests.integration.frameworks.megatron_bridge.bridge_ranks", str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=580, check=False)
    assert done.stdout.splitlines()[-1:] == ["[0, 0, -9, 0, 0, 0, 0, 0]"], (done.stdout[-3000:], done.stderr[-6000:])
    runs = {
        name: [
            json.loads(line)
            for line in (tmp_path / f"{name}.txt").read_text().splitlines()
            if line.startswith('{"step"')
        ]
        for name in ("whole", "killed", "resumed", *MESHES)
    }
    compare(runs)
    if os.environ.get("STREAMPACK_RECORD"):
        RECORDED.write_text(json.dumps(runs))
    assert runs["whole"] == json.loads(RECORDED.read_text())["whole"]


def test_a_state_of_the_first_rank_resumes_on_every_rank(broker: RunningBroker, tmp_path: Path) -> None:
    train = built(config_of(dataset(broker), tmp_path))
    for _ in range(3 * samples.PACKS):
        next(train)
    place = tmp_path / "energon" / "iter_0000003"
    place.mkdir(parents=True)
    torch.save({"dataloader_state_dict": train.save_state()}, place / "train_dataloader_dprank000.pt")
    expected = samples.number_of(next(train))
    train.close()
    for load in (tmp_path, tmp_path / "iter_0000003"):
        resumed = built(config_of(dataset(broker), tmp_path / "new", checkpoint__load=load), step=3)
        assert samples.number_of(next(resumed)) == expected
        resumed.close()
    elsewhere = dataset(broker)
    elsewhere.dataloader_load = str(tmp_path / "energon")
    resumed = built(config_of(elsewhere, tmp_path / "new"), step=3)
    assert samples.number_of(next(resumed)) == expected
    resumed.close()
    with pytest.raises(StateError, match=r"got no file iter_0000004/train_dataloader_dprank000.pt in .*finetune"):
        built(config_of(dataset(broker), tmp_path), step=4)


def test_a_middle_stage_has_boundaries_and_none_in_place_of_tokens(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    stages = [
        built(config_of(dataset(broker), model__pipeline_model_parallel_size=3), context=groups({"pp": stage}, pp=3))
        for stage in range(3)
    ]
    with ThreadPoolExecutor(3) as threads:
        first, middle, last = threads.map(next, stages)
    assert middle["tokens"] is middle["labels"] is middle["loss_mask"] is None
    assert torch.equal(first["tokens"], last["tokens"])
    for name in ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded", "max_seqlen_q"):
        assert torch.equal(first[name], middle[name])
    assert middle["cu_seqlens_q"][0, -1] == samples.BUDGET
    for stage in stages:
        stage.close()


def test_stages_that_may_predict_tokens_get_tokens(adapter: Any) -> None:
    model = config_of(None, model__pipeline_model_parallel_size=3, model__tensor_model_parallel_size=2).model
    model.mtp_num_layers, model.pipeline_model_parallel_layout = 1, "Et|t*2|mL"
    places = groups({"tp": 1, "pp": 1}, tp=2, pp=3).pg_collection
    mesh = adapter.mesh_of_groups(places, model, 6)
    assert mesh == {
        "dp": 1, "dp_rank": 0, "cp": 1, "cp_rank": 0, "tp": 6, "tp_rank": 3, "pp": 1, "pp_rank": 0
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"train__micro_batch_size": 2}, r"micro_batch_size=2, expected 1. A micro-batch is one pack"),
        ({"train__global_batch_size": 8}, r"steps of 4 packs with global_batch_size=8"),
        ({"train__rampup_batch_size": [2, 2, 8]}, r"rampup_batch_size=\[2, 2, 8\] .*global_batch_size|stages:"),
        ({"train__iterations_to_skip": [7]}, r"iterations_to_skip=\[7\], expected none.*streampack skip"),
        ({"model__calculate_per_token_loss": False}, r"calculate_per_token_loss=False, expected True"),
        ({"model__seq_length": 128}, r"model.seq_length=128 and 64 when attach\(\) was called"),
        ({"model__virtual_pipeline_model_parallel_size": 2}, r"1 model chunks with .*parallel_size=2"),
        ({"model__overlap_moe_expert_parallel_comm": True}, r"overlap_moe_expert_parallel_comm=True, expected False"),
        ({"validation__eval_iters": 5}, r"eval_iters=5 without valid_feed"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_settings_that_do_not_go_with_packs_are_refused(
    broker: RunningBroker, changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        built(config_of(dataset(broker), **changed))


def test_meshes_that_disagree_are_refused(broker: RunningBroker) -> None:
    asked = config_of(dataset(broker), model__context_parallel_size=2)
    for config, context in ((asked, groups()), (config_of(dataset(broker)), groups(dp=2))):
        with pytest.raises(MeshError, match=r"got groups of .*expected equal sizes, whose product"):
            built(config, context=context)


def test_an_evaluation_on_another_mesh_is_refused(broker: RunningBroker) -> None:
    config = config_of(dataset(broker, valid_feed="train"), dist__eval_context_parallel_size=2)
    with pytest.raises(UserError, match=r"eval_context_parallel_size with valid_feed, expected one mesh"):
        built(config)


def test_a_recipe_with_its_own_packing_on_is_refused(broker: RunningBroker, adapter: Any) -> None:
    for name in ("enable_offline_packing", "enable_in_batch_packing"):
        recipe = config_of(SimpleNamespace(**{name: True}))
        with pytest.raises(UserError, match=rf"got a recipe with dataset.{name}=True, expected its own packing off"):
            adapter.check_recipe(recipe)
        setattr(recipe.dataset, name, False)
        adapter.check_recipe(recipe)
    adapter.check_recipe(config_of(dataset(broker)))


def test_a_run_without_the_callback_is_refused(broker: RunningBroker) -> None:
    with pytest.raises(UserError, match=r"got no callback of attach\(\).*callbacks=\[callback\]"):
        copy.copy(dataset(broker)).build_datasets(groups())
