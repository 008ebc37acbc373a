"""Deal formed steps to the ranks of a mesh, and sum up padding, load imbalance and the ranks' useful time.

A pack of T tokens takes the time ``a*T + b * (sum of s*s)``, where s are the samples' lengths, and the cost of its
media. The rules' cost of a sample gives a and b. A micro-batch takes as long as its most expensive pack. ``useful`` is
the share of that time that real tokens and media need. The rest is padding and waiting for another rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from streampack.config.rules_settings import PlannedMesh
from streampack.core.deal.assignment import deal_step, packs_of_mesh, split
from streampack.core.flops.cost_fit import StepLoad
from streampack.core.model.keys.planning_keys import Balance, Positive
from streampack.core.model.rules import Rules
from streampack.core.model.samples import I64
from streampack.core.model.steps import PlannedStep
from streampack.core.stats.padding import CAUSES, padding_of
from streampack.errors import UserError
from streampack_services.forecast.media_sizes import PATCHES, media_costs
from streampack_services.ledger.step_rows import StepRows

F64 = NDArray[np.float64]


class PlanMesh(PlannedMesh, frozen=True, kw_only=True):
    """A mesh with ``pp`` pipeline stages, which change how packs are dealt and how long they are."""

    pp: Positive = 1


@dataclass(frozen=True, slots=True)
class Dealt:
    """Steps that were dealt to a mesh.

    ``figures``: fields of ``Forecast`` that the mesh alone decides, by name. ``waste``: padding tokens by cause, int64
    [CAUSES]. ``delivered``: all tokens with padding. ``filled``: number of packs with samples.
    """

    figures: dict[str, float]
    waste: I64
    delivered: int
    filled: int


@dataclass(frozen=True, slots=True, eq=False)
class _OneStep:
    """One step after DEAL.

    By pack, int64 [packs]: ``slots`` (tokens with alignment), ``widths`` (tokens with all padding). By [micro-batch,
    rank], int64: ``costs``, ``attention`` (cost b*s*s alone), ``patches``, ``times`` (cost of the whole width).
    ``real``: cost of the real tokens and media. ``waste``: padding tokens by cause, int64 [CAUSES]. ``formed``: number
    of packs before DEAL.
    """

    slots: I64
    widths: I64
    costs: I64
    attention: I64
    patches: I64
    times: I64
    real: int
    waste: I64
    formed: int


def dealt(steps: list[PlannedStep], lengths: I64, media: I64 | None, dp: int, pp: int) -> Dealt:
    """Deal ``steps`` to ``dp`` ranks and ``pp`` pipeline stages; return their figures.

    The steps' handles are indices into ``lengths``, int64 [n], and into ``media``, the sizes of the samples' media,
    int64 [n, 4]. Raises UserError if a batch has fewer samples than micro-batches and the rules forbid empty ones.
    """
    dealt_steps = [_deal(step, lengths, media, dp, pp) for step in steps]
    batched = steps[0].rules.batch is not None
    # Only the end of a pass has empty packs, unless steps are batches.
    whole = dealt_steps if batched else [step for step in dealt_steps if step.slots.all()] or dealt_steps
    real = np.array([step.real for step in whole], np.float64)
    took = np.array([step.times.max(axis=1).sum() for step in whole], np.float64) * dp
    micro = [len(step.costs) for step in dealt_steps]
    packs = sum(len(step.slots) for step in dealt_steps)
    filled = sum(int((step.slots > 0).sum()) for step in dealt_steps)
    figures = {
        "useful": float(real.sum() / took.sum()),
        "useful_error": float((real / took).std(ddof=1) / np.sqrt(len(whole))) if len(whole) > 1 else 1.0,
        "cost_max_over_mean": _max_over_mean([step.costs for step in dealt_steps]),
        "step_cost_max_over_mean": _max_over_mean([step.costs.sum(axis=0, keepdims=True) for step in dealt_steps]),
        "attention_max_over_mean": _max_over_mean([step.attention for step in dealt_steps]),
        "patches_max_over_mean": _max_over_mean([step.patches for step in dealt_steps]),
        "micro_batches": sum(micro) / len(micro),
        "micro_batches_low": min(micro),
        "micro_batches_high": max(micro),
        "split_share": max(filled - sum(step.formed for step in dealt_steps), 0) / max(packs, 1) if batched else 0.0,
    }
    delivered = sum(int(step.widths.sum()) for step in dealt_steps)
    return Dealt(figures, np.sum([step.waste for step in dealt_steps], axis=0), delivered, filled)


def _deal(step: PlannedStep, lengths: I64, media: I64 | None, dp: int, pp: int) -> _OneStep:
    """Deal one step by its own rules; split its packs as DEAL does if the mesh needs more of them."""
    rules, handles, bounds = step.rules, step.packs.handles, step.packs.bounds
    count = packs_of_mesh(rules, len(step.packs), dp, pp)
    if rules.batch is not None and rules.batch.empty == "error" and len(handles) < count:
        raise UserError(
            f"Got a batch of {len(handles)} samples with dp={dp} and `empty: error`, expected at least {count} "
            f"samples, so that each rank gets {count // dp} micro-batches. Use larger batches or `empty: pad`."
        )
    columns = _columns(lengths[handles], None if media is None else media[handles], rules)
    if count > len(step.packs):
        alone = np.zeros(len(handles), np.uint8)  # groups are not forecast
        parts, _ = split(bounds, columns[2], alone, count)
        columns, bounds = columns[:, np.concatenate(parts)], np.cumsum([0, *map(len, parts)])
    sums = np.concatenate([np.zeros((len(columns), 1), np.int64), np.cumsum(columns, axis=1)], axis=1)
    tokens, slots, costs, real, of_media, patches = np.diff(sums[:, bounds])
    widths = rules.step_widths(slots, pp)
    (a, _), numbers = rules.balance.factors, deal_step(rules, costs, dp)
    times = costs + a * (widths - slots)
    return _OneStep(
        slots, widths, costs[numbers], (costs - of_media - a * slots)[numbers], patches[numbers], times[numbers],
        int(real.sum()), padding_of(tokens, slots, widths, rules), len(step.packs),
    )  # fmt: skip


def load_of(rows: StepRows, rules: Rules, dp: int, pp: int, balance: Balance | None = None) -> StepLoad:
    """Return the load of a recorded step, dealt by ``rules`` to ``dp`` ranks; media and shared tokens count nothing.

    ``balance`` says what a unit of attention is, by default that of the rules. A step whose packs DEAL splits counts as
    if its packs were not split.
    """
    lengths, bounds = rows.own_lengths, rows.bounds
    units = balance or rules.balance
    if not units.factors[1] and not units.window_factors[1]:
        units = Balance(b=1)
    slots = -(-lengths // rules.align.sample) * rules.align.sample
    attention = units.costs(slots) - units.factors[0] * slots
    sums = np.stack([slots, attention, rules.balance.costs(slots)])
    ends = np.concatenate([np.zeros((len(sums), 1), np.int64), np.cumsum(sums, axis=1)], axis=1)
    by_pack = np.diff(ends[:, bounds])
    empty = -len(bounds[1:]) % dp
    by_pack = np.concatenate([by_pack, np.zeros((len(sums), empty), np.int64)], axis=1)
    widths, numbers = rules.step_widths(by_pack[0], pp), deal_step(rules, by_pack[2], dp)
    return StepLoad(widths[numbers].astype(np.float64), by_pack[1][numbers].astype(np.float64))


def _columns(lengths: I64, media: I64 | None, rules: Rules) -> I64:
    """Return columns of samples with these tokens and sizes of media, int64 [6, n].

    These are their tokens, their tokens with alignment (slots), and the cost of the slots. Then follow the cost of the
    tokens, the cost of the media, and the patches. The costs of slots and of tokens contain that of the media.
    """
    slots = -(-lengths // rules.align.sample) * rules.align.sample
    costs, none = rules.balance.costs, np.zeros(len(lengths), np.int64)
    of_media, patches = (none, none) if media is None else (media_costs(media, rules.balance), media[:, PATCHES])
    return np.stack([lengths, slots, costs(slots) + of_media, costs(lengths) + of_media, of_media, patches])


def _max_over_mean(loads: list[I64]) -> float:
    """Return max / mean of each row [rank], averaged over the rows that are not all 0; 1 if there are none."""
    rows = [load[load.any(axis=1)] for load in loads]
    ratios: F64 = np.concatenate([load.max(axis=1) / load.mean(axis=1) for load in rows])
    return float(ratios.mean()) if len(ratios) else 1.0


def waste_shares(waste: I64, empty: float, delivered: float) -> dict[str, float]:
    """Return padding as shares of all delivered tokens, by cause.

    ``waste``: padding tokens by cause, int64 [CAUSES], of ``delivered`` tokens. ``empty``: tokens of further empty
    packs.
    """
    wasted = waste.astype(np.float64)
    wasted[CAUSES.index("empty_pack")] += empty
    return dict(zip(CAUSES, (wasted / max(delivered + empty, 1.0)).tolist(), strict=True))
