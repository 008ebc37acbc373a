"""Memory for packs that is used again once the trainer has dropped them.

A fresh array of a megabyte costs more in page faults than it costs to fill, and a trainer's
process is not ours to tune. So a pack's arrays lie in a slab of anonymous memory, and when the
last view of it is gone, wherever that happens, the slab goes back. Packs may have a new length every step, so
a slab serves what takes half of it or more; and where none does, the one that was idle longest gives way to a new one.
So there are never more slabs than a trainer has held at one time.
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
    """Any thread takes them, one at a time, and any may drop the last view."""

    def __init__(self) -> None:
        self._returned: deque[mmap.mmap] = deque()
        self._taking = threading.Lock()
        self._idle: list[mmap.mmap] = []
        """Those that came back first, first."""

    @property
    def num_idle(self) -> int:
        """Slabs that are lent to nobody."""
        return len(self._idle) + len(self._returned)

    def take(self, num_bytes: int) -> Any:
        """A writable buffer of ``num_bytes``, page aligned, with whatever it held before.

        It is a slab of its own until nothing refers to it: arrays made of it (``np.frombuffer``) do.
        """
        with self._taking:
            memory = self._fitting(round_up(num_bytes, mmap.PAGESIZE))
        lent = (ctypes.c_char * num_bytes).from_buffer(memory)  # dies with its last view, unlike the mapping
        weakref.finalize(lent, self._returned.append, memory).atexit = False
        return lent

    def _fitting(self, size: int) -> mmap.mmap:
        """The smallest idle slab of ``size`` to twice that, of equal ones the last that came back, still in cache; or
        a new one.
        """
        while self._returned:
            self._idle.append(self._returned.popleft())
        at, found = -1, 2 * size + 1
        for place, memory in enumerate(self._idle):
            if size <= len(memory) <= found:
                at, found = place, len(memory)
        if found <= 2 * size:
            return self._idle.pop(at)
        if self._idle:
            del self._idle[0]
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # a fork has its own
