"""numba twins of the hot packers: the same packs as the plain Python, a hundred times sooner.

What each does is told where its twin is (``exact_fill.choose_in_python``); here is only how. The
kernels hold no lock while they run, so a broker forms packs beside its sockets. They are
compiled once and cached on disk; the first call on a machine takes some seconds.

Positions are int64. The window is a doubly linked list over them, so that a sample leaves in O(1):
``after[n]`` is the oldest, ``before[n]`` the youngest. ``by_length`` holds the same samples longest
first (ties: oldest first); it is brought up to date only for a crowded window. A bitset row is a
run of uint64 words, bit g % 64 of word g // 64 saying that a gap of g is reachable.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

MAX_TRIED, MAX_SEEDS, NEARLY_FULL = 1024, 64, 1024  # as in exact_fill; a kernel freezes them
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
    since, gone = np.zeros(n, np.int64), np.zeros(n, np.bool_)
    full, first_full, last_full = np.empty(n, np.int64), 0, 0
    by_length, num_sorted, sorted_to = np.empty(n, np.int64), 0, 0
    rest = np.empty(n, np.int64)
    rows = np.empty((MAX_TRIED + 1) * (budget // 64 + 1), np.uint64)
    indices, end = np.empty(n, np.int64), 0
    bounds, packs = np.zeros(n + 1, np.int64), 0
    edge, held, tokens, num_long = 0, 0, 0, 0

    while True:
        while edge < n and (held < size or tokens < 2 * budget):
            since[edge] = packs - max(ages[edge], 0)
            held += 1
            tokens += lengths[edge]
            num_long += 2 * lengths[edge] > budget
            if lengths[edge] == budget:
                full[last_full] = edge
                last_full += 1
            edge += 1
        ready = held >= size and tokens >= 2 * budget
        if packs >= count or held == 0 or not (closed or ready):
            break

        start = end
        seed = after[n]
        late = packs - since[seed] >= size
        scarce = 4 * num_long * budget > 3 * tokens
        crowded = 10 * num_long * budget > 7 * tokens or not ready
        while first_full < last_full and gone[full[first_full]]:
            first_full += 1
        if first_full < last_full and not late:
            indices[end] = full[first_full]
            end += 1
        else:
            if crowded:
                num_sorted = _sort_in(by_length, num_sorted, lengths, gone, sorted_to, edge)
                sorted_to = edge
            if not ready:
                stop, num_packs = _last_pack(by_length, num_sorted, lengths, budget, seed, indices, end)
                if scarce or num_packs == max(-(-tokens // budget), num_long):
                    end = stop
            elif scarce:
                num_seeds = 1 if late else MAX_SEEDS
                end = _scarce_pack(by_length, num_sorted, lengths, budget, after, edge, num_seeds, rest, indices, end)
        if end == start:
            indices[end] = seed
            end += 1
            room = budget - lengths[seed]
            if crowded:
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

        indices[start:end].sort()
        for i in indices[start:end]:
            after[before[i]], before[after[i]] = after[i], before[i]
            gone[i] = True
            held -= 1
            tokens -= lengths[i]
            num_long -= 2 * lengths[i] > budget
        packs += 1
        bounds[packs] = end

    new_ages = packs - since
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
def _last_pack(by_length, num_sorted, lengths, budget, seed, indices, end):  # type: ignore[no-untyped-def]
    """First fit decreasing over all held: the seed's pack to ``indices``; its end, and how many packs there are.

    A tournament tree over the room of the packs, as in ``decreasing.first_fit_decreasing``.
    """
    leaves = 1
    while leaves < num_sorted:
        leaves *= 2
    open_room = np.full(2 * leaves, budget)
    pack_of = np.empty(num_sorted, np.int64)
    num_packs, seeded = 0, 0
    for k in range(num_sorted):
        length = lengths[by_length[k]]
        node = 1
        while node < leaves:
            node = 2 * node if open_room[2 * node] >= length else 2 * node + 1
        pack_of[k] = node
        num_packs = max(num_packs, node - leaves + 1)
        if by_length[k] == seed:
            seeded = node
        open_room[node] -= length
        while node > 1:
            node //= 2
            open_room[node] = max(open_room[2 * node], open_room[2 * node + 1])
    for k in range(num_sorted):
        if pack_of[k] == seeded:
            indices[end] = by_length[k]
            end += 1
    return end, num_packs


@_compiled
def _scarce_pack(by_length, num_sorted, lengths, budget, after, edge, num_seeds, best, indices, end):  # type: ignore[no-untyped-def]
    """The first of the oldest samples' greedy packs that is as good as full, else the fullest; its end."""
    least, num_best = budget, 0
    seed = after[len(lengths)]
    while seed < edge and num_seeds and (num_best == 0 or NEARLY_FULL * least > budget):
        stop, gap = _greedy_pack(by_length, num_sorted, lengths, budget, seed, indices, end)
        if gap < least:
            least, num_best = gap, stop - end
            best[:num_best] = indices[end:stop]
        num_seeds -= 1
        seed = after[seed]
    indices[end : end + num_best] = best[:num_best]
    return end + num_best


@_compiled
def _greedy_pack(by_length, num_sorted, lengths, budget, seed, indices, end):  # type: ignore[no-untyped-def]
    """The seed, a long sample if it is none, and longest first whatever still fits; its end and the gap left."""
    indices[end] = seed
    end += 1
    room = budget - lengths[seed]
    at = _first_that_fits(by_length, 0, num_sorted, lengths, room)
    partner = seed
    if 2 * lengths[seed] <= budget and at < num_sorted and 2 * lengths[by_length[at]] > budget:
        partner = by_length[at]
        indices[end] = partner
        end += 1
        room -= lengths[partner]
    while room:
        at = _first_that_fits(by_length, at, num_sorted, lengths, room)
        while at < num_sorted and (by_length[at] == seed or by_length[at] == partner):
            at += 1
        if at == num_sorted:
            break
        indices[end] = by_length[at]
        end += 1
        room -= lengths[by_length[at]]
        at += 1
    return end, room


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
