"""What ``exact_fill`` does where filling by age will not do; its docstring says when.

``ordered`` are the positions held, longest first. Every function appends to ``indices`` from ``end`` on and returns the
pack's new end.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from operator import neg

import numpy as np

from streampack.core.jit import COMPILES
from streampack.core.packers.packer_kernels import _compiled, _first_that_fits

#: What a third sample in the pack of a late one may be, in a critical window: one of the oldest so many that fit.
OLD = 64
#: Samples tried where packs may hold only so many.
CAPPED_TRIED = 256
#: Samples left, at most, for them to change places: it takes the square of their number, a few times.
MAX_SWAPPED = 2048
#: Times that all samples are looked at, at most.
SWEEPS = 16


@_compiled
def last_packs(ordered, lengths, sizes, budget, cap, pack_of):  # type: ignore[no-untyped-def]
    """All that is held, planned at once: the packs' numbers to ``pack_of``; how many numbers there are.

    Once the stream is closed and the window runs dry, all that will come is known, so its packs need not be formed one
    after the other. First fit decreasing forms them; then two samples of two packs change places, or a sample moves, as
    long as that makes the fuller of the two packs fuller: hill climbing on the sum of squares of what packs hold, as in
    Fleszar and Hindi, "New heuristics for one-dimensional bin-packing", Computers & Operations Research 29, 2002. A
    pack whose last sample moves away is gone. So there are never more packs than first fit decreasing makes, and where
    that wastes a few packs of some hundred, often two fewer.

    A move is a change of places with nothing: each pack has one sample of length 0 to begin with.
    """
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
            j = _best_swap(i, pack, length, size, room, free) if room[here] else -1
            if j < 0:
                continue
            there, more, also = pack[j], length[i] - length[j], size[i] - size[j]
            room[here] += more
            room[there] -= more
            free[here] += also
            free[there] -= also
            pack[i], pack[j] = there, here
            moved = True
    pack_of[ordered] = pack[:count]
    return num_packs


if COMPILES:

    @_compiled
    def _best_swap(i, pack, length, size, room, free):  # type: ignore[no-untyped-def]
        """The sample that changes places with sample i so that the fuller of both packs gains most; -1 for none."""
        here, best, found = pack[i], 0, -1
        for j in range(len(pack)):
            there, more, also = pack[j], length[i] - length[j], size[i] - size[j]
            if there != here and -room[here] <= more <= room[there] and -free[here] <= also <= free[there]:
                gain = more * (room[here] - room[there] + more)
                if gain > best:
                    best, found = gain, j
        return found

else:

    def _best_swap(i, pack, length, size, room, free):  # type: ignore[no-untyped-def]
        here = pack[i]
        # Samples fall in length: only those from ``first`` to ``last`` fit in both packs.
        first = bisect_left(length, -length[i] - room[here], key=neg)
        last = bisect_right(length, room.max() - length[i], key=neg)
        there, more, also = pack[first:last], length[i] - length[first:last], size[i] - size[first:last]
        fits = (there != here) & (more <= room[there]) & (-free[here] <= also) & (also <= free[there])
        gain = more * (room[here] - room[there] + more) * fits
        best = np.argmax(gain) if len(gain) else 0
        return first + best if len(gain) and gain[best] > 0 else -1


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


if COMPILES:

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

else:

    def closest_pair(ordered, num_full, num_long, lengths, budget, indices, end):  # type: ignore[no-untyped-def]
        gaps = budget - lengths[ordered[num_full:num_long]]
        rising = lengths[ordered[num_long:]][::-1]
        fitting = np.searchsorted(rising, gaps, side="right")  # how many short ones fit each
        left = gaps.copy()
        some = np.flatnonzero(fitting)
        left[some] -= rising[fitting[some] - 1]
        best = np.argmin(left)
        indices[end] = ordered[num_full + best]
        end += 1
        if fitting[best]:
            indices[end] = ordered[len(ordered) - fitting[best]]
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
    """The seed's pack of ``cap`` samples at most, where filling it would have taken more.

    Where samples are so short that as many as may be in the pack would not fill it, its samples are scarce: it takes
    the oldest that leave room for as many as may still come. Otherwise, and with what is left, it is filled exactly
    with few: the fewest samples that leave each gap, by dynamic programming over the oldest (the knapsack of Bellman
    1957 with a count for each weight). Long samples first would do too, once; here those that are short and many leave
    with their share of the long ones.
    """
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
    fewest = np.full(room + 1, slots + 1)  # by gap; slots + 1 where it cannot be left
    fewest[room] = 0
    better = np.zeros((len(rest), room + 1), np.bool_)
    tried = 0
    while tried < len(rest) and fewest[0] > slots:
        if lengths[rest[tried]] <= room:
            _with_one_more(fewest, better[tried], lengths[rest[tried]], sizes[rest[tried]])
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


if COMPILES:

    @_compiled
    def _with_one_more(fewest, better, length, size):  # type: ignore[no-untyped-def]
        """Bring ``fewest`` up to date for one more sample; ``better``: for which gaps the sample is taken."""
        for gap in range(len(fewest) - length):
            if fewest[gap + length] + size < fewest[gap]:
                fewest[gap] = fewest[gap + length] + size
                better[gap] = True

else:

    def _with_one_more(fewest, better, length, size):  # type: ignore[no-untyped-def]
        before, fewer = fewest[: len(fewest) - length], fewest[length:] + size
        better[: len(before)] = fewer < before
        np.minimum(before, fewer, out=before)
