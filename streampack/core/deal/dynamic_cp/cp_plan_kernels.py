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
MOST_COMPARED = 16
"""Groups with room that are compared for a sample, where no new group can be opened."""


@kernel
def padded(length: int, level: int, levels: I64) -> int:
    """Return the tokens of a sample for all ranks of a group."""
    tokens: int = -(-length // levels[level, 0]) * levels[level, 0]
    return tokens


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
def sift_down(heap: I64, keys: I64, count: int, at: int) -> None:
    """Restore the heap of groups, least key first, ties by number, after the key of the group at ``at`` has grown."""
    group = heap[at]
    child = 2 * at + 1
    while child < count:
        if child + 1 < count:
            one, other = heap[child], heap[child + 1]
            if keys[other] < keys[one] or (keys[other] == keys[one] and other < one):
                child += 1
        below = heap[child]
        if keys[group] < keys[below] or (keys[group] == keys[below] and group < below):
            break
        heap[at] = below
        at = child
        child = 2 * at + 1
    heap[at] = group


@kernel
def sift_up(heap: I64, keys: I64, at: int) -> None:
    """Restore the heap after a group was put at ``at``, its end."""
    group = heap[at]
    while at > 0:
        above = heap[(at - 1) // 2]
        if keys[above] < keys[group] or (keys[above] == keys[group] and above < group):
            break
        heap[at] = above
        at = (at - 1) // 2
    heap[at] = group


@kernel
def place_samples(
    lengths: I64, level_of: I64, least: int, ranks: int, micro_batches: int, rank_tokens: int, target: int,
    levels: I64, a: int, b: int,
) -> tuple[int, I64, I64, I64, I64, I64]:  # fmt: skip
    """Put samples into groups of ranks: those of large groups first, then the others, costliest first.

    Args:
        lengths: int64 [n], the samples' tokens, longest first.
        level_of: int64 [n], the least level of each sample's group, largest first.
        least: The level of the smallest groups. Where ranks are left over, the last groups are smaller.
        ranks: Number of ranks.
        micro_batches: Number of micro-batches.
        rank_tokens: Most tokens of a rank in a micro-batch.
        target: Cost of a rank in a micro-batch that is aimed at, in the unit of ``cost_of``.
        levels: As for ``cost_of``.
        a: Cost of a token.
        b: Cost of a squared token.

    Returns:
        The sum of the costliest ranks, or -1 if a sample has no place. Then the group of each sample, int64 [n]. Then
        of each group its cost, its level, its micro-batch and its first rank, int64 [groups] each.
    """
    top = len(levels) - 1
    most_groups = micro_batches * ((ranks >> least) + top + least + 1)
    group_level, batch_of = np.zeros(most_groups, np.int64), np.zeros(most_groups, np.int64)
    first_of, cost = np.zeros(most_groups, np.int64), np.zeros(most_groups, np.int64)
    tokens = np.zeros(most_groups, np.int64)  # tokens of all ranks of a group
    groups = 0
    group_of = np.full(len(lengths), -1, np.int64)
    used = np.zeros(micro_batches, np.int64)  # ranks
    goal = np.full(micro_batches, target, np.int64)  # the cost up to which a micro-batch may be filled
    opened = np.empty(most_groups, np.int64)  # groups of the current level with room for its shortest sample
    i = num_opened = smallest = cursor = 0
    level = top + 1
    while i < len(lengths) and level_of[i] > least:
        if level_of[i] != level:
            level, num_opened, last = level_of[i], 0, i
            while last + 1 < len(lengths) and level_of[last + 1] == level:
                last += 1
            smallest = padded(lengths[last], level, levels)
        more, width, room = cost_of(lengths[i], level, levels, a, b), padded(lengths[i], level, levels), 0
        best, place = -1, -1
        for k in range(num_opened):  # the costliest group with room
            j = opened[k]
            fits = tokens[j] + width <= rank_tokens << level and cost[j] + more <= goal[batch_of[j]]
            if fits and (best < 0 or cost[j] > cost[best]):
                best, place = j, k
        if best < 0:  # a new group, in the micro-batch whose goal rises least, then in the emptiest
            batch, rise = -1, 0
            for m in range(micro_batches):
                if ranks - used[m] >= 1 << level:
                    above = max(more - goal[m], 0)
                    if batch < 0 or above < rise or (above == rise and used[m] < used[batch]):
                        batch, rise = m, above
            if batch >= 0:
                best, place = groups, num_opened
                group_level[best], batch_of[best], first_of[best] = level, batch, used[batch]
                used[batch] += 1 << level
                opened[place] = best
                groups, num_opened = groups + 1, num_opened + 1
        if best < 0:  # of the next groups with room, one where the goal rises least
            least_over = fitting = 0
            for k in range(groups):
                j = (cursor + k) % groups
                room = (rank_tokens << group_level[j]) - tokens[j]
                if padded(lengths[i], group_level[j], levels) <= room:
                    over = cost[j] + cost_of(lengths[i], group_level[j], levels, a, b) - goal[batch_of[j]]
                    if best < 0 or over < least_over:
                        best, least_over = j, over
                    fitting += 1
                    if fitting == MOST_COMPARED:
                        cursor = j + 1
                        break
            if best < 0:
                return -1, group_of, cost[:0], group_level[:0], batch_of[:0], first_of[:0]
            for k in range(num_opened):
                if opened[k] == best:
                    place = k
        cost[best] += cost_of(lengths[i], group_level[best], levels, a, b)
        tokens[best] += padded(lengths[i], group_level[best], levels)
        goal[batch_of[best]] = max(goal[batch_of[best]], cost[best])
        group_of[i] = best
        if place >= 0 and tokens[best] + smallest > rank_tokens << level:
            num_opened -= 1
            opened[place] = opened[num_opened]
        i += 1
    for m in range(micro_batches):
        while used[m] < ranks:
            level = least
            while used[m] + (1 << level) > ranks:
                level -= 1
            group_level[groups], batch_of[groups], first_of[groups] = level, m, used[m]
            used[m] += 1 << level
            groups += 1
    heap, keys = np.empty(groups, np.int64), np.empty(groups, np.int64)  # groups with room; costs above their goals
    full, lacks = np.empty(groups, np.int64), np.empty(groups, np.int64)  # the others; minus their tokens of room
    in_heap = in_full = 0
    for j in range(groups):
        keys[j] = cost[j] - goal[batch_of[j]]
        heap[in_heap] = j
        sift_up(heap, keys, in_heap)
        in_heap += 1
    while i < len(lengths):
        while in_full > 0 and -lacks[full[0]] >= lengths[i]:
            heap[in_heap] = full[0]
            sift_up(heap, keys, in_heap)
            in_heap += 1
            in_full -= 1
            full[0] = full[in_full]
            sift_down(full, lacks, in_full, 0)
        while in_heap > 0:
            j = heap[0]
            width = padded(lengths[i], group_level[j], levels)
            room = (rank_tokens << group_level[j]) - tokens[j]
            if width <= room:
                cost[j] += cost_of(lengths[i], group_level[j], levels, a, b)
                tokens[j] += width
                keys[j] = cost[j] - goal[batch_of[j]]
                sift_down(heap, keys, in_heap, 0)
                group_of[i] = j
                break
            in_heap -= 1
            heap[0] = heap[in_heap]
            sift_down(heap, keys, in_heap, 0)
            lacks[j] = -(room // levels[group_level[j], 0] * levels[group_level[j], 0])
            full[in_full] = j
            sift_up(full, lacks, in_full)
            in_full += 1
        if group_of[i] < 0:
            return -1, group_of, cost[:0], group_level[:0], batch_of[:0], first_of[:0]
        i += 1
    goal[:] = 0
    for j in range(groups):
        goal[batch_of[j]] = max(goal[batch_of[j]], cost[j])
    return goal.sum(), group_of, cost[:groups], group_level[:groups], batch_of[:groups], first_of[:groups]


@kernel
def deal_groups(cost: I64, level: I64, batch_of: I64, first_of: I64, ranks: int, micro_batches: int) -> int:
    """Move groups to other micro-batches, so that groups of like cost run at the same moment.

    Each micro-batch takes the costliest group that is left and has room, ties by number, until its ranks are full.

    Args:
        cost: Cost of each group, int64 [groups].
        level: Its level.
        batch_of: Output: its micro-batch, int64 [groups].
        first_of: Output: its first rank.
        ranks: Number of ranks.
        micro_batches: Number of micro-batches, whose ranks the groups fill.

    Returns:
        The sum of the costliest ranks; -1 if the groups do not fill every micro-batch in this order. The output is not
        valid then.
    """
    groups, levels = len(cost), level.max() + 1
    heap, keys = np.empty(groups, np.int64), -cost
    for j in range(groups):
        heap[j] = j
        sift_up(heap, keys, j)
    # the groups of each level, costliest first, and where they begin
    queue, begin = np.empty(groups, np.int64), np.zeros(levels + 1, np.int64)
    for j in range(groups):
        begin[level[j] + 1] += 1
    for at in range(levels):
        begin[at + 1] += begin[at]
    head, end = begin[:-1].copy(), begin[:-1].copy()
    for count in range(groups, 0, -1):
        j = heap[0]
        queue[end[level[j]]] = j
        end[level[j]] += 1
        heap[0] = heap[count - 1]
        sift_down(heap, keys, count - 1, 0)
    critical = 0
    for m in range(micro_batches):
        room, dearest, taken = ranks, -1, head.copy()
        while room > 0:
            best = -1
            for at in range(levels):
                if head[at] < end[at] and 1 << at <= room:
                    j = queue[head[at]]
                    if best < 0 or cost[j] > cost[best] or (cost[j] == cost[best] and j < best):
                        best = j
            if best < 0:
                return -1
            batch_of[best] = m
            head[level[best]] += 1
            room -= 1 << level[best]
            dearest = max(dearest, cost[best])
        for at in range(levels - 1, -1, -1):  # largest first, so that groups are aligned
            for k in range(taken[at], head[at]):
                first_of[queue[k]] = room
                room += 1 << at
        critical += dearest
    return critical
