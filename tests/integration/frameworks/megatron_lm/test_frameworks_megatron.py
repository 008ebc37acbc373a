"""Megatron: its core's schedule over a loader, killed and started again; who reads, what is saved, what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from streampack import integrations
from streampack.config.typed_yaml import convert
from streampack.core.model.keys.planning_keys import Warmup
from streampack.core.model.rules import Align, Batch, Rules
from streampack.errors import StateError, UserError
from streampack.integrations.checks import megatron_checks
from streampack.sources import SourceSettings, open_source
from tests.integration.frameworks.example_runs import EXAMPLES, killed_and_resumed_is_the_same, serving
from tests.integration.frameworks.megatron_lm.megatron_ranks import arguments, train_iterator
from tests.integration.frameworks.megatron_lm.megatron_ranks import ranks as ranks
from tests.integration.running import RunningBroker, producing_here, running_broker, until, write_jsonl


@pytest.fixture(scope="module")
def broker() -> Iterator[RunningBroker]:
    with serving() as running:
        yield running


def test_a_loop_of_megatron_core_goes_on_where_it_was_killed(
    broker: RunningBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES), prepend=":")  # it imports another example
    whole = killed_and_resumed_is_the_same("megatron_external", broker, tmp_path)
    assert whole[-1]["loss"] < 0.9 * whole[0]["loss"]


def test_the_first_tensor_rank_of_every_stage_reads(broker: RunningBroker, ranks: Any) -> None:
    from megatron.core.rerun_state_machine import RerunDataIterator

    provider = integrations.megatron.datasets_provider(lambda: arguments(), endpoint=broker.trainers)
    assert provider.is_distributed
    try:
        ranks.set_tensor_model_parallel_world_size(2)
        ranks.set_pipeline_model_parallel_world_size(3)
        stages: list[Any] = []
        for stage in range(3):
            ranks.set_pipeline_model_parallel_rank(stage)
            ranks.set_tensor_model_parallel_rank(1)
            assert provider([0, 0, 0]) == (None, None, None)
            ranks.set_tensor_model_parallel_rank(0)
            stages.append(provider([0, 0, 0])[0])
        with ThreadPoolExecutor(3) as threads:
            batches = list(threads.map(lambda train: list(islice(RerunDataIterator(train).iterable, 8)), stages))
    finally:
        for part in ("tensor", "pipeline"):
            getattr(ranks, f"set_{part}_model_parallel_world_size")(None)
            getattr(ranks, f"set_{part}_model_parallel_rank")(None)
    for first, middle, last in zip(*batches, strict=True):
        assert "tokens" not in middle
        assert torch.equal(first["tokens"], last["tokens"])
        assert first["tokens"].shape == first["labels"].shape == first["loss_mask"].shape == (1, 128)
        assert torch.equal(first["cu_seqlens"], middle["cu_seqlens"])
        assert middle["cu_seqlens"][0, -1] == 128
    for train in stages:
        train.close()


def test_durable_checkpoints_are_committed_and_any_mesh_goes_on_from_what_rank_0_saved(
    broker: RunningBroker, tmp_path: Path
) -> None:
    train = train_iterator(broker, args := arguments(tmp_path))
    assert args.dataloader_save == tmp_path, "where Megatron has save_state's written"
    for iteration in (7, 8, 10):
        while train.save_state()["next_step"] < iteration:
            next(train)
        at = tmp_path / f"iter_{iteration:07d}" / "mp_rank_00_000"
        at.mkdir(parents=True)
        torch.save({"dataloader_state_dict": train.save_state()}, at / "train_dataloader_dprank000.pt")
        if iteration == 8:
            (tmp_path / "latest_checkpointed_iteration.txt").write_text("8")
    until(lambda: broker.status()["feeds"]["train"]["committed"] == 7)
    expected = next(train)
    train.close()
    (new := tmp_path / "new").mkdir()
    for elsewhere in (arguments(tmp_path, iteration=10), arguments(new, load=tmp_path, iteration=10)):
        train = train_iterator(broker, elsewhere)
        train.save_state()  # before any step
        assert torch.equal(next(train)["tokens"], expected["tokens"])
        (Path(elsewhere.save) / "latest_checkpointed_iteration.txt").write_text("10")
        train.save_state()
        train.close()
    with pytest.raises(
        StateError, match=r"got no file iter_0000009/mp_rank_\*/train_dataloader_dprank000.pt in .*finetune"
    ):
        train_iterator(broker, arguments(tmp_path, iteration=9))


def test_a_save_between_micro_batches_is_the_state_before_the_step(broker: RunningBroker) -> None:
    train = train_iterator(broker, arguments())
    for taken in range(1, 10):
        pack = next(train)
        assert train.save_state()["next_step"] == taken // pack.num_micro_batches
    assert pack.num_micro_batches > 1
    train.close()


def test_an_iteration_after_the_end_of_the_feed_is_an_error() -> None:
    with serving() as own:  # its producer leaves at the end, and other tests need theirs
        train, packs = train_iterator(own, arguments()), []
        with pytest.raises(UserError, match=r"got the end of the feed after iteration (\d+), expected packs") as caught:
            packs.extend(train)
        assert f"after iteration {packs[-1].step + 1}," in str(caught.value)
        train.close()


def test_each_evaluation_is_over_the_same_steps_of_the_valid_feed(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", [{"text": "abc" * (1 + i * 7 % 30) + str(i)} for i in range(128)])
    source = open_source(convert({"source": "jsonl", "shards": str(file)}, SourceSettings))
    rules = {"budget": 128, "window": {"samples": 16}, "step": {"packs": 4}}
    valid_feed = {"streams": ["more"], "rules": {"step": {"packs": 2}}}
    feeds = {"train": {"streams": ["text"]}, "valid": valid_feed}
    args = arguments(eval_iters=3, eval_global_batch_size=2)
    with (
        running_broker({"rules": rules, "streams": {"text": {}, "more": {}}, "feeds": feeds}) as broker,
        producing_here(broker.producers, {"text": source, "more": source}),
    ):
        provide = integrations.megatron.datasets_provider(lambda: args, endpoint=broker.trainers, valid_feed="valid")
        train, valid, test = provide()
        assert test is None
        assert next(train).num_micro_batches == 4
        packs = [pack["tokens"].tolist() for pack in islice(valid, 18)]
        assert packs[:6] == packs[6:12] == packs[12:]
        assert len({str(pack) for pack in packs}) == 6
        train.close()
        valid.close()
        args.eval_global_batch_size = 4
        with pytest.raises(UserError, match="steps of 2 packs with eval_global_batch_size=4, expected equal numbers"):
            provide()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"dataloader_type": "single"}, "got dataloader_type='single', expected 'external'"),
        ({"micro_batch_size": 2}, "got micro_batch_size=2, expected 1. A micro-batch is one pack"),
        (
            {"calculate_per_token_loss": False},
            "got calculate_per_token_loss=False, expected True. Packs have different",
        ),
        ({"virtual_pipeline_model_parallel_size": 2}, "got virtual_pipeline_model_parallel_size=2, expected None"),
        ({"hybrid_context_parallel": True}, "got hybrid_context_parallel=True, expected False"),
        ({"create_attention_mask_in_dataloader": True}, "got create_attention_mask_in_dataloader=True"),
        ({"dataloader_inter_document_masking": False}, "got neither dataloader_inter_document_masking nor sft"),
        ({"step_batch_size_schedule": "0:4 1M:8"}, "got step_batch_size_schedule='0:4 1M:8', expected None"),
        ({"eval_micro_batch_size": 2}, "got eval_micro_batch_size=2, expected 1"),
        ({"eval_iters": 100}, "got eval_iters=100 without valid_feed, expected a feed to evaluate on"),
        ({"context_parallel_size": 2}, "got context_parallel_size=2 without sft, expected sft"),
        ({"mtp_num_layers": 1, "pipeline_model_parallel_layout": "Et*3|m|L"}, "got mtp_num_layers and pipeline_model"),
    ],
)
def test_arguments_that_packs_do_not_go_with_are_refused(changed: dict[str, Any], message: str) -> None:
    check_args = megatron_checks.check_args
    check_args(arguments())
    check_args(arguments(sft=True, context_parallel_size=2, eval_iters=100, mtp_num_layers=1), valid_feed="valid")
    with pytest.raises(UserError, match=message):
        check_args(arguments(**changed))


def test_a_feed_whose_steps_are_no_iterations_is_refused_at_once(broker: RunningBroker) -> None:
    check_rules = megatron_checks.check_rules
    with pytest.raises(UserError, match="steps of 4 packs with global_batch_size=8, expected equal numbers"):
        train_iterator(broker, arguments(global_batch_size=8))
    with pytest.raises(UserError, match="packs of 128 tokens with seq_length=256, expected equal lengths"):
        train_iterator(broker, arguments(seq_length=256))
    with pytest.raises(UserError, match="got steps with a varying number of packs"):
        check_rules(Rules(budget=128, batch=Batch(samples=8)), arguments(), 1)
    with pytest.raises(UserError, match="got a growing budget"):
        check_rules(Rules(budget=128, packs=4, warmup=Warmup(init=64, steps=4)), arguments(), 1)
    padded = Rules(budget=128, packs=4, align=Align(sample=4, pack=4))
    check_rules(padded, arguments(), 2)
    with pytest.raises(UserError, match="samples padded to multiples of 4 tokens with 4 context-parallel ranks"):
        check_rules(padded, arguments(), 4)
