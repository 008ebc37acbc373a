"""Forecast the steps that a broker with some rules forms from some lengths, and compute their figures.

The overlong policy, the merge by weights, FORM and DEAL are the broker's own functions, applied to lengths. If the
lengths are a whole pass, the steps are exactly those of a run with these rules. So are those of samples with media, if
the sizes of the media are known.

If the lengths are a sample of a pass, the figures hold for the long run. They cover whole batches, or all steps but one
with empty packs, with the whole budget. A packer leaves the samples that fit badly in the window. So the steps that are
formed while a large window is full are better than a run's steps. The number of steps of a pass, with a warm-up, is
estimated by ``pass_size``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from streampack.core.form.former import Former
from streampack.core.merge.schedule import merge_of
from streampack.core.model.keys.planning_keys import PACKER_KEYS, Balance
from streampack.core.model.keys.stream_keys import Overlong
from streampack.core.model.lease_terms import terms_of
from streampack.core.model.rules import Rules, StreamRules
from streampack.core.model.samples import I64, SampleTable
from streampack.core.model.steps import PlannedStep
from streampack.core.packers import parameters_of
from streampack.core.packers.joint.joint_bounds import PATIENCE
from streampack.core.stats.displacement import Displacement, displaced, displacement_of, missed
from streampack.core.stats.fill import figures
from streampack.core.stats.media_figures import MediaFigures
from streampack.core.stats.padding import CAUSES
from streampack.errors import UserError
from streampack_services.forecast.lengths import Workload
from streampack_services.forecast.media_sizes import BYTES, ITEMS, PATCHES, media_costs, pieces_of, unfit
from streampack_services.forecast.pass_size import PassSize, size_of_pass
from streampack_services.forecast.rank_loads import Dealt, dealt, waste_shares

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
    all tokens that the policy drops, 0 to 1. ``media``: sizes of each sample's media, int64 [n, 4] (see
    ``media_sizes``); None without media. ``unfit``: number of samples whose media alone exceed the limits of a pack.
    """

    lengths: I64
    parts: I64
    ended: bool
    overlong: int
    lost_share: float
    media: I64 | None = None
    unfit: int = 0


