"""What a broker with some rules makes of some lengths: predicted by forming and dealing them as it does.

Nothing here is another way of packing. The over-long policy, the merge by weights, FORM and DEAL are the broker's own,
on lengths alone; so where all samples of a pass are given, the steps are those of a run with these rules.

Where they are a sample of the pass, what holds in the long run is told: the figures are those of the steps that were
formed while the window was full, or of whole batches, with the whole budget; and the steps of a pass are estimated
(``pass_size``), those of a warm-up among them.

``useful`` (``rank_loads``) sums up all that is lost; the empty packs that a pass of a stream ends with are told apart.
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
AT_ONCE = 16_384
"""Samples that are admitted together: each choice goes over all that are held."""
FormedSteps = tuple[list[PlannedStep], int]
"""Steps, and how many of them were formed before the end was known."""


@dataclass(frozen=True, slots=True, eq=False)
class Order:
    """Samples as FORM gets them: ``lengths`` int64 [n] in merge order, and which ``parts`` of a split sample they are,
    0 for a whole one. ``ended``: these are a whole pass.

    ``overlong`` samples were over the budget, and ``lost_share`` of all tokens went with them.
    """

    lengths: I64
    parts: I64
    ended: bool
    overlong: int
    lost_share: float


@dataclass(frozen=True, slots=True)
class Forecast:
    """Figures of one setting; shares are of 1. ``waste`` by cause is a share of all that is delivered, and ``filled``
    what real tokens are of it.

    ``utilization``, that of slots and ``bin_balance`` are of the packs that FORM makes, of the whole budget each; the
    rest is of packs as ranks get them. ``useful``: see ``rank_loads``; ``useful_error`` is its standard error, from how
    steps differ; 1 where there is but one. ``cost_max_over_mean`` is the broker's: of the packs of a micro-batch, over
    the ranks, averaged; ``attention_`` that of b*s*s alone; ``step_cost_max_over_mean`` that of the ranks' sums over a
    step. FORM makes ``formed_packs`` for a step, on the average; a rank's step has ``micro_batches_low`` to ``_high``,
    and ``split_share`` of all packs are what DEAL splits off. ``packs`` (with samples) and ``steps`` are those of one
    pass, the steps between ``steps_low`` and ``steps_high``; all are None where nobody knows how much a pass is.
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
    """``rules`` for one pass over the streams of a workload; those that ``rules`` name keep weights and policies.

    ``overlong`` stands in for the policy ``error``, with which a run would stop, or for the policies of all streams.
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


def with_packer(rules: Rules, packer: str, joint: Balance = ALONE, **changes: Any) -> Rules:
    """``rules`` with another packer, without the keys that it does not have, and with other ``changes``.

    ``joint`` is no packer in the rules, but a balance: it has the group and patience of ``joint`` then. Raises
    ValueError where they contradict each other.
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
    """The samples of a workload as the broker merges them; where a sample of a stream is at its end, it ends there."""
    merge = merge_of(rules)
    found, tokens, lost, overlong = list[I64](), 0, 0, 0
    for stream, terms in zip(workload.streams, rules.streams, strict=True):
        for partition, ended in zip(stream.partitions, stream.ended, strict=True):
            pieces = apply_overlong(partition, rules.budget, terms.overlong)
            handles = np.where(pieces.length > 0, pieces.part, -1)  # which sample it is does not matter
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
    """What ``rules`` make of a workload on ``dp`` ranks and ``pp`` stages; ``order`` is ``order_of`` the same budget
    and streams, ``made`` are the steps of ``steps_of``, where they were formed before.

    Raises UserError where the packer refuses, or a mesh is.
    """
    steps, full = made or steps_of(order, rules)
    if not order.ended and full:  # what the end of the sample does is not what the end of the pass does
        steps = steps[:full]
    if not steps:
        raise UserError(f"got {len(order.lengths):,} samples, expected enough for a step: tail: drop leaves nothing")
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
    """Shares of all that is delivered. Of a stream that was not read to its end so many packs are empty; else those
    are that DEAL has.
    """
    if ended or rules.batch is not None:
        return waste_shares(on_mesh.waste, 0.0, on_mesh.delivered)
    waste, empty = on_mesh.waste.copy(), CAUSES.index("empty_pack")
    delivered, waste[empty] = on_mesh.delivered - int(waste[empty]), 0
    each = float(rules.own_widths(np.zeros(1, np.int64))[0]) if pp == 1 else delivered / max(on_mesh.filled, 1)
    return waste_shares(waste, num_empty * each, delivered)


def steps_of(order: Order, rules: Rules) -> FormedSteps:
    """The steps that a forecast is of: in the long run, where a pass is not all here, there is no warm-up."""
    long_run = rules if order.ended else msgspec.structs.replace(rules, warmup=None)
    return formed(order.lengths, long_run, order.parts)


def formed(lengths: I64, rules: Rules, parts: I64 | None = None, at_once: int = AT_ONCE) -> FormedSteps:
    """The steps that FORM makes of samples of these lengths, which are whole ones where ``parts`` says nothing else.

    Packs know their samples by place: ``handles`` are positions in ``lengths``. Steps do not depend on how many are
    admitted ``at_once``; the time that it takes does.
    """
    table = SampleTable(max(len(lengths), 1))
    handles = table.take(len(lengths))
    table.length[handles] = lengths
    table.part[handles] = 0 if parts is None else parts
    former, steps = Former(rules, table), list[PlannedStep]()

    def form() -> int:
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
