"""A run with media that is planned: its rules and files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.integration.running import write, write_jsonl

SAMPLES = 240


RULES: dict[str, Any] = {
    "budget": 512, "window": {"samples": 64}, "step": {"packs": 4}, "overlong": "drop",
    "limits": {"patches": 130, "items": 8}, "balance": {"a": 100, "b": 1, "patches": [900, 7], "items": 50},
}  # fmt: skip


FIELDS = {
    "image_grid_thw": {"dtype": "int32", "axis": "item", "shape": [3]},
    "pixel_values": {"dtype": "reference", "axis": "item"},
}


def rows(seed: int, count: int) -> list[dict[str, Any]]:
    """Samples of up to 700 tokens with up to four images; some exceed a limit alone, and one has no sizes."""
    draws = np.random.default_rng(seed)
    found = []
    for number, length in enumerate(np.clip(draws.lognormal(4.3, 1.0, count), 1, 700).astype(int).tolist()):
        patches = [200] if number % 11 == 7 else draws.integers(1, 31, number % 5).tolist()
        row: dict[str, Any] = {"input_ids": [1] * length}
        if patches:
            row |= {"patches": patches, "images": [f"{number}-{i}.png" for i in range(len(patches))]}
            row |= {"image_grid_thw": [[1, 1, each] for each in patches]}
        found.append(row)
    found[count // 2 + 1].pop("image_grid_thw")
    return found


def make_media_files(folder: Path, **rules: Any) -> Path:
    """broker.yaml, producer.yaml and the data of two streams, three files each."""
    streams = {"chats": {"weight": 0.6, "partitions": 3}, "captions": {"weight": 0.4, "partitions": 2}}
    for at, name in enumerate(streams):
        for number in range(3):
            write_jsonl(folder / f"{name}-{number}.jsonl", rows(3 * at + number, SAMPLES // 6))
    sources = {
        name: {"source": "jsonl", "shards": str(folder / f"{name}-*.jsonl"), "fields": {"pixel_values": "images"}}
        for name in streams
    }
    write(folder / "producer.yaml", {"streams": sources})
    broker = {
        "run": "planned", "rules": RULES | {"poison": "drop"} | rules, "planned_mesh": {"dp": 2}, "streams": streams,
        "fields": FIELDS, "state_dir": str(folder / "state"),
    }  # fmt: skip
    write(folder / "broker.yaml", broker)
    return folder
