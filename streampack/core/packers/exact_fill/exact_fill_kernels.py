"""The loop of ``exact_fill``: refill the window, form a pack, remove the pack. ``exact_fill`` has the theory.

The window is a doubly linked list over positions, so that a sample leaves in O(1). The oldest sample is ``after[n]``,
the youngest ``before[n]``. The order ``by_length`` is updated only for a crowded window or the end. The state of a call
goes from function to function as a ``View``.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from streampack.core.jit import kernel
from streampack.core.packers.blocks.first_fit import first_fit as first_fit_in_lists
from streampack.core.packers.exact_fill.exact_fill_cases import (
    best_with,
    capped,
    closest_pair,
    fill_up,
    first_fit,
    last_packs,
)
from streampack.core.packers.packer import I64, WHOLE
from streampack.core.packers.packer_kernels import (
    MAX_TRIED,
    _fill_exactly,
    _gather,
    _gather_by_age,
    _sort_in,
    _take_ahead,
)

#: Samples gathered by age for the first search; 16 times as many for each next one.
FEW = 64
#: When at most this many samples are left of a closed stream, all of their packs are formed at once.
MAX_LAST = 2048

#: Indices into ``View.now``, the counters of a call. EDGE counts the positions that have entered the window. HELD (the
#: items), SAMPLES, TOKENS, LONG and FULL count what the window holds. PATIENCE is the sum over samples that are not
#: full. PACKS counts the packs formed, and LATE_FROM is the first pack for which lateness is computed again. SORTED
#: counts the positions in ``by_length``, and SORTED_TO is the EDGE when they were sorted. FULL_HEAD and FULL_TAIL are
#: the ends of the queue ``View.full``.
EDGE, HELD, SAMPLES, TOKENS, LONG, FULL, PATIENCE = range(7)
PACKS, LATE_FROM, SORTED, SORTED_TO, FULL_HEAD, FULL_TAIL = range(7, 13)


class View(NamedTuple):
    """The state of one call: the window, scratch space, and counters.

    - ``lengths``, ``sizes``: tokens and samples in each item. Links of the window: ``after``, ``before``.
    - ``due``: the last pack that each sample may wait for, counted from the call's first.
    - ``gone``: the samples that left the window; ``full``, a queue of its full samples.
    - ``by_length``: the samples in the window, longest first.
    - ``pack_of``, ``rest``: scratch space; ``rows`` and ``barren`` are that of ``_fill_exactly``.
    - ``indices``: the packs formed so far.
    - ``now``: counters, see EDGE.
    """

    lengths: I64
    sizes: I64
    after: I64
    before: I64
    due: I64
    gone: NDArray[np.bool_]
    full: I64
    by_length: I64
    pack_of: I64
    rest: I64
    indices: I64
    rows: NDArray[np.uint64]
    barren: NDArray[np.bool_]
    now: I64
    in_turn: bool


@kernel
def exact_fill(  # type: ignore[no-untyped-def]
    lengths, sizes, ages, budget, count, closed, size, cap, counts, most, in_turn
):  # fmt: skip
    """Choose up to ``count`` packs: return the indices, bounds and ages of a ``Choice``.

    ``size`` is the window's size in samples; ``sizes``, the samples in each item; ``cap``, the most samples in a pack.
    ``counts`` and ``most`` are those of ``Limited``. ``in_turn``: full samples leave in their turn, not at once.
    """
    n = len(lengths)
    after, before = np.arange(1, n + 2), np.arange(-1, n)
    after[n], before[0] = 0, n
    now = np.zeros(13, np.int64)
    rows = np.empty((MAX_TRIED + 1) * (budget // 64 + 1), np.uint64)
    of_each = np.empty((5, n), np.int64)
    due, gone = np.zeros(n, np.int64), np.zeros(n, np.bool_)
    view = View(
        lengths, sizes, after, before, due, gone, of_each[0], of_each[1], of_each[2], of_each[3], of_each[4], rows,
        np.zeros(budget + 1, np.bool_), now, in_turn,
    )  # fmt: skip
    bounds, end = np.zeros(n + 1, np.int64), np.int64(0)  # a literal 0 would compile all once more
    fewest = np.int64(-1)
    while now[PACKS] < count:  # no refill after the last pack: the next call may have a window of another size
        _refill(view, ages, budget, size)
        ready = now[HELD] >= size and now[TOKENS] >= 2 * budget
        if now[HELD] == 0 or not (closed or ready):
            break
        last = not ready and not len(most) and (now[HELD] <= MAX_LAST or _is_crowded(now, budget))
        if last and not (in_turn and now[HELD] <= MAX_LAST):
            end = _form_all(view, budget, cap, bounds, end)
            break
        start, seed = end, after[n]
        end = _next_pack(view, budget, size, cap, seed, start)
        if end - start > cap or sizes[view.indices[start:end]].sum() > cap:
            end = capped(view, sizes, now[EDGE], now[SAMPLES], now[TOKENS], budget, cap, seed, start)
        if len(most) and _exceeded(counts, most, view.indices[start:end]) >= 0:
            end = _limited(view, budget, counts, most, seed, start, end)
        if last:
            fewest = _num_last(view, budget, cap, view.indices[:0]) if fewest < 0 else fewest
            others = _num_last(view, budget, cap, view.indices[start:end])
            if others >= fewest:  # the oldest sample's pack would cost another pack
                end = _form_all(view, budget, cap, bounds, start)
                break
            fewest = others
        view.indices[start:end].sort()
        _remove(view, budget, view.indices[start:end])
        bounds[now[PACKS]] = end
    new_ages = np.maximum(due - now[PACKS], 0)  # a full sample may go after its turn, while the window is late
    new_ages[now[EDGE] :] = ages[now[EDGE] :]  # with a count of 0, nothing has entered the window again
    return view.indices[:end].copy(), bounds[: now[PACKS] + 1].copy(), new_ages


@kernel
def _exceeded(counts, most, pack):  # type: ignore[no-untyped-def]
    """Return the unit whose limit the pack exceeds by the largest factor; -1 if it exceeds none."""
    worst, factor = -1, 1.0
    for unit in range(len(most)):
        total = 0
        for i in pack:
            total += counts[unit, i]
        if total > most[unit] and total / most[unit] > factor:
            worst, factor = unit, total / most[unit]
    return worst


@kernel
def _limited(view, budget, counts, most, seed, start, end):  # type: ignore[no-untyped-def]
    """Form the seed's pack again within all limits, after it exceeded one. Return the pack's end."""
    now = view.now
    unit = _exceeded(counts, most, view.indices[start:end])
    held = _held(view, counts[unit])
    end = capped(view, counts[unit], now[EDGE], held, now[TOKENS], budget, most[unit], seed, start)
    if _exceeded(counts, most, view.indices[start:end]) < 0:
        return end
    shares = np.zeros(len(view.lengths), np.int64)
    for number in range(len(most)):
        shares = np.maximum(shares, -(-counts[number] * WHOLE // most[number]))
    return capped(view, shares, now[EDGE], _held(view, shares), now[TOKENS], budget, WHOLE, seed, start)


@kernel
def _held(view, weights):  # type: ignore[no-untyped-def]
    """Return the sum of ``weights`` over the samples in the window."""
    total, i = 0, view.after[len(view.lengths)]
    while i < view.now[EDGE]:
        total += weights[i]
        i = view.after[i]
    return total


@kernel
def _refill(view, ages, budget, size):  # type: ignore[no-untyped-def]
    """Admit samples until the window holds ``size`` samples and two budgets of tokens, or no sample is left."""
    lengths, due, now = view.lengths, view.due, view.now
    i, held, tokens = now[EDGE], now[HELD], now[TOKENS]
    while i < len(lengths) and (held < size or tokens < 2 * budget or ages[i] >= 0):
        wait = tokens // budget if view.in_turn and lengths[i] == budget else size + held
        due[i] = now[PACKS] + (ages[i] if ages[i] >= 0 else wait)
        held += 1
        tokens += lengths[i]
        now[SAMPLES] += view.sizes[i]
        now[LONG] += 2 * lengths[i] > budget
        if lengths[i] == budget:
            view.full[now[FULL_TAIL]] = i
            now[FULL_TAIL] += 1
            now[FULL] += 1
        else:
            now[PATIENCE] += due[i] - now[PACKS]
        i += 1
    now[EDGE], now[HELD], now[TOKENS] = i, held, tokens


@kernel
def _remove(view, budget, pack):  # type: ignore[no-untyped-def]
    """Remove a formed pack's samples from the window, and update the counters."""
    lengths, after, before, now = view.lengths, view.after, view.before, view.now
    for i in pack:
        after[before[i]], before[after[i]] = after[i], before[i]
        view.gone[i] = True
        now[HELD] -= 1
        now[SAMPLES] -= view.sizes[i]
        now[TOKENS] -= lengths[i]
        now[LONG] -= 2 * lengths[i] > budget
        if lengths[i] == budget:
            now[FULL] -= 1
        else:
            now[PATIENCE] -= view.due[i] - now[PACKS]
    now[PACKS] += 1
    now[PATIENCE] -= now[HELD] - now[FULL]