@dataclass(frozen=True, slots=True)
class Forecast:
    """Figures of one setting; shares are from 0 to 1.

    Packs that FORM makes, as a share of their budget:
    ``utilization``: real tokens. ``slot_utilization``: tokens with alignment. ``bin_balance``: see ``core.stats.fill``.

    Packs that ranks get:
    ``filled``: real tokens / capacity. ``waste``: padding / capacity, by cause.
    ``useful``: share of the ranks' time spent on real tokens and media (see ``rank_loads``). ``useful_error``: its
    standard error over the steps, 1 for a single step.
    ``cost_max_over_mean``: load imbalance over the ranks of a micro-batch, averaged. ``attention_max_over_mean``: the
    same of the cost b*s*s alone. ``patches_max_over_mean``: the same of the number of patches.
    ``step_cost_max_over_mean``: the same of the ranks' costs of a whole step.
    ``micro_batches``: mean per rank and step, from ``micro_batches_low`` to ``micro_batches_high``.
    ``formed_packs``: mean packs per step before DEAL. ``split_share``: share of packs that DEAL splits off others.

    Order of the samples: the median and the 99th percentile of the displacement, in steps, without its sign
    (``core.stats.displacement``): ``displacement_p50``, ``displacement_p99``.

    ``overlong`` samples are over the budget, and ``unfit`` samples have media over the limits of a pack; the policy
    loses ``lost_share`` of all tokens.

    Media in the packs that FORM makes:
    ``bound_by``: share of the packs with samples, by the axis that is fullest compared with its limit. It is empty
    without media. ``most_patches``, ``most_items``: most of a pack.

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
    patches_max_over_mean: float
    formed_packs: float
    micro_batches: float
    micro_batches_low: int
    micro_batches_high: int
    split_share: float
    displacement_p50: int
    displacement_p99: int
    overlong: int
    unfit: int
    lost_share: float
    bound_by: dict[str, float]
    most_patches: int
    most_items: int
    packs: int | None
    steps: int | None
    steps_low: int | None
    steps_high: int | None


def planned_rules(rules: Rules, workload: Workload, overlong: Overlong, *, all_streams: bool = False) -> Rules:
    """Return ``rules`` for one pass over the streams of a workload; streams that ``rules`` name keep their weights.

    ``overlong`` replaces the policy ``error``, which would stop a run; with ``all_streams`` it replaces every policy.
    """
    named = {stream.name: stream for stream in rules.streams}
    streams = []
    for lengths in workload.streams:
        stream = named.get(lengths.name, StreamRules(lengths.name))
        policy = overlong if all_streams or stream.overlong == "error" else stream.overlong
        streams.append(
            msgspec.structs.replace(
                stream, partitions=len(lengths.partitions), passes=1, overlong=policy, pushed=False,
                on_exhaust="renormalise",
            )
        )  # fmt: skip
    return msgspec.structs.replace(rules, streams=tuple(streams), merge="schedule", between_passes="continue")


def rules_of_sizes(rules: Rules) -> Rules:
    """Return rules without stages and ``share``, because lengths and sizes of media do not show shared tokens."""
    return msgspec.structs.replace(rules, share=None, stages=())


def rules_of_lengths(rules: Rules) -> Rules:
    """Return rules without those that lengths say nothing of: ``share``, and all that concerns media."""
    return rules_of_sizes(rules.without_media())


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
    in_turn = "in_turn" in parameters_of(packer) and (rules.in_turn or rules.packer != packer)
    rules = msgspec.structs.replace(rules, **packs, **foreign, packer=packer, balance=balance, **changes)
    return msgspec.structs.replace(rules, in_turn=in_turn and rules.batch is None)


def order_of(workload: Workload, rules: Rules) -> Order:
    """Apply the overlong policy to the samples of a workload and merge the streams as the broker does."""
    merge = merge_of(rules)
    parts, media = list[I64](), list[I64]()
    first = tokens = lost = overlong = num_unfit = 0
    for stream, terms in zip(workload.streams, terms_of(rules), strict=True):
        for number, (partition, ended) in enumerate(zip(stream.partitions, stream.ended, strict=True)):
            sizes = stream.media[number] if stream.media is not None else None
            pieces = pieces_of(partition, sizes, terms)
            count = len(pieces.length)
            merge.push(
                len(parts), np.where(pieces.length > 0, np.arange(first, first + count), -1), pieces.length, pieces.part
            )
            if ended:
                merge.end(len(parts))
            parts.append(pieces.part)
            media += [sizes[pieces.source]] if sizes is not None else []
            first += count
            tokens += int(partition.sum())
            lost += pieces.lost_tokens
            overlong += int((partition > rules.budget).sum())
            num_unfit += int(unfit(partition, sizes, terms.limits).sum())
    taken = merge.take(1 << 60)
    return Order(
        taken.lengths, np.concatenate(parts)[taken.handles], workload.whole, overlong, lost / max(tokens, 1),
        np.concatenate(media)[taken.handles] if len(media) == len(parts) else None, num_unfit,
    )  # fmt: skip


def forecast(
    workload: Workload, order: Order, rules: Rules, dp: int, pp: int = 1, made: FormedSteps | None = None
) -> Forecast:
    """Forecast the figures of ``rules`` for a workload on ``dp`` data-parallel ranks and ``pp`` pipeline stages.

    ``order``: the result of ``order_of`` for the same budget and streams. ``made``: the result of ``steps_of``, if
    known. Raises UserError if the packer or the mesh is not possible, or if no step can be formed.
    """
    steps = long_run_steps(order, rules, made or steps_of(order, rules))
    steps = [msgspec.structs.replace(step, rules=rules) for step in steps]  # FORM does not know the shape of packs
    has_media = order.media is not None
    tokens, slots = np.concatenate([step.packs.sums[:2] for step in steps], axis=1)
    num_filled = int((slots > 0).sum())
    on_mesh = dealt(steps, order.lengths, order.media, dp, pp)
    of_media = _media_figures(steps, order, rules)
    if order.ended:
        size = PassSize(on_mesh.filled, len(steps), len(steps), len(steps))
        num_empty: float = len(slots) - num_filled
    else:
        size = size_of_pass(workload, rules, slots[slots > 0], on_mesh.filled / len(steps))
        num_empty = num_filled * size.empty_share
    in_all = rules.budget * max(num_filled + num_empty, 1)
    moved = _displacement(steps, order.lengths)
    waste = _waste(on_mesh, rules, num_empty, pp, ended=order.ended)
    return Forecast(
        utilization=int(tokens.sum()) / in_all,
        slot_utilization=int(slots.sum()) / in_all,
        bin_balance=figures(tokens if order.ended else tokens[slots > 0], rules.budget).bin_balance,
        filled=1 - sum(waste.values()),
        waste=waste,
        formed_packs=len(slots) / len(steps),
        displacement_p50=moved.p50,
        displacement_p99=moved.p99,
        overlong=order.overlong,
        unfit=order.unfit,
        lost_share=order.lost_share,
        bound_by={axis: count / max(num_filled, 1) for axis, count in of_media.bound_by.items()} if has_media else {},
        most_patches=of_media.most_patches,
        most_items=of_media.most_items,
        packs=size.packs,
        steps=size.steps,
        steps_low=size.steps_low,
        steps_high=size.steps_high,
        **on_mesh.figures,  # type: ignore[arg-type]  # mypy knows no types by name
    )


def long_run_steps(order: Order, rules: Rules, made: FormedSteps) -> list[PlannedStep]:
    """Return the steps that hold for the long run: without the last ones, if the samples are only a part of a pass.

    Raises UserError if no step can be formed.
    """
    steps, full = made
    if not order.ended:  # the end of the sample is not the end of the pass
        steps = _without_tail(steps) if rules.batch is None else steps[:full] or steps
    if not steps:
        raise UserError(
            f"Got {len(order.lengths):,} samples, which do not fill a step, and `tail: drop` drops incomplete steps. "
            "Pass more samples, or set `tail: pad`."
        )
    return steps


def _displacement(steps: list[PlannedStep], lengths: I64) -> Displacement:
    """Return the displacement of the samples of the first steps; handles are places in ``lengths``, int64 [n]."""
    handles = np.concatenate([step.packs.handles for step in steps])
    sizes = np.array([step.num_samples for step in steps])
    step_tokens = np.array([int(step.packs.tokens.sum()) for step in steps])
    tokens = missed((np.cumsum(lengths) - lengths)[handles], sizes, step_tokens)
    return displacement_of(displaced(tokens, float(step_tokens.mean())))


def _without_tail(steps: list[PlannedStep]) -> list[PlannedStep]:
    """Return steps without the last one if it has empty packs, which only the end of a pass has."""
    return steps[:-1] if len(steps) > 1 and not steps[-1].packs.counts.all() else steps


def _media_figures(steps: list[PlannedStep], order: Order, rules: Rules) -> MediaFigures:
    """Return the media of ``steps``, as a broker counts them; nothing without media."""
    media = MediaFigures(_long_run(order, rules))
    if order.media is not None:
        for step in steps:
            sizes = order.media[step.packs.handles]
            columns = sizes[:, ITEMS], sizes[:, PATCHES], sizes[:, BYTES]
            media.add(step.packs.bounds, step.packs.slots, *columns, step.number)
    return media


def _waste(on_mesh: Dealt, rules: Rules, num_empty: float, pp: int, *, ended: bool) -> dict[str, float]:
    """Return the padding by cause, as shares of the capacity that is delivered.

    If the lengths are a sample of a pass, ``num_empty`` packs count as empty, in place of DEAL's own number of empty
    packs.
    """
    if ended or rules.batch is not None:
        return waste_shares(on_mesh.waste, 0.0, on_mesh.delivered)
    waste, empty = on_mesh.waste.copy(), CAUSES.index("empty_pack")
    delivered, waste[empty] = on_mesh.delivered - int(waste[empty]), 0
    width = float(rules.own_widths(np.zeros(1, np.int64))[0]) if pp == 1 else delivered / max(on_mesh.filled, 1)
    return waste_shares(waste, num_empty * width, delivered)


def steps_of(order: Order, rules: Rules) -> FormedSteps:
    """Form the steps of an order; leave out the warm-up of the budget for samples of only a part of a pass."""
    return formed(order.lengths, _long_run(order, rules), order.parts, media=order.media)


def _long_run(order: Order, rules: Rules) -> Rules:
    """Return ``rules``, without the warm-up of the budget if the samples are only a part of a pass."""
    return rules if order.ended else msgspec.structs.replace(rules, warmup=None)


def formed(
    lengths: I64, rules: Rules, parts: I64 | None = None, at_once: int = AT_ONCE, media: I64 | None = None
) -> FormedSteps:
    """Form the steps of samples with these ``lengths``, int64 [n]; the steps' ``handles`` are indices into ``lengths``.

    ``parts``: index of each sample within its split sample; None: all are whole samples. ``at_once``: samples to admit
    at once, which changes the speed but not the steps. ``media``: sizes of their media, int64 [n, 4], or None.
    """
    table = SampleTable(max(len(lengths), 1))
    handles = table.take(len(lengths))
    table.length[handles] = lengths
    table.part[handles] = 0 if parts is None else parts
    if media is not None:
        costs = media_costs(media, rules.balance)
        table.put(handles, {"items": media[:, ITEMS], "patches": media[:, PATCHES], "extra_cost": costs})
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
