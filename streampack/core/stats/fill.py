"""Measures of how full packs are, used to compare packers and runs.

The definitions are NeMo-RL's (``nemo_rl/data/packing/metrics.py``), so that numbers can be compared. All are functions
of the packs' token sums and the budget. The caller passes sums of real or of aligned tokens; their difference is the
padding of alignment.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from streampack.core.model.steps import PlannedPacks


@dataclass(frozen=True, slots=True)
class Figures:
    """Measures of how full packs are. Ratios are fractions of 1. All measures are 0 if there are no packs."""

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
    """Return the measures of packs that hold ``sums`` tokens, int64 [packs]; each has a capacity of ``budget`` tokens.

    Raises ValueError for a budget below 1, a negative sum, or one above the budget.

    >>> figures(np.array([8, 4]), 8).utilization
    0.75
    """
    if budget >= 1 and len(sums) and (int(sums.min()) < 0 or int(sums.max()) > budget):
        raise ValueError(f"got packs of {int(sums.min())} to {int(sums.max())} tokens, expected 0 to {budget} tokens")
    return from_moments(len(sums), int(sums.sum()), int(sums @ sums), budget)


def from_moments(packs: int, tokens: int, square_tokens: int, budget: int) -> Figures:
    """Return the measures of ``packs`` packs that hold ``tokens`` in total.

    The squares of the packs' tokens add up to ``square_tokens``. The result equals that of ``figures``, and needs only
    totals. Raises ValueError for a budget below 1.

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
        bin_balance=_balance(packs, tokens, square_tokens),
        theoretical_min_packs=minimum,
        packing_efficiency=minimum / packs,
    )


def of_budgets(moments: Mapping[int, tuple[int, int, int]]) -> Figures:
    """Return the measures of packs of several budgets: by budget the packs, their tokens, and the sum of squares.

    Bin balance compares how full the packs are, since packs of another budget hold more tokens.

    >>> of_budgets({8: (2, 12, 80)}) == from_moments(2, 12, 80, 8)
    True
    >>> of_budgets({8: (1, 8, 64), 16: (1, 16, 256)}).bin_balance
    1.0
    """
    if len(moments) == 1:
        ((budget, of_one),) = moments.items()
        return from_moments(*of_one, budget)
    packs, tokens = (sum(column) for column in list(zip(*moments.values(), strict=True))[:2]) if moments else (0, 0)
    if not packs:
        return Figures()
    utilization = tokens / sum(count * budget for budget, (count, _, _) in moments.items())
    minimum = sum(-(-total // budget) for budget, (_, total, _) in moments.items())
    fill = sum(total / budget for budget, (_, total, _) in moments.items())
    square_fill = sum(squares / budget**2 for budget, (_, _, squares) in moments.items())
    return Figures(
        packs=packs, tokens=tokens, utilization=utilization, waste_ratio=1 - utilization,
        bin_balance=_balance(packs, fill, square_fill), theoretical_min_packs=minimum,
        packing_efficiency=minimum / packs,
    )  # fmt: skip


@dataclass(slots=True)
class Totals:
    """Totals over all steps of all iterations.

    ``slot_tokens`` are aligned tokens. ``square_tokens`` and ``square_slot_tokens`` are sums of the squares of the
    packs' tokens. ``dropped_*`` count what ``tail: drop`` dropped. ``shared_tokens`` are tokens that samples share with
    samples before them: ``tokens`` does not count these again.
    """

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
    shared_tokens: int = 0

    def add(self, packs: PlannedPacks, steps: int = 1) -> None:
        """Add the packs of one or several ``steps``."""
        self.steps += steps
        self.packs += len(packs)
        self.samples += len(packs.handles)
        self.empty_packs += len(packs) - int(np.count_nonzero(packs.counts))
        self.tokens += int(packs.tokens.sum())
        self.slot_tokens += int(packs.slots.sum())
        self.square_tokens += int(packs.tokens @ packs.tokens)
        self.square_slot_tokens += int(packs.slots @ packs.slots)

    def __add__(self, other: Totals) -> Totals:
        """Return the totals of both."""
        return Totals(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))

    @property
    def moments(self) -> tuple[int, int, int]:
        """Packs, their tokens, and the sum of the squares."""
        return self.packs, self.tokens, self.square_tokens

    @property
    def slot_moments(self) -> tuple[int, int, int]:
        """The same of aligned tokens."""
        return self.packs, self.slot_tokens, self.square_slot_tokens


def _balance(packs: int, tokens: float, square_tokens: float) -> float:
    """Return ``bin_balance``: 1 - sample standard deviation / mean of the packs' tokens, from their sums."""
    if not tokens:
        return 0.0
    if packs == 1:
        return 1.0
    variance = max(packs * square_tokens - tokens**2, 0) / (packs * (packs - 1))
    return 1.0 - math.sqrt(variance) * packs / tokens