@kernel
def _next_pack(view, budget, size, cap, seed, start):  # type: ignore[no-untyped-def]
    """Write the next pack to ``indices`` from ``start`` on, in any order. Return the pack's end."""
    now = view.now
    late = _is_late(view, budget, size)
    others = now[HELD] - now[FULL]
    tokens = now[TOKENS] - now[FULL] * budget
    long_share = (now[LONG] - now[FULL]) * budget
    crowded = _is_crowded(now, budget)
    while now[FULL_HEAD] < now[FULL_TAIL] and view.gone[view.full[now[FULL_HEAD]]]:
        now[FULL_HEAD] += 1
    if now[FULL_HEAD] < now[FULL_TAIL] and not late:
        full = view.full[now[FULL_HEAD]]
        patient = 8 * others < 3 * size or 5 * now[PATIENCE] >= 6 * size * others
        if view.due[full] <= now[PACKS] if view.in_turn else patient:
            view.indices[start] = full
            return start + 1
    if crowded:
        _sort(view)
    if not crowded or 8 * tokens <= others * budget:
        return _filled(view, budget, cap, seed, crowded, start)
    ordered = view.by_length[: now[SORTED]]
    gain = budget
    if 16 * long_share < 15 * tokens:
        gain = (5 * long_share - 4 * tokens) // (30 * max(1, tokens // budget))
    if late:
        end = best_with(ordered, view.after, now[EDGE], view.lengths, budget, seed, gain, view.indices, start)
    else:
        end = closest_pair(ordered, now[FULL], now[LONG], view.lengths, budget, view.indices, start)
        pair = view.indices[start:end].copy()
        filled = view.lengths[pair].sum()
        if gain < budget - filled and view.lengths[seed] < budget:
            end = best_with(ordered, view.after, now[EDGE], view.lengths, budget, seed, gain, view.indices, start)
            if view.lengths[view.indices[start:end]].sum() < filled + gain:
                end = start + len(pair)
                view.indices[start:end] = pair
    return fill_up(ordered, view.lengths, budget, view.indices, start, end)


