"""The JSON of ``/status``: its keys, their order and their types are an interface that users and the page read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import streampack as sp
from streampack.sources import SourceSettings, open_source
from tests.integration.running import RunningBroker, folder, producing_here, running_broker, until, write_jsonl

GOLDEN = Path(__file__).with_name("status_shape.json")
"""The types at each path of the JSON, in the order in which a broker sends them. ``[]`` is an element of an array.

A short run reaches no number for ``stalled_s`` and ``step_s``: they were added by hand. A run records the rest:
``python -m tests.integration.watching.test_status_json``."""
Shape = dict[str, set[str]]
NAMES = {"bool": "boolean", "int": "integer", "float": "number", "str": "string", "list": "array", "dict": "object"}


def shape(value: Any, path: str = "$", found: Shape | None = None) -> Shape:
    """Return the types at each path, in the order of the keys."""
    found = {} if found is None else found
    found.setdefault(path, set()).add("null" if value is None else NAMES[type(value).__name__])
    if isinstance(value, dict):
        for key, each in value.items():
            shape(each, f"{path}.{key}", found)
    elif isinstance(value, list):
        for each in value:
            shape(each, f"{path}[]", found)
    return found


def statuses(path: Path) -> Iterator[dict[str, Any]]:
    """Yield a broker's status before anything came, while a rank waits, in mid-run and after the end of its feed."""
    settings = {
        "run": "golden", "state_dir": str(path / "log"),
        "streams": {
            "web": {"partitions": 1, "overlong": "truncate", "poison": "drop"}, "rollouts": {"partitions": 1},
        },
        "feeds": {
            "train": {
                "streams": ["web"], "rules": {"budget": 256, "window": {"samples": 32}, "step": {"packs": 4}},
            },
            "padded": {"streams": ["rollouts"], "rules": {"padded": True, "budget": 256, "step": {"samples": 8}}},
        },
    }  # fmt: skip
    rows: list[dict[str, Any]] = [{"tokens": [1] * (1 + 7 * n % 300)} for n in range(200)]
    source = open_source(SourceSettings("jsonl", str(write_jsonl(path / "a.jsonl", [*rows, {"tokens": []}]))))
    with running_broker(settings) as broker:
        yield broker.status()
        with sp.connect(broker.trainers, feed="train", format="numpy") as loader:
            yield when(broker, lambda feed: bool(feed["readers"] and feed["waiting_for"]))
            with producing_here(broker.producers, {"web": source}):
                steps = loader.steps()
                next(steps)
                loader.commit(0)
                keys = ("steps_left", "waiting_lengths")
                yield when(broker, lambda feed: feed["committed"] == 0 and all(feed[key] for key in keys))
                for _ in steps:
                    pass
                yield when(broker, spoke_at_the_end)


def spoke_at_the_end(feed: dict[str, Any]) -> bool:
    """Say whether the feed has ended and its rank has said what it has waited for."""
    (rank,) = feed["readers"] or [None]
    return bool(rank and feed["state"] == "ended" and rank["stats"] and rank["starved_streams"])


def when(broker: RunningBroker, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Wait for a status whose feed ``train`` meets the condition."""
    until(lambda: condition(broker.feed()))
    return broker.status()


def recorded(path: Path) -> tuple[Shape, Shape]:
    """Return the types that a broker sends before anything came, and those that it sends over a whole run."""
    first, every = Shape(), Shape()
    for status in statuses(path):
        first = first or shape(status)
        shape(status, found=every)
    return first, every


def test_status_keeps_its_keys_their_order_and_their_types(tmp_path: Path) -> None:
    golden = json.loads(GOLDEN.read_text())
    first, every = recorded(tmp_path)
    assert list(first) == list(golden)[: len(first)]
    assert set(every) == set(golden)
    assert {path: types - set(golden[path]) for path, types in every.items() if types - set(golden[path])} == {}


if __name__ == "__main__":
    with folder() as where:
        lines = [f" {json.dumps(path)}: {json.dumps(sorted(types))}" for path, types in recorded(where)[1].items()]
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")
