"""The packs that the model chunks of a virtual pipeline take from one loader, each in its own time.

A schedule of virtual stages runs a chunk on several micro-batches before it runs the next chunk. Each chunk therefore
takes every pack of a step, and keeps those that other chunks have taken before. Frameworks change the batch that they
take: Megatron-LM removes keys that a stage does not need. So each chunk gets a copy of the pack's keys.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from copy import copy
from typing import Any

from streampack.errors import UserError


class ChunkPacks:
    """The packs of all steps, for each of ``num_chunks`` chunks.

    Args:
        steps: Iterator of steps, each an iterable of packs. It may raise an error at each call.
        num_chunks: Number of model chunks of this rank.
        arrange: Changes a pack for all chunks.
    """

    def __init__(self, steps: Iterator[Any], num_chunks: int = 1, arrange: Callable[[Any], Any] | None = None) -> None:
        self._steps, self._arrange = steps, arrange
        self._packs: Iterator[Any] = iter(())
        self._waiting: list[deque[Any]] = [deque() for _ in range(num_chunks)]
        self._taken = [0] * num_chunks

    def take(self, chunk: int) -> Any:
        """Return the next pack of ``chunk``. Raises StopIteration after the last step, and UserError as ``check``."""
        waiting = self._waiting[chunk]
        if not waiting:
            pack = self._next()
            for each in self._waiting:
                each.append(pack)
        self._taken[chunk] += 1
        pack = waiting.popleft()
        return copy(pack) if len(self._waiting) > 1 else pack

    def check(self) -> None:
        """Raise UserError unless all chunks have taken the same packs."""
        if any(self._waiting):
            raise UserError(
                f"got model chunks of one rank that took {self._taken} packs so far, expected equal numbers at the end "
                f"of each iteration. Let every chunk take each micro-batch, since each needs the boundaries of samples"
            )

    def iterator(self, chunk: int) -> Iterator[Any]:
        """Return an iterator of the packs of ``chunk``."""
        while True:
            try:
                pack = self.take(chunk)
            except StopIteration:
                return
            yield pack

    def _next(self) -> Any:
        """Return the next pack for the chunk that is first."""
        while (pack := next(self._packs, None)) is None:
            self.check()
            self._packs = iter(next(self._steps))
        return pack if self._arrange is None else self._arrange(pack)
