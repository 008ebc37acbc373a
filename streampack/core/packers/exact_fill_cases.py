"""numba twins of what ``exact_fill`` does where filling by age will not do; its docstring says when.

``ordered`` are the positions held, longest first. Every function appends to ``indices`` from ``end`` on and returns the
pack's new end.
"""

from __future__ import annotations

import numpy as np

from streampack.core.packers.kernels import _compiled, _first_that_fits

#: As in exact_fill, capped_fill and closed_fill; a kernel freezes them.
OLD, CAPPED_TRIED, MAX_SWAPPED, SWEEPS = 64, 256, 2048, 16


@_compiled
def last_packs(ordered, lengths, sizes, budget, cap, pack_of):  # type: ignore[no-untyped-def]
    """All that is held, planned at once: the packs' numbers to ``pack_of``; how many numbers there are."""
    count = len(ordered)
    num_packs = first_fit(ordered, lengths, sizes, budget, cap, pack_of)
    if count > MAX_SWAPPED:
        return num_packs
    length, size = np.zeros(count + num_packs, np.int64), np.zeros(count + num_packs, np.int64)
    pack = np.empty(count + num_packs, np.int64)
    length[:count], size[:count], pack[:count] = lengths[ordered], sizes[ordered], pack_of[ordered]
    pack[count:] = np.arange(num_packs)
    room, free = np.full(num_packs, budget), np.full(num_packs, cap)
    for k in range(count):
        room[pack[k]] -= length[k]
        free[pack[k]] -= size[k]
    moved, sweeps = True, 0
    while moved and sweeps < SWEEPS:
        moved = False
        sweeps += 1
        for i in range(count):
            here = pack[i]
            if room[here] == 0:
                continue
            best, with_whom = 0, -1
            for j in range(count + num_packs):
                there, more, also = pack[j], length[i] - length[j], size[i] - size[j]
                if there != here and -room[here] <= more <= room[there] and -free[here] <= also <= free[there]:
                    gain = more * (room[here] - room[there] + more)
                    if gain > best:
                        best, with_whom = gain, j
            if with_whom < 0:
                continue
            there, more, also = pack[with_whom], length[i] - length[with_whom], size[i] - size[with_whom]
            room[here] += more
            room[there] -= more
            free[here] += also
            free[there] -= also
            pack[i], pack[with_whom] = there, here
            moved = True
    pack_of[ordered] = pack[:count]
    return num_packs


@_compiled
def first_fit(ordered, lengths, sizes, budget, cap, pack_of):  # type: ignore[no-untyped-def]
    """Each of these into the first pack with room, its number to ``pack_of``; how many packs there are.

    A tournament tree over the room of the packs, as in ``first_fit.first_fit``.
    """
    leaves = 1
    while leaves < len(ordered):
        leaves *= 2
    room, free = np.full(2 * leaves, budget), np.full(leaves, cap)
    num_packs = 0
    for i in ordered:
        node = _first_with(room, lengths[i], 1)
        while free[node - leaves] < sizes[i]:
            node = _first_with(room, lengths[i], node + 1)
        pack_of[i] = node - leaves
        num_packs = max(num_packs, node - leaves + 1)
        free[node - leaves] -= sizes[i]
        room[node] = room[node] - lengths[i] if free[node - leaves] else 0
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return num_packs


@_compiled
def _first_with(room, least, node):  # type: ignore[no-untyped-def]
    """The first leaf with a room of at least ``least``, from this leaf or the root on; there must be one."""
    while room[node] < least:
        while node & 1:  # all of its parent is behind
            node >>= 1
        node += 1
    while 2 * node < len(room):
        node = 2 * node if room[2 * node] >= least else 2 * node + 1
    return node


@_compiled
def closest_pair(ordered, num_full, num_long, lengths, budget, indices, end):  # type: ignore[no-untyped-def]
    """The long sample, and the longest short one that fits it, that leave the least gap; the pack's end."""
    least, at = budget, len(ordered)
    long, fits = num_full, len(ordered)
    for k in range(num_full, num_long):
        gap = budget - lengths[ordered[k]]
        while at > num_long and lengths[ordered[at - 1]] <= gap:
            at -= 1
        if at < len(ordered):
            gap -= lengths[ordered[at]]
        if gap < least:
            least, long, fits = gap, k, at
    indices[end] = ordered[long]
    end += 1
    if fits < len(ordered):
        indices[end] = ordered[fits]
        end += 1
    return end


