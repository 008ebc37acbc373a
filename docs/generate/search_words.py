"""The order of search results: guides before references, measurements last; and words that users type for a page."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

BOOSTS = {
    "get-started/": 4,
    "migrate/": 3,
    "how-to/": 3,
    "concepts/": 2,
    "reference/": 1,
    "repository/benchmarks/": 0.001,
}
"""How much a match counts, by the beginning of a page's path. Other pages count ``OTHERS``."""
OTHERS = 0.1
WORDS = {
    "concepts/exactly-once.md": ("failures", "guarantees"),
    "concepts/memory.md": ("oom", "out of memory", "ram"),
    "concepts/packing.md": ("packing", "sequence packing"),
    "how-to/accelerate.md": ("accelerate launch", "ddp"),
    "how-to/choose-packing.md": ("padding", "utilization", "budget"),
    "how-to/deploy.md": ("export", "relay"),
    "how-to/docker.md": ("compose", "image", "container"),
    "how-to/dynamic-cp.md": ("sequence parallel", "ulysses", "ring attention"),
    "how-to/loss-rose.md": ("loss spike", "nan"),
    "how-to/observe.md": ("slow", "stall", "hang", "grafana", "prometheus"),
    "how-to/packing-and-learning.md": ("learning rate", "batch size", "loss", "cross contamination"),
    "how-to/padded-rows.md": ("padded batches", "attention_mask", "dynamic batching"),
    "how-to/plan.md": ("budget", "window"),
    "how-to/plan-one-step.md": ("plan_step", "without a broker"),
    "how-to/pretraining-mixture.md": ("webdataset", "mixture", "jsonl", "parquet"),
    "how-to/resume-and-elastic.md": ("resume", "checkpoint", "nccl timeout", "elastic"),
    "how-to/sft-hf-trl.md": ("sft", "trl", "chat template"),
    "how-to/sizing.md": ("sizing", "how much memory", "cores", "bandwidth", "disk"),
    "how-to/slurm.md": ("sbatch", "srun", "preemption"),
    "how-to/systemd.md": ("service unit", "bare metal"),
    "how-to/troubleshooting.md": ("faq", "oom", "error", "message", "timeout"),
    "how-to/upgrade.md": ("version", "0.2.0", "release notes"),
    "migrate/from-dataloader.md": ("migrate", "migration", "dataloader", "collate_fn"),
    "migrate/from-streaming-loaders.md": ("migrate", "mosaicml", "mds", "energon", "webdataset"),
    "migrate/from-trl-packing.md": ("migrate", "trl", "axolotl", "sft packing"),
    "reference/limits.md": ("limits", "maximum", "not supported"),
    "reference/packs.md": ("batch", "cu_seqlens", "position_ids"),
    "reference/rows.md": ("loss mask", "labels", "input_ids"),
}
"""Words of users by page, for pages whose titles have other words. The site shows them beside a result."""


def ordered(meta: MutableMapping[str, Any], uri: str) -> None:
    """Add boost and words to a page's metadata, which the search reads."""
    boost = next((boost for start, boost in BOOSTS.items() if uri.startswith(start)), OTHERS)
    meta["search"] = {"boost": boost} | meta.get("search", {})
    if uri in WORDS:
        meta["tags"] = list(WORDS[uri])
