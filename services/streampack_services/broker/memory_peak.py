"""An estimate of the memory that a broker process takes at its peak, by part; use it for a container's limit.

``memory`` is the size of the arena, the largest part. The system gives a page of it only when the page is first
written, and a broker with small steps never fills the arena. The fill depends on the lengths of samples. A partition
may be ahead by ``MAX_UNMERGED`` samples or by its share of the memory, whichever is less. A pushed partition with large
batches is bounded by its share alone.

Lengths are unknown before a run, so there are two estimates: one at a mean of 500 tokens per sample, one at the longest
samples. Both assume that trainers are slower than producers and that each rank reads ``PREFETCH`` steps ahead.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from streampack.config.daemon_settings import BrokerConfig
from streampack.core.intake.intake import MAX_UNMERGED, ROW_BYTES
from streampack.core.model.capacity import FeedPlan, step_tokens
from streampack.core.model.rule_changes import rules_of_stages
from streampack.transport.slots import FEW_SLOTS, SLOT_BYTES
from streampack_services.broker.memory_plan import Plan

MEAN_TOKENS = 500
"""Assumed mean tokens of a sample."""
PROCESS_BYTES = 180 << 20
"""Memory of the interpreter, its libraries and kernels, idle on x86-64 with Python 3.11 and numba 0.68.

175 MiB were measured, or 213 where the kernel maps all of libllvmlite's file; it takes such pages back when needed.
"""
KEPT = 2
"""Memory that arriving chunks take / their bytes. malloc keeps the buffers that it gave, also those that are free.

Two producers with 16 MiB of arriving chunks were measured at 43 to 55 MiB; fewer bytes to trainers make up for a part.
"""
PREFETCH = 2
"""Steps that a client asks for beyond the one in use."""
PARTLY_FILLED = 4
"""Blocks of the arena that are used in part: the block being filled, and blocks with a few live samples."""


@dataclass(frozen=True, slots=True)
class Peak:
    """The memory of a broker process at its peak, by part, in bytes."""

    libraries: int
    """The interpreter, its libraries and the compiled kernels."""
    arena: int
    """Pages of the arena that are written."""
    arriving: int
    """Chunks from producers that are not in the arena yet; they may wait for late fields, or for their turn."""
    leaving: int
    """Messages to trainers that are not confirmed yet."""
    tables: int
    """Rows of the samples held: metadata, queues and windows."""

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(asdict(self).values())


def peak(config: BrokerConfig, plan: Plan, mean_tokens: int | None = MEAN_TOKENS) -> Peak:
    """Estimate the peak memory of a broker at full load.

    Args:
        config: The broker's configuration.
        plan: Its memory plan.
        mean_tokens: Mean tokens of a sample; None if all samples are as long as the rules allow.
    """
    quota, streams = plan.capacity.quota_tokens, [stream for feed in plan.feeds for stream in feed.rules.streams]
    partitions, pushed = sum(s.partitions for s in streams), sum(s.partitions for s in streams if s.pushed)
    read_ahead = quota if mean_tokens is None else min(quota, MAX_UNMERGED * mean_tokens)
    ahead = (partitions - pushed) * read_ahead + pushed * quota
    merged = [_merged_tokens(config, feed, mean_tokens) for feed in plan.feeds]
    live = ahead + sum(merged)
    arena = min(live + PARTLY_FILLED * plan.block_tokens, plan.memory_bytes // plan.token_bytes) * plan.token_bytes
    arriving = plan.arriving * plan.chunk_bytes
    if config.listen.producers.startswith("ipc://"):
        arriving += FEW_SLOTS * min(SLOT_BYTES, plan.chunk_bytes)  # the broker maps each producer's shared memory
    meshes = [stage.planned_mesh for feed in config.feeds for stage in config.stages_of(feed)]
    tps = [mesh.tp for mesh in (config.planned_mesh, *meshes) if mesh is not None]
    steps = zip(plan.feeds, merged, strict=True)
    leaving = sum((PREFETCH + 1) * min(_step_tokens(feed), num_steps) for feed, num_steps in steps) * max(tps)
    waits = [feed.rules for feed in plan.feeds if feed.rules.late_fields or feed.rules.paces]
    staged = quota * sum(stream.partitions for rules in waits for stream in rules.streams if stream.pushed)
    samples = live // (mean_tokens or MEAN_TOKENS)
    return Peak(
        libraries=PROCESS_BYTES,
        arena=plan.memory_bytes if mean_tokens is None else arena,
        arriving=min(KEPT * partitions * arriving, ahead * plan.token_bytes) + staged * plan.token_bytes,
        leaving=min(leaving * plan.token_bytes, plan.leaving_bytes),
        tables=samples * ROW_BYTES,
    )


def _merged_tokens(config: BrokerConfig, feed: FeedPlan, mean_tokens: int | None) -> int:
    """Return the tokens that a feed holds from the merge until every rank has them.

    These are the tokens of the window (at least two steps), of the two steps before it, and of the steps formed ahead.
    """
    if mean_tokens is None or feed.rules.batch is not None:
        return feed.merged_tokens
    step = _step_tokens(feed)
    window = max(max(stage.max_window for stage in rules_of_stages(feed.rules)) * mean_tokens, 2 * step)
    return min(feed.merged_tokens, config.steps_ahead * step + window + 2 * step)


def _step_tokens(feed: FeedPlan) -> int:
    """Return the tokens of a step; for batches of unknown size, the tokens that the feed may hold."""
    return step_tokens(feed.rules) if feed.rules.batch is None else feed.merged_tokens
