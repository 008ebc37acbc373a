"""How full the packs are: the figures that every packer and every run is judged by.

The definitions are NeMo-RL's (``nemo_rl/data/packing/metrics.py``), so that numbers can be laid
side by side. All of them are functions of the packs' token sums and the budget: whether the sums
count real or padded tokens is the caller's choice, and alignment waste is the difference.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from streampack.core.model.steps import PlannedPacks


@dataclass(frozen=True, slots=True)
class Figures:
    """Section 7's figures; ratios are of 1, not of 100. All are 0 when there are no packs."""

    packs: int = 0
    tokens: int = 0
    #: tokens / (packs * budget)
    utilization: float = 0.0
    #: 1 - utilization
    waste_ratio: float = 0.0
    #: 1 - sample standard deviation (n - 1) of the packs' utilization / its mean; 1 for one pack; may be negative
    bin_balance: float = 0.0
    #: ceil(tokens / budget): no packing has fewer, and lengths above budget / 2 may allow no packing with so few
    theoretical_min_packs: int = 0
    #: theoretical_min_packs / packs
    packing_efficiency: float = 0.0


def figures(sums: NDArray[np.int64], budget: int) -> Figures:
    """The figures of packs that hold ``sums`` tokens, int64 [packs], of ``budget`` tokens each.

    Raises ValueError for a budget below 1, a negative sum, or one above the budget.

    >>> figures(np.array([8, 4]), 8).utilization
    0.75
    """
    if budget < 1:
        raise ValueError(f"got a budget of {budget} tokens, expected at least 1")
    packs = len(sums)
    if not packs:
        return Figures()
    if int(sums.min()) < 0 or int(sums.max()) > budget:
        raise ValueError(f"got packs of {int(sums.min())} to {int(sums.max())} tokens, expected 0 to {budget}")
    tokens = int(sums.sum())
    minimum = -(-tokens // budget)
    return Figures(
        packs=packs,
        tokens=tokens,
        utilization=tokens / (packs * budget),
        waste_ratio=1 - tokens / (packs * budget),
        bin_balance=_balance(sums),
        theoretical_min_packs=minimum,
        packing_efficiency=minimum / packs,
    )


def from_moments(packs: int, tokens: int, square_tokens: int, budget: int) -> Figures:
    """The figures of ``packs`` packs whose sums add up to ``tokens`` and their squares to ``square_tokens``.

    For a run that counts and keeps no sums: the integers are exact, so this equals ``figures`` up to rounding.

    >>> from_moments(2, 12, 80, 8) == figures(np.array([8, 4]), 8)
    True
    """
    if budget < 1:
        raise ValueError(f"got a budget of {budget} tokens, expected at least 1")
    if not packs:
        return Figures()
    minimum = -(-tokens // budget)
    return Figures(
        packs=packs,
        tokens=tokens,
        utilization=tokens / (packs * budget),
        waste_ratio=1 - tokens / (packs * budget),
        bin_balance=_balance_from_moments(packs, tokens, square_tokens),
        theoretical_min_packs=minimum,
        packing_efficiency=minimum / packs,
    )


@dataclass(slots=True)
class Totals:
    """What was formed, summed over all steps of all iterations: for the figures of section 7 of the packing design."""

    steps: int = 0
    packs: int = 0
    empty_packs: int = 0
    samples: int = 0
    tokens: int = 0
    slot_tokens: int = 0
    square_tokens: int = 0
    square_slot_tokens: int = 0
    dropped_samples: int = 0
    dropped_tokens: int = 0

    def add(self, packs: PlannedPacks, steps: int = 1) -> None:
        """Count the packs of a step, or of some."""
        self.steps += steps
        self.packs += len(packs)
        self.samples += len(packs.handles)
        self.empty_packs += len(packs) - int(np.count_nonzero(packs.counts))
        self.tokens += int(packs.tokens.sum())
        self.slot_tokens += int(packs.slots.sum())
        self.square_tokens += int(packs.tokens @ packs.tokens)
        self.square_slot_tokens += int(packs.slots @ packs.slots)


def _balance_from_moments(packs: int, tokens: int, square_tokens: int) -> float:
    if not tokens:
        return 0.0
    if packs == 1:
        return 1.0
    variance = (packs * square_tokens - tokens**2) / (packs * (packs - 1))
    return 1.0 - math.sqrt(variance) * packs / tokens


def _balance(sums: NDArray[np.int64]) -> float:
    """1 - sample deviation / mean; the budget cancels out. Empty packs alone balance nothing: 0."""
    mean = float(sums.mean())
    if mean == 0:
        return 0.0
    return 1.0 if len(sums) == 1 else 1.0 - float(sums.std(ddof=1)) / mean
