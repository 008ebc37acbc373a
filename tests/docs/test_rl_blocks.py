"""Blocks whose names stand for a program of the reader's: docs/how-to/rl-loop.md and docs/how-to/shared-prefixes.md."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import streampack
from tests.docs.pages import BLOCKS
from tests.integration.running import PATIENCE_S, RunningBroker, running_broker
from tests.integration.small_broker import SmallBroker

ROLLOUTS = {"pushed": True, "partitions": 1}
FIELDS = {
    "advantages": {"dtype": "float32", "align": "target", "late": True},
    "reward": {"dtype": "float32", "axis": "sample", "late": True},
}


def ran(text: str, page: str, names: dict[str, Any]) -> dict[str, Any]:
    """Run the block of a page that holds a text; return the names that it leaves behind."""
    (code,) = [each.code for each in BLOCKS if each.page == page and each.language == "python" and text in each.code]
    names = names | {"streampack": streampack}
    exec(compile(code.replace("tcp://node0:7402", names.get("endpoint", "")), page, "exec"), names)
    return names


@pytest.fixture
def broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningBroker]:
    settings = {
        "merge": "arrival", "state_dir": str(tmp_path), "fields": FIELDS, "streams": {"rollouts": ROLLOUTS},
        "rules": {"budget": 64, "step": {"samples": 4}, "staleness": {"max_policy_lag": 1, "on_exceed": "wait"}},
    }  # fmt: skip
    with running_broker(settings) as running:
        monkeypatch.setenv("STREAMPACK_ENDPOINT", running.trainers)
        monkeypatch.setenv("STREAMPACK_PRODUCERS", running.producers)
        yield running


def test_each_side_of_the_rl_loop_does_what_its_page_says(broker: RunningBroker) -> None:
    page = "docs/how-to/rl-loop.md"
    completions, rewards = [[1, 2, 3], [1, 2, 4], [1, 5, 6], [1, 7]], [1.0, 0.0, 0.5, 0.25]
    names: dict[str, Any] = {"prompts": [[1]] * 4, "completions": completions, "rewards": rewards, "entropies": rewards}
    names |= {"advantages": [[0.5] * len(each) for each in completions], "endpoint": broker.trainers}
    names["llm"] = SimpleNamespace(generate=lambda prompts, version: completions)
    with (
        streampack.Producer(stream="rollouts", partition=0) as names["rollouts"],
        streampack.connect(broker.trainers, format="numpy") as names["loader"],
    ):
        rollouts, loader = names["rollouts"], names["loader"]
        loader.publish(0)
        names = ran("wait_to_start(len(prompts))", page, names)
        assert rollouts.amend(range(4), advantages=names["advantages"], reward=rewards) == {}
        names = ran("dropped = rollouts.amend(", page, names)
        assert names["dropped"] == {}
        names["step"] = step = next(iter(loader.steps()))
        assert [value for pack in step for value in pack["reward"].tolist()] == rewards

        results: list[Any] = []
        found = threading.Event()

        def update(*values: Any) -> None:
            results.append(values)
            raise Seen

        names["curriculum"] = SimpleNamespace(update=update)
        with pytest.raises(Seen):
            ran("step.report(", page, names)
        assert results[0][2].tolist() == rewards

        def later(version: int) -> None:
            def publish() -> None:
                loader.publish(version + 1)
                found.set()

            threading.Timer(0.2, publish).start()

        version = ran("loader.publish(", page, names | {"save_weights": later})["version"]
        assert version in (1, 2), "a generator may not know version 1 yet when it asks for the newest"
        assert found.wait(PATIENCE_S)
        assert rollouts.wait_for(2) == 2


class Seen(Exception):
    """Ends a block that reads for ever."""


def test_groups_of_the_page_are_pushed_with_their_prompts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = SmallBroker(terms={"share": "prefix"})
    monkeypatch.setenv("STREAMPACK_PRODUCERS", broker.endpoint)
    names = {"worker": 1, "v": 0, "prompts": [[1, 2], [3]], "generate": lambda prompt: [[*prompt, 8], [*prompt, 9]]}
    try:
        ran("for prompt in prompts", "docs/how-to/shared-prefixes.md", names)
    finally:
        broker.stop()
    assert [taken.lengths for taken in broker.taken] == [[3, 3], [2, 2]]
