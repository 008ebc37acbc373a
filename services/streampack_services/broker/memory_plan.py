"""How a broker's ``memory`` is divided: a share for each feed's merged samples, a share for each partition's credit.

The needs of the rules come first. Partitions get up to a quarter of the arena; this limits how far producers may be
ahead. The feeds divide the rest by their needs. A ``memory`` that cannot hold the needs of the rules is an error before
anything starts.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from msgspec.structs import replace

from streampack.config.daemon_settings import BrokerConfig
from streampack.config.stage_settings import other_stages
from streampack.config.typed_yaml import parse_size
from streampack.core.deal.step_cache import PART_BYTES
from streampack.core.model.capacity import (
    Capacity,
    FeedPlan,
    largest_budget,
    needed_tokens,
    step_tokens,
    wanted_tokens,
)
from streampack.core.model.rule_changes import rules_of_stages
from streampack.core.model.rules import Rules
from streampack.core.model.rules import as_recorded as rules_as_recorded
from streampack.errors import ConfigError
from streampack.transport.unread import resident_bytes
from streampack_services.broker.arena import SLACK, arena_tokens
from streampack_services.broker.machine_memory import machine_memory

log = logging.getLogger("streampack.broker")

LEAST_CHUNK_BYTES = 1 << 20
"""Least bytes of a chunk, unless ``limits.chunk`` is less. A partition's share of memory holds two chunks of this size.
If the share is larger, chunks grow up to ``limits.chunk`` and the share holds four. A producer then always has a chunk
in flight."""
LEAVING = 8
"""``memory`` / bytes that may be sent to trainers and not confirmed."""
LEAST_LEAVING = 4
"""Messages of packs that may always be sent to trainers and not confirmed."""
ARRIVING_BYTES = 8 << 20
"""Bytes of a producer's chunks that may wait for a busy broker, before they are copied into the arena."""
TRIM_S, TRIM_BYTES = 10.0, 16 << 20
"""Seconds between two looks at the memory, and its growth after which freed memory is given back to the system."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


@dataclass(frozen=True, slots=True)
class Plan:
    """The feeds' rules, and how the memory is divided among feeds and partitions."""

    feeds: tuple[FeedPlan, ...]
    capacity: Capacity
    """Limits for producers."""
    memory_bytes: int
    """Size of the arena."""
    token_bytes: int
    """Bytes of one token with its fields."""
    block_tokens: int
    """Tokens of a block of the arena."""
    chunk_bytes: int
    """Most bytes of a producer's chunk, unless one sample is longer."""
    arriving: int
    """Chunks of a producer that may wait for the broker before they are copied into the arena."""
    leaving_bytes: int
    """Most bytes sent to trainers and not confirmed; they are not part of ``memory_bytes``."""

    @property
    def rules(self) -> Rules:
        """Rules of the first feed. The dtype of tokens and the fields are the same in all feeds."""
        return self.feeds[0].rules


class _Needs(NamedTuple):
    """The least memory that the rules of a configuration need."""

    feeds: dict[str, Rules]
    by_feed: dict[str, int]
    """Merged tokens that each feed needs."""
    sample: int
    """Tokens of the longest sample."""
    block: int
    """Tokens of a block of the arena."""
    quota: int
    """Least tokens of a partition that may wait for the merge."""
    partitions: int
    """Partitions of all feeds."""
    least_chunk: int
    """Least size of a chunk, in bytes."""
    token_bytes: int
    """Bytes of one token with its fields."""

    @property
    def num_bytes(self) -> int:
        """The least ``memory``, in bytes."""
        live = sum(self.by_feed.values()) + self.partitions * self.quota
        return int((live * SLACK + 4 * self.block) * self.token_bytes)

    def __str__(self) -> str:
        windows = " and ".join(_held(rules, self.sample) for rules in self.feeds.values())
        return f"{-(-self.num_bytes // 2**20)}MiB for {windows}, and {self.partitions} partitions"


