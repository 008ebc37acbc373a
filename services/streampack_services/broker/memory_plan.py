"""How a broker's memory is shared out: so much for each feed's merged samples, so much for each partition on its way.

What the rules need comes first; of what is left partitions get up to a quarter of the arena, which is what producers
may be ahead by, and the feeds the rest, by their needs. A memory that cannot hold what the rules need is refused before
anything is started.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import NamedTuple

from msgspec.structs import replace

from streampack.config.daemon_settings import BrokerConfig
from streampack.config.typed_yaml import parse_size
from streampack.core.deal.step_cache import PART_BYTES
from streampack.core.model.capacity import Capacity, FeedPlan, needed_tokens, wanted_tokens
from streampack.core.model.rules import Rules
from streampack.errors import ConfigError
from streampack_services.broker.arena import SLACK, arena_tokens
from streampack_services.broker.machine_memory import machine_memory

LEAST_CHUNK_BYTES = 1 << 20
"""A partition's share of memory holds two chunks of so many bytes, unless ``limits.chunk`` is less; of larger ones, up
to that limit, it holds four: a message costs what it costs whatever its size, one that nothing is sent behind costs
more."""
LEAVING = 8
"""One part in so many of ``memory`` may be on its way to readers, and at least ``LEAST_LEAVING`` parts of a step."""
LEAST_LEAVING = 4
ARRIVING_BYTES = 8 << 20
"""Of a producer's chunks, before they are taken in: those that a busy broker finds when it turns to them."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


@dataclass(frozen=True, slots=True)
class Plan:
    """What a configuration comes to: the feeds' rules, and how memory is shared out (bytes and tokens)."""

    feeds: tuple[FeedPlan, ...]
    capacity: Capacity
    memory_bytes: int
    token_bytes: int
    block_tokens: int
    chunk_bytes: int
    """Of a producer's message, but for one sample that is longer."""
    arriving: int
    """Chunks of a producer that are held before they are taken in."""
    leaving_bytes: int
    """Of steps, sent to readers and not confirmed: beside ``memory``, bounded by a part of it."""

    @property
    def rules(self) -> Rules:
        """Of the first feed; tokens and fields are the same in all."""
        return self.feeds[0].rules


class _Needs(NamedTuple):
    """What the rules of a configuration need, in tokens but for ``least_chunk`` and ``token_bytes``."""

    feeds: dict[str, Rules]
    by_feed: dict[str, int]
    sample: int
    block: int
    quota: int
    partitions: int
    least_chunk: int
    token_bytes: int

    @property
    def num_bytes(self) -> int:
        """The least ``memory``."""
        live = sum(self.by_feed.values()) + self.partitions * self.quota
        return int((live * SLACK + 4 * self.block) * self.token_bytes)

    def __str__(self) -> str:
        windows = " and ".join(_held(rules) for rules in self.feeds.values())
        return f"{-(-self.num_bytes // 2**20)}MiB for {windows}, and {self.partitions} partitions"


def _needs(config: BrokerConfig) -> _Needs:
    feeds = {name: config.plan(name) for name in config.feeds}
    size = next(iter(feeds.values())).token_bytes
    budget = max(rules.budget for rules in feeds.values())
    least = min(parse_size(config.limits.chunk, "limits.chunk"), LEAST_CHUNK_BYTES)
    sample = max(config.limits.sample_tokens, budget + 1)  # what is cut to it is still seen to be over-long
    return _Needs(
        feeds=feeds,
        by_feed={name: needed_tokens(rules, sample) for name, rules in feeds.items()},
        sample=sample,
        block=max(least // size, 8 * budget),  # large beside a stored sample: little is lost where none fits
        quota=2 * max(least // size, sample),
        partitions=sum(stream.partitions for rules in feeds.values() for stream in rules.streams),
        least_chunk=least,
        token_bytes=size,
    )


def check_machine(config: BrokerConfig, memory: int | None = None) -> None:
    """Raise ConfigError if ``memory`` bytes (by default the configuration's) are more than this machine has."""
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
    raise ConfigError(
        f"memory: got {config.memory}, but {machine}. Set memory to less: the rules need at least {needs}"
    )


def with_enough_memory(config: BrokerConfig) -> BrokerConfig:
    """``config`` with its ``memory`` doubled until the rules fit, at most to what the machine has. Raises ConfigError
    where that is too little.
    """
    memory, least = parse_size(config.memory, "memory"), _needs(config).num_bytes
    if memory >= least:
        return config
    check_machine(config, least)
    while memory < least:
        memory = 2 * max(memory, 2**20)
    machine = machine_memory()
    return replace(config, memory=memory if machine is None else min(memory, max(machine.num_bytes, least)))


def plan(config: BrokerConfig) -> Plan:
    """Raises ConfigError where the memory cannot hold what the rules need, with the figure that would."""
    wanted = _needs(config)
    feeds, needs, partitions, least_quota = wanted.feeds, wanted.by_feed, wanted.partitions, wanted.quota
    sample, block, size = wanted.sample, wanted.block, wanted.token_bytes
    memory = parse_size(config.memory, "memory")
    limit = parse_size(config.limits.chunk, "limits.chunk")
    needed = sum(needs.values())
    capacity = arena_tokens(memory, size, block)
    if capacity < needed + partitions * least_quota:
        raise ConfigError(f"memory: got {config.memory}, expected at least {wanted}")
    quota = max(least_quota, min(capacity // 4, capacity - needed) // partitions)
    spare, wants = capacity - quota * partitions - needed, {n: wanted_tokens(r, sample) for n, r in feeds.items()}
    part = max(PART_BYTES, size * max(rules.budget for rules in feeds.values()))
    leaving = max(memory // LEAVING, LEAST_LEAVING * part) // len(feeds)
    plans = tuple(
        FeedPlan(
            name,
            rules,
            needs[name] + spare * wants[name] // sum(wants.values()),
            config.feeds[name].cp_layout,
            config.retain.checkpoints,
            config.feeds[name].on_rewind == "discard",
            config.limits.peers,
            leaving,
        )
        for name, rules in feeds.items()
    )
    chunk = max(wanted.least_chunk, min(limit, quota * size // 4))
    longest = Capacity(quota, sample, max(chunk // size, sample) * size, config.limits.peers)
    arriving = max(4, ARRIVING_BYTES // chunk)
    return Plan(plans, longest, memory, size, block, chunk, arriving, leaving * len(feeds))


def _held(rules: Rules) -> str:
    if rules.batch is None:
        outliers = ", outliers that joint balance holds beside it," if rules.balance.kind == "joint" else ""
        return f"a window of {rules.window} samples{outliers} and {rules.packs} packs a step of {rules.budget} tokens"
    return f"batches of {rules.batch.samples or 'some'} samples, and 2 packs of {rules.budget} tokens"


def keep_freed_memory() -> None:
    """Have glibc keep freed megabyte buffers instead of faulting each one in again: a third of the
    time of a message of 1 MiB otherwise. Elsewhere than on glibc nothing happens.
    """
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        libc.mallopt(_M_TRIM_THRESHOLD, 64 << 20)
    except (OSError, AttributeError):
        return
