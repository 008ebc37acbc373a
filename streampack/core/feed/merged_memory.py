"""A feed's memory for what is merged: in the window, in packs, in steps that some rank has not returned.

Samples that wait for the merge are bounded by each partition's quota, those merged by this. Neither borrows from the
other nor from another feed, so the merge can always get the sample it waits for, and a full arena cannot deadlock.
"""

from __future__ import annotations

from streampack.core.model.capacity import needed_tokens
from streampack.core.model.rules import Rules
from streampack.core.model.samples import I64, SampleTable


class MergedMemory:
    """Counts the tokens of samples in ``table`` that are merged and not yet released, up to ``limit_tokens``."""

    def __init__(self, limit_tokens: int, rules: Rules, max_sample_tokens: int, table: SampleTable) -> None:
        self.limit_tokens = limit_tokens
        self.needed_tokens = needed_tokens(rules, max_sample_tokens)
        """Below that a step might never be whole."""
        self.held_tokens = 0
        self._max_sample_tokens, self._table = max_sample_tokens, table

    @property
    def room(self) -> int:
        """Tokens that may be merged now; one sample of any length goes beyond it and still fits."""
        return self.limit_tokens - self.held_tokens - self._max_sample_tokens

    def hold(self, handles: I64) -> None:
        """Samples, int64 [n], are merged; or they were dropped unmerged, and count until they are released."""
        self.held_tokens += int(self._table.length[handles].sum())

    def release(self, handles: I64) -> None:
        """Nobody reads them any more."""
        self.held_tokens -= int(self._table.length[handles].sum())