@_compiled
def best_with(ordered, after, edge, lengths, budget, seed, gain, indices, end):  # type: ignore[no-untyped-def]
    """The seed with the one sample that fits best, or an old and another if these fill ``gain`` more; its end."""
    room = budget - lengths[seed]
    indices[end] = seed
    end += 1
    one = _longest_but(ordered, lengths, room, seed, seed)
    if one < 0:
        return end
    least = room - lengths[one] - gain
    first, second, tried, old = one, -1, 0, after[seed]
    while old < edge and tried < OLD and least > 0:
        if lengths[old] <= room:
            tried += 1
            other = _longest_but(ordered, lengths, room - lengths[old], seed, old)
            if other >= 0 and room - lengths[old] - lengths[other] < least:
                least = room - lengths[old] - lengths[other]
                first, second = other, old
        old = after[old]
    indices[end] = first
    end += 1
    if second >= 0:
        indices[end] = second
        end += 1
    return end


@_compiled
def _longest_but(ordered, lengths, room, one, other):  # type: ignore[no-untyped-def]
    """The longest sample that fits but these two; -1 if there is none."""
    at = _first_that_fits(ordered, 0, len(ordered), lengths, room)
    while at < len(ordered) and (ordered[at] == one or ordered[at] == other):
        at += 1
    return ordered[at] if at < len(ordered) else -1


@_compiled
def fill_up(ordered, lengths, budget, indices, start, end):  # type: ignore[no-untyped-def]
    """Longest first whatever still fits into the pack at ``start``; its end."""
    room = budget
    for i in indices[start:end]:
        room -= lengths[i]
    at = 0
    while room:
        at = _first_that_fits(ordered, at, len(ordered), lengths, room)
        while at < len(ordered) and np.any(indices[start:end] == ordered[at]):
            at += 1
        if at == len(ordered):
            break
        indices[end] = ordered[at]
        end += 1
        room -= lengths[ordered[at]]
        at += 1
    return end


@_compiled
def capped(view, edge, samples, tokens, budget, cap, seed, end):  # type: ignore[no-untyped-def]
    """The seed's pack of ``cap`` samples at most, where filling it would have taken more."""
    lengths, sizes, after, indices = view.lengths, view.sizes, view.after, view.indices
    indices[end] = seed
    end += 1
    room, slots = budget - lengths[seed], cap - sizes[seed]
    ahead = room * samples >= slots * tokens
    num_rest = 0
    i = after[seed]
    while i < edge and num_rest < CAPPED_TRIED and slots > 0:
        if lengths[i] <= room and sizes[i] <= slots:
            if ahead and (room - lengths[i]) * samples >= (slots - sizes[i]) * tokens:
                indices[end] = i
                end += 1
                room -= lengths[i]
                slots -= sizes[i]
            else:
                view.rest[num_rest] = i
                num_rest += 1
        i = after[i]
    return _fill_with_few(view.rest[:num_rest], lengths, sizes, room, slots, indices, end)


@_compiled
def _fill_with_few(rest, lengths, sizes, room, slots, indices, end):  # type: ignore[no-untyped-def]
    """Those that leave the smallest gap, with ``slots`` samples at most."""
    fewest = np.full(room + 1, slots + 1)
    fewest[room] = 0
    better = np.zeros((len(rest), room + 1), np.bool_)
    tried = 0
    while tried < len(rest) and fewest[0] > slots:
        length, size = lengths[rest[tried]], sizes[rest[tried]]
        for gap in range(room - length + 1):
            if fewest[gap + length] + size < fewest[gap]:
                fewest[gap] = fewest[gap + length] + size
                better[tried, gap] = True
        tried += 1
    gap = 0
    while fewest[gap] > slots:
        gap += 1
    while tried:
        tried -= 1
        if better[tried, gap]:
            indices[end] = rest[tried]
            end += 1
            gap += lengths[rest[tried]]
    return end
