"""Import the client's compiled kernels in a thread, if numba is installed.

Importing numba takes most of a second; compiling takes longer, once per machine. Until then, or if numba is missing or
does not work, numpy builds the same arrays. The import begins after ``LOADED_AFTER`` tokens, so a process that reads
only a few steps does not pay, and the first step is not delayed.

A fork waits for the import. A child with a half-imported numba, whose locks belong to a thread that no longer exists,
would hang on importing numba. The end of the process waits, too, since LLVM would crash in the middle of its work.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
from collections.abc import Callable

log = logging.getLogger("streampack.client")

LOADED_AFTER = 1 << 20
"""Number of tokens built by the process after which the import begins."""


class Kernels:
    """The compiled functions of ``layout_kernels``; each is None until the import is done."""

    def __init__(self) -> None:
        self.derive: Callable[..., None] | None = None
        self.lay_out: Callable[..., int] | None = None
        self._thread: threading.Thread | None = None
        self._begun = threading.Lock()
        """Lock that the first call of ``load`` acquires for good, so that only one import begins."""
        self._tokens = 0

    def count_tokens(self, num_tokens: int) -> None:
        """Count tokens that were built, and begin the import after ``LOADED_AFTER`` of them."""
        self._tokens += num_tokens
        if self._tokens >= LOADED_AFTER:
            self.load()

    def load(self) -> None:
        """Begin the import in a thread, unless it has begun. Any thread may call it."""
        if self._begun.acquire(blocking=False):
            self._thread = threading.Thread(target=self._import, name="streampack-compile")
            os.register_at_fork(before=self.wait)
            self._thread.start()

    def wait(self) -> None:
        """Wait until the import has succeeded or failed, if it has begun."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _import(self) -> None:
        """Import the kernels and publish them; log if numba is missing or broken."""
        try:
            found = importlib.import_module("streampack.core.layout.layout_kernels")
        except Exception as error:  # numba is missing, or does not work on this machine
            log.info("numba is missing or does not work (%r), so numpy builds the tensors", error)
            return
        if hasattr(found.derive, "py_func"):  # with NUMBA_DISABLE_JIT they would be slow Python functions
            self.derive, self.lay_out = found.derive, found.lay_out


kernels = Kernels()
"""The kernels of this process."""
