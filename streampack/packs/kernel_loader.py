"""The client's compiled kernels, where numba is installed: loaded beside the work, and never waited for.

Importing numba takes most of a second and compiling, the first time on a machine, some more; numpy builds the same
tensors until it is done, and for good where numba is missing or does not work. So it begins when a process has built
some: who reads a few steps, to validate or to look at them, needs no kernels, and no first step comes later for them.
A fork waits for the import: a child that inherits numba half imported, its locks held by a thread that is gone, would
hang where it imports numba itself. So does the end of the process, which LLVM would not survive in the middle of its
work.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
from collections.abc import Callable

log = logging.getLogger("streampack.client")

LOADED_AFTER = 1 << 20
"""So many tokens make the kernels worth their import."""


class Kernels:
    """Those of ``layout_kernels`` once they are there, else None; ``load`` begins to bring them."""

    def __init__(self) -> None:
        self.derive: Callable[..., None] | None = None
        self.lay_out: Callable[..., int] | None = None
        self._thread: threading.Thread | None = None
        self._begun = threading.Lock()
        """Taken by the first who begins, and kept."""
        self._tokens = 0

    def note(self, num_tokens: int) -> None:
        """So many more tokens were built."""
        self._tokens += num_tokens
        if self._tokens >= LOADED_AFTER:
            self.load()

    def load(self) -> None:
        """Begin to, in a thread; idempotent, and any thread may."""
        if self._begun.acquire(blocking=False):
            self._thread = threading.Thread(target=self._import, name="streampack-compile")
            os.register_at_fork(before=self.wait)
            self._thread.start()

    def wait(self) -> None:
        """Until they are there, or known not to come."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _import(self) -> None:
        try:
            found = importlib.import_module("streampack.core.layout.layout_kernels")
        except Exception as error:  # none, or whatever it finds amiss with this machine: numpy does without
            log.info("numba does not work here (%r): numpy builds the tensors", error)
            return
        if hasattr(found.derive, "py_func"):  # else NUMBA_DISABLE_JIT has left them plain Python
            self.derive, self.lay_out = found.derive, found.lay_out


kernels = Kernels()
"""Of this process."""
