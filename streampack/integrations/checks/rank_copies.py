"""The ranks that read the same packs, because a framework shards batches for its other axes itself."""

from __future__ import annotations

from typing import Any

from torch import distributed


def copies_of(dp: int, dp_rank: int) -> tuple[int, int]:
    """Return how many ranks share this data-parallel rank, and this rank's number among them; may communicate."""
    if not distributed.is_initialized() or distributed.get_world_size() == dp:
        return 1, 0
    ranks: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(ranks, dp_rank)
    return ranks.count(dp_rank), ranks[: distributed.get_rank()].count(dp_rank)
