"""numba twins of what ``exact_fill`` does where filling by age will not do; its docstring says when.

``ordered`` are the positions held, longest first. Every function appends to ``indices`` from ``end`` on and returns the
pack's new end.
"""

from __future__ import annotations

import numpy as np

from streampack.core.packers.kernels import _compiled, _first_that_fits

GAIN, CAPPED_TRIED = 64, 256  # as in exact_fill; a kernel freezes them


@_compiled
def plan(ordered, lengths, budget, gone, pack_of):  # type: ignore[no-untyped-def]
    """First fit decreasing over all held that are not gone: their packs to ``pack_of``; how many packs there are.

    A tournament tree over the room of the packs, as in ``decreasing.first_fit_decreasing``.
    """
    leaves = 1
    while leaves < len(ordered):
        leaves *= 2
    open_room = np.full(2 * leaves, budget)
    num_packs = 0
    for i in ordered:
        if gone[i]:
            continue
        node = 1
        while node < leaves:
            node = 2 * node if open_room[2 * node] >= lengths[i] else 2 * node + 1
        pack_of[i] = node
        num_packs = max(num_packs, node - leaves + 1)
        open_room[node] -= lengths[i]
        while node > 1:
            node //= 2
            open_room[node] = max(open_room[2 * node], open_room[2 * node + 1])
    return num_packs


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
def best_with(ordered, lengths, budget, seed, rich, indices, end):  # type: ignore[no-untyped-def]
    """The seed with the one sample, or in a rich window the two, that fit it best; the pack's end."""
    room = budget - lengths[seed]
    indices[end] = seed
    end += 1
    one = _first_that_fits(ordered, 0, len(ordered), lengths, room)
    if one < len(ordered) and ordered[one] == seed:
        one += 1
    if one == len(ordered):
        return end
    limit = room - lengths[ordered[one]] - budget // GAIN
    i, j = one, len(ordered) - 1
    first, second = one, -1
    while rich and i < j:
        if ordered[i] == seed:
            i += 1
            continue
        if ordered[j] == seed:
            j -= 1
            continue
        gap = room - lengths[ordered[i]] - lengths[ordered[j]]
        if gap < 0:
            i += 1
            continue
        if gap < limit:
            limit, first, second = gap, i, j
        j -= 1
    indices[end] = ordered[first]
    end += 1
    if second >= 0:
        indices[end] = ordered[second]
        end += 1
    return end


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
