"""What a broker with some rules makes of some lengths: predicted by forming and dealing them as it does.

Nothing here is another way of packing. The over-long policy, the merge by weights, FORM and DEAL are the broker's own,
on lengths alone; so where all samples of a pass are given, the steps are those of a run with these rules.

Where they are a sample of the pass, what holds in the long run is told: the figures are those of the packs that were
formed while the window was full, and the steps of a pass are estimated (``pass_size``).

``useful`` sums up all that is lost. A rank needs a*C + b * (sum of s*s over the samples) for a pack of C tokens, a
micro-batch takes as long as its dearest pack, and what real tokens cost is a share of that time. Padding and waiting
for another rank have the rest; the empty packs that a pass ends with are told apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from streampack.core.deal import deal
from streampack.core.figures import figures
from streampack.core.form import Former, Step
from streampack.core.intake import apply_overlong
from streampack.core.merge import merge_of
from streampack.core.packers import parameters_of
from streampack.core.packers.joint import PATIENCE
from streampack.core.rules import PACKER_KEYS, Balance, Overlong, Rules, StreamRules
from streampack.core.samples import I64, SampleTable
from streampack.core.waste import CAUSES, waste_of
from streampack_services.lengths import Workload
from streampack_services.pass_size import PassSize, size_of_pass

F64 = NDArray[np.float64]
ALONE = Balance("joint", group=1)


@dataclass(frozen=True, slots=True, eq=False)
class Order:
    """Samples as FORM gets them: ``lengths`` int64 [n] in merge order. ``ended``: these are a whole pass.

    ``overlong`` samples were over the budget, and ``lost_share`` of all tokens went with them.
    """

    lengths: I64
    ended: bool
    overlong: int
    lost_share: float


@dataclass(frozen=True, slots=True)
class Forecast:
    """Figures of one setting; shares are of 1. ``waste`` by cause is a share of all that is delivered.

    ``useful``: see the module; of steps without empty packs, where there are some. ``useful_error`` is its standard
    error, from how steps differ; 1 where there is but one. ``cost_max_over_mean`` is the broker's: of the packs of a
    micro-batch, over the ranks, averaged; ``attention_`` that of b*s*s alone; ``step_cost_max_over_mean`` that of the
    ranks' sums over a step. ``packs`` and ``steps`` are those of one pass, the steps between ``steps_low`` and
    ``steps_high``; all are None where nobody knows how much a pass is.
    """

    utilisation: float
    slot_utilisation: float
    bin_balance: float
    waste: dict[str, float]
    useful: float
    useful_error: float
    cost_max_over_mean: float
    step_cost_max_over_mean: float
    attention_max_over_mean: float
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
    return msgspec.structs.replace(rules, **foreign, packer=packer, balance=balance, **changes)


def order_of(workload: Workload, rules: Rules) -> Order:
    """The samples of a workload as the broker merges them; where a sample of a stream is at its end, it ends there."""
    merge = merge_of(rules)
    found, tokens, lost, overlong = list[I64](), 0, 0, 0
    for stream, terms in zip(workload.streams, rules.streams, strict=True):
        for partition, ended in zip(stream.partitions, stream.ended, strict=True):
            pieces = apply_overlong(partition, rules.budget, terms.overlong)
            handles = np.where(pieces.length > 0, 0, -1)  # which sample it is does not matter
            merge.push(len(found), handles, pieces.length, pieces.part)
            if ended:
                merge.end(len(found))
            found.append(pieces.length)
            tokens += int(partition.sum())
            lost += pieces.lost_tokens
            overlong += pieces.num_touched
    taken = merge.take(1 << 60)
    return Order(taken.lengths, workload.whole, overlong, lost / max(tokens, 1))


def forecast(workload: Workload, order: Order, rules: Rules, dp: int) -> Forecast:
    """What ``rules`` make of a workload on ``dp`` ranks; ``order`` is ``order_of`` the same budget and streams.

    Raises UserError where the packer refuses.
    """
    steps, full = formed(order.lengths, rules)
    packs = Packs.of(steps, order.lengths, rules)
    if not order.ended:  # what the end of the sample does is not what the end of the pass does
        packs = packs.head(full) if full else packs.filled()
    num_filled = int((packs.slots > 0).sum())
    if order.ended:
        size: PassSize | None = PassSize(num_filled, len(steps), len(steps), len(steps), 0.0)
        num_empty: float = len(packs.slots) - num_filled
    else:
        size = size_of_pass(workload, rules, packs.slots)
        num_empty = num_filled * size.empty_share if size else 0
    slots_in_all = rules.budget * max(num_filled + num_empty, 1)
    tokens, slots = int(packs.tokens.sum()), int(packs.slots.sum())
    dealt = packs.dealt(dp)
    return Forecast(
        utilisation=tokens / slots_in_all,
        slot_utilisation=slots / slots_in_all,
        bin_balance=figures(packs.tokens, rules.budget).bin_balance,
        waste=_waste(packs, rules, num_empty),
        useful=dealt.useful,
        useful_error=dealt.useful_error,
        cost_max_over_mean=dealt.micro_batch,
        step_cost_max_over_mean=dealt.step,
        attention_max_over_mean=dealt.attention,
        overlong=order.overlong,
        lost_share=order.lost_share,
        packs=size.packs if size else None,
        steps=size.steps if size else None,
        steps_low=size.low if size else None,
        steps_high=size.high if size else None,
    )


def _waste(packs: Packs, rules: Rules, num_empty: float) -> dict[str, float]:
    """Of ``packs`` and so many empty ones, as shares of all that is delivered, with no pipeline."""
    held = packs.slots > 0
    tokens, slots = packs.tokens[held], packs.slots[held]
    widths = rules.own_widths(slots)
    wasted = waste_of(tokens, slots, widths, rules).astype(np.float64)
    wasted[CAUSES.index("empty_pack")] += (empty := num_empty * float(rules.own_widths(np.zeros(1, np.int64))[0]))
    delivered = max(float(widths.sum()) + empty, 1.0)
    return dict(zip(CAUSES, (wasted / delivered).tolist(), strict=True))


def formed(lengths: I64, rules: Rules) -> tuple[list[Step], int]:
    """The steps that FORM makes of samples of these lengths, and how many packs were formed before the end was known.

    Packs know their samples by place: ``handles`` are positions in ``lengths``.
    """
    table = SampleTable(max(len(lengths), 1))
    handles = table.take(len(lengths))
    table.length[handles] = lengths
    former = Former(rules, table)
    former.admit(handles, lengths)
    steps, full = list[Step](), 0
    for closed in (False, True):
        former.closed = closed
        while (request := former.request(max(len(lengths), 1))) is not None:
            choice = request.choose()
            full += 0 if closed else len(choice.bounds) - 1
            steps += former.apply(choice)
    return steps + former.cut(), full


@dataclass(frozen=True, slots=True)
class Dealt:
    """Max / mean over ranks, averaged: of cost by micro-batch and by step, of attention (b*s*s alone) by micro-batch;
    and the share of the ranks' time in which real tokens are computed, with its standard error."""

    micro_batch: float
    step: float
    attention: float
    useful: float
    useful_error: float


