"""The loop of ``joint``: refill the window, form a group of packs, remove the group. ``joint`` has the theory.

Positions are int64 indices into ``lengths``. ``by_age`` and ``by_length`` list the samples held, oldest and longest
first, and are updated once a group. In ``by_length`` the outliers come first: ``outliers`` is their number. ``density``
is the mean work per token of the ordinary samples. The bitset is that of ``packer_kernels``.
"""

from __future__ import annotations

import numpy as np

from streampack.core.packers.joint.joint_bounds import WAITING
from streampack.core.packers.packer_kernels import MAX_TRIED, _compiled, _fill_exactly, _sort_in

#: Ordinary samples leave 3/OPEN of a group's tokens open, and 2/OPEN of each pack.
OPEN = 32
#: Samples tried for a perfect fill before more are gathered; enough unless lengths share a factor.
FEW = 64


@_compiled
def joint(lengths, ages, sizes, budget, count, closed, window, group, patience, cap):  # type: ignore[no-untyped-def]
    """Choose at least ``count`` packs, in whole groups: return the indices, bounds and ages of a ``Choice``.

    Arguments are those of ``Joint.choose``; ``cap`` is the most samples in a pack. It is one long function because its
    parts share their state.
    """
    n = len(lengths)
    seen = int((ages >= 0).sum())
    edge, held, num_sorted, sorted_to = seen, seen, 0, 0
    due, gone = ages.copy(), np.zeros(n, np.bool_)
    by_age, by_length = np.arange(n), np.empty(n, np.int64)
    rows = np.empty((MAX_TRIED + 1) * (budget // 64 + 1), np.uint64)
    barren = np.zeros(budget + 1, np.bool_)
    chosen, left, rest = np.empty(n, np.int64), np.empty(n, np.int64), np.empty(n, np.int64)
    is_outlier, forced, pack_of = np.zeros(n, np.bool_), np.zeros(n, np.bool_), np.full(n, -1)
    indices, end = np.empty(n, np.int64), 0
    bounds, packs = np.zeros(n + 1, np.int64), 0
    groups, tokens = 0, group * budget
    all_tokens = all_squares = 0  # of those held
    for length in lengths[:seen]:
        all_tokens += length
        all_squares += length * length

    while packs < count:
        ready = short = False
        while True:
            num_sorted = _sort_in(by_length, num_sorted, lengths, gone, sorted_to, edge)
            sorted_to = edge
            outliers, outlier_tokens, ordinary, density = _split(
                by_length, num_sorted, lengths, budget, all_tokens, all_squares
            )
            crowded = outlier_tokens >= max(WAITING * tokens, 2 * ordinary)
            missing, missing_tokens = window - held + outliers, 2 * tokens - ordinary
            if short:
                break
            ready = (missing <= 0 and missing_tokens <= 0) or crowded
            if ready:
                break
            while edge < n and (missing > 0 or missing_tokens > 0):
                due[edge] = groups + 2 * patience + all_tokens // tokens
                all_tokens += lengths[edge]
                all_squares += lengths[edge] * lengths[edge]
                by_age[held] = edge
                held += 1
                missing -= 1
                missing_tokens -= lengths[edge]
                edge += 1
            short = missing > 0 or missing_tokens > 0
        if held == 0 or not (closed or ready):
            break

        is_outlier[by_length[:outliers]] = True
        num_packs = group
        mean = num_late = num_forced = 0
        last = False
        if not ready:
            num_packs = _last_packs(by_length, held, lengths, sizes, budget, group, cap, pack_of)
            last = num_packs > 0
            num_packs = num_packs or group
        if not last:
            for i in by_age[:held]:
                if num_late < group and due[i] <= groups:
                    chosen[num_late] = i
                    forced[i] = True
                    num_late += 1
            size, space, num_forced = min(group, outliers), budget, num_late
            first = 0
            if ready:
                first = _first_run(
                    by_length, outliers, lengths, budget, density, group, due, groups + patience, crowded
                )
            while first + size <= outliers and size:
                for i in by_length[first : first + size]:
                    if not forced[i]:
                        chosen[num_forced] = i
                        forced[i] = True
                        num_forced += 1
                space -= lengths[by_length[first]]
                first += size
                first = _longest_run(by_length, outliers, lengths, density, group, first, space) if ready else outliers
            num_chosen = _by_age(chosen, num_forced, by_age, held, lengths, budget, group, is_outlier, forced)
            longest, mean = _shorts(by_length, outliers, held, lengths, ordinary)
            _longest_first(chosen[:num_late], lengths)
            _longest_first(chosen[num_late:num_chosen], lengths)
            room, work = np.full(group, budget), np.zeros(group, np.int64)
            free = np.full(group, cap)
            for i in chosen[:num_chosen]:
                keep = 0 if forced[i] else budget // (OPEN // 2)
                pack_of[i] = _place(lengths[i], sizes[i], keep, mean, room, work, free, group)

        # Write one pack after another: first the placed samples (a counting sort), then those that fill the pack.
        order, starts = _by_pack(by_length[:held] if last else chosen[:num_chosen], pack_of, num_packs)
        if not last:
            num_left = _left(left, rest, by_age, held, lengths, pack_of, is_outlier, ready, longest)
        for p in range(num_packs):
            start = end
            for i in order[starts[p] : starts[p + 1]]:
                indices[end] = i
                end += 1
            if not last and room[p]:
                end = _fill(left, num_left, gone, rest, lengths, sizes, room[p], free[p], rows, barren, indices, end)
            for i in indices[start:end]:
                gone[i] = True
                all_tokens -= lengths[i]
                all_squares -= lengths[i] * lengths[i]
            if end > start:
                indices[start:end].sort()
                packs += 1
                bounds[packs] = end
        is_outlier[by_length[:outliers]] = False
        forced[chosen[:num_forced]] = False
        held = _drop(by_age, held, gone)
        seen = edge
        groups += 1

    new_ages = np.maximum(due - groups, 0)
    new_ages[seen:] = -1
    return indices[:end].copy(), bounds[: packs + 1].copy(), new_ages


@_compiled
def _split(by_length, held, lengths, budget, tokens, squares):  # type: ignore[no-untyped-def]
    """Split the window's samples into outliers and ordinary samples.

    Return the number of outliers, their tokens, the tokens of the ordinary samples, and the ordinary samples' density.
    The sums over all samples held are ``tokens`` and ``squares``.
    """
    outlier_tokens = outliers = 0
    for i in by_length[:held]:
        length = lengths[i]
        if 5.0 * float(length) * float(length) * float(tokens) <= 3.0 * float(budget) * float(squares):
            break
        outliers += 1
        outlier_tokens += length
        tokens -= length
        squares -= length * length
    return outliers, outlier_tokens, tokens, squares // max(tokens, 1)


@_compiled
def _first_run(by_length, outliers, lengths, budget, density, group, due, soon, crowded):  # type: ignore[no-untyped-def]
    """Return the index in ``by_length`` where the first run of outliers to place begins.

    If an outlier is ``due`` by group ``soon``, take the run around the oldest such outlier with the least ratio of
    longest to shortest. Otherwise take the longest run of similar outliers. If there is none, take the run with the
    least ratio in a ``crowded`` window, else return ``outliers``.
    """
    size = min(group, outliers)
    lasts = outliers - size
    at = -1
    for k in range(outliers):
        if due[by_length[k]] <= soon and (at < 0 or by_length[k] < by_length[at]):
            at = k
    start, stop = 0, lasts + 1
    if at >= 0:
        start, stop = max(0, at - size + 1), min(at, lasts) + 1
    else:
        first = _longest_run(by_length, outliers, lengths, density, group, 0, budget)
        if first < outliers or not crowded:
            return first
    best, first = np.inf, start
    for k in range(start, stop):
        ratio = lengths[by_length[k]] / lengths[by_length[k + size - 1]]
        if ratio < best:
            best, first = ratio, k
    return first


@_compiled
def _longest_run(by_length, outliers, lengths, density, group, start, room):  # type: ignore[no-untyped-def]
    """Return the index of the longest run of ``group`` similar outliers that fit ``room``; ``outliers`` if none fits.

    The search begins at ``start``. The docstring of ``joint`` defines similar outliers.
    """
    for k in range(start, outliers - group + 1):
        long, short = lengths[by_length[k]], lengths[by_length[k + group - 1]]
        work = long * long + (room - long) * density
        if long <= room and work <= short * short + (room - short) * density * 3 // 2:
            return k
    return outliers


@_compiled
def _by_age(chosen, num_forced, by_age, held, lengths, budget, group, is_outlier, forced):  # type: ignore[no-untyped-def]
    """Append the oldest ordinary samples, then the oldest outliers, to ``chosen``, behind the forced samples.

    Stop at the first sample that would leave less than 3/OPEN of the group's tokens open. Return the new number of
    chosen samples.
    """
    room = group * budget - group * (budget // OPEN) * 3
    for i in chosen[:num_forced]:
        room -= lengths[i]
    num_chosen = num_forced
    for outlier in (False, True):
        for i in by_age[:held]:
            if is_outlier[i] == outlier and not forced[i]:
                room -= lengths[i]
                if room < 0:
                    return num_chosen
                chosen[num_chosen] = i
                num_chosen += 1
    return num_chosen


@_compiled
def _shorts(by_length, outliers, held, lengths, ordinary):  # type: ignore[no-untyped-def]
    """Return the longest and the mean length of the short samples.

    Short samples are the shortest ordinary ones, with an eighth of the tokens of the ordinary ones.
    """
    tokens = longest = count = 0
    while outliers < held - count and 8 * tokens < ordinary:
        count += 1
        longest = lengths[by_length[held - count]]
        tokens += longest
    return longest, tokens // max(count, 1)


@_compiled
def _longest_first(chosen, lengths):  # type: ignore[no-untyped-def]
    """Sort the positions in place, longest first; among equal lengths, the oldest first."""
    chosen.sort()
    chosen[:] = chosen[np.argsort(-lengths[chosen], kind="mergesort")]


@_compiled
def _place(length, size, keep, mean, room, work, free, count):  # type: ignore[no-untyped-def]
    """Place a sample in the pack with the least work that has room for it; return the pack, or -1 if none has room.

    The pack keeps ``keep`` tokens open. ``room``, ``work`` and ``free`` (samples) of the ``count`` packs are updated.
    """
    best = -1
    for p in range(count):
        if room[p] >= length + keep and free[p] >= size and (best < 0 or work[p] < work[best]):
            best = p
    if best >= 0:
        room[best] -= length
        free[best] -= size
        work[best] += length * (length - mean)
    return best


@_compiled
def _last_packs(by_length, held, lengths, sizes, budget, group, cap, pack_of):  # type: ignore[no-untyped-def]
    """Place all remaining samples in as few packs as ``_place`` can: set ``pack_of``, return the number of packs.

    Return 0, with ``pack_of`` cleared, if ``group`` packs are not enough.
    """
    tokens = 0
    for i in by_length[:held]:
        tokens += lengths[i]
    for count in range(-(-tokens // budget), group + 1):
        room, work, free = np.full(count, budget), np.zeros(count, np.int64), np.full(count, cap)
        placed = 0
        while placed < held:
            i = by_length[placed]
            pack_of[i] = _place(lengths[i], sizes[i], 0, 0, room, work, free, count)
            if pack_of[i] < 0:
                break
            placed += 1
        if placed == held:
            return count
    for i in by_length[:held]:
        pack_of[i] = -1
    return 0


@_compiled
def _by_pack(chosen, pack_of, num_packs):  # type: ignore[no-untyped-def]
    """Return the placed samples, one pack after another, and the index at which each pack begins."""
    starts = np.zeros(num_packs + 1, np.int64)
    for i in chosen:
        if pack_of[i] >= 0:
            starts[pack_of[i] + 1] += 1
    starts = np.cumsum(starts)
    at, order = starts.copy(), np.empty(starts[num_packs], np.int64)
    for i in chosen:
        if pack_of[i] >= 0:
            order[at[pack_of[i]]] = i
            at[pack_of[i]] += 1
    return order, starts


@_compiled
def _left(left, others, by_age, held, lengths, pack_of, is_outlier, ready, longest):  # type: ignore[no-untyped-def]
    """Write the samples that may fill packs to ``left``: first the short samples, then the others, both by age.

    Return their number. Samples that are placed, and waiting outliers, are left out. ``others`` is scratch space.
    """
    num_left = num_others = 0
    for i in by_age[:held]:
        if pack_of[i] < 0 and not (ready and is_outlier[i]):
            if lengths[i] <= longest:
                left[num_left] = i
                num_left += 1
            else:
                others[num_others] = i
                num_others += 1
    left[num_left : num_left + num_others] = others[:num_others]
    return num_left + num_others


@_compiled
def _drop(positions, count, gone):  # type: ignore[no-untyped-def]
    """Remove the samples marked in ``gone`` from ``positions`` in place. Return the number of remaining positions."""
    kept = 0
    for i in positions[:count]:
        if not gone[i]:
            positions[kept] = i
            kept += 1
    return kept


@_compiled
def _fill(left, num_left, gone, rest, lengths, sizes, room, free, rows, barren, indices, end):  # type: ignore[no-untyped-def]
    """Append samples of ``left`` that fill a pack's ``room`` to ``indices``. Return the new end.

    The pack takes at most ``free`` samples. If the exact fill needs more, the longest that fit are taken instead.
    """
    for most in (FEW, MAX_TRIED):
        num_rest = 0
        for i in left[:num_left]:
            if lengths[i] <= room and num_rest < most and not gone[i]:
                rest[num_rest] = i
                num_rest += 1
            if num_rest == most:
                break
        stop = _fill_exactly(rest, num_rest, lengths, room, rows, barren, indices, end)
        tokens = samples = 0
        for i in indices[end:stop]:
            tokens += lengths[i]
            samples += sizes[i]
        if tokens == room or num_rest < most:
            break
    if samples <= free:
        return stop
    fits = left[:num_left].copy()
    _longest_first(fits, lengths)
    stop = end
    for i in fits:
        if free == 0:
            break
        if lengths[i] <= room and sizes[i] <= free and not gone[i]:
            indices[stop] = i
            stop += 1
            room -= lengths[i]
            free -= sizes[i]
    return stop
