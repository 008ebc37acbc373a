"""Megatron's schedule of hybrid context parallelism runs the broker's plan, which no rank has planned or exchanged.

The loop is the one of ``docs/how-to/dynamic-cp.md``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from streampack.config.typed_yaml import convert
from streampack.sources import SourceSettings, open_source
from tests.integration.frameworks.framework_runs import Job, run_jobs
from tests.integration.frameworks.megatron_lm import PACKAGES
from tests.integration.running import producing_here, running_broker, write_jsonl
from tests.training.proofs.tiny import FIELDS, Alone, assert_same, rows

SAMPLES = rows(32)
RULES = {"budget": 64, "window": {"samples": 16}, "step": {"packs": 4}, "shape": "exact"}
FEEDS: dict[str, dict[str, Any]] = {
    "alone": {"cp": "dynamic", "rank_tokens": 8, "max_group": 8},
    "tensor": {"cp": "dynamic", "rank_tokens": 16, "max_group": 4},
}
REFUSED = (
    "got no process group of 2 ranks from Megatron, expected one",
    "got hybrid_context_parallel=False, expected True",
    "got calculate_per_token_loss=False, expected True",
    "got pipeline_model_parallel_size=2, expected 1",
    "got 12 data-parallel x context-parallel ranks, expected a power of two, because Megatron makes no process groups",
    "got a pack of the ranks 8 to 11 on rank",
    "got packs of the layout 'zigzag', expected a feed with `cp: dynamic`",
    "got packs in another format, expected format='thd'",
)
Ranks = list[tuple[list[dict[str, Any]], list[str]]]
pytestmark = pytest.mark.skipif(
    not (PACKAGES / "megatron").is_dir(), reason="neither STREAMPACK_MEGATRON nor .venv/megatron has Megatron-LM"
)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ranks]:
    """The calls of the schedule on 8 ranks, with one tensor rank and with two, by feed."""
    folder = tmp_path_factory.mktemp("hybrid")
    file = write_jsonl(folder / "rows.jsonl", SAMPLES)
    sources = {
        name: open_source(convert({"source": "jsonl", "shards": str(file)}, SourceSettings)) for name in FEEDS
    }  # fmt: skip
    settings = {
        "rules": RULES, "fields": FIELDS, "planned_mesh": {"dp": 8, "tp": 2},
        "streams": {name: {"partitions": 1} for name in FEEDS},
        "feeds": {name: {"streams": [name], **feed} for name, feed in FEEDS.items()},
    }  # fmt: skip
    jobs = {name: Job([name, str(tp), str(folder)], ranks=8) for tp, name in enumerate(FEEDS, start=1)}
    with running_broker(settings) as broker, producing_here(broker.producers, sources):
        run_jobs("megatron_lm.hybrid_ranks", jobs, folder, file, PACKAGES, STREAMPACK_ENDPOINT=broker.trainers)
    return {name: [torch.load(folder / f"{name}-{rank}", weights_only=False) for rank in range(8)] for name in FEEDS}


def test_recorded_calls_are_the_plan_and_samples_are_in_one_pack(ranks: dict[str, Ranks]) -> None:
    for name, tp in (("alone", 1), ("tensor", 2)):
        sizes, trained = set(), []
        for step in zip(*[seen for seen, _ in ranks[name][::tp]], strict=True):
            for rank in step:
                assert rank["calls"] == [(pack, size) for pack, (_, size) in rank["plan"]]
                assert rank["tokens"] == rank["expected"]
            for calls in zip(*[rank["calls"] for rank in step], strict=True):
                assert all(sum(other == call for other in calls) == call[1] for call in calls)
                sizes |= {size for _, size in calls}
            trained += [row for rank in step for row in rank["rows"]]
        assert sizes == {size for size in (1, 2, 4, 8) if size * tp <= 8}
        assert sorted(trained) == list(range(len(SAMPLES)))


def test_loss_and_gradients_are_those_of_the_samples(ranks: dict[str, Ranks]) -> None:
    alone = Alone(SAMPLES)
    for name, tp in (("alone", 1), ("tensor", 2)):
        for step in zip(*[seen for seen, _ in ranks[name]], strict=True):
            expected = alone.step(sorted(row for rank in step[::tp] for row in rank["rows"]))
            for rank in step:
                assert_same(rank["found"], expected)


def test_settings_that_the_plan_does_not_suit_are_refused(ranks: dict[str, Ranks]) -> None:
    for _, messages in ranks["alone"]:
        assert [got[: len(expected)] for got, expected in zip(messages, REFUSED, strict=True)] == list(REFUSED)
