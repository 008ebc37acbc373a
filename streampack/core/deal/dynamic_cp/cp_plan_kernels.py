"""The loops of ``cp_plan``, compiled by numba where it is installed.

All numbers are integers, and equal values are decided by the lower number, so every process makes the same plan. A
group has ``2 ** level`` ranks. ``levels`` int64 [levels, 3] has a row for each level. It begins with the multiple to
which samples are padded. The others are the ranks of the largest group over those of this group, and the exchange of a
token in 4096ths of ``a``.
"""

from __future__ import annotations

import numpy as np

from streampack.core.jit import kernel
from streampack.core.model.samples import I64

ONE_BITS = 12
ONE = 1 << ONE_BITS
"""The exchange of a token that costs as much as its computation."""
BUCKETS = 4096
"""Buckets that sort groups by the cost that they lack."""


@kernel
def padded(length: int, level: int, levels: I64) -> int:
    """Return the tokens of a sample for all ranks of a group."""
    unit: int = levels[level, 0]
    if unit & (unit - 1) == 0:  # a power of two needs no division, which takes most of the time
        return -(-length & -unit)
    return -(-length // unit) * unit


@kernel
def cost_of(length: int, level: int, levels: I64, a: int, b: int) -> int:
    """Return the cost of a sample for each rank of its group, times the ranks of the largest group."""
    tokens = padded(length, level, levels)
    exchange: int = a * tokens * levels[level, 2] >> ONE_BITS
    cost: int = (a * tokens + b * tokens * tokens + exchange) * levels[level, 1]
    return cost


@kernel
def least_levels(lengths: I64, least: int, rank_tokens: int, levels: I64) -> I64:
    """Return the level of the smallest group that has room for each sample, at least ``least``; int64 [n].

    ``lengths`` int64 [n], longest first. The largest group must have room for each.
    """
    level_of = np.empty(len(lengths), np.int64)
    level = len(levels) - 1
    for i in range(len(lengths)):
        while level > least and padded(lengths[i], level - 1, levels) <= rank_tokens << (level - 1):
            level -= 1
        level_of[i] = level
    return level_of


@kernel
def total_cost(lengths: I64, level_of: I64, levels: I64, a: int, b: int) -> int:
    """Return the cost of all samples for all ranks, times the ranks of the largest group."""
    total = 0
    for i in range(len(lengths)):
        total += cost_of(lengths[i], level_of[i], levels, a, b) << level_of[i]
    return total


@kernel
def widen(lengths: I64, level_of: I64, most_cost: int, most: int, levels: I64, a: int, b: int) -> I64:
    """Return larger groups for samples that cost a rank more than ``most_cost``, as far as that lowers their cost.

    No group passes the level ``most``. A longer sample has at least the group of a shorter one, int64 [n].
    """
    wider = level_of.copy()
    for i in range(len(lengths)):
        cost = cost_of(lengths[i], wider[i], levels, a, b)
        if cost <= most_cost and level_of[i] == level_of[-1]:
            break
        while wider[i] < most and cost > most_cost:
            less = cost_of(lengths[i], wider[i] + 1, levels, a, b)
            if less >= cost:
                break
            cost = less
            wider[i] += 1
    for i in range(len(lengths) - 2, -1, -1):
        wider[i] = max(wider[i], wider[i + 1])
    return wider


@kernel
def fits(length: int, level: int, room: int, most_cost: int, levels: I64, a: int, b: int) -> bool:
    """Return whether a group of the level has room for the tokens and the cost of a sample."""
    is_below: bool = padded(length, level, levels) <= room and cost_of(length, level, levels, a, b) <= most_cost
    return is_below


@kernel
def put(group: int, bucket: int, first: I64, last: I64, nexts: I64) -> int:
    """Put a group at the end of a bucket, or of the last one if there is none so high; return the bucket."""
    bucket = min(bucket, len(first) - 1)
    if first[bucket] < 0:
        first[bucket] = group
    else:
        nexts[last[bucket]] = group
    last[bucket] = group
    nexts[group] = -1
    return bucket


@kernel
def place_samples(
    lengths: I64, level_of: I64, least: int, ranks: int, micro_batches: int, rank_tokens: int, total: int,
    full: int, target: int, costly: int, levels: I64, a: int, b: int,
) -> tuple[int, int, I64, I64, I64, I64]:  # fmt: skip
    """Put samples into groups of ranks: first those that need larger groups or are costly, then the others.

    The first fill one micro-batch after another. The costliest sample that is left opens a group, while its ranks are
    free. The first group's cost is the height of the micro-batch, or ``target`` if that is more. A group takes the
    longest samples that fit below this height and have room. The others go, longest first, to the group that is
    furthest below the height of its micro-batch. Groups are compared by buckets of like costs.

    Args:
        lengths: int64 [n], the samples' tokens, longest first.
        level_of: int64 [n], the least level of each sample's group, largest first.
        least: The level of the smallest groups. Where ranks are left over, the last groups are smaller.
        ranks: Number of ranks.
        micro_batches: Fewest micro-batches.
        rank_tokens: Most tokens of a rank in a micro-batch.
        total: Cost of all samples for all ranks, in the unit of ``cost_of``.
        full: Cost of a rank whose tokens are all of short samples.
        target: Least height of a micro-batch, but at most twice what is left for each rank.
        costly: Samples that cost more in the smallest groups are costly.
        levels: As for ``cost_of``.
        a: Cost of a token.
        b: Cost of a squared token.

    Returns:
        The sum of the costliest ranks, or -1 if a sample has no place. The number of micro-batches. The group of each
        sample, int64 [n]. Then of each group its cost, its level and its micro-batch, int64 [groups] each.
    """
    top, n, wide, unit = len(levels) - 1, len(lengths), 0, levels[0, 1]
    target -= target % unit  # multiples of it scale with the largest group, so a plan does not depend on its size
    head, end = np.zeros(top + 1, np.int64), np.zeros(top + 1, np.int64)  # the samples of each level
    while wide < n and (level_of[wide] > least or cost_of(lengths[wide], least, levels, a, b) > costly):
        if end[level_of[wide]] == 0:
            head[level_of[wide]] = wide
        wide += 1
        end[level_of[wide - 1]] = wide
    following = np.arange(wide + 1)  # a sample itself, or if it has a group, one that may have none
    group_of = np.full(n, -1, np.int64)
    group_level, batch_of = np.empty(wide, np.int64), np.empty(wide, np.int64)
    cost, tokens = np.empty(wide, np.int64), np.empty(wide, np.int64)  # tokens of all ranks of a group
    used, goal = np.zeros(wide + micro_batches, np.int64), np.zeros(wide + micro_batches, np.int64)  # ranks; heights
    groups = batches = placed = 0
    while placed < wide:
        height = -1
        while True:
            level, more = -1, -1
            for at in range(least, top + 1):
                while head[at] < end[at] and group_of[head[at]] >= 0:
                    head[at] += 1
                if head[at] < end[at] and 1 << at <= ranks - used[batches]:
                    cost_at = cost_of(lengths[head[at]], at, levels, a, b)
                    if cost_at > more:
                        level, more = at, cost_at
            if level < 0:
                break
            if height < 0:
                height = max(total, 0) // ranks
                height = max(min(target, 2 * (height - height % unit)), more)
            used[batches] += 1 << level
            filled, room, at, start, i = 0, rank_tokens << level, level, 0, head[level]
            while True:
                filled += cost_of(lengths[i], level, levels, a, b)
                room -= padded(lengths[i], level, levels)
                group_of[i], following[i] = groups, i + 1
                placed += 1
                i = -1
                while i < 0 and at >= least:  # the longest sample that fits, of this level or a lower one
                    low, high = max(head[at], start), end[at]
                    if low < high and not fits(lengths[high - 1], level, room, height - filled, levels, a, b):
                        low = high
                    while low < high and following[low] != low:
                        following[low] = following[following[low]]
                        low = following[low]
                    if low < high and fits(lengths[low], level, room, height - filled, levels, a, b):
                        high = low
                    while low < high:
                        middle = (low + high) >> 1
                        if fits(lengths[middle], level, room, height - filled, levels, a, b):
                            high = middle
                        else:
                            low = middle + 1
                    while following[low] != low:
                        following[low] = following[following[low]]
                        low = following[low]
                    if low < end[at]:
                        i = start = low
                    else:
                        at -= 1
                if i < 0:
                    break
            total -= filled + min(height - filled, full) << level
            group_level[groups], batch_of[groups], cost[groups] = level, batches, filled
            tokens[groups] = (rank_tokens << level) - room
            groups += 1
        total -= min(height, full) * (ranks - used[batches])
        goal[batches] = height
        batches += 1
    height = max(total, 0) // (ranks * max(micro_batches - batches, 1))
    height -= height % unit
    if batches < micro_batches:
        goal[batches:micro_batches] = height
        batches, height = micro_batches, 0
    spare = np.zeros(batches * ((ranks >> least) + least + 1), np.int64)  # groups of the ranks that are left
    level_of_group = np.concatenate((group_level[:groups], spare))
    batch_of = np.concatenate((batch_of[:groups], spare))
    cost, tokens = np.concatenate((cost[:groups], spare)), np.concatenate((tokens[:groups], spare))
    for m in range(batches):
        while used[m] < ranks:
            level = least
            while used[m] + (1 << level) > ranks:
                level -= 1
            level_of_group[groups], batch_of[groups] = level, m
            used[m] += 1 << level
            groups += 1
    level_of_group, batch_of, cost = level_of_group[:groups], batch_of[:groups], cost[:groups]
    # a group waits in the bucket of its key, or for the first sample that it has room for
    first, last, waiting = np.full(BUCKETS, -1, np.int64), np.empty(BUCKETS, np.int64), np.full(n, -1, np.int64)
    keys, nexts, highest = np.empty(groups, np.int64), np.empty(groups, np.int64), goal.max()
    span, shift, bucket = height + highest, 0, 0
    if wide < n:
        span += cost_of(lengths[wide], least, levels, a, b)
    while span >> shift >= BUCKETS:
        shift += 1
    for j in range(groups):
        keys[j] = cost[j] - goal[batch_of[j]] + highest
        put(j, keys[j] >> shift, first, last, nexts)
    for i in range(wide, n):
        j = waiting[i]
        while j >= 0:
            group, j = j, nexts[j]
            bucket = min(bucket, put(group, keys[group] >> shift, first, last, nexts))
        while group_of[i] < 0:
            while bucket < BUCKETS and first[bucket] < 0:
                bucket += 1
            if bucket == BUCKETS:
                return -1, batches, group_of, cost[:0], level_of_group[:0], batch_of[:0]
            j = first[bucket]
            first[bucket] = nexts[j]
            level = level_of_group[j]
            room = (rank_tokens << level) - tokens[j]
            width = padded(lengths[i], level, levels)
            if width <= room:
                group_of[i] = j
                tokens[j] += width
                more = cost_of(lengths[i], level, levels, a, b)
                cost[j] += more
                keys[j] += more
                put(j, keys[j] >> shift, first, last, nexts)
            else:
                low, high = i + 1, n
                while low < high:
                    middle = (low + high) >> 1
                    if padded(lengths[middle], level, levels) <= room:
                        high = middle
                    else:
                        low = middle + 1
                if low < n:
                    nexts[j] = waiting[low]
                    waiting[low] = j
    goal[:] = 0
    for j in range(groups):
        goal[batch_of[j]] = max(goal[batch_of[j]], cost[j])
    return goal.sum(), batches, group_of, cost, level_of_group, batch_of


@kernel
def deal_groups(cost: I64, level: I64, order: I64, batch_of: I64, ranks: int, micro_batches: int) -> int:
    """Move groups to other micro-batches, so that groups of like cost run at the same moment.

    Each micro-batch takes the costliest group that is left and has room, ties by number, until its ranks are full.

    Args:
        cost: Cost of each group, int64 [groups].
        level: Its level.
        order: The groups, costliest first.
        batch_of: Output: its micro-batch, int64 [groups].
        ranks: Number of ranks.
        micro_batches: Number of micro-batches, whose ranks the groups fill.

    Returns:
        The sum of the costliest ranks; -1 if the groups do not fill every micro-batch in this order. The output is not
        valid then.
    """
    groups, levels = len(cost), level.max() + 1
    # the places in the order that the groups of each level have, and where they begin
    queue, begin = np.empty(groups, np.int64), np.zeros(levels + 1, np.int64)
    for j in range(groups):
        begin[level[j] + 1] += 1
    for at in range(levels):
        begin[at + 1] += begin[at]
    head, end = begin[:-1].copy(), begin[:-1].copy()
    for k in range(groups):
        at = level[order[k]]
        queue[end[at]] = k
        end[at] += 1
    critical = 0
    for m in range(micro_batches):
        room, dearest = ranks, -1
        while room > 0:
            best, place = -1, groups
            for at in range(levels):
                if head[at] < end[at] and 1 << at <= room and queue[head[at]] < place:
                    best, place = at, queue[head[at]]
            if best < 0:
                return -1
            batch_of[order[place]] = m
            head[best] += 1
            room -= 1 << best
            dearest = max(dearest, cost[order[place]])
        critical += dearest
    return critical