def _needs(config: BrokerConfig, recorded: Mapping[str, Rules] = MappingProxyType({})) -> _Needs:
    """Return the least memory that the rules need, with the stages that the log has ``recorded``."""
    feeds = {name: _with_recorded_stages(config.plan(name), recorded.get(name)) for name in config.feeds}
    size = next(iter(feeds.values())).token_bytes
    budget = max(map(largest_budget, feeds.values()))
    least = min(parse_size(config.limits.chunk, "limits.chunk"), LEAST_CHUNK_BYTES)
    sample = max(
        config.limits.sample_tokens, budget + 1
    )  # one token more than the budget shows that a sample is over-long
    return _Needs(
        feeds=feeds,
        by_feed={
            name: needed_tokens(rules, sample) + (_most_media(config) // size if rules.has_extra_bytes else 0)
            for name, rules in feeds.items()
        },
        sample=sample,
        block=max(least // size, 8 * budget),  # blocks much larger than samples, so that their unused ends are small
        quota=2 * max(least // size, sample),
        partitions=sum(stream.partitions for rules in feeds.values() for stream in rules.streams),
        least_chunk=least,
        token_bytes=size,
    )


def _most_media(config: BrokerConfig) -> int:
    """Return the most bytes of a sample's media: those of a chunk."""
    return parse_size(config.limits.chunk, "limits.chunk")


def check_machine(config: BrokerConfig, memory: int | None = None) -> None:
    """Raise ConfigError if ``memory`` bytes are more than this machine has; None: the configuration's ``memory``."""
    machine = machine_memory()
    memory = parse_size(config.memory, "memory") if memory is None else memory
    if machine is None or memory <= machine.num_bytes:
        return
    needs = _needs(config)
    if needs.num_bytes > machine.num_bytes:
        raise ConfigError(
            f"memory: the rules need at least {needs}, but {machine}. Lower rules.budget or rules.window, or use a "
            f"machine with more memory"
        )
    raise ConfigError(f"memory: got {config.memory}, but {machine}. Lower memory: the rules need only {needs}")


def with_enough_memory(config: BrokerConfig) -> BrokerConfig:
    """Return ``config`` with its ``memory`` doubled until the rules fit, at most to the memory of the machine.

    Raises:
        ConfigError: The rules need more memory than the machine has.
    """
    memory, least = parse_size(config.memory, "memory"), _needs(config).num_bytes
    if memory >= least:
        return config
    check_machine(config, least)
    while memory < least:
        memory = 2 * max(memory, 2**20)
    machine = machine_memory()
    return replace(config, memory=memory if machine is None else min(memory, max(machine.num_bytes, least)))


def _with_recorded_stages(rules: Rules, recorded: Rules | None) -> Rules:
    """Return ``rules`` with the stages of the ``recorded`` rules, if nothing else differs; else the log is refused."""
    if recorded is None:
        return rules
    staged = replace(rules, stages=recorded.stages)
    return staged if rules_as_recorded(staged, recorded) == recorded else rules


def plan(config: BrokerConfig, recorded: Mapping[str, Rules] = MappingProxyType({})) -> Plan:
    """Divide the configuration's ``memory`` among the feeds, for the largest stage of each.

    Args:
        config: The broker's configuration.
        recorded: The rules of each feed as the log has them, whose stages hold.

    Raises:
        ConfigError: The memory is too small for the rules; the message has the least size.
    """
    wanted = _needs(config, recorded)
    feeds, needs, partitions, least_quota = wanted.feeds, wanted.by_feed, wanted.partitions, wanted.quota
    sample, block, size = wanted.sample, wanted.block, wanted.token_bytes
    memory = parse_size(config.memory, "memory")
    limit = parse_size(config.limits.chunk, "limits.chunk")
    needed = sum(needs.values())
    capacity = arena_tokens(memory, size, block)
    if capacity < needed + partitions * least_quota:
        raise ConfigError(f"memory: got {config.memory}, but the rules need at least {wanted}")
    quota = max(least_quota, min(capacity // 4, capacity - needed) // partitions)
    spare, wants = capacity - quota * partitions - needed, {n: wanted_tokens(r, sample) for n, r in feeds.items()}
    part = max(PART_BYTES, size * max(map(largest_budget, feeds.values())))
    leaving = max(memory // LEAVING, LEAST_LEAVING * part) // len(feeds)
    plans = tuple(
        FeedPlan(
            name,
            rules,
            needs[name] + spare * wants[name] // sum(wants.values()),
            config.feeds[name].layout,
            config.retain.checkpoints,
            config.feeds[name].on_rewind == "discard",
            config.limits.peers,
            _most_media(config) if rules.has_extra_bytes else 0,
            leaving,
        )
        for name, rules in feeds.items()
    )
    chunk = max(wanted.least_chunk, min(limit, quota * size // 4))
    longest = Capacity(quota, sample, max(chunk // size, sample) * size, config.limits.peers, config.limits.keys)
    arriving = max(4, ARRIVING_BYTES // chunk)
    return Plan(plans, longest, memory, size, block, chunk, arriving, leaving * len(feeds))


def as_recorded(config: BrokerConfig, recorded: Mapping[str, Rules]) -> Plan:
    """Return the plan with the stages that the log has, and with its order of samples; say what differs.

    Args:
        config: The broker's configuration.
        recorded: The rules of each feed as the log has them. An earlier version may have begun the log, with another
            order of samples.
    """
    feeds, planned = [], plan(config, recorded)
    for feed in planned.feeds:
        if others := other_stages(config.plan(feed.name).stages, feed.rules.stages):
            log.warning(
                "feed %r: the stages of the log hold, and those of broker.yaml differ: %s. To change a stage that has "
                "not begun, run 'streampack set --cancel ID', and 'streampack set stage FILE --at-step N'",
                feed.name, others,
            )  # fmt: skip
        rules = rules_as_recorded(feed.rules, recorded.get(feed.name, feed.rules))
        if rules != feed.rules:
            log.info(
                "feed %r: the log has window %s and in_turn %s, which stay for this run. A new run has window %s and "
                "in_turn %s", feed.name, rules.window, str(rules.in_turn).lower(), feed.rules.window,
                str(feed.rules.in_turn).lower(),
            )  # fmt: skip
        feeds.append(dataclasses.replace(feed, rules=rules))
    return dataclasses.replace(planned, feeds=tuple(feeds))


def _held(rules: Rules, sample: int) -> str:
    """Describe for a person the samples and packs that a feed must hold at once, in the stage that needs the most."""
    stages = rules_of_stages(rules)
    largest = max(range(len(stages)), key=lambda number: needed_tokens(stages[number], sample))
    stage = f" in stage {rules.stages[largest - 1].name!r}" if largest else ""
    rules = stages[largest]
    if rules.batch is None:
        outliers = " (plus outliers that joint balance keeps)" if rules.balance.kind == "joint" else ""
        return (
            f"a window of {rules.max_window} samples{outliers} with {step_tokens(rules) // rules.budget} packs of "
            f"{rules.budget} tokens in each step{stage}"
        )
    size = f" of {rules.batch.samples} samples" if rules.batch.samples else ""
    return f"batches{size} with 2 packs of {rules.budget} tokens{stage}"


def keep_freed_memory() -> None:
    """Make glibc keep freed buffers up to 32 MiB for reuse; does nothing without glibc.

    Otherwise a message of 1 MiB spends a third of its time on page faults.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        libc.mallopt(_M_TRIM_THRESHOLD, 64 << 20)


def give_back_memory() -> None:
    """Give memory that glibc keeps, but that is free, back to the system; does nothing without glibc."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


class FreedMemory:
    """Gives freed memory back after the process has grown."""

    def __init__(self) -> None:
        self._look_at, self._resident, self._again = 0.0, 0, False

    def look(self, now: float, is_idle: bool) -> None:
        """Give freed memory back to the system, if the process has grown much since the last time.

        Do it once more when no messages wait (``is_idle``): only then is the memory of a flood free.
        """
        if now < self._look_at:
            return
        self._look_at = now + TRIM_S
        has_grown = resident_bytes() > self._resident + TRIM_BYTES
        if has_grown or (self._again and is_idle):
            give_back_memory()
            self._again = has_grown
        self._resident = resident_bytes() if has_grown else min(self._resident, resident_bytes())
