"""The loop of ``joint``: refill the window, form a group of packs, remove the group. ``joint`` has the theory.

Positions are int64 indices into ``lengths`` and ``work``. ``by_age`` and ``by_work`` list the samples held, oldest and
most work first, and are updated once a group. In ``by_work`` the outliers come first: ``outliers`` is their number.
``density`` is the mean work per token of the ordinary samples. ``counts`` and ``most`` are those of ``Limited``; their
first unit is samples. The bitset is that of ``packer_kernels``.
"""

from __future__ import annotations

import numpy as np

from streampack.core.jit import kernel
from streampack.core.packers.joint.joint_bounds import WAITING
from streampack.core.packers.packer_kernels import MAX_TRIED, _fill_exactly, _sort_in

#: Ordinary samples leave 3/OPEN of a group's tokens open, and 2/OPEN of each pack.
OPEN = 32
#: Samples tried for a perfect fill before more are gathered; enough unless lengths share a factor.
FEW = 64


@kernel
def joint(lengths, work, ages, counts, most, budget, count, closed, window, group, patience):  # type: ignore[no-untyped-def]
    """Choose at least ``count`` packs, in whole groups: return the indices, bounds and ages of a ``Choice``.

    Arguments are those of ``Joint.choose``; ``work`` int64 [n] is the work of each sample.
    """
    n = len(lengths)
    seen = int((ages >= 0).sum())
    edge, held, num_sorted, sorted_to = seen, seen, 0, 0
    due, gone = ages.copy(), np.zeros(n, np.bool_)
    by_age, by_work = np.arange(n), np.empty(n, np.int64)
    rows = np.empty((MAX_TRIED + 1) * (budget // 64 + 1), np.uint64)
    barren = np.zeros(budget + 1, np.bool_)
    chosen, left, rest = np.empty(n, np.int64), np.empty(n, np.int64), np.empty(n, np.int64)
    is_outlier, forced, pack_of = np.zeros(n, np.bool_), np.zeros(n, np.bool_), np.full(n, -1)
    indices, end = np.empty(n, np.int64), 0
    bounds, packs = np.zeros(n + 1, np.int64), 0
    groups, tokens = 0, group * budget
    all_tokens = all_work = 0  # of those held
    for i in range(seen):
        all_tokens += lengths[i]
        all_work += work[i]

    while packs < count:
        ready = short = False
        while True:
            num_sorted = _sort_in(by_work, num_sorted, work, gone, sorted_to, edge)
            sorted_to = edge
            outliers, outlier_tokens, ordinary, density = _split(
                by_work, num_sorted, lengths, work, budget, all_tokens, all_work
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
                all_work += work[edge]
                by_age[held] = edge
                held += 1
                missing -= 1
                missing_tokens -= lengths[edge]
                edge += 1
            short = missing > 0 or missing_tokens > 0
        if held == 0 or not (closed or ready):
            break

        is_outlier[by_work[:outliers]] = True
        num_packs, num_forced, last = group, 0, False
        if not ready:
            num_packs = _last_packs(by_work, held, lengths, work, counts, most, budget, group, pack_of)
            last = num_packs > 0
            num_packs = num_packs or group
        if not last:
            num_late, num_forced, num_chosen = _choose(
                chosen, forced, by_age, held, by_work, outliers, lengths, work, is_outlier, due, groups, patience,
                budget, density, group, ready, crowded,
            )  # fmt: skip
            short_work, mean = _shorts(by_work, outliers, held, lengths, work, ordinary)
            room, free = _place_group(
                chosen[:num_chosen], num_late, forced, is_outlier, lengths, work, counts, most, budget, density, mean,
                group, pack_of,
            )  # fmt: skip

        # Write one pack after another: first the placed samples (a counting sort), then those that fill the pack.
        order, starts = _by_pack(by_work[:held] if last else chosen[:num_chosen], pack_of, num_packs)
        if not last:
            num_left = _left(left, rest, by_age, held, work, pack_of, is_outlier, ready, short_work)
        for p in range(num_packs):
            start = end
            for i in order[starts[p] : starts[p + 1]]:
                indices[end] = i
                end += 1
            if not last and room[p]:
                end = _fill(left, num_left, gone, rest, lengths, counts, p, room[p], free, rows, barren, indices, end)
            for i in indices[start:end]:
                gone[i] = True
                all_tokens -= lengths[i]
                all_work -= work[i]
            if end > start:
                indices[start:end].sort()
                packs += 1
                bounds[packs] = end
        is_outlier[by_work[:outliers]] = False
        forced[chosen[:num_forced]] = False
        held = _drop(by_age, held, gone)
        seen = edge
        groups += 1

    new_ages = np.maximum(due - groups, 0)
    new_ages[seen:] = ages[seen:]
    return indices[:end].copy(), bounds[: packs + 1].copy(), new_ages


@kernel
def _split(by_work, held, lengths, work, budget, tokens, all_work):  # type: ignore[no-untyped-def]
    """Split the window's samples into outliers and ordinary samples.

    Return the number of outliers, their tokens, the tokens of the ordinary samples, and the ordinary samples' density.
    The sums over all samples held are ``tokens`` and ``all_work``.
    """
    outlier_tokens = outliers = 0
    for i in by_work[:held]:
        if 5.0 * float(work[i]) * float(tokens) <= 3.0 * float(budget) * float(all_work):
            break
        outliers += 1
        outlier_tokens += lengths[i]
        tokens -= lengths[i]
        all_work -= work[i]
    return outliers, outlier_tokens, tokens, all_work // max(tokens, 1)


@kernel
def _choose(  # type: ignore[no-untyped-def]
    chosen, forced, by_age, held, by_work, outliers, lengths, work, is_outlier, due, groups, patience, budget, density,
    group, ready, crowded,
):  # fmt: skip
    """Write the samples of group number ``groups`` to ``chosen``: late ones, runs of outliers, then others by age.

    Late samples and those of runs are marked in ``forced``. Return the number of late samples, with that of the samples
    of runs, and that of all.
    """
    num_late = 0
    for i in by_age[:held]:
        if num_late < group and due[i] <= groups:
            chosen[num_late] = i
            forced[i] = True
            num_late += 1
    size, space, num_forced, first = min(group, outliers), budget, num_late, 0
    if ready:
        first = _first_run(by_work, outliers, lengths, work, budget, density, group, due, groups + patience, crowded)
    while first + size <= outliers and size:
        longest = 0
        for i in by_work[first : first + size]:
            longest = max(longest, lengths[i])
            if not forced[i]:
                chosen[num_forced] = i
                forced[i] = True
                num_forced += 1
        space -= longest
        first = _next_run(by_work, outliers, lengths, work, density, group, first + size, space) if ready else outliers
    num_chosen = _by_age(chosen, num_forced, by_age, held, lengths, budget, group, is_outlier, forced)
    return num_late, num_forced, num_chosen


@kernel
def _place_group(  # type: ignore[no-untyped-def]
    chosen, num_late, forced, is_outlier, lengths, work, counts, most, budget, density, mean, group, pack_of
):
    """Place the ``chosen`` samples in the packs of a group, the late ones first: set ``pack_of``.

    Return the open tokens of the packs, and what they have ``free`` of each unit.
    """
    _largest_first(chosen[:num_late], work, lengths, density)
    _largest_first(chosen[num_late:], work, lengths, density)
    room, load, free = np.full(group, budget), np.zeros(group, np.int64), _free(most, group)
    keeps = np.full(len(chosen), budget // (OPEN // 2))
    for k in range(len(chosen)):
        if forced[chosen[k]]:
            keeps[k] = 0
        elif not is_outlier[chosen[k]]:
            keeps[k] = min(keeps[k], budget - lengths[chosen[k]])
    _place(chosen, keeps, lengths, work, counts, mean, room, load, free, pack_of, False)
    return room, free


@kernel
def _first_run(by_work, outliers, lengths, work, budget, density, group, due, soon, crowded):  # type: ignore[no-untyped-def]
    """Return the index in ``by_work`` where the first run of outliers to place begins.

    If an outlier is ``due`` by group ``soon``, take the run around the oldest such outlier with the least ratio of most
    to least work. Otherwise take the run of similar outliers with most work. If there is none, take the run with the
    least ratio in a ``crowded`` window, else return ``outliers``.
    """
    size = min(group, outliers)
    lasts = outliers - size
    at = -1
    for k in range(outliers):
        if due[by_work[k]] <= soon and (at < 0 or by_work[k] < by_work[at]):
            at = k
    start, stop = 0, lasts + 1
    if at >= 0:
        start, stop = max(0, at - size + 1), min(at, lasts) + 1
    else:
        first = _next_run(by_work, outliers, lengths, work, density, group, 0, budget)
        if first < outliers or not crowded:
            return first
    best, first = np.inf, start
    for k in range(start, stop):
        ratio = work[by_work[k]] / work[by_work[k + size - 1]]
        if ratio < best:
            best, first = ratio, k
    return first


@kernel
def _next_run(by_work, outliers, lengths, work, density, group, start, room):  # type: ignore[no-untyped-def]
    """Return the index of the next run of ``group`` similar outliers that fit ``room``; ``outliers`` if none fits.

    The search begins at ``start``. The docstring of ``joint`` defines similar outliers.
    """
    for k in range(start, outliers - group + 1):
        most, least = by_work[k], by_work[k + group - 1]
        highest = work[most] + (room - lengths[most]) * density
        if highest <= work[least] + (room - lengths[least]) * density * 3 // 2:
            fit = True
            for i in by_work[k : k + group]:
                fit &= lengths[i] <= room
            if fit:
                return k
    return outliers


@kernel
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


@kernel
def _shorts(by_work, outliers, held, lengths, work, ordinary):  # type: ignore[no-untyped-def]
    """Return the most work of a short sample, and the work that short samples have for a token.

    Short samples are the ordinary ones with the least work, with an eighth of the tokens of the ordinary ones. Their
    work for a token is their mean length, and the work of their media for a token.
    """
    tokens = highest = media = count = 0
    while outliers < held - count and 8 * tokens < ordinary:
        count += 1
        i = by_work[held - count]
        highest = work[i]
        tokens += lengths[i]
        media += work[i] - lengths[i] * lengths[i]
    return highest, tokens // max(count, 1) + media // max(tokens, 1)


@kernel
def _largest_first(chosen, work, lengths, density):  # type: ignore[no-untyped-def]
    """Sort the positions in place, largest first; among samples of equal size, the oldest first.

    The size of a sample is its work, or that of its tokens at ``density`` if it is more.
    """
    chosen.sort()
    chosen[:] = chosen[np.argsort(-np.maximum(work[chosen], lengths[chosen] * density), kind="mergesort")]


@kernel
def _free(most, packs):  # type: ignore[no-untyped-def]
    """Return the limits of ``packs`` empty packs, int64 [packs, units]."""
    free = np.empty((packs, len(most)), np.int64)
    free[:] = most
    return free


@kernel
def _fits(counts, i, free, p, unit):  # type: ignore[no-untyped-def]
    """Return True if pack p has ``free`` what sample i has of each unit from ``unit`` on."""
    while unit < len(counts) and counts[unit, i] <= free[p, unit]:
        unit += 1
    return unit == len(counts)


@kernel
def _place(order, keeps, lengths, work, counts, mean, room, load, free, pack_of, every):  # type: ignore[no-untyped-def]
    """Place samples in ``order``, each in the pack with the least work that has room for it; set ``pack_of``.

    Sample ``order[k]`` leaves ``keeps[k]`` tokens of its pack open. ``room``, ``load`` (work) and ``free``
    (``Limited``) of the packs are updated. Samples without room get -1; with ``every``, the first of them ends the
    placing. Return True if every sample has a pack.
    """
    placed = True
    for k in range(len(order)):
        i, best, needed = order[k], -1, lengths[order[k]] + keeps[k]
        for p in range(len(room)):
            if room[p] >= needed and (best < 0 or load[p] < load[best]) and _fits(counts, i, free, p, 0):
                best = p
        pack_of[i] = best
        if best >= 0:
            room[best] -= lengths[i]
            load[best] += work[i] - lengths[i] * mean
            for unit in range(len(counts)):
                free[best, unit] -= counts[unit, i]
        else:
            placed = False
            if every:
                break
    return placed


@kernel
def _last_packs(by_work, held, lengths, work, counts, most, budget, group, pack_of):  # type: ignore[no-untyped-def]
    """Place all remaining samples in as few packs as ``_place`` can: set ``pack_of``, return the number of packs.

    Return 0, with ``pack_of`` cleared, if ``group`` packs are not enough.
    """
    tokens = 0
    for i in by_work[:held]:
        tokens += lengths[i]
    for count in range(-(-tokens // budget), group + 1):
        room, load, free = np.full(count, budget), np.zeros(count, np.int64), _free(most, count)
        keeps = np.zeros(held, np.int64)
        if _place(by_work[:held], keeps, lengths, work, counts, 0, room, load, free, pack_of, True):
            return count
    for i in by_work[:held]:
        pack_of[i] = -1
    return 0


@kernel
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


@kernel
def _left(left, others, by_age, held, work, pack_of, is_outlier, ready, short_work):  # type: ignore[no-untyped-def]
    """Write the samples that may fill packs to ``left``: first the short samples, then the others, both by age.

    Return their number. Samples that are placed, and waiting outliers, are left out. ``others`` is scratch space.
    """
    num_left = num_others = 0
    for i in by_age[:held]:
        if pack_of[i] < 0 and not (ready and is_outlier[i]):
            if work[i] <= short_work:
                left[num_left] = i
                num_left += 1
            else:
                others[num_others] = i
                num_others += 1
    left[num_left : num_left + num_others] = others[:num_others]
    return num_left + num_others


@kernel
def _drop(positions, count, gone):  # type: ignore[no-untyped-def]
    """Remove the samples marked in ``gone`` from ``positions`` in place. Return the number of remaining positions."""
    kept = 0
    for i in positions[:count]:
        if not gone[i]:
            positions[kept] = i
            kept += 1
    return kept


@kernel
def _fill(left, num_left, gone, rest, lengths, counts, p, room, free, rows, barren, indices, end):  # type: ignore[no-untyped-def]
    """Choose samples of ``left`` that fill the ``room`` of pack p, and append them to ``indices``. Return the new end.

    The pack takes at most ``free`` of each unit. If the samples of an exact fill need more, the longest that fit are
    taken instead.
    """
    for most in (FEW, MAX_TRIED):
        num_rest = 0
        for i in left[:num_left]:
            if lengths[i] <= room and num_rest < most and not gone[i] and _fits(counts, i, free, p, 1):
                rest[num_rest] = i
                num_rest += 1
            if num_rest == most:
                break
        stop = _fill_exactly(rest, num_rest, lengths, room, rows, barren, indices, end)
        tokens = 0
        for i in indices[end:stop]:
            tokens += lengths[i]
        if tokens == room or num_rest < most:
            break
    within = True
    for unit in range(len(counts)):
        total = 0
        for i in indices[end:stop]:
            total += counts[unit, i]
        within &= total <= free[p, unit]
    if within:
        return stop
    fits = left[:num_left].copy()
    _largest_first(fits, lengths, lengths, 0)
    stop = end
    for i in fits:
        if free[p, 0] == 0:
            break
        if lengths[i] <= room and not gone[i] and _fits(counts, i, free, p, 0):
            indices[stop] = i
            stop += 1
            room -= lengths[i]
            for unit in range(len(counts)):
                free[p, unit] -= counts[unit, i]
    return stop
