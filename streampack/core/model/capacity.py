"""What a broker is given before it runs: its feeds, and how much each side of it may hold."""

from __future__ import annotations

from dataclasses import dataclass

from streampack.core.model.rules import Rules
from streampack.core.packers.joint import joint_bounds

MAX_PEERS = 16_384


@dataclass(frozen=True, slots=True)
class Capacity:
    """What producers may send: ``quota_tokens`` of each partition wait for the merge at most, a sample has up to
    ``max_sample_tokens``, a message up to ``max_chunk_bytes``; ``max_peers`` of them are there at a time.
    """

    quota_tokens: int
    max_sample_tokens: int
    max_chunk_bytes: int
    max_peers: int = MAX_PEERS


@dataclass(frozen=True, slots=True)
class FeedPlan:
    """A feed before it runs: ``layout`` is how context parallelism cuts its packs, ``merged_tokens`` its share of
    the arena for all that is merged.
    """

    name: str
    rules: Rules
    merged_tokens: int
    layout: str = "zigzag"
    keeps: int = 3
    """Committed checkpoints that trainers can go back to."""
    discards: bool = False
    """When they go back, pushed samples that came since are dropped."""
    max_readers: int = MAX_PEERS
    leaving_bytes: int = 64 << 20
    """Payload that may be on its way to all readers together, sent and not confirmed; one part may be beyond it."""


def needed_tokens(rules: Rules, max_sample_tokens: int) -> int:
    """Merged tokens without which a step might never be whole: the window of longest samples (``joint`` holds
    outliers beside it), the step being formed, one being served, and a sample on its way.

    Of batches nobody knows how long their samples are: those of one are a token each at least.
    """
    if rules.batch is not None:
        return (rules.batch.samples or rules.batch.min_samples) + 2 * rules.budget + max_sample_tokens
    held = (rules.window + 2) * rules.budget
    if rules.balance.kind == "joint" and rules.balance.group is not None:
        align = rules.align.sample
        held = align * joint_bounds.held_tokens(rules.budget // align, rules.balance.group, rules.window)
    return held + 2 * rules.packs * rules.budget + max_sample_tokens


def wanted_tokens(rules: Rules, max_sample_tokens: int) -> int:
    """What a feed would have of the memory that no feed needs: of batches, three of the longest samples."""
    needed = needed_tokens(rules, max_sample_tokens)
    if rules.batch is None or rules.batch.samples is None:
        return needed
    return max(3 * rules.batch.samples * rules.budget, needed)
