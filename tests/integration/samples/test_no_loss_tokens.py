"""Samples from which nothing is learned: trained on and counted, dropped and counted, or refused, as the run says."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

import streampack
from streampack.errors import SampleError
from tests.integration.running import RunningBroker, in_process, running_broker, until

BUDGET = 16


def rows(seed: int, count: int = 150) -> list[dict[str, Any]]:
    """Samples of up to three budgets; many learn nothing, or lose what they would learn to a cut."""
    draw = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        ids = draw.integers(1, 50, int(draw.integers(1, 3 * BUDGET)))
        learned = draw.random(len(ids)) < draw.choice([0.0, 0.03, 0.5])
        found.append({"input_ids": ids.tolist(), "labels": np.where(learned, ids, -100).tolist()})
    return found


def learned_of(source: Any, **settings: Any) -> dict[int, int]:
    """The loss tokens of each delivered sample, over all its pieces."""
    found: Counter[int] = Counter()
    own: dict[str, Any] = {"fields": {"labels": {}}, "format": "numpy", "budget": BUDGET, "packs": 2, "window": 8}
    with streampack.local(source, **own | settings) as loader:
        for pack in loader:
            parts = np.split(pack.labels, pack.cu_seqlens_padded[1:-1])
            for (_, index, _), labels in zip(pack.sample_ids.tolist(), parts, strict=False):
                found[index] += int((labels != -100).sum())
    return dict(found)


@pytest.mark.parametrize("overlong", ["truncate", "split", "drop"])
@pytest.mark.parametrize("kind", ["rows", "arrays"])
def test_only_samples_that_would_have_taught_nothing_are_dropped(overlong: str, kind: str) -> None:
    """The oracle is the run that trains on all: its labels, after every cut."""
    data: Any = rows(seed=len(overlong))
    data = datasets.Dataset.from_list(data) if kind == "arrays" else data
    every = learned_of(data, overlong=overlong)
    kept = learned_of(data, overlong=overlong, no_loss_tokens="drop")
    assert kept == {index: count for index, count in every.items() if count}
    assert 0 < len(kept) < len(every)


@pytest.mark.parametrize(
    "row",
    [
        {"input_ids": [1, 2, 3], "labels": [-100] * 3},
        {"input_ids": [1], "labels": [1]},
        {"input_ids": [1] * 20, "labels": [-100] * 16 + [1] * 4},
        {"input_ids": [1, 2, 3], "labels": [1, -100, -100]},
    ],
)
def test_an_error_names_the_sample_and_what_to_set(row: dict[str, Any]) -> None:
    good = {"input_ids": [4, 5], "labels": [-100, 5]}
    with pytest.raises(SampleError, match=r"row 1: got a sample of which no token counts .*`no_loss_tokens`.*`drop`"):
        learned_of([good, row], overlong="truncate", no_loss_tokens="error", shuffle=False)


def test_one_token_without_any_mask_is_such_a_sample() -> None:
    settings: dict[str, Any] = {"fields": {}, "shuffle": False}
    assert learned_of([[1], [2, 3], [4]], **settings) == {0: 0, 1: 1, 2: 0}
    assert learned_of([[1], [2, 3], [4]], **settings, no_loss_tokens="drop") == {1: 1}


def of_stream(broker: RunningBroker, name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(each for each in broker.status()["streams"] if each["stream"] == name)
    return found


def test_pushed_samples_are_dropped_alone_and_every_view_counts_them(tmp_path: Path) -> None:
    """A group keeps its other samples; all keep their places, and the ledger has lost none."""
    config = {
        "state_dir": str(tmp_path / "state"), "merge": "arrival", "fields": {"loss_mask": {}},
        "rules": {"budget": 32, "step": {"packs": 2}},
        "streams": {"strict": {"pushed": True, "partitions": 1, "no_loss_tokens": "error"},
                    "loose": {"pushed": True, "partitions": 1, "no_loss_tokens": "drop"}},
    }  # fmt: skip
    good, bad = ({"input_ids": [1, 2, 3], "loss_mask": [0, 0, last]} for last in (1, 0))
    with running_broker(config) as broker:
        with streampack.Producer(broker.producers, stream="loose") as loose:
            loose.send_group([good, bad, good], keep="pack")
            loose.send(bad)
            loose.send(good)
            loose.close(end=True)
        with streampack.Producer(broker.producers, stream="strict") as strict:
            with pytest.raises(SampleError, match="no token counts in the loss"):
                strict.send(bad)
            strict.send(good)
            strict.close(end=True)
        with streampack.connect(broker.trainers, format="numpy") as loader:
            ids = sorted(tuple(row) for pack in loader for row in pack.sample_ids.tolist())
            assert loader.rules.streams[0].no_loss_tokens == "error"
        assert ids == [(0, 0, 0), (1, 0, 0), (1, 2, 0), (1, 4, 0)]
        until(lambda: of_stream(broker, "loose")["rejected"] == {"no_loss_tokens": 2})
        assert of_stream(broker, "strict")["rejected"] == of_stream(broker, "loose")["warnings"] == {}
        asked = "why", "--sample", "loose:1", "--state-dir", tmp_path / "state"
        until(lambda: "no_loss_tokens" in in_process(*asked).stdout)
    done = in_process("ledger", "verify", "--state-dir", tmp_path / "state")
    assert done.returncode == 0, done.stdout
