"""numba twin of ``exact_fill.choose_in_python``, which tells what is done; here is only how.

The window is a doubly linked list over positions, so that a sample leaves in O(1): ``after[n]`` is the oldest,
``before[n]`` the youngest. ``by_length`` is brought up to date only for a crowded window or the end. What a call
works on goes from function to function as a ``View``.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from streampack.core.packers.exact_fill_cases import best_with, capped, closest_pair, fill_up, plan
from streampack.core.packers.kernels import (
    MAX_TRIED,
    _compiled,
    _fill_exactly,
    _gather,
    _gather_by_age,
    _sort_in,
    _take_ahead,
)
from streampack.core.packers.window import I64

MAX_PLANNED = 2048  # as in exact_fill; a kernel freezes it

#: What the numbers in ``View.now`` are; tokens and samples, those held; PLANNED is -1 where there is no plan.
EDGE, HELD, SAMPLES, TOKENS, LONG, FULL, PATIENCE = range(7)
PACKS, LATE_FROM, SORTED, SORTED_TO, FULL_HEAD, FULL_TAIL, PLANNED = range(7, 14)


class View(NamedTuple):
    """The window and room to work in. All but ``rows`` and ``now`` are as long as the lengths, or one longer."""

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
    now: I64


@_compiled
def exact_fill(lengths, sizes, ages, budget, count, closed, size, cap):  # type: ignore[no-untyped-def]
    """Indices, bounds and ages, as ``exact_fill.choose_in_python``; ``cap`` samples a pack at most."""
    n = len(lengths)
    after, before = np.arange(1, n + 2), np.arange(-1, n)
    after[n], before[0] = 0, n
    now = np.zeros(14, np.int64)
    now[PLANNED] = -1
    rows = np.empty((MAX_TRIED + 1) * (budget // 64 + 1), np.uint64)
    of_each = np.empty((5, n), np.int64)
    due, gone = np.zeros(n, np.int64), np.zeros(n, np.bool_)
    view = View(
        lengths, sizes, after, before, due, gone, of_each[0], of_each[1], of_each[2], of_each[3], of_each[4], rows, now
    )
    bounds, end = np.zeros(n + 1, np.int64), np.int64(0)  # a literal 0 would compile all once more
    while True:
        _refill(view, ages, budget, size)
        ready = now[HELD] >= size and now[TOKENS] >= 2 * budget
        if now[PACKS] >= count or now[HELD] == 0 or not (closed or ready):
            break
        start, seed = end, after[n]
        end = _next_pack(view, budget, size, ready, seed, start)
        if end - start > cap or sizes[view.indices[start:end]].sum() > cap:
            end = capped(view, now[EDGE], now[SAMPLES], now[TOKENS], budget, cap, seed, start)
            now[PLANNED] = -1
        view.indices[start:end].sort()
        _remove(view, budget, view.indices[start:end])
        bounds[now[PACKS]] = end
    new_ages = due - now[PACKS]
    new_ages[now[EDGE] :] = -1
    return view.indices[:end].copy(), bounds[: now[PACKS] + 1].copy(), new_ages


@_compiled
def _refill(view, ages, budget, size):  # type: ignore[no-untyped-def]
    lengths, due, now = view.lengths, view.due, view.now
    i, held, tokens = now[EDGE], now[HELD], now[TOKENS]
    while i < len(lengths) and (held < size or tokens < 2 * budget):
        due[i] = now[PACKS] + (ages[i] if ages[i] >= 0 else size + held)
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


@_compiled
def _remove(view, budget, pack):  # type: ignore[no-untyped-def]
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


@_compiled
def _next_pack(view, budget, size, ready, seed, start):  # type: ignore[no-untyped-def]
    """The next pack to ``indices[start:]``, in any order; its end."""
    now = view.now
    late = _is_late(view, size)
    others = now[HELD] - now[FULL]
    tokens = now[TOKENS] - now[FULL] * budget
    long_share = (now[LONG] - now[FULL]) * budget
    crowded = 5 * long_share > 4 * tokens
    patient = 8 * others < 3 * size or 5 * now[PATIENCE] >= 6 * size * others
    while now[FULL_HEAD] < now[FULL_TAIL] and view.gone[view.full[now[FULL_HEAD]]]:
        now[FULL_HEAD] += 1
    if now[FULL_HEAD] < now[FULL_TAIL] and not late and (patient or not ready):
        view.indices[start] = view.full[now[FULL_HEAD]]
        now[PLANNED] -= now[PLANNED] > 0  # it has a pack of its own in any plan
        return start + 1
    ending = not ready and now[HELD] <= MAX_PLANNED
    if crowded or ending:
        args = (view.by_length, now[SORTED], view.lengths, view.gone)
        now[SORTED] = _sort_in(*args, now[SORTED_TO], now[EDGE])
        now[SORTED_TO] = now[EDGE]
    if ending:
        return _next_of_the_last(view, budget, seed, start)
    if not crowded or 8 * tokens <= others * budget:
        return _filled(view, budget, seed, crowded, start)
    ordered = view.by_length[: now[SORTED]]
    if late:
        end = best_with(ordered, view.lengths, budget, seed, 16 * long_share < 15 * tokens, view.indices, start)
    else:
        end = closest_pair(ordered, now[FULL], now[LONG], view.lengths, budget, view.indices, start)
    return fill_up(ordered, view.lengths, budget, view.indices, start, end)


@_compiled
def _is_late(view, size):  # type: ignore[no-untyped-def]
    """Whether the oldest sample has to be in the next pack."""
    now, due, after = view.now, view.due, view.after
    if now[PACKS] < now[LATE_FROM]:
        return False
    least, rank = np.iinfo(np.int64).max, 0
    i = after[len(due)]
    while i < now[EDGE]:
        least = min(least, due[i] - rank)
        rank += 1
        i = after[i]
    spare = least - now[PACKS]
    now[LATE_FROM] = now[PACKS] + min(spare, size)
    return spare <= 0


@_compiled
def _filled(view, budget, seed, longest_first, end):  # type: ignore[no-untyped-def]
    """The seed and what fills its pack; its end."""
    lengths, rest, indices, now = view.lengths, view.rest, view.indices, view.now
    indices[end] = seed
    end += 1
    room = budget - lengths[seed]
    if longest_first:
        num_rest = _gather(rest, view.by_length, now[SORTED], seed, lengths, room)
        if 2 * lengths[seed] <= budget and num_rest and 2 * lengths[rest[0]] > budget:
            indices[end] = rest[0]
            end += 1
            room -= lengths[rest[0]]
            num_rest = _gather(rest, rest, num_rest, rest[0], lengths, room)
    else:
        num_rest = _gather_by_age(rest, view.after, view.after[seed], now[EDGE], lengths, room)
    num_rest, room, end = _take_ahead(rest, num_rest, lengths, room, now[HELD], now[TOKENS], indices, end)
    return _fill_exactly(rest, num_rest, lengths, room, view.rows, indices, end)


@_compiled
def _next_of_the_last(view, budget, seed, start):  # type: ignore[no-untyped-def]
    """The seed's pack of the plan, or one that makes the plan for the others no worse; its end. Keeps the plan."""
    lengths, gone, indices, now, pack_of = view.lengths, view.gone, view.indices, view.now, view.pack_of
    ordered = view.by_length[: now[SORTED]]
    if now[PLANNED] < 0:
        now[PLANNED] = plan(ordered, lengths, budget, gone, pack_of)
    if now[PLANNED] > max(-(-now[TOKENS] // budget), now[LONG]):
        end = _filled(view, budget, seed, np.bool_(True), start)
        gone[indices[start:end]] = True
        other = np.empty(len(lengths), np.int64)
        planned = plan(ordered, lengths, budget, gone, other)
        gone[indices[start:end]] = False
        if planned < now[PLANNED]:
            now[PLANNED] = planned
            pack_of[ordered] = other[ordered]
            return end
    now[PLANNED] -= 1
    end = start
    for i in ordered:
        if pack_of[i] == pack_of[seed]:
            indices[end] = i
            end += 1
    return end
