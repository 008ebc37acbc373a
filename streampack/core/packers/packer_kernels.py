"""Loops that the kernels of ``exact_fill`` and ``joint`` share: compiled where numba is installed, else plain Python.

Compiled kernels do not hold the GIL while they run, so a broker forms packs beside its sockets. They are compiled once
and cached on disk (``core.jit``).

A few inner loops have a plain form, in numpy or over Python ints, which runs until they are compiled. Without a
compiler, loops over arrays take a hundred times as long; compiled, the plain forms take up to twice as long.

Arguments that many kernels share:

- Positions are int64 indices into ``lengths``, oldest first.
- ``by_length``: the positions in the window, longest first (ties: oldest first). ``gone`` bool [n]: samples that left.
- ``rest``: scratch space for candidates of the pack. ``room``: tokens that the pack may still take.
- ``indices``: the result, to which a kernel appends from ``end`` on.
- A bitset row is a run of uint64 words; without numba, one Python int. Bit g says that a gap of g tokens is reachable.
"""

from __future__ import annotations

import numpy as np

from streampack.core.jit import kernel

#: Samples tried in one subset sum. 20 to 40 are enough for a perfect fill unless lengths share a factor.
MAX_TRIED = 1024
ONE = np.uint64(1)


def _sort_in_plainly(by_length, num_sorted, lengths, gone, start, stop):  # type: ignore[no-untyped-def]
    """Update ``by_length``: drop samples that are gone, merge in positions start..stop. Return the new count."""
    kept = by_length[:num_sorted]
    kept = kept[~gone[kept]]
    fresh = start + np.flatnonzero(~gone[start:stop])
    fresh = fresh[np.argsort(-lengths[fresh], kind="mergesort")]
    old, end = len(kept), len(kept) + len(fresh)
    for k in range(len(fresh) - 1, -1, -1):
        at = _first_that_fits(kept, 0, old, lengths, lengths[fresh[k]] - 1)
        by_length[at + k + 1 : old + k + 1] = kept[at:old]
        by_length[at + k] = fresh[k]
        old = at
    by_length[:old] = kept[:old]
    return end


@kernel(plain=_sort_in_plainly)
def _sort_in(by_length, num_sorted, lengths, gone, start, stop):  # type: ignore[no-untyped-def]
    """Update ``by_length``: drop samples that are gone, merge in positions start..stop. Return the new count.

    ``num_sorted`` is the number of positions in ``by_length`` before the call.
    """
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


@kernel
def _gather(rest, source, num_source, seed, lengths, room):  # type: ignore[no-untyped-def]
    """Copy the samples of ``source`` that fit ``room``, but not the seed, to ``rest`` in order. Return their number.

    ``rest`` may be ``source``.
    """
    num_rest = 0
    for k in range(num_source):
        i = source[k]
        if lengths[i] <= room and i != seed:
            rest[num_rest] = i
            num_rest += 1
    return num_rest


@kernel
def _gather_by_age(rest, most, after, first, edge, lengths, room):  # type: ignore[no-untyped-def]
    """Copy up to ``most`` samples that fit ``room`` to ``rest``, oldest first. Return their number.

    ``after`` links each position in the window to the next one; ``first`` is where to begin, ``edge`` the end.
    """
    num_rest = 0
    i = first
    while i < edge and num_rest < most:
        if lengths[i] <= room:
            rest[num_rest] = i
            num_rest += 1
        i = after[i]
    return num_rest


@kernel
def _first_that_fits(by_length, start, stop, lengths, room):  # type: ignore[no-untyped-def]
    """Return the first index of ``by_length`` in start..stop with a length of at most ``room``; ``stop`` if none."""
    while start < stop:
        middle = (start + stop) // 2
        if lengths[by_length[middle]] <= room:
            stop = middle
        else:
            start = middle + 1
    return start


