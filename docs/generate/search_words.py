"""The order of search results: guides before references, measurements last; and words that users type for a page."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

BOOSTS = {"get-started/": 4, "how-to/": 3, "concepts/": 2, "reference/": 1, "repository/benchmarks/": 0.001}
"""How much a match counts, by the beginning of a page's path. Other pages count ``OTHERS``."""
OTHERS = 0.1
WORDS = {
    "concepts/exactly-once.md": ("limits", "failures", "guarantees"),
    "concepts/memory.md": ("oom", "out of memory", "ram"),
    "concepts/packing.md": ("packing", "sequence packing"),
    "how-to/deploy.md": ("slurm", "docker", "systemd"),
    "how-to/dynamic-cp.md": ("sequence parallel", "ulysses", "ring attention"),
    "how-to/frameworks.md": ("migrate", "migration", "dataloader", "accelerate"),
    "how-to/loss-rose.md": ("loss spike", "nan"),
    "how-to/observe.md": ("slow", "stall", "hang", "grafana", "prometheus"),
    "how-to/pretraining-mixture.md": ("webdataset", "mixture", "jsonl", "parquet"),
    "how-to/resume-and-elastic.md": ("resume", "checkpoint", "nccl timeout", "elastic"),
    "how-to/sft-hf-trl.md": ("sft", "trl", "chat template"),
    "how-to/plan.md": ("budget", "sizing", "window"),
    "reference/rows.md": ("loss mask", "labels", "input_ids"),
}
"""Words of users by page, for pages whose titles have other words. The site shows them beside a result."""


def ordered(meta: MutableMapping[str, Any], uri: str) -> None:
    """Add boost and words to a page's metadata, which the search reads."""
    found = [boost for start, boost in BOOSTS.items() if uri.startswith(start)]
    meta["search"] = {"boost": found[0] if found else OTHERS} | meta.get("search", {})
    if uri in WORDS:
        meta["tags"] = list(WORDS[uri])
