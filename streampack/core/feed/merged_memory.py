"""The limit of a feed's memory for merged samples: in the window, in packs, and in steps that a rank has not returned.

The quota of each partition bounds the samples that wait for the merge; this limit bounds the merged samples. Neither
limit borrows from the other or from another feed. So the merge can always get the sample that it waits for, and a full
arena causes no deadlock.
"""

from __future__ import annotations

from streampack.core.model.capacity import needed_tokens
from streampack.core.model.rules import Rules
from streampack.core.model.samples import I64, SampleTable


class MergedMemory:
    """Counts the tokens of merged samples of ``table`` until they are released, up to ``limit_tokens``."""

    def __init__(
        self, limit_tokens: int, rules: Rules, max_sample_tokens: int, table: SampleTable, max_extra_bytes: int = 0
    ) -> None:  # fmt: skip
        self.limit_tokens = limit_tokens
        self.needed_tokens = needed_tokens(rules, max_sample_tokens)
        """Least limit with which every step can be formed, in tokens."""
        self.held_tokens = 0
        self.held_samples = 0
        """Number of samples, or pieces of split samples, that were merged and not returned by all ranks."""
        self._token_bytes, self._table = rules.token_bytes, table
        self._reserve = max_sample_tokens + (max_extra_bytes // rules.token_bytes if rules.has_extra_bytes else 0)

    @property
    def room(self) -> int:
        """Tokens that may be merged now, with a reserve for one more sample of any length."""
        return self.limit_tokens - self.held_tokens - self._reserve

    def tokens_of(self, handles: I64) -> int:
        """Return the memory of samples, ``handles`` int64 [n], in tokens: extra bytes count as tokens."""
        tokens = int(self._table.length[handles].sum())
        if self._table.has("extra_bytes"):
            tokens += int((-(-self._table.extra_bytes[handles] // self._token_bytes)).sum())
        return tokens

    def hold(self, handles: I64) -> None:
        """Count samples that were merged, or dropped before the merge; ``handles`` int64 [n]."""
        self.held_tokens += self.tokens_of(handles)
        self.held_samples += len(handles)

    def release(self, handles: I64) -> None:
        """Stop counting released samples; ``handles`` int64 [n]."""
        self.held_tokens -= self.tokens_of(handles)
        self.held_samples -= len(handles)
