"""The cases in which ``exact_fill`` does not fill a pack by age; the docstring of ``exact_fill`` describes them.

``ordered`` are the positions held, longest first. ``sizes`` are the samples in each item, ``cap`` the most samples in a
pack. Functions that form one pack append positions to ``indices`` from ``end`` on and return the pack's new end.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from operator import neg

import numpy as np

from streampack.core.jit import kernel
from streampack.core.packers.packer_kernels import _first_that_fits

#: In a critical window, the seed of a late pack may get a third sample: one of this many oldest samples that fit.
OLD = 64
#: Samples tried for a pack whose number of samples is capped; as many again that have nothing of a capped unit.
CAPPED_TRIED = 256
#: The most samples for which ``last_packs`` tries swaps: a sweep takes the square of their number.
MAX_SWAPPED = 2048
#: The most sweeps of ``last_packs`` over all samples.
SWEEPS = 16


@kernel
def last_packs(ordered, lengths, sizes, budget, cap, pack_of):  # type: ignore[no-untyped-def]
    """Plan all packs of the window's samples together: write each sample's pack number to ``pack_of``.

    Return how many numbers are in use; some of them may belong to no sample.

    Once the stream is closed and the window runs dry, all remaining samples are known, so all their packs can be formed
    together. First fit decreasing forms them. Then two samples of two packs swap, or a sample moves to another pack, as
    long as the fuller of both packs becomes fuller. This is hill climbing on the sum of squares of the packs' tokens.
    See Fleszar and Hindi, "New heuristics for one-dimensional bin-packing", Computers & Operations Research 29,
    2002. A pack whose last sample moves away disappears. So there are never more packs than first fit decreasing makes.
    If first fit decreasing wastes a few packs of some hundred, there are often two packs fewer.

    A move is a swap with nothing: each pack begins with one sample of length 0.
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


def _best_swap_plainly(i, pack, length, size, room, free):  # type: ignore[no-untyped-def]
    """Return the sample whose swap with sample ``i`` adds most tokens to the fuller pack; -1 if none does."""
    here = pack[i]
    # Samples are longest first: only those from ``first`` to ``last`` fit in both packs.
    first = bisect_left(length, -length[i] - room[here], key=neg)
    last = bisect_right(length, room.max() - length[i], key=neg)
    there, more, also = pack[first:last], length[i] - length[first:last], size[i] - size[first:last]
    fits = (there != here) & (more <= room[there]) & (-free[here] <= also) & (also <= free[there])
    gain = more * (room[here] - room[there] + more) * fits
    best = np.argmax(gain) if len(gain) else 0
    return first + best if len(gain) and gain[best] > 0 else -1


@kernel(plain=_best_swap_plainly)
def _best_swap(i, pack, length, size, room, free):  # type: ignore[no-untyped-def]
    """Return the sample whose swap with sample ``i`` adds most tokens to the fuller pack; -1 if none does.

    ``room`` and ``free`` are the tokens and samples that each pack may still take.
    """
    here, best, partner = pack[i], 0, -1
    for j in range(len(pack)):
        there, more, also = pack[j], length[i] - length[j], size[i] - size[j]
        if there != here and -room[here] <= more <= room[there] and -free[here] <= also <= free[there]:
            gain = more * (room[here] - room[there] + more)
            if gain > best:
                best, partner = gain, j
    return partner


@kernel
def first_fit(ordered, lengths, sizes, budget, cap, pack_of):  # type: ignore[no-untyped-def]
    """Put each sample of ``ordered`` into the first pack with room: write the pack's number to ``pack_of``.

    Return the number of packs. A tournament tree over the packs' room finds the pack, as in ``first_fit.first_fit``.
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


@kernel
def _first_with(room, least, node):  # type: ignore[no-untyped-def]
    """Return the first leaf with a room of at least ``least``, from leaf or root ``node`` on; it must exist."""
    while room[node] < least:
        while node & 1:  # a right child: the search is done with its parent
            node >>= 1
        node += 1
    while 2 * node < len(room):
        node = 2 * node if room[2 * node] >= least else 2 * node + 1
    return node


def _closest_pair_plainly(ordered, num_full, num_long, lengths, budget, indices, end):  # type: ignore[no-untyped-def]
    """Append the pair of a long and a short sample that leaves the smallest gap. Return the pack's end."""
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


