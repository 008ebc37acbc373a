"""numba twins of the hot packers: the same packs as the plain Python, a hundred times sooner.

What each does is told where its twin is (``exact_fill.choose_in_python``); here is only how. The
kernels hold no lock while they run, so a broker forms packs beside its sockets. They are
compiled once and cached on disk; the first call on a machine takes some seconds.

Positions are int64. The window is a doubly linked list over them, so that a sample leaves in O(1):
``after[n]`` is the oldest, ``before[n]`` the youngest. ``by_length`` holds the same samples longest
first (ties: oldest first); it is brought up to date only for a crowded window or the last one. A bitset row is a
run of uint64 words, bit g % 64 of word g // 64 saying that a gap of g is reachable.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

MAX_TRIED, GAIN = 1024, 64  # as in exact_fill; a kernel freezes them
ONE = np.uint64(1)


def _compiled(function: Callable[..., Any]) -> Any:
    """Compiled without the GIL, and cached on disk where there is a place to write to."""
    try:
        return njit(nogil=True, cache=True)(function)
    except RuntimeError:  # numba: "no locator available", a read-only installation without a home
        return njit(nogil=True)(function)


@_compiled
def exact_fill(lengths, ages, budget, count, closed, size):  # type: ignore[no-untyped-def]
    """Indices, bounds and ages, as ``exact_fill.choose_in_python``. Long, for its state is shared."""
    n = len(lengths)
    after, before = np.arange(1, n + 2), np.arange(-1, n)
    after[n], before[0] = 0, n
    due, gone = np.zeros(n, np.int64), np.zeros(n, np.bool_)
    full, first_full, last_full = np.empty(n, np.int64), 0, 0
    by_length, num_sorted, sorted_to = np.empty(n, np.int64), 0, 0
    rest = np.empty(n, np.int64)
    rows = np.empty((MAX_TRIED + 1) * (budget // 64 + 1), np.uint64)
    indices, end = np.empty(n, np.int64), 0
    bounds, packs = np.zeros(n + 1, np.int64), 0
    edge, held, tokens, num_long, num_full = 0, 0, 0, 0, 0
    patience, late_from = 0, 0

    while True:
        while edge < n and (held < size or tokens < 2 * budget):
            due[edge] = packs + (ages[edge] if ages[edge] >= 0 else size + held)
            held += 1
            tokens += lengths[edge]
            num_long += 2 * lengths[edge] > budget
            if lengths[edge] == budget:
                full[last_full] = edge
                last_full += 1
                num_full += 1
            else:
                patience += due[edge] - packs
            edge += 1
        ready = held >= size and tokens >= 2 * budget
        if packs >= count or held == 0 or not (closed or ready):
            break

        start = end
        seed = after[n]
        late, planned, pack_of = False, 0, bounds
        if packs >= late_from:
            spare = _least_spare(after, edge, due) - packs
            late_from = packs + min(spare, size)
            late = spare <= 0
        others = held - num_full
        other_tokens = tokens - num_full * budget
        long_share = (num_long - num_full) * budget
        crowded = 5 * long_share > 4 * other_tokens
        critical = crowded and 8 * other_tokens > others * budget
        patient = 8 * others < 3 * size or 5 * patience >= 6 * size * others
        while first_full < last_full and gone[full[first_full]]:
            first_full += 1
        if first_full < last_full and not late and (patient or not ready):
            indices[end] = full[first_full]
            end += 1
        else:
            if crowded or not ready:
                num_sorted = _sort_in(by_length, num_sorted, lengths, gone, sorted_to, edge)
                sorted_to = edge
            if not ready:
                pack_of = np.empty(num_sorted, np.int64)
                planned = _plan(by_length, num_sorted, lengths, budget, gone, pack_of)
                if planned == max(-(-tokens // budget), num_long):
                    end = _planned(by_length, num_sorted, pack_of, seed, indices, end)
            elif critical:
                if late:
                    rich = 16 * long_share < 15 * other_tokens
                    end = _best_with(by_length, num_sorted, lengths, budget, seed, rich, indices, end)
                else:
                    end = _closest_pair(by_length, num_full, num_long, num_sorted, lengths, budget, indices, end)
                end = _fill_up(by_length, num_sorted, lengths, budget, indices, start, end)
        if end == start:
            indices[end] = seed
            end += 1
            room = budget - lengths[seed]
            if crowded or not ready:
                num_rest = _gather(rest, by_length, num_sorted, seed, lengths, room)
                if 2 * lengths[seed] <= budget and num_rest and 2 * lengths[rest[0]] > budget:
                    indices[end] = rest[0]
                    end += 1
                    room -= lengths[rest[0]]
                    num_rest = _gather(rest, rest, num_rest, rest[0], lengths, room)
            else:
                num_rest = _gather_by_age(rest, after, after[seed], edge, lengths, room)
            num_rest, room, end = _take_ahead(rest, num_rest, lengths, room, held, tokens, indices, end)
            end = _fill_exactly(rest, num_rest, lengths, room, rows, indices, end)
            if not ready and _without(by_length, num_sorted, lengths, budget, gone, indices[start:end]) >= planned:
                end = _planned(by_length, num_sorted, pack_of, seed, indices, start)

        indices[start:end].sort()
        for i in indices[start:end]:
            after[before[i]], before[after[i]] = after[i], before[i]
            gone[i] = True
            held -= 1
            tokens -= lengths[i]
            num_long -= 2 * lengths[i] > budget
            if lengths[i] == budget:
                num_full -= 1
            else:
                patience -= due[i] - packs
        packs += 1
        patience -= held - num_full
        bounds[packs] = end

    new_ages = due - packs
    new_ages[edge:] = -1
    return indices[:end].copy(), bounds[: packs + 1].copy(), new_ages


@_compiled
def _sort_in(by_length, num_sorted, lengths, gone, start, stop):  # type: ignore[no-untyped-def]
    """Bring ``by_length`` up to date: drop who has left, merge in start..stop; how many it then holds."""
    kept = 0
    for i in by_length[:num_sorted]:
        if not gone[i]:
            by_length[kept] = i
            kept += 1
    fresh = start + np.flatnonzero(~gone[start:stop])
    fresh = fresh[np.argsort(-lengths[fresh], kind="mergesort")]
    old, at = kept - 1, kept + len(fresh) - 1
    for i in fresh[::-1]:
        while old >= 0 and lengths[by_length[old]] < lengths[i]:
            by_length[at] = by_length[old]
            old -= 1
            at -= 1
        by_length[at] = i
        at -= 1
    return kept + len(fresh)


@_compiled
def _gather(rest, source, num_source, seed, lengths, room):  # type: ignore[no-untyped-def]
    """The samples of ``source`` but the seed that fit, in order, into ``rest``; how many. May work in place."""
    num_rest = 0
    for k in range(num_source):
        i = source[k]
        if lengths[i] <= room and i != seed:
            rest[num_rest] = i
            num_rest += 1
    return num_rest


@_compiled
def _gather_by_age(rest, after, first, edge, lengths, room):  # type: ignore[no-untyped-def]
    """The same from the linked list, oldest first."""
    num_rest = 0
    i = first
    while i < edge:
        if lengths[i] <= room:
            rest[num_rest] = i
            num_rest += 1
        i = after[i]
    return num_rest


@_compiled
def _plan(by_length, num_sorted, lengths, budget, gone, pack_of):  # type: ignore[no-untyped-def]
    """First fit decreasing over all held that are not gone: their packs to ``pack_of``; how many packs there are.

    A tournament tree over the room of the packs, as in ``decreasing.first_fit_decreasing``.
    """
    leaves = 1
    while leaves < num_sorted:
        leaves *= 2
    open_room = np.full(2 * leaves, budget)
    num_packs = 0
    for k in range(num_sorted):
        if gone[by_length[k]]:
            continue
        length = lengths[by_length[k]]
        node = 1
        while node < leaves:
            node = 2 * node if open_room[2 * node] >= length else 2 * node + 1
        pack_of[k] = node
        num_packs = max(num_packs, node - leaves + 1)
        open_room[node] -= length
        while node > 1:
            node //= 2
            open_room[node] = max(open_room[2 * node], open_room[2 * node + 1])
    return num_packs


@_compiled
def _planned(by_length, num_sorted, pack_of, seed, indices, end):  # type: ignore[no-untyped-def]
    """The seed's pack of a plan to ``indices``; its end."""
    for k in range(num_sorted):
        if by_length[k] == seed:
            seeded = pack_of[k]
    for k in range(num_sorted):
        if pack_of[k] == seeded:
            indices[end] = by_length[k]
            end += 1
    return end


