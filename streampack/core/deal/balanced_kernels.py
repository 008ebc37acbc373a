"""The hot loops of ``balanced``: compiled by numba where it is installed.

Each loop is plain Python over numpy arrays, and also runs without numba. ``difference`` and ``best_exchange`` have
another form for that, which takes less time without a compiler.
"""

from __future__ import annotations

from heapq import heapify, heappop, heapreplace

import numpy as np

from streampack.core.deal.deal import MOST
from streampack.core.jit import kernel
from streampack.core.model.samples import I64
from streampack.core.packers.blocks.karmarkar_karp import karmarkar_karp


def difference_by_lists(costs: I64, parts: int, step: int) -> I64:
    """Return the part of each item, as ``difference`` does; faster where nothing is compiled."""
    part_of = np.empty(len(costs), np.int64)
    for number, part in enumerate(karmarkar_karp(costs.tolist(), parts, equal_sizes=step > 1)):
        part_of[part] = number
    return part_of


@kernel(plain=difference_by_lists)
def difference(costs: I64, parts: int, step: int) -> I64:
    """Split items into ``parts`` of nearly equal cost by largest differencing; return the part of each, int64 [n].

    ``costs`` int64 [n], costliest first. ``step``: 1, or ``parts`` for parts of equal sizes. Parts are numbered as
    ``karmarkar_karp`` returns them.
    """
    size = len(costs)
    num_partitions = -(-size // step)
    # The parts of each partition that are not empty, costliest first, and the items of each as a chain.
    sums = np.zeros((num_partitions, parts), np.int64)
    first = np.zeros((num_partitions, parts), np.int64)
    last = np.zeros((num_partitions, parts), np.int64)
    used = np.zeros(num_partitions, np.int64)
    follows = np.full(size, -1, np.int64)
    heap = [(np.int64(0), np.int64(0)) for _ in range(num_partitions)]
    for number in range(num_partitions):
        start = number * step
        used[number] = min(step, size - start)
        for part in range(used[number]):
            sums[number, part] = costs[start + part]
            first[number, part] = last[number, part] = start + part
        least = sums[number, parts - 1]
        heap[number] = (least - sums[number, 0], np.int64(number))
    heapify(heap)
    total = np.empty(parts, np.int64)
    begin = np.empty(parts, np.int64)
    end = np.empty(parts, np.int64)
    while len(heap) > 1:
        one = heappop(heap)[1]
        other = heap[0][1]
        alone, also = parts - used[other], parts - used[one]
        count = 0
        for part in range(min(used[one], alone)):
            total[count], begin[count], end[count] = sums[one, part], first[one, part], last[one, part]
            count += 1
        for part in range(min(used[other], also)):
            total[count], begin[count], end[count] = sums[other, part], first[other, part], last[other, part]
            count += 1
        for part in range(alone, used[one]):
            match = parts - 1 - part
            total[count] = sums[one, part] + sums[other, match]
            follows[last[one, part]] = first[other, match]
            begin[count], end[count] = first[one, part], last[other, match]
            count += 1
        order = np.argsort(-total[:count], kind="mergesort")
        for part in range(count):
            sums[one, part] = total[order[part]]
            first[one, part] = begin[order[part]]
            last[one, part] = end[order[part]]
        used[one] = count
        heapreplace(heap, (sums[one, parts - 1] - sums[one, 0], one))
    part_of = np.zeros(size, np.int64)
    for _, whole in heap[:1]:
        for part in range(used[whole]):
            item = first[whole, part]
            while item >= 0:
                part_of[item] = parts - 1 - part
                item = follows[item]
    return part_of


@kernel
def difference_within(work: I64, rank_of: I64, dp: int, rows: int) -> I64:
    """Split the samples of each rank into ``rows`` packs by largest differencing; return their packs, int64 [n].

    ``work`` int64 [n], dearest first; ``rank_of`` int64 [n]. The m-th pack of rank r is number m * dp + r.
    """
    where = np.empty(len(work), np.int64)
    for rank in range(dp):
        of_rank = np.flatnonzero(rank_of == rank)
        where[of_rank] = difference(work[of_rank], rows, 1) * dp + rank
    return where


@kernel
def sort_rows(where: I64, work: I64, dp: int, rows: int) -> I64:
    """Renumber the packs of each rank, most costly first; return the packs of the samples, int64 [n].

    ``where`` and ``work``, int64 [n], are the pack and the cost of each sample.
    """
    cost = np.zeros((dp, rows), np.int64)
    for i in range(len(where)):
        cost[where[i] % dp, where[i] // dp] += work[i]
    number = np.empty(rows * dp, np.int64)
    for rank in range(dp):
        order = np.argsort(-cost[rank], kind="mergesort")
        number[order * dp + rank] = np.arange(rows) * dp + rank
    return number[where]


@kernel
def place(work: I64, sizes: I64, rank_of: I64, dp: int, rows: int, most: I64, cap: int) -> tuple[I64, bool]:
    """Put each sample, costliest first, into the cheapest pack that has room.

    Returns the samples' packs, int64 [n], and True if all samples fit. The m-th pack of rank r is number m * dp + r. A
    sample goes to the rank in ``rank_of`` int64 [n], or to any rank where that is -1. ``sizes`` int64 [k, n] and
    ``most`` int64 [k]: the sizes of each sample, and the most of a pack.
    """
    cost, count = np.zeros(rows * dp, np.int64), np.zeros(rows * dp, np.int64)
    room = np.zeros((len(most), rows * dp), np.int64)
    room[:] = most.reshape(-1, 1)
    where = np.full(len(work), -1, np.int64)
    for i in range(len(work)):
        free = rank_of[i] < 0
        best = -1
        for pack in range(0 if free else rank_of[i], rows * dp, 1 if free else dp):
            if count[pack] < cap and (best < 0 or cost[pack] < cost[best]):
                fits = True
                for unit in range(len(most)):
                    fits &= sizes[unit, i] <= room[unit, pack]
                if fits:
                    best = pack
        if best < 0:
            return where, False
        where[i] = best
        cost[best] += work[i]
        count[best] += 1
        for unit in range(len(most)):
            room[unit, best] -= sizes[unit, i]
    return where, True


def best_by_arrays(
    work: I64, sizes: I64, mine: I64, others: I64, theirs: I64, spare: I64, room: I64, own: I64, slack: I64,
    halves: I64, gap: int,
) -> tuple[int, int]:  # fmt: skip
    """Return the best exchange of a sample of ``mine`` with one of ``others``; (-1, -1) if none helps.

    Args:
        work: int64 [n], the cost of each sample.
        sizes: int64 [k, n], the sizes of each sample in k units, such as its padded tokens.
        mine: int64 [k], samples of the costliest pack of a micro-batch.
        others: int64 [m], samples of other packs.
        theirs: int64 [m], the packs of ``others``.
        spare: int64 [packs], the most that each pack's work may grow.
        room: int64 [k, packs], how much more of each unit each pack may hold.
        own: int64 [k], how much more of each unit the pack of ``mine`` may hold.
        slack: int64 [packs], cost of the costliest pack of the same micro-batch minus the pack's own.
        halves: int64 [packs], ``slack`` in the micro-batch of ``mine``, ``MOST`` elsewhere.
        gap: Cost of the pack of ``mine`` minus that of the next costliest in its micro-batch.
    """
    less = work[mine][:, None] - work[others]
    gain = np.minimum(np.minimum(less, gap), halves[theirs] - less) - np.maximum(less - slack[theirs], 0)
    fits = (less > 0) & (less <= spare[theirs]) & ((gain > 0) | (less < slack[theirs]))
    for unit in range(len(own)):
        grows = sizes[unit, mine][:, None] - sizes[unit, others]
        fits &= (grows <= room[unit, theirs]) & (-grows <= own[unit])
    if not fits.any():
        return -1, -1
    gain = np.where(fits, gain, -1)
    after = np.where(gain == gain.max(), np.maximum(-less, less - slack[theirs]), MOST)
    one, other = divmod(int(np.argmin(after)), len(others))
    return int(mine[one]), int(others[other])


@kernel(plain=best_by_arrays)
def best_exchange(
    work: I64, sizes: I64, mine: I64, others: I64, theirs: I64, spare: I64, room: I64, own: I64, slack: I64,
    halves: I64, gap: int,
) -> tuple[int, int]:  # fmt: skip
    """Return the best exchange, as ``best_by_arrays`` does; with loops, which are faster when compiled by numba."""
    one = other = best = -1
    least = MOST
    for i in mine:
        for k in range(len(others)):
            j, pack = others[k], theirs[k]
            less = work[i] - work[j]
            if less <= 0 or less > spare[pack]:
                continue
            fits = True
            for unit in range(len(own)):
                grows = sizes[unit, i] - sizes[unit, j]
                fits &= grows <= room[unit, pack] and -grows <= own[unit]
            if not fits:
                continue
            gain = min(less, gap, halves[pack] - less) - max(less - slack[pack], 0)
            if gain < best or (gain <= 0 and less >= slack[pack]):
                continue
            after = max(-less, less - slack[pack])
            if gain > best or after < least:
                best, least, one, other = gain, after, i, j
    return one, other


@kernel
def level(
    work: I64, sizes: I64, where: I64, dp: int, rows: int, most: I64, cap: int, most_work: int, limit: int
) -> None:
    """Exchange samples between packs, in place in ``where``, while that makes the critical path shorter.

    The arrays, int64 [n + packs], have the samples first, and then a free place in each pack, with work and sizes 0.
    The pack of each sample or place is in ``where``. ``sizes`` int64 [k, n + packs] and ``most`` int64 [k]: as for
    ``place``. No rank's work grows beyond ``most_work``. The search ends after about ``limit`` pairs of samples. See
    ``balanced``.
    """
    packs = rows * dp
    num_samples = len(work) - packs
    cost, count, load = np.zeros(packs, np.int64), np.zeros(packs, np.int64), np.zeros(dp, np.int64)
    room = np.zeros((len(most), packs), np.int64)
    room[:] = most.reshape(-1, 1)
    for i in range(num_samples):
        cost[where[i]] += work[i]
        for unit in range(len(most)):
            room[unit, where[i]] -= sizes[unit, i]
        count[where[i]] += 1
        load[where[i] % dp] += work[i]
    top = np.array([cost[row * dp : (row + 1) * dp].max() for row in range(rows)])
    steps = np.unique(work)
    least = (steps[1:] - steps[:-1]).min() if len(steps) > 1 else MOST
    micro_batches, ranks = np.arange(packs) // dp, np.arange(packs) % dp
    row = still = 0
    while still < rows and limit > 0:
        rest = cost[row * dp : (row + 1) * dp].copy()
        rank = np.argmax(rest)
        here = row * dp + rank
        rest[rank] = 0
        gap = cost[here] - rest.max()
        own_rows = np.flatnonzero(where[:num_samples] == here)
        # The most that other packs may grow before their rank passes ``most_work``; below ``least`` no sample fits.
        spare = np.where(ranks == rank, MOST, most_work - load[ranks])
        spare[here] = 0
        usable = (spare >= least)[where]
        usable[num_samples:] &= count < (cap if len(own_rows) > 1 else 0)
        others = np.flatnonzero(usable)
        other_ranks = where[others]
        slack = top[micro_batches] - cost
        halves = np.where(micro_batches == row, slack, MOST)
        own = room[:, here].copy()
        one, other = best_exchange(work, sizes, own_rows, others, other_ranks, spare, room, own, slack, halves, gap)
        limit -= len(work) + len(own_rows) * len(others)
        if one < 0:
            still += 1
            row = (row + 1) % rows
            continue
        there = where[other]
        for pack, sign in ((here, -1), (there, 1)):
            cost[pack] += sign * (work[one] - work[other])
            room[:, pack] -= sign * (sizes[:, one] - sizes[:, other])
            count[pack] += sign if other >= num_samples else 0
            load[pack % dp] += sign * (work[one] - work[other])
        where[one] = there
        if other < num_samples:
            where[other] = here
        for changed in (row, there // dp):
            top[changed] = cost[changed * dp : (changed + 1) * dp].max()
        still = 0
