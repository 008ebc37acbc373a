"""What the process of a broker takes at its peak, part by part: the figure for a container's limit.

``memory`` is the arena's size, most of the whole where it is full; but a page of it is taken when it is first written
to, and a broker whose steps are small never fills it. How full it gets depends on the lengths of samples, which nobody
knows before a run, since a partition may be so many samples ahead (``MAX_UNMERGED``) or so many bytes, whichever comes
first; a pushed partition with large batches is bounded by the bytes alone. So there are two figures: at a mean of 500
tokens a sample, and of the longest. Both are of trainers that are slower than producers, each reading ``PREFETCH``
steps ahead: others need less.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from streampack.config.daemon_settings import BrokerConfig
from streampack.core.intake.intake import MAX_UNMERGED, ROW_BYTES
from streampack.core.model.capacity import FeedPlan
from streampack.transport.shared_memory import FEW_SLOTS, SLOT_BYTES
from streampack_services.broker.memory_plan import Plan

MEAN_TOKENS = 500
"""Of a sample, where nothing is known."""
PROCESS_BYTES = 180 << 20
"""The interpreter, its libraries and the compiled kernels: 175 MiB idle on x86-64 with Python 3.11, numba 0.68."""
PREFETCH = 2
"""Steps that a client asks for beyond the one in use."""
PARTLY_FILLED = 4
"""Blocks: one that is being filled, and some whose last samples wait."""


@dataclass(frozen=True, slots=True)
class Peak:
    """Bytes of each part."""

    libraries: int
    arena: int
    arriving: int
    leaving: int
    tables: int

    @property
    def total(self) -> int:
        return sum(asdict(self).values())


def peak(config: BrokerConfig, plan: Plan, mean_tokens: int | None = MEAN_TOKENS) -> Peak:
    """Of a broker of ``config`` at full load. ``mean_tokens`` of a sample; None: as long as they may be."""
    quota, streams = plan.capacity.quota_tokens, [stream for feed in plan.feeds for stream in feed.rules.streams]
    partitions, pushed = sum(s.partitions for s in streams), sum(s.partitions for s in streams if s.pushed)
    read_ahead = quota if mean_tokens is None else min(quota, MAX_UNMERGED * mean_tokens)
    ahead = (partitions - pushed) * read_ahead + pushed * quota
    merged = [_merged_tokens(config, feed, mean_tokens) for feed in plan.feeds]
    live = ahead + sum(merged)
    arena = min(live + PARTLY_FILLED * plan.block_tokens, plan.memory_bytes // plan.token_bytes) * plan.token_bytes
    arriving = plan.arriving * plan.chunk_bytes
    if config.listen.producers.startswith("ipc://"):
        arriving += FEW_SLOTS * min(SLOT_BYTES, plan.chunk_bytes)  # of each producer's own memory, once it was read
    steps = zip(plan.feeds, merged, strict=True)
    leaving = sum((PREFETCH + 1) * min(_step_tokens(feed), held) for feed, held in steps) * config.planned_mesh.tp
    samples = live // (mean_tokens or MEAN_TOKENS)
    return Peak(
        libraries=PROCESS_BYTES,
        arena=plan.memory_bytes if mean_tokens is None else arena,
        arriving=min(partitions * arriving, ahead * plan.token_bytes),
        leaving=min(leaving * plan.token_bytes, plan.leaving_bytes),
        tables=samples * ROW_BYTES,
    )


def _merged_tokens(config: BrokerConfig, feed: FeedPlan, mean_tokens: int | None) -> int:
    """The window, what waits behind it and the steps that are formed, until every rank has them.

    Two steps wait to be formed, and as many more come at once when they do not; the window may be larger.
    """
    if mean_tokens is None or feed.rules.batch is not None:
        return feed.merged_tokens
    step = _step_tokens(feed)
    window = max(feed.rules.window * mean_tokens, 2 * step)
    return min(feed.merged_tokens, config.steps_ahead * step + window + 2 * step)


def _step_tokens(feed: FeedPlan) -> int:
    """Of a batch nobody knows: as much as is held."""
    return feed.rules.packs * feed.rules.budget if feed.rules.batch is None else feed.merged_tokens
