"""Streams of sample lengths to pack: six kinds that are the same throughout, and five whose lengths shift.

One kind is real: the files of Python's standard library, as long as their bytes at 3.2 bytes a token. The others are
drawn. All are clipped to the budget, as a truncating policy would, and depend on (kind, budget, count, seed) alone,
``source_code`` on the Python that runs, too. Lengths are int64 [n], in 1..budget.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

I64 = NDArray[np.int64]
Draw = Callable[[np.random.Generator, int, int], NDArray[np.float64]]

BUDGETS = (2048, 8192, 32768)
BYTES_A_TOKEN = 3.2


@cache
def file_lengths() -> NDArray[np.float64]:
    """Tokens in each file of the standard library that is not empty."""
    root = Path(sysconfig.get_paths()["stdlib"])
    sizes = [path.stat().st_size for path in sorted(root.rglob("*.py")) if "site-packages" not in path.parts]
    return np.array([size for size in sizes if size]) / BYTES_A_TOKEN


def _question_answer(rng: np.random.Generator, n: int, budget: int) -> NDArray[np.float64]:
    """Four in five are short questions, the fifth brings the text that it asks about."""
    return np.where(rng.random(n) < 0.8, rng.lognormal(5.2, 0.5, n), rng.lognormal(7.6, 0.6, n))


STATIONARY: dict[str, Draw] = {
    "short_sft": lambda rng, n, budget: rng.lognormal(5, 0.8, n),
    "question_answer": _question_answer,
    "math": lambda rng, n, budget: rng.lognormal(6.3, 0.7, n),
    "source_code": lambda rng, n, budget: rng.choice(file_lengths(), n),
    "rl_rollouts": lambda rng, n, budget: rng.lognormal(6.5, 1.2, n),
    "zipf": lambda rng, n, budget: np.minimum(rng.zipf(1.5, n), budget).astype(np.float64),
}


def _drift(rng: np.random.Generator, n: int, budget: int) -> NDArray[np.float64]:
    """The median grows from 150 to 3000 tokens."""
    return np.exp(np.linspace(5, 8, n) + rng.normal(0, 0.8, n))


def _curriculum(rng: np.random.Generator, n: int, budget: int) -> NDArray[np.float64]:
    """RL rollouts, roughly the short ones first."""
    lengths = np.log(rng.lognormal(6.5, 1.2, n))
    drawn: NDArray[np.float64] = np.exp(lengths[np.argsort(lengths + rng.normal(0, 0.5, n))])
    return drawn


def _blocks(rng: np.random.Generator, n: int, budget: int) -> NDArray[np.float64]:
    """Blocks of 1,000 of one kind each, drawn."""
    kinds = list(STATIONARY.values())
    return np.concatenate([kinds[rng.integers(6)](rng, min(1000, n - at), budget) for at in range(0, n, 1000)])


def _in_turns(rng: np.random.Generator, n: int, budget: int) -> NDArray[np.float64]:
    """4,096 chats, then as many that fill more than half of the budget, and so on: more than a window can mend."""
    long = rng.uniform(budget / 2 + 1, budget, n)
    return np.where(np.arange(n) // 4096 % 2 == 0, rng.lognormal(5, 0.8, n), long)


SHIFTING: dict[str, Draw] = {
    "drift_up": _drift,
    "drift_down": lambda rng, n, budget: _drift(rng, n, budget)[::-1],
    "curriculum": _curriculum,
    "blocks_of_kinds": _blocks,
    "short_long_in_turns": _in_turns,
}


def lengths_of(kind: str, budget: int, n: int = 49_152, seed: int = 0) -> I64:
    """``n`` lengths of a kind; each (kind, seed) is a stream of its own."""
    kinds = STATIONARY | SHIFTING
    rng = np.random.default_rng([seed, list(kinds).index(kind)])
    return np.clip(np.ceil(kinds[kind](rng, n, budget)), 1, budget).astype(np.int64)
