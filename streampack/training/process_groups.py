"""Process groups for dynamic context parallelism: the ranks that share a pack change with every micro-batch.

A rank is in one group of each size: 2, 4, 8 and more consecutive ranks. All are made once, before training, because
making a group takes a collective call.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist

log = logging.getLogger("streampack.training")


def cp_groups(dp_cp_group: Any = None, max_group: int = 64, device: Any = None) -> dict[int, Any]:
    """Make the process groups of this rank for a feed with ``cp: dynamic``; all ranks call this once.

    Pass the result as ``connect(..., cp_groups=...)``. Then ``batch.cp_group`` is the group of the ranks that share the
    batch, or None for a rank alone.

    Args:
        dp_cp_group: Process group of all dp x cp ranks, ordered by dp_rank * cp + cp_rank. Default: all ranks.
        max_group: Most ranks of a group, as ``max_group`` of the feed.
        device: Device of the tensor with which each group is used once, so that its connections exist. Default: the
            CPU, or for NCCL the current CUDA device.

    Returns:
        The group by its size: 2, 4, 8, ... up to ``max_group`` and the number of ranks.

    Example:
        >>> groups = cp_groups(max_group=16)  # doctest: +SKIP
        >>> loader = streampack.connect(mesh={"dp": 8, "cp": 8, ...}, cp_groups=groups)  # doctest: +SKIP
    """
    members = dist.get_process_group_ranks(dist.group.WORLD if dp_cp_group is None else dp_cp_group)
    place, groups, size = members.index(dist.get_rank()), dict[int, Any](), 2
    if device is None and dist.get_backend(dp_cp_group) == "nccl":
        device = "cuda"
    while size <= min(max_group, len(members)):
        first = place // size * size
        if first + size <= len(members):
            groups[size] = dist.new_group(members[first : first + size], use_local_synchronization=True)
            dist.all_reduce(torch.zeros(1, device=device), group=groups[size])
        size *= 2
    log.info("made %d process groups of %s ranks for dynamic context parallelism", len(groups), [*groups])
    return groups
