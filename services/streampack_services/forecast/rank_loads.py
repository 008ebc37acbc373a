"""What a mesh makes of steps that FORM has made of lengths: dealt by the broker's own functions, and summed up.

A rank needs a*T + b * (sum of s*s over its samples) for a pack that is T tokens long, by the rules' cost of a sample,
and a micro-batch takes as long as its dearest pack. What real tokens cost is a share of that time: ``useful``. Padding
and waiting for another rank have the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from streampack.config.daemon_settings import PlannedMesh
from streampack.core.deal.assignment import deal_step, packs_of_mesh, split
from streampack.core.model.rules import Positive, Rules
from streampack.core.model.samples import I64
from streampack.core.model.steps import PlannedStep
from streampack.core.stats.padding import CAUSES, padding_of
from streampack.errors import UserError

F64 = NDArray[np.float64]


class PlanMesh(PlannedMesh, frozen=True, kw_only=True):
    """With the ``pp`` stages of a pipeline: they decide no alignment, but how packs are dealt and how long they are."""

    pp: Positive = 1


@dataclass(frozen=True, slots=True, eq=False)
class FormSamples:
    """Samples as FORM gets them, and what they come to by some rules: ``columns`` int64 [4, n], their tokens, slots
    (tokens when aligned), cost as DEAL has it, and cost of their real tokens alone.
    """

    rules: Rules
    columns: I64

    @classmethod
    def of(cls, lengths: I64, rules: Rules) -> FormSamples:
        """Of these ``lengths``, int64 [n]."""
        slots = -(-lengths // rules.align.sample) * rules.align.sample
        costs = rules.balance.costs
        return cls(rules, np.stack([lengths, slots, costs(slots), costs(lengths)]))


@dataclass(frozen=True, slots=True)
class Dealt:
    """Steps over a mesh. Max / mean over ranks, averaged: of cost by micro-batch and by step, of attention (b*s*s
    alone) by micro-batch.

    ``useful``: see the module; ``useful_error`` is its standard error, from how steps differ, 1 where there is but one.
    ``waste`` int64 [CAUSES] of ``delivered`` tokens, padding too. ``packs`` are all, the ``filled`` have samples, and
    ``split`` of them are more than were formed. A step has ``micro_batches`` for each rank: least, mean, most.
    """

    micro_batch: float
    step: float
    attention: float
    useful: float
    useful_error: float
    waste: I64
    delivered: int
    packs: int
    filled: int
    split: int
    micro_batches: tuple[int, float, int]


@dataclass(frozen=True, slots=True, eq=False)
class _OneStep:
    """A step of ``formed`` packs, dealt. By pack, int64 [packs]: tokens, slots, widths; by [micro-batch, rank]: costs,
    attention, times. ``real``: what its real tokens cost.
    """

    tokens: I64
    slots: I64
    widths: I64
    costs: I64
    attention: I64
    times: I64
    real: int
    formed: int


def dealt(steps: list[PlannedStep], samples: FormSamples, dp: int, pp: int) -> Dealt:
    """``steps`` whose handles are places in ``samples``, over ``dp`` ranks and ``pp`` stages.

    Raises UserError where the rules forbid what the mesh would need.
    """
    every = [_deal(step, samples, dp, pp) for step in steps]
    whole = _without_tail(every, samples.rules)
    real = np.array([each.real for each in whole], np.float64)
    took = np.array([each.times.max(axis=1).sum() for each in whole], np.float64) * dp
    micro = [len(each.costs) for each in every]
    wasted = [padding_of(each.tokens, each.slots, each.widths, samples.rules) for each in every]
    packs, filled = sum(len(each.slots) for each in every), sum(int((each.slots > 0).sum()) for each in every)
    formed = sum(each.formed for each in every)
    return Dealt(
        micro_batch=_max_over_mean([each.costs for each in every]),
        step=_max_over_mean([each.costs.sum(axis=0, keepdims=True) for each in every]),
        attention=_max_over_mean([each.attention for each in every]),
        useful=float(real.sum() / took.sum()),
        useful_error=float((real / took).std(ddof=1) / np.sqrt(len(whole))) if len(whole) > 1 else 1.0,
        waste=np.sum(wasted, axis=0),
        delivered=sum(int(each.widths.sum()) for each in every),
        packs=packs,
        filled=filled,
        split=max(filled - formed, 0) if samples.rules.batch is not None else 0,
        micro_batches=(min(micro), sum(micro) / len(micro), max(micro)),
    )


def _without_tail(steps: list[_OneStep], rules: Rules) -> list[_OneStep]:
    """Those without the empty packs that a pass of a stream ends with; all, where they all have some."""
    if rules.batch is not None:
        return steps
    return [each for each in steps if each.slots.all()] or steps


def _deal(step: PlannedStep, samples: FormSamples, dp: int, pp: int) -> _OneStep:
    rules = samples.rules
    handles, bounds = step.packs.handles, step.packs.bounds
    columns = samples.columns[:, handles]
    count = packs_of_mesh(rules, len(step.packs), dp, pp)
    if rules.batch is not None and rules.batch.empty == "error" and len(handles) < count:
        raise UserError(
            f"got a batch of {len(handles)} samples for dp={dp}, {count // dp} micro-batches each, expected {count} at "
            f"least: with empty: error a run would stop there"
        )
    if count == len(step.packs):
        sums = np.concatenate([np.zeros((4, 1), np.int64), np.cumsum(columns, axis=1)], axis=1)
        sums = np.stack([sums[:, end] - sums[:, begin] for begin, end in pairwise(bounds.tolist())], axis=1)
    else:
        alone = np.zeros(len(handles), np.uint8)  # of groups nothing is forecast
        parts, _ = split(bounds, columns[2], alone, count)
        sums = np.stack([columns[:, part].sum(axis=1) for part in parts], axis=1)
    tokens, slots, costs, real = sums
    widths = rules.step_widths(slots, pp)
    a, numbers = linear_cost(rules), deal_step(rules, costs, dp)
    attention = costs - a * slots
    return _OneStep(
        tokens, slots, widths, costs[numbers], attention[numbers], (attention + a * widths)[numbers], int(real.sum()),
        len(step.packs),
    )  # fmt: skip


def linear_cost(rules: Rules) -> int:
    """What a token costs whatever its sample is: ``a`` of a*s + b*s*s."""
    one, two = rules.balance.costs(np.array([1, 2])).tolist()
    return int(one) - (int(two) - 2 * int(one)) // 2


def _max_over_mean(found: list[I64]) -> float:
    """The dearest of each row by its mean, averaged over the rows of all that are not empty; 1 if there are none."""
    rows = [each[each.any(axis=1)] for each in found]
    ratios: F64 = np.concatenate([each.max(axis=1) / each.mean(axis=1) for each in rows])
    return float(ratios.mean()) if len(ratios) else 1.0


def waste_shares(waste: I64, empty: float, delivered: float) -> dict[str, float]:
    """By cause, of all that is ``delivered`` and ``empty`` tokens more, in packs without samples."""
    wasted = waste.astype(np.float64)
    wasted[CAUSES.index("empty_pack")] += empty
    return dict(zip(CAUSES, (wasted / max(delivered + empty, 1.0)).tolist(), strict=True))