@kernel
def _take_ahead(rest, num_rest, lengths, room, held, tokens, indices, end):  # type: ignore[no-untyped-def]
    """Take samples of ``rest`` in order without a search, while the room is above 16 mean lengths.

    Each taken sample leaves room for 8 mean lengths, so that the search can still fill the pack exactly. The window
    holds ``held`` samples of ``tokens``. Return the count left in ``rest``, the room and the new end.
    """
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


def _fill_exactly_plainly(rest, num_rest, lengths, room, rows, barren, indices, end):  # type: ignore[no-untyped-def]
    """Append the subset of ``rest`` that leaves the smallest gap in ``room``. Return the new end."""
    fits = rest[:num_rest][lengths[rest[:num_rest]] <= room][:MAX_TRIED]
    row, tried, fruitless = 1 << int(room), [], set()
    for i, length in zip(fits.tolist(), lengths[fits].tolist(), strict=True):
        if row & 1:
            break
        if length in fruitless:
            continue
        wider = row | row >> length
        if wider == row:
            fruitless.add(length)
        else:
            tried.append((row, i, length))
            row = wider
    gap = (row & -row).bit_length() - 1
    for before, i, length in reversed(tried):
        if not before >> gap & 1:
            indices[end] = i
            end += 1
            gap += length
    return end


@kernel(plain=_fill_exactly_plainly)
def _fill_exactly(rest, num_rest, lengths, room, rows, barren, indices, end):  # type: ignore[no-untyped-def]
    """Append the subset of ``rest`` that leaves the smallest gap in ``room``. Return the new end.

    Samples are tried in order, so the subset consists of early samples. A length that reaches no new gap also
    reaches none later in the pack, so other samples of that length are not tried. Such lengths are marked in
    ``barren`` bool [budget + 1], which is all False before and after.
    """
    words = room // 64 + 1
    rows[:words] = 0
    rows[room >> 6] = ONE << np.uint64(room & 63)
    kept = seen = k = 0
    while k < num_rest and seen < MAX_TRIED and not rows[kept * words] & ONE:
        i = rest[k]
        k += 1
        if lengths[i] <= room:
            seen += 1
            if barren[lengths[i]]:
                continue
            if _widen(rows, kept * words, words, lengths[i]):
                rest[k - 1], rest[kept] = rest[kept], i
                kept += 1
            else:
                barren[lengths[i]] = True
    for i in rest[:k]:
        barren[lengths[i]] = False
    gap = _lowest_bit(rows, kept * words)
    while kept:
        kept -= 1
        if not rows[kept * words + (gap >> 6)] >> np.uint64(gap & 63) & ONE:
            indices[end] = rest[kept]
            end += 1
            gap += lengths[rest[kept]]
    return end


@kernel
def _widen(rows, row, words, length):  # type: ignore[no-untyped-def]
    """Write the next bitset row: this row OR itself shifted down by ``length`` bits. Return True if a bit was added.

    ``row`` is the index of the row's first word. The loops run over views, whose indices cannot be negative, so that
    the compiler vectorizes them.
    """
    skip = length >> 6
    low = np.uint64(length & 63)
    high = np.uint64(63) - low  # shifted once more below, for a shift by 64 is undefined
    last = words - skip - 1
    old, above, new = rows[row : row + words], rows[row + skip : row + words], rows[row + words : row + 2 * words]
    added = np.uint64(0)
    for j in range(last):
        shifted = above[j] >> low | above[j + 1] << high << ONE
        added |= shifted & ~old[j]
        new[j] = old[j] | shifted
    shifted = above[last] >> low
    added |= shifted & ~old[last]
    new[last] = old[last] | shifted
    for j in range(last + 1, words):
        new[j] = old[j]
    return added != 0


@kernel
def _lowest_bit(rows, row):  # type: ignore[no-untyped-def]
    """Return the lowest set bit of the bitset row that begins at word ``row``; a bit must be set."""
    gap = 0
    while rows[row + (gap >> 6)] == 0:
        gap += 64
    while not rows[row + (gap >> 6)] >> np.uint64(gap & 63) & ONE:
        gap += 1
    return gap
