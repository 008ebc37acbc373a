"""``streampack report``: how well the cost of ``rules.balance`` explains the measured step times, and a better cost.

The log has the samples of each step, and ``hours.json`` the times of the last steps and the mesh. Each step is dealt
again as the run dealt it. ``core.flops.cost_fit`` fits the factors. The gain is that of the same packs, dealt by the
fitted cost.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from streampack.core.flops.cost_fit import fit_cost
from streampack.core.model.keys.planning_keys import Balance
from streampack_services.audit import why
from streampack_services.forecast.rank_loads import load_of
from streampack_services.ledger.formed_by import FormingRules
from streampack_services.ledger.run_hours import read_hours
from streampack_services.ledger.state_dir import read_ledger, state_folder
from streampack_services.ledger.step_rows import StepRows

Tree = dict[str, Any]
FEWEST = 30
"""Step times that a fit needs."""
MOST_STEPS = 500
"""Steps that a fit uses: the last ones."""

OF_NO_LOG: Tree = {"steps": 0, "why": "an address has no step times. Run 'streampack report STATE_DIR' for them"}
"""In place of the fit of a run at a broker's address."""


def fit_of(state_dir: Path, feed: str | None) -> Tree | None:
    """Return the fit of a feed's cost to its step times, for JSON; None without times.

    Without a fit, the tree has only ``steps``, the number of times, and ``why``.
    """
    with read_ledger(state_folder(state_dir, None)) as ledger:
        history = why.feed_of(ledger, feed)
        times = read_hours(state_dir)[history.name].step_times if history.name in read_hours(state_dir) else None
        if times is None or not times.seconds:
            return None
        forming = FormingRules(ledger, history)
        steps: list[tuple[StepRows, float, Balance]] = []
        for number in sorted(times.seconds)[-MOST_STEPS:]:
            rows = ledger.step(history.name, number, history.effective(number))
            if rows is not None:
                steps.append((rows, times.seconds[number], forming.of(rows).rules.balance))
        balance = steps[-1][2] if steps else Balance()
        used = [(rows, seconds) for rows, seconds, own in steps if own == balance]
        if len(used) < FEWEST:
            text = f"got {len(used)} step times with the same balance, expected at least {FEWEST}"
            return {"steps": len(used), "why": text}
        rules = [forming.of(rows).rules for rows, _ in used]
        loads = [load_of(rows, own, times.dp, times.pp) for (rows, _), own in zip(used, rules, strict=True)]
        fit = fit_cost(loads, np.array([seconds for _, seconds in used]), *_units(balance))
        better = _balance(balance, fit.a, fit.b)
        dealt = [
            load_of(rows, replace(own, balance=better), times.dp, times.pp, balance)
            for (rows, _), own in zip(used, rules, strict=True)
        ]
    before, after = (sum(map(fit.seconds, part)) for part in (loads, dealt))
    return {
        "steps": fit.steps, "left_out": fit.left_out, "dp": times.dp, "r2": fit.r2, "r2_before": fit.r2_before,
        "seconds_per_token": fit.a, "seconds_per_unit": fit.b, "seconds_per_step": fit.constant,
        "before": _factors(balance), "fitted": _factors(better), "gain": 1 - after / before,
    }  # fmt: skip


def sentences_of(fit: Tree | None) -> list[str]:
    """Return a fit as sentences; none without step times."""
    if fit is None:
        return []
    if "why" in fit:
        return [f"The cost of packs is not fitted to step times: {fit['why']}."]
    shares = {name: max(fit[name], 0.0) for name in ("r2_before", "r2")}
    keys = ", ".join(f"{name}: {value}" for name, value in fit["fitted"].items())
    text = (
        f"Step times: the cost of `balance` explains R^2 {shares['r2_before']:.2f} of the times of {fit['steps']:,} "
        f"steps, and a fitted cost {shares['r2']:.2f}."
    )
    gain = max(fit["gain"], 0.0)
    if gain < LEAST_GAIN:
        return [f"{text} Packs dealt by the fitted cost would save less than {LEAST_GAIN:.1%} of the time."]
    return [f"{text} Packs dealt by it would save {gain:.1%} of the time. In a new run, set `balance: {{{keys}}}`."]


LEAST_GAIN = 0.001
"""Share of the time from which a better cost is recommended."""


def _units(balance: Balance) -> tuple[int, int]:
    """Return the factors of tokens and of attention, which counts squares if they cost nothing."""
    return balance.factors[0], 1 if balance.factors[1] or balance.window_factors[1] else 0


def _balance(balance: Balance, a: float, b: float) -> Balance:
    """Return the balance with fitted factors, in seconds for each token and each unit of attention."""
    attention = balance.factors[1] or int(not balance.window_factors[1])
    if not b or a / b >= 1 << 32:
        return replace(balance, hidden_size=None, a=1, b=0, sliding=None)
    return replace(balance, hidden_size=None, a=round(a / b), b=attention)


def _factors(balance: Balance) -> Tree:
    """Return the keys of a balance that are factors of tokens."""
    a, b = balance.factors
    return {"a": a, "b": b} | ({} if balance.sliding is None else {"sliding": list(balance.sliding)})
