"""What the hot packers' kernels share: compiled by numba where it is installed, plain Python elsewhere.

Compiled kernels hold no lock while they run, so a broker forms packs beside its sockets. They are compiled once and
cached on disk; the first call on a machine takes some seconds.

A few inner loops have a second form, in numpy or over Python ints, for where nothing compiles (``COMPILES``). There
loops over arrays take a hundred times as long; compiled, the numpy forms take up to twice as long as the loops.

Positions are int64. ``by_length`` holds those in the window longest first (ties: oldest first). A bitset row is a run
of uint64 words, or one Python int: see below.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from streampack.core.jit import COMPILES, njit

#: Samples tried in one subset sum. 20 to 40 are enough for a perfect fill unless lengths share a factor.
MAX_TRIED = 1024
ONE = np.uint64(1)


def _compiled(function: Callable[..., Any]) -> Any:
    """Compiled without the GIL, and cached on disk where there is a place to write to.

    A kernel holds the code of those it calls, while numba compiles it again only where its own file has changed: a
    stale kernel would form other packs. So its stamp has those of the kernels that its file imports.
    """
    kernel = njit(nogil=True, cache=True)(function)
    if not hasattr(getattr(kernel, "_cache", None), "_cache_file"):  # no place to write to, or NUMBA_DISABLE_JIT
        return kernel
    imported = {
        name: each._cache._cache_file._source_stamp
        for name, each in function.__globals__.items()
        if hasattr(each, "py_func") and each.__module__ != function.__module__
    }
    file: Any = kernel._cache._cache_file
    file._source_stamp = (file._source_stamp, tuple(sorted(imported.items())))
    return kernel


if COMPILES:

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

else:

    def _sort_in(by_length, num_sorted, lengths, gone, start, stop):  # type: ignore[no-untyped-def]
        held = by_length[:num_sorted]
        held = held[~gone[held]]
        fresh = start + np.flatnonzero(~gone[start:stop])
        fresh = fresh[np.argsort(-lengths[fresh], kind="mergesort")]
        old, end = len(held), len(held) + len(fresh)
        for k in range(len(fresh) - 1, -1, -1):
            at = _first_that_fits(held, 0, old, lengths, lengths[fresh[k]] - 1)
            by_length[at + k + 1 : old + k + 1] = held[at:old]
            by_length[at + k] = fresh[k]
            old = at
        by_length[:old] = held[:old]
        return end


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
def _gather_by_age(rest, most, after, first, edge, lengths, room):  # type: ignore[no-untyped-def]
    """The same from the linked list, oldest first, ``most`` at most."""
    num_rest = 0
    i = first
    while i < edge and num_rest < most:
        if lengths[i] <= room:
            rest[num_rest] = i
            num_rest += 1
        i = after[i]
    return num_rest


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


if COMPILES:

    @_compiled
    def _fill_exactly(rest, num_rest, lengths, room, rows, barren, indices, end):  # type: ignore[no-untyped-def]
        """Add the subset that leaves the smallest gap; among those, one of the first samples in order. The new end.

        A length that reaches no new gap reaches none later in the pack either, with other samples before it: the rest
        of that length need not be tried. ``barren`` bool [budget + 1], by length, is all False before and after.
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

else:  # a row of the bitset is one Python int

    def _fill_exactly(rest, num_rest, lengths, room, rows, barren, indices, end):  # type: ignore[no-untyped-def]
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


@_compiled
def _widen(rows, row, words, length):  # type: ignore[no-untyped-def]
    """The next row: this one OR itself shifted down by ``length`` bits; whether that added any.

    Over views, whose indices cannot be negative: so the loops are vectorized.
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


@_compiled
def _lowest_bit(rows, row):  # type: ignore[no-untyped-def]
    """The lowest bit set in a row that has one."""
    gap = 0
    while rows[row + (gap >> 6)] == 0:
        gap += 64
    while not rows[row + (gap >> 6)] >> np.uint64(gap & 63) & ONE:
        gap += 1
    return gap
