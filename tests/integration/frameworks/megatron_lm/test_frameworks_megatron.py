"""Megatron: its core's schedule over a loader, killed and started again; who reads, what is saved, what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import streampack
from streampack import integrations
from streampack.config.typed_yaml import convert
from streampack.core.layout.shards import shard_slices
from streampack.core.model.keys.planning_keys import Warmup
from streampack.core.model.rules import Align, Batch, Rules
from streampack.errors import StateError, UserError
from streampack.integrations.checks import megatron_checks
from streampack.sources import SourceSettings, open_source
from streampack.views.megatron import arranged
from streampack.views.view import View
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


@contextmanager
def as_mesh(ranks: Any, **sizes: int) -> Iterator[None]:
    """Sizes of Megatron's mesh, in place of one rank."""
    try:
        for name, size in sizes.items():
            getattr(ranks, f"set_{name}_model_parallel_world_size")(size)
        yield
    finally:
        for name in sizes:
            getattr(ranks, f"set_{name}_model_parallel_world_size")(None)
            getattr(ranks, f"set_{name}_model_parallel_rank")(None)


def of_stages(broker: RunningBroker, ranks: Any, num_stages: int, args: Any) -> list[list[Any]]:
    """The iterators of each model chunk, on each stage's first tensor rank of two; the second rank has none."""
    stages: list[list[Any]] = []
    with as_mesh(ranks, tensor=2, pipeline=num_stages):
        for stage in range(num_stages):
            provider = integrations.megatron.datasets_provider(lambda: args, endpoint=broker.trainers)
            assert provider.is_distributed
            numbers: list[int | None] = [*range(args.virtual_pipeline_model_parallel_size or 0)] or [None]
            ranks.set_pipeline_model_parallel_rank(stage)
            for rank in (1, 0):
                ranks.set_tensor_model_parallel_rank(rank)
                chunks = [provider([0, 0, 0], vp_stage=number)[0] for number in numbers]
                assert rank == 0 or chunks == [None] * len(numbers)
            stages.append(chunks)
    return stages


def test_the_first_tensor_rank_of_every_stage_reads(broker: RunningBroker, ranks: Any) -> None:
    from megatron.core.rerun_state_machine import RerunDataIterator

    stages = [chunks[0] for chunks in of_stages(broker, ranks, 3, arguments())]
    with ThreadPoolExecutor(3) as threads:
        batches = list(threads.map(lambda train: list(islice(RerunDataIterator(train).iterable, 8)), stages))
    for first, middle, last in zip(*batches, strict=True):
        assert "tokens" not in middle
        assert torch.equal(first["tokens"], last["tokens"])
        assert first["tokens"].shape == first["labels"].shape == first["loss_mask"].shape == (1, 128)
        assert torch.equal(first["cu_seqlens"], middle["cu_seqlens"])
        assert middle["cu_seqlens"][0, -1] == 128
    for train in stages:
        train.close()


def test_chunks_of_a_virtual_pipeline_take_the_same_packs_of_one_loader(broker: RunningBroker, ranks: Any) -> None:
    """Megatron's get_batch deletes keys of the batch that it takes, and other chunks need them."""

    def take(chunks: list[Any]) -> list[list[list[int]]]:
        taken: list[list[list[int]]] = [[], []]
        for number in [0, 0, 1, 1, 0, 0, 1, 1] * 2:
            pack = next(chunks[number])
            taken[number].append(pack["tokens"].tolist())
            pack["tokens"] = pack["labels"] = None
        return taken

    stages = of_stages(broker, ranks, 2, arguments(virtual_pipeline_model_parallel_size=2))
    with ThreadPoolExecutor(2) as threads:
        first, last = threads.map(take, stages)
    assert first[0] == first[1] == last[0] == last[1]
    assert len({str(pack) for pack in first[0]}) == 8
    for chunks in stages:
        assert chunks[0].save_state()["next_step"] == 2
        chunks[0].close()


def test_a_chunk_that_takes_no_boundaries_ends_training(broker: RunningBroker) -> None:
    args = arguments(virtual_pipeline_model_parallel_size=2)
    provider = integrations.megatron.datasets_provider(lambda: args, endpoint=broker.trainers)
    with pytest.raises(UserError, match="got vp_stage=1 with 0 model chunks, expected chunks in order from 0"):
        provider(vp_stage=1)
    train = provider(vp_stage=0)[0]
    for _ in range(4):
        next(train)
    for take in (lambda: next(train), train.save_state):
        with pytest.raises(UserError, match=r"got model chunks of one rank that took \[4, 0\] packs so far"):
            take()
    train.close()


def test_a_middle_stage_that_may_predict_tokens_gets_tokens(broker: RunningBroker, ranks: Any) -> None:
    stages = of_stages(broker, ranks, 3, arguments(mtp_num_layers=1, pipeline_model_parallel_layout="Et*3|m|L"))
    with ThreadPoolExecutor(3) as threads:
        first, middle, last = threads.map(next, [chunks[0] for chunks in stages])
    for key in ("tokens", "labels", "loss_mask", "position_ids", "cu_seqlens"):
        assert torch.equal(first[key], middle[key])
        assert torch.equal(first[key], last[key])
    for chunks in stages:
        chunks[0].close()