@kernel
def _is_crowded(now, budget):  # type: ignore[no-untyped-def]
    """Return True if one pack per long sample has room for over 4/5 of the tokens; full samples do not count."""
    return 5 * (now[LONG] - now[FULL]) * budget > 4 * (now[TOKENS] - now[FULL] * budget)


@kernel
def _sort(view):  # type: ignore[no-untyped-def]
    """Update ``by_length``: drop samples that left the window, add those that entered."""
    now = view.now
    now[SORTED] = _sort_in(view.by_length, now[SORTED], view.lengths, view.gone, now[SORTED_TO], now[EDGE])
    now[SORTED_TO] = now[EDGE]


@kernel
def _is_late(view, budget, size):  # type: ignore[no-untyped-def]
    """Return True if the oldest sample has to be in the next pack."""
    now = view.now
    if now[PACKS] < now[LATE_FROM]:
        return False
    least = _least_due(view.due, view.after, view.gone, now[EDGE], view.lengths, budget if view.in_turn else 0)
    spare = least - now[PACKS]
    now[LATE_FROM] = now[PACKS] + min(spare, size)
    return spare <= 0


def _least_due_plainly(due, after, gone, edge, lengths, full):  # type: ignore[no-untyped-def]
    """Return the first pack that must take the oldest sample: the least ``due`` minus the count of older ones.

    Samples as long as ``full`` do not count, but as older ones.
    """
    positions = after[len(due)] + np.flatnonzero(~gone[after[len(due)] : edge])
    spare = (due[positions] - np.arange(len(positions)))[lengths[positions] != full]
    return spare.min(initial=np.iinfo(np.int64).max)


