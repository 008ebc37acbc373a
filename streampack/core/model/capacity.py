"""The plan of a broker before it runs: its feeds, and the most that producers and readers may hold."""

from __future__ import annotations

from dataclasses import dataclass

from streampack.core.model.rule_changes import rules_of_stages
from streampack.core.model.rules import Rules
from streampack.core.packers.joint import joint_bounds

MAX_PEERS = 16_384
MAX_KEYS = 2**20


@dataclass(frozen=True, slots=True)
class Capacity:
    """Limits on producers.

    Attributes:
        quota_tokens: The most tokens of one partition that may wait for the merge.
        max_sample_tokens: The most tokens in a sample.
        max_chunk_bytes: The most bytes in a message.
        max_peers: The most producers connected at a time.
        max_keys: The most keys of a pushed stream's current write.
    """

    quota_tokens: int
    max_sample_tokens: int
    max_chunk_bytes: int
    max_peers: int = MAX_PEERS
    max_keys: int = MAX_KEYS


@dataclass(frozen=True, slots=True)
class FeedPlan:
    """The plan of one feed."""

    name: str
    rules: Rules
    merged_tokens: int
    """The feed's share of the arena for merged samples, in tokens."""
    layout: str = "zigzag"
    """The way in which context parallelism cuts packs: see ``layout.shards``."""
    keeps: int = 3
    """Number of committed checkpoints that trainers can go back to."""
    discards: bool = False
    """True: pushed samples that came after a checkpoint are dropped when trainers go back to it."""
    max_readers: int = MAX_PEERS
    max_extra_bytes: int = 0
    """The most bytes of a sample's media."""
    leaving_bytes: int = 64 << 20
    """The most payload sent to all readers together and not confirmed; one part may be beyond it."""


def needed_tokens(rules: Rules, max_sample_tokens: int) -> int:
    """Return the least number of merged tokens that a feed must be able to hold to complete every step of every stage.

    The number covers a full window of the longest samples (with ``joint`` also the outliers) and one more sample. It
    also covers the step being formed and the step being served. In batch mode the lengths are unknown, and each sample
    counts one token. Tokens that samples share count once, although memory holds them for each sample. With stages,
    the largest stage counts.
    """
    if rules.stages:
        return max(needed_tokens(stage_rules, max_sample_tokens) for stage_rules in rules_of_stages(rules))
    if rules.batch is not None:
        return (rules.batch.samples or rules.batch.min_samples) + 2 * rules.budget + max_sample_tokens
    tokens = (rules.max_window + 2) * rules.budget
    if rules.balance.kind == "joint" and rules.balance.group is not None:
        align = rules.align.sample
        units = rules.budget // align
        tokens = align * joint_bounds.held_tokens(units, rules.balance.group, rules.max_window, rules.forms_by_media)
    return tokens + 2 * rules.most_packs * rules.budget + max_sample_tokens


def ahead_tokens(rules: Rules, max_sample_tokens: int) -> int:
    """Return the most tokens outside steps that the memory always holds; they are enough to form a step.

    In batch mode the lengths are unknown, and there is no such number: the result is larger than any memory.
    """
    if rules.batch is not None:
        return 1 << 62
    if rules.stages:
        return max(ahead_tokens(stage_rules, max_sample_tokens) for stage_rules in rules_of_stages(rules))
    return needed_tokens(rules, max_sample_tokens) - rules.most_packs * rules.budget - max_sample_tokens


def step_tokens(rules: Rules) -> int:
    """Return the most tokens of a step that is a number of packs, in any of the stages."""
    return max(stage_rules.most_packs * stage_rules.budget for stage_rules in rules_of_stages(rules))


def largest_budget(rules: Rules) -> int:
    """Return the largest budget of all stages."""
    return max(stage_rules.budget for stage_rules in rules_of_stages(rules))


SHARED = 8
"""Tokens of memory for one token of packs whose samples share tokens, if there is memory to spare."""


def wanted_tokens(rules: Rules, max_sample_tokens: int) -> int:
    """Return the merged tokens that a feed should hold if there is memory to spare.

    For batches of a fixed number of samples, this is the size of three batches of the longest samples.
    """
    needed = needed_tokens(rules, max_sample_tokens) * (1 if rules.share is None else SHARED)
    if rules.batch is None or rules.batch.samples is None:
        return needed
    return max(3 * rules.batch.samples * largest_budget(rules), needed)