@_compiled
def _without(by_length, num_sorted, lengths, budget, gone, pack):  # type: ignore[no-untyped-def]
    """How many packs a plan has without the samples of ``pack``."""
    gone[pack] = True
    num_packs = _plan(by_length, num_sorted, lengths, budget, gone, np.empty(num_sorted, np.int64))
    gone[pack] = False
    return num_packs


@_compiled
def _least_spare(after, edge, due):  # type: ignore[no-untyped-def]
    """The number of the first pack that has to take the oldest sample."""
    least, rank = np.iinfo(np.int64).max, 0
    i = after[len(due)]
    while i < edge:
        least = min(least, due[i] - rank)
        rank += 1
        i = after[i]
    return least


@_compiled
def _closest_pair(by_length, num_full, num_long, num_sorted, lengths, budget, indices, end):  # type: ignore[no-untyped-def]
    """The long sample, and the longest short one that fits it, that leave the least gap; the pack's end."""
    least, at = budget, num_sorted
    long, fits = num_full, num_sorted
    for k in range(num_full, num_long):
        gap = budget - lengths[by_length[k]]
        while at > num_long and lengths[by_length[at - 1]] <= gap:
            at -= 1
        if at < num_sorted:
            gap -= lengths[by_length[at]]
        if gap < least:
            least, long, fits = gap, k, at
    indices[end] = by_length[long]
    end += 1
    if fits < num_sorted:
        indices[end] = by_length[fits]
        end += 1
    return end


