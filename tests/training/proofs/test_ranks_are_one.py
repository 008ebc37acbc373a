"""Proof, on many ranks: context-parallel shards and ragged accumulation have the loss and gradients of the samples, and
a run that is killed goes on as if it had not been. Real processes under gloo, float64, a real broker.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streampack.config.typed_yaml import convert
from streampack.sources import SourceSettings, open_source
from tests.integration.running import RunningBroker, producing_here, running_broker, write_jsonl
from tests.training.proofs.processes import on_ranks
from tests.training.proofs.tiny import FIELDS, TOLERANCE, Alone, assert_same, rows, together
from tests.training.proofs.trainers import EVERY, Seen, averaged, in_groups, summed, train

SAMPLES = rows(60)
FEW = 32
"""Samples that go around rings."""
STEPS = 4 * EVERY
LAYOUTS = ("zigzag", "zigzag_pack", "contiguous")
RAGGED = {"shape": "exact", "align": {"sample": 8, "pack": 16}}
FEEDS: dict[str, dict[str, Any]] = {
    **{layout: {"cp_layout": layout, "rules": RAGGED} for layout in LAYOUTS},
    "ragged": {"rules": RAGGED | {"step": {"samples": 25, "min_micro_batches": 2}}},
    "dynamic": {"cp": "dynamic", "rank_tokens": 8, "max_group": 8, "rules": {"shape": "exact"}},
    "train": {"rules": {"step": {"packs": 8}, "align": {"sample": 4, "pack": 4}}},
}


@pytest.fixture(scope="module")
def alone() -> Alone:
    return Alone(SAMPLES)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningBroker]:
    folder = tmp_path_factory.mktemp("data")
    few, all_ = write_jsonl(folder / "few.jsonl", SAMPLES[:FEW]), write_jsonl(folder / "all.jsonl", SAMPLES)
    files = {f"of_{name}": few if name in (*LAYOUTS, "dynamic") else all_ for name in FEEDS}
    sources = {
        name: open_source(convert({"source": "jsonl", "shards": str(file)}, SourceSettings))
        for name, file in files.items()
    }
    tree = {
        "planned_mesh": {"dp": 4, "cp": 2},
        "rules": {"budget": 64, "window": {"samples": 16}, "step": {"packs": 4}},
        "fields": FIELDS,
        "streams": {name: {"partitions": 1, "passes": 8 if name == "of_train" else 1} for name in sources},
        "feeds": {name: {"streams": [f"of_{name}"], **settings} for name, settings in FEEDS.items()},
    }
    with running_broker(tree) as running, producing_here(running.producers, sources):
        yield running


@pytest.fixture(scope="module")
def one_rank(broker: RunningBroker) -> dict[str, list[Seen]]:
    (one,) = on_ranks(1, summed, broker.trainers, LAYOUTS, 1)
    return one  # type: ignore[no-any-return]


@pytest.mark.parametrize("cp", [2, 4])
def test_ring_attention_over_shards_has_the_loss_and_gradients_of_one_rank(
    broker: RunningBroker, one_rank: dict[str, list[Seen]], alone: Alone, cp: int
) -> None:
    first, *others = on_ranks(cp, summed, broker.trainers, LAYOUTS, cp)
    for layout in LAYOUTS:
        assert len(first[layout]) > 2
        for many, one in zip(first[layout], one_rank[layout], strict=True):
            assert (many.digest, many.rows) == (one.digest, one.rows)
            assert_same(many.found, one.found)
            assert_same(many.found, alone.step(many.rows))
        assert all(other[layout][-1].rows == first[layout][-1].rows for other in others)


def test_groups_that_change_with_every_micro_batch_have_the_loss_and_gradients_of_the_samples(
    broker: RunningBroker, alone: Alone
) -> None:
    ranks = on_ranks(8, in_groups, broker.trainers, "dynamic", 4)
    sizes, rows = set(), []
    for step in zip(*ranks, strict=True):
        of_step = sorted(row for seen, _ in step for row in seen.rows)
        assert_same(step[0][0].found, alone.step(of_step))
        assert len({seen.digest for seen, _ in step}) == 1
        sizes |= {size for _, packs in step for _, _, size in packs}
        rows += of_step
    assert sizes == {1, 2, 4, 8}
    assert sorted(rows) == list(range(FEW))


@pytest.mark.parametrize(("dp", "cp"), [(1, 1), (2, 1), (4, 1), (2, 2)])
def test_ragged_accumulation_has_the_gradients_of_one_big_batch(broker: RunningBroker, dp: int, cp: int) -> None:
    """DDP averages over dp x cp ranks, so losses are multiplied by them; the batch has no packs, and is one pass."""
    ranks = on_ranks(dp * cp, averaged, broker.trainers, "ragged", cp)
    seen = []
    for step in zip(*ranks, strict=True):
        of = sorted(row for rank in step[::cp] for row in rank.rows)
        lengths = {length for rank in step for length in rank.lengths}
        assert len(lengths) > 1, "ragged"
        assert min(len(rank.lengths) for rank in step) > 1, "accumulated"
        assert len({rank.digest for rank in step}) == 1
        assert_same(step[0].found, together([SAMPLES[row] for row in of]))
        seen += of
    assert sorted(seen) == list(range(len(SAMPLES)))


def test_a_run_that_is_killed_has_the_loss_curve_of_one_that_was_not(broker: RunningBroker, tmp_path: Path) -> None:
    """Killed in a step, between a backward pass and the optimizer. At the same dp it has the same bits."""
    whole, trained = on_ranks(2, train, broker.trainers, tmp_path / "whole", STEPS)[0]
    assert [index for index, *_ in whole] == list(range(STEPS))
    on_ranks(2, train, broker.trainers, tmp_path / "2", STEPS, (1, 2 * EVERY + 1), dies=1)
    for dp in (4, 1, 2):
        if dp != 2:
            shutil.copytree(tmp_path / "2", tmp_path / str(dp))
        rest, parameters = on_ranks(dp, train, broker.trainers, tmp_path / str(dp), STEPS)[0]
        assert [line[:2] for line in rest] == [line[:2] for line in whole[2 * EVERY :]], "steps and digests"
        tolerance = 0.0 if dp == 2 else TOLERANCE
        for (*_, got), (*_, expected) in zip(rest, whole[2 * EVERY :], strict=True):
            assert abs(got - expected) <= tolerance * expected
        for name, expected in trained.items():
            assert (parameters[name] - expected).abs().max() <= tolerance * expected.abs().max(), name
    assert whole[-1][-1] < whole[0][-1], "it learns"
