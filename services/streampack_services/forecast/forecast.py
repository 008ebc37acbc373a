"""Forecast the steps that a broker with some rules forms from some lengths, and compute their figures.

The overlong policy, the merge by weights, FORM and DEAL are the broker's own functions, applied to lengths. If the
lengths are a whole pass, the steps are exactly those of a run with these rules.

If the lengths are a sample of a pass, the figures hold for the long run. They cover the steps that were formed while
the window was full, or whole batches, with the whole budget. The number of steps of a pass, with a warm-up, is
estimated by ``pass_size``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from streampack.core.form.former import Former
from streampack.core.intake.overlong import apply_overlong
from streampack.core.merge.schedule import merge_of
from streampack.core.model.rules import PACKER_KEYS, Balance, Overlong, Rules, StreamRules
from streampack.core.model.samples import I64, SampleTable
from streampack.core.model.steps import PlannedStep
from streampack.core.packers import parameters_of
from streampack.core.packers.joint.joint_bounds import PATIENCE
from streampack.core.stats.fill import figures
from streampack.core.stats.padding import CAUSES
from streampack.errors import UserError
from streampack_services.forecast.lengths import Workload
from streampack_services.forecast.pass_size import PassSize, size_of_pass
from streampack_services.forecast.rank_loads import Dealt, FormSamples, dealt, waste_shares

ALONE = Balance("joint", group=1)
"""The packer ``joint`` with groups of one pack."""
AT_ONCE = 16_384
"""Samples to admit at once; more make each choice of the packer slower."""
FormedSteps = tuple[list[PlannedStep], int]
"""Steps, and the number of steps that were formed before the end of the samples."""


@dataclass(frozen=True, slots=True, eq=False)
class Order:
    """Samples in the order of the merge, after the overlong policy.

    ``lengths``: tokens per sample, int64 [n]. ``parts``: index of each within its split sample, 0 for a whole sample.
    ``ended``: the samples are a whole pass. ``overlong``: number of samples over the budget. ``lost_share``: share of
    all tokens that the policy drops, 0 to 1.
    """

    lengths: I64
    parts: I64
    ended: bool
    overlong: int
    lost_share: float


@dataclass(frozen=True, slots=True)
class Forecast:
    """Figures of one setting; shares are from 0 to 1.

    Packs that FORM makes, as a share of their budget:
    ``utilization``: real tokens. ``slot_utilization``: tokens with alignment. ``bin_balance``: see ``core.stats.fill``.

    Packs that ranks get:
    ``filled``: real tokens / capacity. ``waste``: padding / capacity, by cause.
    ``useful``: share of the ranks' time spent on real tokens (see ``rank_loads``). ``useful_error``: its standard error
    over the steps, 1 for a single step.
    ``cost_max_over_mean``: load imbalance over the ranks of a micro-batch, averaged. ``attention_max_over_mean``: the
    same of the cost b*s*s alone. ``step_cost_max_over_mean``: the same of the ranks' costs of a whole step.
    ``micro_batches``: mean per rank and step, from ``micro_batches_low`` to ``micro_batches_high``.
    ``formed_packs``: mean packs per step before DEAL. ``split_share``: share of packs that DEAL splits off others.

    ``overlong`` samples are over the budget; the policy loses ``lost_share`` of all tokens.

    One pass has ``packs`` with samples and ``steps``, with a 95% interval from ``steps_low`` to ``steps_high``. These
    are None if the size of a pass is not known.
    """

    utilization: float
    slot_utilization: float
    bin_balance: float
    filled: float
    waste: dict[str, float]
    useful: float
    useful_error: float
    cost_max_over_mean: float
    step_cost_max_over_mean: float
    attention_max_over_mean: float
    formed_packs: float
    micro_batches: float
    micro_batches_low: int
    micro_batches_high: int
    split_share: float
    overlong: int
    lost_share: float
    packs: int | None
    steps: int | None
    steps_low: int | None
    steps_high: int | None


def planned_rules(rules: Rules, workload: Workload, overlong: Overlong, *, all_streams: bool = False) -> Rules:
    """Return ``rules`` for one pass over the streams of a workload; streams that ``rules`` name keep their weights.

    ``overlong`` replaces the policy ``error``, which would stop a run; with ``all_streams`` it replaces every policy.
    """
    known = {stream.name: stream for stream in rules.streams}
    streams = []
    for each in workload.streams:
        stream = known.get(each.name, StreamRules(each.name))
        policy = overlong if all_streams or stream.overlong == "error" else stream.overlong
        streams.append(
            msgspec.structs.replace(
                stream, partitions=len(each.partitions), passes=1, overlong=policy, pushed=False,
                on_exhaust="renormalise",
            )
        )  # fmt: skip
    return msgspec.structs.replace(rules, streams=tuple(streams), merge="schedule", between_passes="continue")


def rules_of_lengths(rules: Rules) -> Rules:
    """Return rules without those that lengths say nothing of: ``share``, and all that concerns media."""
    balance = msgspec.structs.replace(rules.balance, patches=None, items=None)
    return msgspec.structs.replace(rules, share=None, media_fields=(), limits=None, balance=balance)


def with_packer(rules: Rules, packer: str, joint: Balance = ALONE, **changes: Any) -> Rules:
    """Return ``rules`` with another packer and other ``changes``, without the keys that the packer does not have.

    The packer ``"joint"`` is ``exact_fill`` with the balance ``joint``; its group and patience come from ``joint``.
    Raises ValueError for rules that contradict each other.
    """
    foreign = {key: None for key in PACKER_KEYS if key not in parameters_of(packer)}
    kind = rules.balance.kind if rules.balance.kind != "joint" else "deal"
    balance = msgspec.structs.replace(rules.balance, kind=kind, group=None, patience=PATIENCE)
    if packer == "joint":
        packer, balance = (
            "exact_fill",
            msgspec.structs.replace(balance, kind="joint", group=joint.group, patience=joint.patience),
        )
    packs = {"padded": False, "shape": "fixed"} if rules.padded else {}
    return msgspec.structs.replace(rules, **packs, **foreign, packer=packer, balance=balance, **changes)


def order_of(workload: Workload, rules: Rules) -> Order:
    """Apply the overlong policy to the samples of a workload and merge the streams as the broker does."""
    merge = merge_of(rules)
    found, tokens, lost, overlong = list[I64](), 0, 0, 0
    for stream, terms in zip(workload.streams, rules.streams, strict=True):
        for partition, ended in zip(stream.partitions, stream.ended, strict=True):
            pieces = apply_overlong(partition, rules.budget, terms.overlong)
            handles = np.where(pieces.length > 0, pieces.part, -1)  # any handle will do, so it carries the part
            merge.push(len(found), handles, pieces.length, pieces.part)
            if ended:
                merge.end(len(found))
            found.append(pieces.length)
            tokens += int(partition.sum())
            lost += pieces.lost_tokens
            overlong += pieces.num_touched
    taken = merge.take(1 << 60)
    return Order(taken.lengths, taken.handles, workload.whole, overlong, lost / max(tokens, 1))


def forecast(
    workload: Workload, order: Order, rules: Rules, dp: int, pp: int = 1, made: FormedSteps | None = None
) -> Forecast:
    """Forecast the figures of ``rules`` for a workload on ``dp`` data-parallel ranks and ``pp`` pipeline stages.

    ``order``: the result of ``order_of`` for the same budget and streams. ``made``: the result of ``steps_of``, if
    known. Raises UserError if the packer or the mesh is not possible, or if no step can be formed.
    """
    steps, full = made or steps_of(order, rules)
    if not order.ended and full:  # the end of the sample is not the end of the pass
        steps = steps[:full]
    if not steps:
        raise UserError(
            f"Got {len(order.lengths):,} samples, which do not fill a step, and `tail: drop` drops incomplete steps. "
            "Pass more samples, or set `tail: pad`."
        )
    tokens, slots = np.concatenate([step.packs.sums[:2] for step in steps], axis=1)
    num_filled = int((slots > 0).sum())
    on_mesh = dealt(steps, FormSamples.of(order.lengths, rules), dp, pp)
    if order.ended:
        size: PassSize | None = PassSize(on_mesh.filled, len(steps), len(steps), len(steps), 0.0)
        num_empty: float = len(slots) - num_filled
    else:
        size = size_of_pass(workload, rules, slots[slots > 0], on_mesh.filled / len(steps))
        num_empty = num_filled * size.empty_share if size else 0
    in_all = rules.budget * max(num_filled + num_empty, 1)
    waste = _waste(on_mesh, rules, num_empty, pp, ended=order.ended)
    return Forecast(
        utilization=int(tokens.sum()) / in_all,
        slot_utilization=int(slots.sum()) / in_all,
        bin_balance=figures(tokens if order.ended else tokens[slots > 0], rules.budget).bin_balance,
        filled=1 - sum(waste.values()),
        waste=waste,
        useful=on_mesh.useful,
        useful_error=on_mesh.useful_error,
        cost_max_over_mean=on_mesh.micro_batch,
        step_cost_max_over_mean=on_mesh.step,
        attention_max_over_mean=on_mesh.attention,
        formed_packs=len(slots) / len(steps),
        micro_batches=on_mesh.micro_batches[1],
        micro_batches_low=on_mesh.micro_batches[0],
        micro_batches_high=on_mesh.micro_batches[2],
        split_share=on_mesh.split / max(on_mesh.packs, 1),
        overlong=order.overlong,
        lost_share=order.lost_share,
        packs=size.packs if size else None,
        steps=size.steps if size else None,
        steps_low=size.low if size else None,
        steps_high=size.high if size else None,
    )


def _waste(on_mesh: Dealt, rules: Rules, num_empty: float, pp: int, *, ended: bool) -> dict[str, float]:
    """Return the padding by cause, as shares of the capacity that is delivered.

    If the lengths are a sample of a pass, ``num_empty`` packs count as empty, in place of DEAL's own number of empty
    packs.
    """
    if ended or rules.batch is not None:
        return waste_shares(on_mesh.waste, 0.0, on_mesh.delivered)
    waste, empty = on_mesh.waste.copy(), CAUSES.index("empty_pack")
    delivered, waste[empty] = on_mesh.delivered - int(waste[empty]), 0
    each = float(rules.own_widths(np.zeros(1, np.int64))[0]) if pp == 1 else delivered / max(on_mesh.filled, 1)
    return waste_shares(waste, num_empty * each, delivered)


def steps_of(order: Order, rules: Rules) -> FormedSteps:
    """Form the steps of an order; leave out the warm-up of the budget for samples of only a part of a pass."""
    long_run = rules if order.ended else msgspec.structs.replace(rules, warmup=None)
    return formed(order.lengths, long_run, order.parts)


def formed(lengths: I64, rules: Rules, parts: I64 | None = None, at_once: int = AT_ONCE) -> FormedSteps:
    """Form the steps of samples with these ``lengths``, int64 [n]; the steps' ``handles`` are indices into ``lengths``.

    ``parts``: index of each sample within its split sample; None: all are whole samples. ``at_once``: samples to admit
    at once, which changes the speed but not the steps.
    """
    table = SampleTable(max(len(lengths), 1))
    handles = table.take(len(lengths))
    table.length[handles] = lengths
    table.part[handles] = 0 if parts is None else parts
    former, steps = Former(rules, table), list[PlannedStep]()

    def form() -> int:
        """Form all packs that FORM has enough samples for; return the number of steps so far."""
        while (request := former.request(max(len(lengths), 1))) is not None:
            steps.extend(former.apply(request.choose()))
        return len(steps)

    full = 0
    for first in range(0, len(lengths), at_once):
        former.admit(handles[first : first + at_once], lengths[first : first + at_once])
        full = form()
    former.closed = True
    form()
    return steps + former.cut(), full
