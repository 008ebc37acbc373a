"""Traffic and report that the pipes of streampack and the bare pipe share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from benchmarks.lengths import I64, STATIONARY, lengths_of

NUM_PRODUCERS = 2
MESSAGE_BYTES = 1 << 20
PACK_TOKENS = 8192
MEAN_SAMPLE_TOKENS = 500
SAMPLE_SIGMA = 1.0  # of the log of the length
WARM_UP_S = 0.5
LENGTHS = ("lognormal", *STATIONARY)


@dataclass(frozen=True)
class Traffic:
    """How tokens travel: over ``ipc`` or ``tcp`` (127.0.0.1), as ``int32`` or ``uint16``, in samples of ``lengths``.

    ``lognormal`` has a mean of 500 tokens; the others are those of ``lengths.py``, of which ``source_code`` are the
    files of Python's standard library. All are clipped to a pack. Raises ValueError for another transport or dtype.
    """

    transport: Literal["ipc", "tcp"] = "ipc"
    tokens: Literal["int32", "uint16"] = "int32"
    lengths: str = "lognormal"

    def __post_init__(self) -> None:
        for name, value, known in (
            ("transport", self.transport, ("ipc", "tcp")),
            ("tokens", self.tokens, ("int32", "uint16")),
            ("lengths", self.lengths, LENGTHS),
        ):
            if value not in known:
                raise ValueError(f"got {name} {value!r}, expected one of {', '.join(known)}")

    @property
    def token_bytes(self) -> int:
        return np.dtype(self.tokens).itemsize

    def draw(self, seed: int, num_tokens: int) -> I64:
        """Lengths of samples, int64 [n] in 1..PACK_TOKENS, at least ``num_tokens`` in all."""
        if self.lengths != "lognormal":
            drawn = lengths_of(self.lengths, PACK_TOKENS, max(64, num_tokens // 32), seed)
        else:
            mu = np.log(MEAN_SAMPLE_TOKENS) - SAMPLE_SIGMA**2 / 2
            count = max(64, 4 * num_tokens // MEAN_SAMPLE_TOKENS)
            drawn = np.random.default_rng(seed).lognormal(mu, SAMPLE_SIGMA, count).astype(np.int64)
            drawn = drawn.clip(1, PACK_TOKENS)
        return drawn[: int(np.searchsorted(np.cumsum(drawn), num_tokens)) + 1]


@dataclass(frozen=True)
class PipeResult:
    """What passed through a pipe between the first and the last token that were timed."""

    tokens: int
    seconds: float
    tokens_per_second: float
    cpu_seconds: dict[str, float]
    """By process, user and system, over the same interval."""
    peak_bytes: dict[str, int] = field(default_factory=dict)
    """By process, the most that was resident, since its start."""
    next_ms: dict[str, float] = field(default_factory=dict)
    """How long the consumer waited for its next pack: p50, p99, p99.9, and the most."""