@kernel(plain=_closest_pair_plainly)
def closest_pair(ordered, num_full, num_long, lengths, budget, indices, end):  # type: ignore[no-untyped-def]
    """Append the pair of a long and a short sample that leaves the smallest gap. Return the pack's end.

    In ``ordered`` full samples come first, up to ``num_full``; then long ones, up to ``num_long``; then short ones.
    """
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


@kernel
def best_with(ordered, after, edge, lengths, budget, seed, gain, indices, end):  # type: ignore[no-untyped-def]
    """Append the seed and the longest sample that fits; return the pack's end.

    Append three samples instead if these fill at least ``gain`` tokens more. The three are the seed, one of the ``OLD``
    oldest that fit, and the longest that fits with both.
    """
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


@kernel
def _longest_but(ordered, lengths, room, one, other):  # type: ignore[no-untyped-def]
    """Return the longest sample that fits ``room``, other than ``one`` and ``other``; -1 if there is none."""
    at = _first_that_fits(ordered, 0, len(ordered), lengths, room)
    while at < len(ordered) and (ordered[at] == one or ordered[at] == other):
        at += 1
    return ordered[at] if at < len(ordered) else -1


@kernel
def fill_up(ordered, lengths, budget, indices, start, end):  # type: ignore[no-untyped-def]
    """Append all samples that still fit to the pack ``indices[start:end]``, longest first. Return the pack's end."""
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


@kernel
def capped(view, sizes, edge, samples, tokens, budget, cap, seed, end):  # type: ignore[no-untyped-def]
    """Form the seed's pack again with at most ``cap`` samples, after it was filled with more. Return the pack's end.

    ``sizes`` are the samples in each item; or what it has of another unit, of which a pack may hold ``cap``.

    If ``cap`` samples of mean length do not fill the pack, it first takes the oldest samples. Each must leave a room
    per remaining sample of at least the mean length. The rest is filled exactly with few samples. Dynamic programming
    over the oldest finds the fewest samples that leave each gap (the knapsack of Bellman 1957 with a count for each
    weight). Longest first would use up the long samples at once; here short samples leave with their share of long
    ones. The window holds ``samples`` and ``tokens`` in total.
    """
    lengths, after, indices = view.lengths, view.after, view.indices
    indices[end] = seed
    end += 1
    room, slots = budget - lengths[seed], cap - sizes[seed]
    spares = sizes.min() == 0  # samples without the unit, which a pack without slots can take
    ahead = room * samples >= slots * tokens
    num_rest = num_spares = 0
    i = after[seed]
    while i < edge and (num_rest - num_spares < CAPPED_TRIED or num_spares < CAPPED_TRIED) and (slots > 0 or spares):
        if lengths[i] <= room and sizes[i] <= slots:
            tried = num_spares if sizes[i] == 0 else num_rest - num_spares
            if ahead and (room - lengths[i]) * samples >= (slots - sizes[i]) * tokens:
                indices[end] = i
                end += 1
                room -= lengths[i]
                slots -= sizes[i]
            elif tried < CAPPED_TRIED:
                view.rest[num_rest] = i
                num_rest += 1
                num_spares += sizes[i] == 0
        i = after[i]
    return _fill_with_few(view.rest[:num_rest], lengths, sizes, room, slots, indices, end)


@kernel
def _fill_with_few(rest, lengths, sizes, room, slots, indices, end):  # type: ignore[no-untyped-def]
    """Append the subset of ``rest`` with at most ``slots`` samples that leaves the smallest gap. Return the new end."""
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


def _with_one_more_plainly(fewest, better, length, size):  # type: ignore[no-untyped-def]
    """Update ``fewest``, the least number of samples that leaves each gap, with one more sample."""
    before, fewer = fewest[: len(fewest) - length], fewest[length:] + size
    better[: len(before)] = fewer < before
    np.minimum(before, fewer, out=before)


@kernel(plain=_with_one_more_plainly)
def _with_one_more(fewest, better, length, size):  # type: ignore[no-untyped-def]
    """Update ``fewest``, the least number of samples that leaves each gap, with one more sample.

    ``better`` bool [gaps] is set where the sample is taken.
    """
    for gap in range(len(fewest) - length):
        if fewest[gap + length] + size < fewest[gap]:
            fewest[gap] = fewest[gap + length] + size
            better[gap] = True