@dataclass(frozen=True, slots=True, eq=False)
class Packs:
    """Packs of whole steps, columns [p]: ``tokens`` real, ``slots`` with alignment, ``costs`` as DEAL has them; the
    time that a rank needs for one (``times``), and for its real tokens alone (``real_times``)."""

    rules: Rules
    tokens: I64
    slots: I64
    costs: I64
    times: F64
    real_times: F64

    @classmethod
    def of(cls, steps: list[Step], lengths: I64, rules: Rules) -> Packs:
        """Of steps over samples of these ``lengths``."""
        packs = [pack for step in steps for pack in step.packs]
        tokens, slots, costs = (
            np.array([getattr(pack, name) for pack in packs], np.int64)
            for name in ("num_tokens", "num_slot_tokens", "cost")
        )
        a, real = linear_cost(rules), rules.balance.costs(lengths)
        real_times = np.array([float(real[pack.handles].sum()) for pack in packs])
        return cls(rules, tokens, slots, costs, (costs - a * slots + a * rules.budget).astype(np.float64), real_times)

    def head(self, count: int) -> Packs:
        """The first ``count``."""
        return self._only(slice(count))

    def filled(self) -> Packs:
        """Those with samples."""
        return self._only(self.slots > 0)

    def _only(self, which: slice | NDArray[np.bool_]) -> Packs:
        columns = (self.tokens, self.slots, self.costs, self.times, self.real_times)
        return Packs(self.rules, *(column[which] for column in columns))  # type: ignore[arg-type]

    def dealt(self, dp: int) -> Dealt:
        """Over ``dp`` ranks: of whole steps, or, if there are less packs than in one, with empty ones beside them."""
        size, empty = self.rules.packs, float(linear_cost(self.rules) * self.rules.budget)
        whole = max(len(self.slots) // size, 1) * size
        missing = max(whole - len(self.slots), 0)
        costs = np.pad(self.costs[:whole], (0, missing)).reshape(-1, size)
        times = np.pad(self.times[:whole], (0, missing), constant_values=empty).reshape(-1, size)
        numbers = np.stack([deal(step, dp, self.rules.balance.kind).ravel() for step in costs])
        dealt = np.take_along_axis(costs, numbers, 1).reshape(len(numbers), -1, dp)
        took = np.take_along_axis(times, numbers, 1).reshape(len(numbers), -1, dp)
        full = costs.all(axis=1) if costs.all(axis=1).any() else np.ones(len(costs), np.bool_)
        real = np.pad(self.real_times[:whole], (0, missing)).reshape(-1, size)
        by_step = real[full].sum(axis=1) / took[full].max(axis=2).sum(axis=1) / dp
        return Dealt(
            micro_batch=_max_over_mean(dealt.reshape(-1, dp)),
            step=_max_over_mean(dealt.sum(axis=1)),
            attention=_max_over_mean(took.reshape(-1, dp) - empty),
            useful=float(real[full].sum() / took[full].max(axis=2).sum() / dp),
            useful_error=float(by_step.std(ddof=1) / np.sqrt(len(by_step))) if len(by_step) > 1 else 1.0,
        )


def linear_cost(rules: Rules) -> int:
    """What a token costs whatever its sample is: ``a`` of a*s + b*s*s."""
    one, two = rules.balance.costs(np.array([1, 2])).tolist()
    return int(one) - (int(two) - 2 * int(one)) // 2


def _max_over_mean(rows: NDArray[Any]) -> float:
    """The dearest of each row by its mean, averaged over the rows that are not empty; 1 if there are none."""
    rows = rows[rows.any(axis=1)]
    return float((rows.max(axis=1) / rows.mean(axis=1)).mean()) if len(rows) else 1.0
