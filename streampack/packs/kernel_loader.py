"""The client's compiled kernels, once the process has built some tokens.

Importing numba takes most of a second. So ``streampack.kernels`` begins after ``LOADED_AFTER`` tokens: a process that
reads only a few steps does not pay, and the first step is not delayed. Until the kernels are there, or if numba is
missing or does not work, numpy builds the same arrays.
"""

from __future__ import annotations

from collections.abc import Callable

from streampack.core.layout import layout_kernels
from streampack.kernels import background

LOADED_AFTER = 1 << 20
"""Number of tokens built by the process after which the kernels are asked for."""


class Kernels:
    """The compiled functions of ``layout_kernels``; each is None until it is compiled."""

    def __init__(self) -> None:
        self.derive: Callable[..., None] | None = None
        self.lay_out: Callable[..., int] | None = None
        self._asked_of: background.Compiler | None = None
        """The compiler of this process, once it was asked; a fork has another one."""
        self._tokens = 0

    def count_tokens(self, num_tokens: int) -> None:
        """Count tokens that were built, and ask for the kernels after ``LOADED_AFTER`` of them."""
        self._tokens += num_tokens
        if self._tokens >= LOADED_AFTER and self.derive is None:
            self.load()
            self._take()

    def load(self) -> None:
        """Ask for the kernels, unless they were asked for. Any thread may call it."""
        if self._asked_of is not background.compiler:
            self._asked_of = background.compiler
            for kernel in (layout_kernels.lay_out, layout_kernels.derive):
                background.compiler.ask(kernel, kernel.keys)

    def wait(self) -> None:
        """Wait until the kernels are there, or cannot be had, if they were asked for."""
        background.compiler.wait()
        self._take()

    def _take(self) -> None:
        """Publish the kernels once they are compiled."""
        if layout_kernels.derive.is_compiled:
            self.derive, self.lay_out = layout_kernels.derive, layout_kernels.lay_out


kernels = Kernels()
"""The kernels of this process."""
