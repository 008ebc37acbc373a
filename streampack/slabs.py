"""Memory for packs that is used again once the trainer has dropped them.

A fresh array of a megabyte costs more in page faults than it costs to fill, and a trainer's
process is not ours to tune. So a pack's arrays lie in a slab of anonymous memory, and when the
last view of it is gone, wherever that happens, the slab goes back. At most what a trainer holds
at one time is ever mapped.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections import deque
from typing import Any


class Slabs:
    """Slabs by size; any thread may drop the last view."""

    def __init__(self) -> None:
        self._idle: dict[int, deque[mmap.mmap]] = {}

    def take(self, num_bytes: int) -> Any:
        """A writable buffer of ``num_bytes``, page aligned, with whatever it held before.

        It is a slab of its own until nothing refers to it: arrays made of it (``np.frombuffer``) do.
        """
        idle = self._idle.setdefault(num_bytes, deque())
        try:
            memory = idle.pop()
        except IndexError:
            memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # a fork has its own
        lent = (ctypes.c_char * num_bytes).from_buffer(memory)  # dies with its last view, unlike the mapping
        weakref.finalize(lent, idle.append, memory).atexit = False
        return lent