@kernel(plain=_least_due_plainly)
def _least_due(due, after, gone, edge, lengths, full):  # type: ignore[no-untyped-def]
    """Return the first pack that must take the oldest sample: the least ``due`` minus the count of older ones.

    Samples as long as ``full`` do not count, but as older ones.
    """
    least, rank = np.iinfo(np.int64).max, 0
    i = after[len(due)]
    while i < edge:
        if lengths[i] != full:
            least = min(least, due[i] - rank)
        rank += 1
        i = after[i]
    return least


@kernel
def _filled(view, budget, cap, seed, crowded, start):  # type: ignore[no-untyped-def]
    """Write the seed and the samples that fill its pack, from ``start`` on. Return the pack's end.

    Samples are searched by age, or longest first if ``crowded``. More than ``FEW`` are gathered only if the first ones
    do not fill the pack.
    """
    lengths, rest, indices, now = view.lengths, view.rest, view.indices, view.now
    most = len(rest) if crowded else FEW
    while True:
        end, room = start + 1, budget - lengths[seed]
        indices[start] = seed
        if crowded:
            gathered = _gather(rest, view.by_length, now[SORTED], seed, lengths, room)
            if 2 * lengths[seed] <= budget and gathered and 2 * lengths[rest[0]] > budget:
                indices[end] = rest[0]
                end += 1
                room -= lengths[rest[0]]
                gathered = _gather(rest, rest, gathered, rest[0], lengths, room)
        else:
            gathered = _gather_by_age(rest, most, view.after, view.after[seed], now[EDGE], lengths, room)
        num_rest, room, end = _take_ahead(rest, gathered, lengths, room, now[HELD], now[TOKENS], indices, end)
        if end - start > cap:  # the caller forms the pack again with fewer samples
            return end
        end = _fill_exactly(rest, num_rest, lengths, room, view.rows, view.barren, indices, end)
        if gathered < most or (
            room * now[HELD] <= 16 * now[TOKENS]
            and (lengths[indices[start:end]].sum() == budget or (lengths[rest[:num_rest]] <= room).sum() >= MAX_TRIED)
        ):
            return end
        most *= 16


def _num_last_plainly(view, budget, cap, left_out):  # type: ignore[no-untyped-def]
    """Return how many packs first fit decreasing makes of the window's samples without those ``left_out``."""
    _sort(view)
    ordered = view.by_length[: view.now[SORTED]]
    ordered = ordered[~np.isin(ordered, left_out)]
    lengths, sizes = view.lengths[ordered].tolist(), view.sizes[ordered].tolist()
    return len(first_fit_in_lists(range(len(lengths)), lengths, int(budget), int(cap), sizes))


@kernel(plain=_num_last_plainly)
def _num_last(view, budget, cap, left_out):  # type: ignore[no-untyped-def]
    """Return how many packs first fit decreasing makes of the window's samples without those ``left_out``."""
    _sort(view)
    ordered, count = np.empty(view.now[SORTED], np.int64), 0
    view.gone[left_out] = True
    for i in view.by_length[: view.now[SORTED]]:
        if not view.gone[i]:
            ordered[count] = i
            count += 1
    view.gone[left_out] = False
    return first_fit(ordered[:count], view.lengths, view.sizes, budget, cap, view.pack_of)


@kernel
def _form_all(view, budget, cap, bounds, end):  # type: ignore[no-untyped-def]
    """Form packs of all samples in the window, the oldest sample's pack first. Return the end of the last pack."""
    now, after, indices = view.now, view.after, view.indices
    _sort(view)
    pack_of, edge = view.pack_of, now[EDGE]
    num_packs = last_packs(view.by_length[: now[SORTED]], view.lengths, view.sizes, budget, cap, pack_of)
    rank, ends, packs = np.full(num_packs, -1), np.zeros(num_packs, np.int64), 0
    i = after[len(view.lengths)]
    while i < edge:
        if rank[pack_of[i]] < 0:
            rank[pack_of[i]] = packs
            packs += 1
        ends[rank[pack_of[i]]] += 1
        i = after[i]
    ends = end + np.cumsum(ends[:packs])
    bounds[now[PACKS] + 1 : now[PACKS] + packs + 1] = ends
    now[PACKS] += packs
    i = view.before[len(view.lengths)]
    while i < edge:
        ends[rank[pack_of[i]]] -= 1
        indices[ends[rank[pack_of[i]]]] = i
        i = view.before[i]
    return end + now[HELD]