@_compiled
def _best_with(by_length, num_sorted, lengths, budget, seed, rich, indices, end):  # type: ignore[no-untyped-def]
    """The seed with the one sample, or in a rich window the two, that fit it best; the pack's end."""
    room = budget - lengths[seed]
    indices[end] = seed
    end += 1
    one = _first_that_fits(by_length, 0, num_sorted, lengths, room)
    if one < num_sorted and by_length[one] == seed:
        one += 1
    if one == num_sorted:
        return end
    limit = room - lengths[by_length[one]] - budget // GAIN
    i, j = one, num_sorted - 1
    first, second = one, -1
    while rich and i < j:
        if by_length[i] == seed:
            i += 1
            continue
        if by_length[j] == seed:
            j -= 1
            continue
        gap = room - lengths[by_length[i]] - lengths[by_length[j]]
        if gap < 0:
            i += 1
            continue
        if gap < limit:
            limit, first, second = gap, i, j
        j -= 1
    indices[end] = by_length[first]
    end += 1
    if second >= 0:
        indices[end] = by_length[second]
        end += 1
    return end


@_compiled
def _fill_up(by_length, num_sorted, lengths, budget, indices, start, end):  # type: ignore[no-untyped-def]
    """Longest first whatever still fits into the pack at ``start``; its end."""
    room = budget
    for i in indices[start:end]:
        room -= lengths[i]
    at = 0
    while room:
        at = _first_that_fits(by_length, at, num_sorted, lengths, room)
        while at < num_sorted and np.any(indices[start:end] == by_length[at]):
            at += 1
        if at == num_sorted:
            break
        indices[end] = by_length[at]
        end += 1
        room -= lengths[by_length[at]]
        at += 1
    return end


@_compiled
def _first_that_fits(by_length, start, stop, lengths, room):  # type: ignore[no-untyped-def]
    while start < stop:
        middle = (start + stop) // 2
        if lengths[by_length[middle]] <= room:
            stop = middle
        else:
            start = middle + 1
    return start


@_compiled
def _take_ahead(rest, num_rest, lengths, room, held, tokens, indices, end):  # type: ignore[no-untyped-def]
    skipped = 0
    for k in range(num_rest):
        i = rest[k]
        if room * held > 16 * tokens and (room - lengths[i]) * held >= 8 * tokens:
            indices[end] = i
            end += 1
            room -= lengths[i]
        else:
            rest[skipped] = i
            skipped += 1
    return skipped, room, end


@_compiled
def _fill_exactly(rest, num_rest, lengths, room, rows, indices, end):  # type: ignore[no-untyped-def]
    words = room // 64 + 1
    rows[:words] = 0
    rows[room >> 6] = ONE << np.uint64(room & 63)
    kept = seen = k = 0
    while k < num_rest and seen < MAX_TRIED and not rows[kept * words] & ONE:
        i = rest[k]
        k += 1
        if lengths[i] <= room:
            seen += 1
            if _widen(rows, kept * words, words, lengths[i]):
                rest[kept] = i  # kept < k: in place
                kept += 1
    gap = _lowest_bit(rows, kept * words)
    while kept:
        kept -= 1
        if not rows[kept * words + (gap >> 6)] >> np.uint64(gap & 63) & ONE:
            indices[end] = rest[kept]
            end += 1
            gap += lengths[rest[kept]]
    return end


@_compiled
def _widen(rows, row, words, length):  # type: ignore[no-untyped-def]
    """The next row: this one OR itself shifted down by ``length`` bits; whether that added any."""
    new = row + words
    skip = length >> 6
    low = np.uint64(length & 63)
    high = np.uint64(63) - low  # shifted once more below, for a shift by 64 is undefined
    last = words - skip - 1
    added = np.uint64(0)
    for j in range(last):
        shifted = rows[row + j + skip] >> low | rows[row + j + skip + 1] << high << ONE
        added |= shifted & ~rows[row + j]
        rows[new + j] = rows[row + j] | shifted
    shifted = rows[row + words - 1] >> low
    added |= shifted & ~rows[row + last]
    rows[new + last] = rows[row + last] | shifted
    for j in range(last + 1, words):
        rows[new + j] = rows[row + j]
    return added != 0


@_compiled
def _lowest_bit(rows, row):  # type: ignore[no-untyped-def]
    """The lowest bit set in a row that has one."""
    gap = 0
    while rows[row + (gap >> 6)] == 0:
        gap += 64
    while not rows[row + (gap >> 6)] >> np.uint64(gap & 63) & ONE:
        gap += 1
    return gap
