"""``Slabs``: memory for packs, reused once the trainer has dropped them.

A new array of a megabyte costs more in page faults than filling it costs. A pack's arrays therefore lie in a slab of
anonymous memory. When the last view of a slab is gone, in any thread, the slab is idle again.

The length of packs may change every step. A slab serves requests of at least half its size. If no idle slab fits, a new
one replaces the slab that was idle longest. There are never more slabs than a trainer has held at one time.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref
from collections import deque
from typing import Any

from streampack.core.layout.boundaries import round_up


class Slabs:
    """A pool of memory slabs. Any thread may take a slab, and any thread may drop its last view."""

    def __init__(self) -> None:
        self._returned: deque[mmap.mmap] = deque()
        self._taking = threading.Lock()
        self._idle: list[mmap.mmap] = []
        """Idle slabs, first in, first out."""

    @property
    def num_idle(self) -> int:
        """Number of idle slabs."""
        return len(self._idle) + len(self._returned)

    def take(self, num_bytes: int) -> Any:
        """Return a writable buffer of ``num_bytes``, page aligned and not cleared.

        The slab returns to the pool when the last reference to the buffer is gone. Arrays made from the buffer by
        ``np.frombuffer`` are references.
        """
        with self._taking:
            memory = self._fitting(round_up(num_bytes, mmap.PAGESIZE))
        lent = (ctypes.c_char * num_bytes).from_buffer(memory)  # freed with its last view, unlike the mapping
        weakref.finalize(lent, self._returned.append, memory).atexit = False
        return lent

    def _fitting(self, size: int) -> mmap.mmap:
        """Return the smallest idle slab of ``size`` to twice ``size`` bytes, or else a new slab.

        Among equal slabs, the last one returned is taken: it is still in cache.
        """
        while self._returned:
            self._idle.append(self._returned.popleft())
        at, smallest = -1, 2 * size + 1
        for place, memory in enumerate(self._idle):
            if size <= len(memory) <= smallest:
                at, smallest = place, len(memory)
        if smallest <= 2 * size:
            return self._idle.pop(at)
        if self._idle:
            del self._idle[0]
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # private: a forked child gets a copy
