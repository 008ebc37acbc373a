"""A run that does not end by itself."""

from __future__ import annotations

from pathlib import Path

from tests.integration.running import write, write_jsonl

RULES = {"budget": 256, "window": {"samples": 64}, "step": {"packs": 4}}


ENDLESS = {"rules": RULES, "streams": {"web": {"partitions": 2, "repeat": True}}}


def producer_config(path: Path, broker: str, processes: int = 1) -> Path:
    """producer.yaml for a stream ``web`` of 2 files, 300 samples of 1 to 97 tokens each."""
    for number in range(2):
        rows = [{"tokens": [number] * (1 + 31 * i % 97)} for i in range(300)]
        write_jsonl(path / f"{number}.jsonl", rows)
    source = {"source": "jsonl", "shards": str(path / "?.jsonl")}
    return write(path / "producer.yaml", {"broker": broker, "processes": processes, "streams": {"web": source}})