@given(st.integers(1, 4), st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_a_shard_of_an_arranged_row_has_the_parts_of_each_sample_that_attention_expects(
    cp: int, chunks: list[int]
) -> None:
    from megatron.core.utils import get_batch_on_this_cp_rank

    bounds = np.cumsum([0, *(2 * cp * size for size in chunks)], dtype=np.int32)
    tokens = torch.arange(int(bounds[-1]))[None]
    keys = {"tokens": tokens, "labels": tokens + 1, "loss_mask": tokens % 3.0, "position_ids": tokens * 7}
    row = arranged(View({**keys, "cu_seqlens": torch.from_numpy(bounds)[None]}), cp)
    assert row["cu_seqlens"].tolist() == [bounds.tolist()]
    for rank in range(cp):
        slices = zip(*shard_slices(bounds, cp, rank, "zigzag"), strict=True)
        expected = np.concatenate([np.arange(start, stop) for start, stop in slices])
        group: Any = SimpleNamespace(size=lambda: cp, rank=lambda rank=rank: rank)
        shard = get_batch_on_this_cp_rank({name: row[name] for name in keys}, group)
        for name in keys:
            assert torch.equal(shard[name], keys[name][:, expected])


def test_all_values_by_token_of_an_arranged_row_are_those_of_its_tokens() -> None:
    lengths = (29, 3, 17)
    fields: dict[str, Any] = {"half": {"dtype": "float32"}, "pair": {"dtype": "uint16", "shape": [2]}}
    rows = [{"tokens": list(range(1, n)), "half": np.arange(1, n) / 2, "pair": [[t, 7] for t in range(1, n)]}
            for n in lengths]  # fmt: skip
    with streampack.local(rows, budget=64, packs=1, align=8, format="megatron", fields=fields) as loader:
        (batch,) = next(loader.steps())
        assert isinstance(batch, View)
        row = arranged(batch, 4)
    real = ~row.padding_mask
    assert not torch.equal(row["tokens"], batch["tokens"])
    assert torch.equal(row.input_ids, row["tokens"])
    assert int(real.sum()) == sum(lengths) - len(lengths)
    assert torch.equal(row.half[real] * 2, row["tokens"][0, real].float())
    assert torch.equal(row.pair[real, 0].long(), row["tokens"][0, real])


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

        def of_chunks() -> list[list[Any]]:
            """The packs of an evaluation, which two model chunks take in turns."""
            virtual = arguments(eval_iters=3, eval_global_batch_size=2, virtual_pipeline_model_parallel_size=2)
            provide = integrations.megatron.datasets_provider(
                lambda: virtual, endpoint=broker.trainers, valid_feed="valid"
            )
            chunks = [provide(vp_stage=chunk) for chunk in range(2)]
            return [[next(valid)["tokens"].tolist() for _, valid, _ in chunks] for _ in range(6)]

        shared = of_chunks()
        provide = integrations.megatron.datasets_provider(lambda: args, endpoint=broker.trainers, valid_feed="valid")
        train, valid, test = provide()
        assert test is None
        assert next(train).num_micro_batches == 4
        packs = [pack["tokens"].tolist() for pack in islice(valid, 18)]
        assert packs[:6] == packs[6:12] == packs[12:]
        assert shared == [[pack, pack] for pack in packs[:6]]
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
        ({"overlap_moe_expert_parallel_comm": True}, "got overlap_moe_expert_parallel_comm=True, expected False"),
        ({"hybrid_context_parallel": True}, "got hybrid_context_parallel=True, expected False"),
        ({"create_attention_mask_in_dataloader": True}, "got create_attention_mask_in_dataloader=True"),
        ({"dataloader_inter_document_masking": False}, "got neither dataloader_inter_document_masking nor sft"),
        ({"step_batch_size_schedule": "0:4 1M:8"}, "got step_batch_size_schedule='0:4 1M:8', expected None"),
        ({"eval_micro_batch_size": 2}, "got eval_micro_batch_size=2, expected 1"),
        ({"eval_iters": 100}, "got eval_iters=100 without valid_feed, expected a feed to evaluate on"),
    ],
)
def test_arguments_that_packs_do_not_go_with_are_refused(changed: dict[str, Any], message: str) -> None:
    check_args = megatron_checks.check_args
    check_args(arguments())
    check_args(arguments(sft=True, context_parallel_size=2, eval_iters=100, mtp_num_layers=1), valid_feed="valid")
    old = arguments(sft=True)
    del old.dataloader_inter_document_masking
    check_args(old)
    old.pipeline_model_parallel_size = 2
    with pytest.raises(UserError, match=r"got pipeline_model_parallel_size=2 with a Megatron-LM before 0\.19"):
        check_args(old)
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
