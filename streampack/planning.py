"""``plan_step``: plan one optimizer update over a mesh, for a program that holds a global batch.

A plan gives the samples of each pack, the rank and micro-batch of each pack, the step's denominators, and the order of
results. The plan depends only on the lengths and the arguments. Every rank may therefore call ``plan_step`` with the
same lengths and take its own part, without communication. No tokens move.

- ``mode="packed"``: packs are formed by cost (``core.deal.balanced``). With ``packer`` or another ``balance``, the
  packer fills packs up to the budget. Then the most expensive packs are split until all ranks have as many
  micro-batches, and DEAL matches costs by micro-batch.
- ``mode="padded"``: dynamic batching (``core.deal.dynamic_batches``).
- ``mode="dynamic_cp"``: dynamic context parallelism (``core.deal.dynamic_cp``). Each sample gets as many ranks as it
  needs.

With ``patches``, samples have media, as in a run: packs keep ``limits``, and the cost of media counts in that of packs.

All given samples are in one step. Split a batch for several updates first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from streampack.core.deal.balanced import MAX_SAMPLES, Bounds, balanced_packs
from streampack.core.deal.deal import BALANCES, ORDERS, arrange, deal, num_packs, split_dearest
from streampack.core.deal.dynamic_batches import PaddedFigures, padded_batches
from streampack.core.deal.dynamic_cp.cp_plan import CpCosts, CpPlan, plan_groups
from streampack.core.media.media_format import MAX_PATCHES
from streampack.core.model.keys.planning_keys import Balance
from streampack.core.model.samples import I64
from streampack.core.packers.arguments import aligned_units, check_numbers, integers, is_integer
from streampack.core.packers.closed import closed_packs, pack_lengths, way_back
from streampack.core.packers.packer import Extra, Limited, Packer
from streampack.core.packers.registry import LIMITED_PACKERS, make_packer
from streampack.core.stats.fill import Figures, figures
from streampack.errors import ConfigError, SampleError

Value = TypeVar("Value", bound=np.generic)


@dataclass(frozen=True, slots=True)
class Spread:
    """Tokens per data-parallel rank: least, most and mean.

    Example:
        >>> plan_step([5, 3, 8, 2, 6], budget=8, dp=2).after
        Spread(least=11, most=13, mean=12.0)
    """

    least: int
    """Real tokens of the rank with the fewest."""
    most: int
    """Real tokens of the rank with the most."""
    mean: float
    """Mean number of real tokens over the ranks."""

    @property
    def difference(self) -> int:
        """Difference between the ranks with the most and the fewest tokens."""
        return self.most - self.least


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The packs of one optimizer update by rank and micro-batch, with their costs; returned by ``plan_step``.

    Example:
        >>> plan = plan_step([5, 3, 8, 2, 6], budget=8, dp=2)
        >>> plan.packs[1]
        [[2], [1]]
        >>> plan.num_micro_batches, plan.num_tokens
        (2, 24)
        >>> plan.order(), plan.way_back()
        (array([3, 4, 0, 2, 1]), array([2, 4, 3, 0, 1]))
    """

    packs: list[list[list[int]]]
    """``packs[rank][micro_batch]``: numbers of the samples, as positions in ``lengths``; empty for an empty pack.

    With dynamic context parallelism, all ranks of a group have the same pack."""
    shapes: list[tuple[int, int]]
    """``shapes[micro_batch]``: (rows, tokens of a row), equal on all ranks.

    A packed micro-batch is one row of ``budget`` tokens. A padded one has a row for each sample; a rank with one sample
    fewer has a row of padding. With dynamic context parallelism, a rank has a row of at most ``budget`` tokens."""
    num_samples: int
    """Samples of the step, over all ranks and micro-batches."""
    num_tokens: int
    """Real tokens of the step, over all ranks and micro-batches."""
    num_loss_tokens: int | None
    """Loss tokens of the step, over all ranks and micro-batches: the denominator of the summed loss, at least 1. None
    if ``loss_tokens`` was not given."""
    costs: I64
    """int64 [micro_batches, dp] cost of each pack with its media (see ``a``, ``b`` and ``patch_costs``); if padded, the
    cost of the whole shape."""
    before: Spread
    """Real tokens per rank if the samples were split into dp equal parts in the given order."""
    after: Spread
    """Real tokens per rank as planned."""
    figures: Figures | None = None
    """Utilization of the packs by real tokens; None if padded."""
    aligned: Figures | None = None
    """Utilization of the packs by tokens padded to ``align``; None if padded."""
    padded: PaddedFigures | None = None
    """Token counts of padded micro-batches; None if packed."""
    patches: I64 | None = None
    """int64 [micro_batches, dp] patches of each pack; None if ``patches`` was not given."""
    cp_groups: I64 | None = None
    """int64 [micro_batches, dp, 2] first rank and size of each rank's context-parallel group; None without groups."""

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches on each rank."""
        return len(self.shapes)

    @property
    def cost_ratio(self) -> float:
        """Load imbalance: max / mean cost over ranks, averaged over micro-batches; 1.0 is perfect."""
        means = self.costs.mean(axis=1)
        return float((self.costs.max(axis=1)[means > 0] / means[means > 0]).mean()) if means.any() else 1.0

    def order(self) -> I64:
        """Return the sample numbers in the packs' order, rank after rank, micro-batch after micro-batch.

        Returns:
            int64 [n], each number from 0 to n - 1 once.
        """
        return np.fromiter(chain.from_iterable(self._own_packs()), np.int64, self.num_samples)

    def way_back(self) -> I64:
        """Return the position of each sample in ``order``; ``results[plan.way_back()]`` is in the samples' order.

        Returns:
            int64 [n].
        """
        return way_back(self._own_packs())

    def _own_packs(self) -> list[list[int]]:
        """Return every pack once, rank after rank; the first rank of a group has the group's pack."""
        if self.cp_groups is None:
            return list(chain.from_iterable(self.packs))
        return [
            pack
            for rank, packs in enumerate(self.packs)
            for pack, first in zip(packs, self.cp_groups[:, rank, 0].tolist(), strict=True)
            if first == rank
        ]

    def restore(self, results: NDArray[Value]) -> NDArray[Value]:
        """Return results in the order in which the samples were given to ``plan_step``.

        Args:
            results: Array [n, ...] with one result for each sample, in the order of ``order``.

        Returns:
            An array of the same shape and dtype.

        Raises:
            SampleError: ``results`` is not an array, or its first dimension is not n.

        Example:
            >>> plan = plan_step([5, 3, 8, 2, 6], budget=8, dp=2)
            >>> plan.restore(plan.order()).tolist()
            [0, 1, 2, 3, 4]
        """
        if not hasattr(results, "shape"):
            raise SampleError(
                f"got results of type {type(results).__name__}, expected an array. Pass numpy.array(results)"
            )
        if results.shape[:1] != (self.num_samples,):
            shape = list(results.shape)
            raise SampleError(
                f"got results of shape {shape}, expected [{self.num_samples}, ...] with one entry for each sample"
            )
        return results[self.way_back()]


def plan_step(
    lengths: Sequence[int] | I64,
    budget: int,
    dp: int = 1,
    *,
    mode: Literal["packed", "padded", "dynamic_cp"] = "packed",
    align: int = 1,
    micro_batch_multiple: int | None = None,
    min_micro_batches: int = 1,
    order: str = "largest_first",
    packer: str | None = None,
    balance: str | None = None,
    empty: Literal["pad", "error"] = "pad",
    loss_tokens: Sequence[int] | I64 | None = None,
    hidden_size: int | None = None,
    a: int = 24576,
    b: int = 1,
    patches: Sequence[Sequence[int] | I64] | None = None,
    patch_costs: tuple[int, int] = (0, 0),
    item_cost: int = 0,
    limits: Mapping[str, int] | None = None,
    pp: int = 1,
    variable_lengths: bool = False,
    max_group: int | None = None,
    exchange: tuple[float, float] = (0.05, 0.2),
    ranks_of_node: int = 8,
    **parameters: Any,
) -> StepPlan:
    """Plan the packs of one optimizer update over a mesh.

    The plan is a function of the arguments alone: ranks with equal arguments get equal plans.

    Args:
        lengths: Integers [n], the real tokens of each sample.
        budget: Tokens of a pack; in modes ``"padded"`` and ``"dynamic_cp"``, tokens of a micro-batch of one rank.
        dp: Number of data-parallel ranks; in mode ``"dynamic_cp"``, of data-parallel times context-parallel ranks.
        mode: ``"packed"`` for packs, or ``"padded"`` for micro-batches of padded rows. ``"dynamic_cp"`` makes packs for
            groups of 1, 2, 4 or more consecutive ranks, so that a sample may be longer than the budget.
        align: Multiple of tokens to which each sample (padded: each micro-batch) is padded, as cp and tp require.
        micro_batch_multiple: The number of micro-batches of a rank is a multiple of this. Default: ``pp``.
        min_micro_batches: Least number of micro-batches of a rank.
        order: Order of a rank's micro-batches: ``"largest_first"``, ``"small_at_edges"`` (for pipelines), or
            ``"packer"`` (as formed).
        packer: Name of a packer of ``pack_lengths``. Default: ``"exact_fill"``. With ``balance="level"``, the packer
            is the fallback.
        balance: Method to balance cost over ranks. With ``"level"``, packs are formed for a short critical path: the
            sum, over micro-batches, of the most expensive rank's cost. The others distribute packs as they were formed:
            ``"deal"``, ``"karmarkar_karp"``, or ``"none"`` (in turn). Default: ``"level"``, or ``"deal"`` with a
            ``packer``, with dp 1, or with more than 8,192 samples.
        empty: If there are too few samples for all micro-batches: ``"pad"`` adds empty packs, ``"error"`` raises.
        loss_tokens: Integers [n], the loss tokens of each sample. Default: unknown.
        hidden_size: Hidden size h of the model, for the cost 6 * h * s + s * s in place of ``a`` and ``b``.
        a: Cost per token; a sample of s padded tokens costs a * s + b * s * s.
        b: Cost per squared token.
        patches: For each sample, the patches of each of its media items; empty for a sample without media. Default: no
            sample has media.
        patch_costs: Cost per patch and per squared patch: an item of p patches costs ``patch_costs[0] * p +
            patch_costs[1] * p * p + item_cost``. These are ``balance.patches`` and ``balance.items`` of broker.yaml.
        item_cost: Cost per media item.
        limits: Most ``patches`` and ``items`` of a pack. Default: only the budget limits a pack.
        pp: Number of pipeline stages.
        variable_lengths: True if the trainer takes micro-batches of several lengths; required for padded with pp > 1.
        max_group: Most ranks of a context-parallel group, in mode ``"dynamic_cp"``. Default: ``dp``.
        exchange: Cost of the exchange of a token within a node and across nodes, as shares of the cost ``a`` of a
            token, in mode ``"dynamic_cp"``.
        ranks_of_node: Consecutive ranks on one node, for ``exchange``.
        parameters: Parameters of the packer, such as ``max_samples_per_pack``.

    Returns:
        The plan of all ranks.

    Raises:
        SampleError: A sample's length is below 1 or above the budget, its media are above ``limits``, or there are too
            few samples; a ValueError, too.
        ConfigError: Another argument is invalid; the message names the argument.

    Example:
        >>> plan = plan_step([5, 3, 8, 2, 6], budget=8, dp=2)
        >>> plan.packs
        [[[3, 4], [0]], [[2], [1]]]
        >>> plan = plan_step([5, 3, 2, 6], budget=8, dp=2, patches=[[4], [4, 4], [], []], limits={"patches": 8})
        >>> plan.packs
        [[[3], [2]], [[0], [1]]]
    """
    tokens = integers(lengths)
    check_numbers(budget=budget, dp=dp, align=align, min_micro_batches=min_micro_batches, pp=pp)
    multiple = pp if micro_batch_multiple is None else micro_batch_multiple
    check_numbers(micro_batch_multiple=multiple)
    check_numbers(0, a=a, b=b)
    if hidden_size is not None:
        check_numbers(hidden_size=hidden_size)
    if balance is None:
        balance = "level" if packer is None and dp > 1 and len(tokens) <= MAX_SAMPLES else "deal"
    _check_names(mode, order, balance, empty)
    media = _media_of(patches, len(tokens), patch_costs, item_cost, limits)
    if media is not None:
        _check_media(media, mode, packer)
    num_loss_tokens = None if loss_tokens is None else max(_sum_of_loss(integers(loss_tokens), len(tokens)), 1)
    batch = _Batch(
        tokens, budget, dp, align, multiple, min_micro_batches, Balance(hidden_size=hidden_size, a=a, b=b), media
    )
    if mode == "dynamic_cp":
        unused = {
            "packer": packer, "micro_batch_multiple": multiple - 1, "min_micro_batches": min_micro_batches - 1,
            "pp": pp - 1, "patches": patches, "empty": empty == "error", **parameters,
        }  # fmt: skip
        for name, value in unused.items():
            if value:
                raise ConfigError(f'{name}: got a value with mode="dynamic_cp", expected none. Leave {name} out')
        groups = _planned_groups(batch, max_group, exchange, ranks_of_node)
        return _plan_of_groups(batch, groups, order, num_loss_tokens)
    if max_group is not None:
        raise ConfigError(
            f'max_group: got {max_group!r} with mode={mode!r}, expected mode="dynamic_cp", which makes groups of ranks'
        )
    if mode == "packed":
        formed = _packed(batch, packer, balance, parameters)
    elif packer is None and not parameters:
        formed = _padded(batch, pp, variable_lengths)
    else:
        raise ConfigError(
            f"packer: got {packer!r} with parameters {sorted(parameters)}, expected neither, because padded "
            f"samples are not packed"
        )
    if empty == "error" and (none := sum(not pack for pack in formed.packs)):
        raise SampleError(
            f"got {len(tokens)} samples, which leave {none} of {len(formed.packs)} micro-batches of {dp} ranks empty, "
            f"expected at least one sample in each. Ask for fewer micro-batches, or pass empty='pad'"
        )
    return _plan_of(batch, formed, arrange(formed.dealt, formed.costs, order), num_loss_tokens)


DEFAULT = "exact_fill"
"""Packer of a step for which none is named."""
MAX_EXCHANGE = 64.0
"""The largest cost of the exchange of a token, over that of its computation."""
MAX_FACTOR, MAX_COST = 1 << 32, 1 << 62
"""Bounds of a factor of costs, as in broker.yaml, and of the cost of all media."""


class _Media(NamedTuple):
    """The media of n samples: patches and cost of each, int64 [n], and what counts against the limits of packs."""

    patches: I64
    costs: I64
    limited: Limited


@dataclass(frozen=True, slots=True)
class _Batch:
    """The samples of a step, and the arguments of ``plan_step`` that both modes need."""

    lengths: I64
    budget: int
    dp: int
    align: int
    multiple: int
    least: int
    balance: Balance
    media: _Media | None

    @property
    def slots(self) -> I64:
        """Padded tokens of each sample, int64 [n]."""
        return -(-self.lengths // self.align) * self.align

    @property
    def work(self) -> I64:
        """Cost of each sample with its media, int64 [n]."""
        return self.balance.costs(self.slots) + (0 if self.media is None else self.media.costs)

    def num_packs(self, fewest: int) -> int:
        """Return the number of packs of all ranks if the samples need ``fewest`` packs."""
        return num_packs(fewest, dp=self.dp, micro_batch_multiple=self.multiple, min_micro_batches=self.least)


class _Formed(NamedTuple):
    """Formed packs before their order is chosen.

    ``packs``: sample numbers of each pack. ``dealt``: pack numbers, int64 [micro_batches, dp]. ``costs``: int64
    [packs]. ``shapes``: rows and tokens of each micro-batch. ``figures``: fields of ``StepPlan`` that say how full the
    packs are.
    """

    packs: list[list[int]]
    dealt: I64
    costs: I64
    shapes: list[tuple[int, int]]
    figures: dict[str, Any]


def _plan_of(batch: _Batch, formed: _Formed, rows: I64, num_loss_tokens: int | None) -> StepPlan:
    """Return the plan of formed packs; ``rows`` int64 [micro_batches, dp] are the pack numbers in order."""
    packs, tokens = formed.packs, batch.lengths
    by_rank = np.array([part.sum() for part in np.array_split(tokens, batch.dp)])
    return StepPlan(
        packs=[[packs[i] for i in column] for column in rows.T.tolist()],
        shapes=[formed.shapes[i] for i in (rows[:, 0] // batch.dp).tolist()],
        num_samples=len(tokens),
        num_tokens=int(tokens.sum()),
        num_loss_tokens=num_loss_tokens,
        costs=formed.costs[rows],
        before=_spread(by_rank),
        after=_spread(_sums(packs, tokens)[rows].sum(axis=0)),
        patches=None if batch.media is None else _sums(packs, batch.media.patches)[rows],
        **formed.figures,
    )


def _planned_groups(
    batch: _Batch, max_group: int | None, exchange: tuple[float, float], ranks_of_node: int
) -> CpPlan:  # fmt: skip
    """Plan context-parallel groups; raise ConfigError or SampleError for arguments that have no plan."""
    most = batch.dp if max_group is None else max_group
    check_numbers(max_group=most, ranks_of_node=ranks_of_node)
    if len(exchange) != 2 or not all(0 <= share <= MAX_EXCHANGE for share in exchange):
        raise ConfigError(f"exchange: got {exchange!r}, expected two numbers from 0 to {MAX_EXCHANGE:g}")
    if batch.budget % (2 * batch.align):
        raise ConfigError(f"budget: got {batch.budget}, expected a multiple of 2 * align = {2 * batch.align}")
    if len(short := np.flatnonzero(batch.lengths < 1)):
        raise SampleError(f"sample {short[0]}: got {batch.lengths[short[0]]} tokens, expected at least 1")
    costs = CpCosts(*batch.balance.factors, *exchange, ranks_of_node)
    try:
        return plan_groups(batch.lengths, batch.dp, batch.budget, most, costs, batch.align)
    except ValueError as error:
        raise SampleError(str(error)) from None


def _plan_of_groups(batch: _Batch, groups: CpPlan, order: str, num_loss_tokens: int | None) -> StepPlan:
    """Return the plan of context-parallel groups, micro-batches in ``order``."""
    packs: list[list[int]] = [[] for _ in groups.size]
    for sample, group in enumerate(groups.group_of.tolist()):
        packs[group].append(sample)
    dealt = arrange(groups.dealt(batch.dp), groups.costs, order)
    tokens = _sums(packs, batch.lengths)[dealt] / groups.size[dealt]
    of_ranks = tokens.sum(axis=0)
    by_rank = np.array([part.sum() for part in np.array_split(batch.lengths, batch.dp)])
    return StepPlan(
        packs=[[packs[i] for i in column] for column in dealt.T.tolist()],
        shapes=[(1, batch.budget)] * groups.num_micro_batches,
        num_samples=len(batch.lengths),
        num_tokens=int(batch.lengths.sum()),
        num_loss_tokens=num_loss_tokens,
        costs=groups.costs[dealt],
        before=_spread(by_rank),
        after=Spread(int(of_ranks.min()), int(of_ranks.max()), float(of_ranks.mean())),
        cp_groups=np.stack([groups.first[dealt], groups.size[dealt]], axis=-1),
    )


def _padded(batch: _Batch, pp: int, variable_lengths: bool) -> _Formed:
    """Form micro-batches of padded rows."""
    drawn = padded_batches(
        batch.lengths, batch.budget, batch.dp, length_round=batch.align, micro_batch_multiple=batch.multiple,
        min_micro_batches=batch.least, pp=pp, variable_lengths=variable_lengths,
    )  # fmt: skip
    spans = list(pairwise(drawn.bounds.tolist()))
    columns = [drawn.places[start:stop, rank] for start, stop in spans for rank in range(batch.dp)]
    packs = [column[column >= 0].tolist() for column in columns]
    shapes = [(stop - start, length) for (start, stop), length in zip(spans, drawn.lengths.tolist(), strict=True)]
    costs = [rows * int(batch.balance.costs(np.array(length))) for rows, length in shapes]
    dealt = np.arange(len(packs), dtype=np.int64).reshape(-1, batch.dp)
    return _Formed(packs, dealt, np.repeat(costs, batch.dp), shapes, {"padded": drawn.figures})


def _packed(batch: _Batch, packer: str | None, balance: str, parameters: dict[str, Any]) -> _Formed:
    """Form packs by the packer, or with the balance ``level`` by cost, and deal them to the ranks."""
    if packer == "karmarkar_karp":  # this packer counts lengths in units of the alignment
        a, b = batch.balance.a, batch.balance.b
        parameters = {"a": a * batch.align, "b": b * batch.align * batch.align} | parameters
    aligned_units(batch.lengths, batch.budget, batch.align)
    chosen = make_packer(packer or DEFAULT, **parameters)
    work = batch.work

    def full() -> list[list[int]]:
        """Return packs filled by the packer, the most expensive ones split until all ranks have enough."""
        formed = _filled(batch, chosen, parameters)
        return split_dearest(formed, work, batch.num_packs(len(formed)))

    if balance == "level":
        most_samples = getattr(chosen, "max_samples_per_pack", None) or max(len(batch.lengths), 1)
        packs = _level(batch, work, most_samples, full)
    else:
        packs = full()
    costs = _sums(packs, work)
    dealt = deal(costs, batch.dp, "none" if balance == "level" else balance)
    filled = {"figures": batch.lengths, "aligned": batch.slots}
    fill = {name: figures(_sums(packs, tokens), batch.budget) for name, tokens in filled.items()}
    return _Formed(packs, dealt, costs, [(1, batch.budget)] * len(dealt), fill)


def _filled(batch: _Batch, packer: Packer, parameters: dict[str, Any]) -> list[list[int]]:
    """Return packs that the packer fills up to the budget, and to the limits of media."""
    count = max(len(batch.lengths), 1)
    if batch.media is not None and len(batch.media.limited.most):
        units, extra = batch.slots // batch.align, Extra(batch.media.limited)
        return closed_packs(packer, units, batch.budget // batch.align, count, extra=extra)
    return pack_lengths(batch.lengths, batch.budget, packer.name, count, batch.align, **parameters)


def _level(batch: _Batch, work: I64, most_samples: int, full: Callable[[], list[list[int]]]) -> list[list[int]]:
    """Return packs for a short critical path: as few as the sums of all sizes allow, of equal cost."""
    sizes, most = batch.slots[np.newaxis], np.array([batch.budget], np.int64)
    if batch.media is not None:
        limited = batch.media.limited
        sizes, most = np.vstack([sizes, limited.counts]), np.append(most, limited.most)
    fewest = max(int((-(-sizes.sum(axis=1) // most)).max()), -(-len(batch.lengths) // most_samples))
    return balanced_packs(work, sizes, Bounds(batch.dp, most, most_samples), batch.num_packs(fewest), full)


def _media_of(
    patches: Sequence[Sequence[int] | I64] | None, num_samples: int, patch_costs: tuple[int, int], item_cost: int,
    limits: Mapping[str, int] | None,
) -> _Media | None:  # fmt: skip
    """Return the media that arguments of ``plan_step`` describe, or None.

    Raises SampleError for media that are not integers, not of each sample, or above the limits; ConfigError for the
    other arguments.
    """
    linear, quadratic = _checked_factors(patch_costs, item_cost)
    if limits is not None and not isinstance(limits, Mapping):
        raise ConfigError(f"limits: got {limits!r}, expected a mapping such as {{'patches': 16384}}")
    if patches is None:
        for name, value in (("limits", limits), ("patch_costs", linear or quadratic), ("item_cost", item_cost)):
            if value:
                raise ConfigError(f"{name}: got {value!r} without patches, expected the patches of each sample")
        return None
    of_samples = _listed(patches, num_samples)
    items = np.array(list(map(len, of_samples)), np.int64)
    of_items = np.array(list(chain.from_iterable(of_samples)), np.int64)
    source = np.repeat(np.arange(num_samples), items)
    floats = of_items.astype(np.float64)
    if float((floats * (linear + quadratic * floats) + item_cost).sum()) >= MAX_COST:
        raise ConfigError(f"patch_costs: got {patch_costs!r}, with which the media cost 2**62 or more. Use less")
    sums, costs = np.zeros((2, num_samples), np.int64)
    np.add.at(sums, source, of_items)
    np.add.at(costs, source, of_items * (linear + quadratic * of_items) + item_cost)
    return _Media(sums, costs, _limited({"patches": sums, "items": items}, limits or {}, num_samples))


def _checked_factors(patch_costs: tuple[int, int], item_cost: int) -> tuple[int, int]:
    """Return the two factors of the cost of patches; raise ConfigError if one, or ``item_cost``, is not valid."""
    try:
        linear, quadratic = patch_costs
    except (TypeError, ValueError):
        raise ConfigError(f"patch_costs: got {patch_costs!r}, expected two integers") from None
    factors = {"patch_costs[0]": linear, "patch_costs[1]": quadratic, "item_cost": item_cost}
    check_numbers(0, **factors)
    for name, factor in factors.items():
        if factor >= MAX_FACTOR:
            raise ConfigError(f"{name}: got {factor}, expected an integer below {MAX_FACTOR}")
    return linear, quadratic


def _listed(patches: Sequence[Sequence[int] | I64], num_samples: int) -> list[list[int]]:
    """Return the patches of each sample's items as lists; raise SampleError for anything else."""
    if len(patches) != num_samples:
        raise SampleError(
            f"got patches for {len(patches)} samples, expected a list with those of each item for each of "
            f"{num_samples} samples"
        )
    listed = list[list[int]]()
    for i, sample in enumerate(patches):
        try:
            numbers = list(np.asarray(sample) if hasattr(sample, "__array__") else sample)
        except TypeError:
            raise SampleError(f"sample {i}: got patches {sample!r}, expected a list with those of each item") from None
        for number in numbers:
            if not is_integer(number) or not 0 <= number <= MAX_PATCHES:
                raise SampleError(f"sample {i}: got {number!r} patches, expected integers from 0 to {MAX_PATCHES}")
        listed.append(numbers)
    return listed


def _limited(counts: Mapping[str, I64], limits: Mapping[str, int], num_samples: int) -> Limited:
    """Return what samples have of each limited unit; ``counts`` int64 [num_samples] are by the unit's name."""
    for name, limit in limits.items():
        if name not in counts:
            raise ConfigError(f"limits: got {name!r}, expected patches or items")
        check_numbers(**{f"limits[{name!r}]": limit})
        if len(over := np.flatnonzero(counts[name] > limit)):
            got = f"sample {over[0]}: got {counts[name][over[0]]} {name}"
            raise SampleError(f"{got}, expected at most the limit of {limit}")
    columns = [counts[name] for name in limits]
    stacked = np.stack(columns) if columns else np.zeros((0, num_samples), np.int64)
    return Limited(stacked, np.array(list(limits.values()), np.int64))


def _check_media(media: _Media, mode: str, packer: str | None) -> None:
    """Raise ConfigError if media do not go together with the other arguments of ``plan_step``."""
    if mode == "padded":
        raise ConfigError('patches: got media with mode="padded", which do not go together yet. Leave one of them out')
    if len(media.limited.most) and not make_packer(packer or DEFAULT).keeps_limits:
        packers = " or ".join(map(repr, LIMITED_PACKERS))
        raise ConfigError(
            f"limits: got limits with packer {packer!r}, expected {packers}, which keeps limits for media"
        )


def _check_names(mode: str, order: str, balance: str, empty: str) -> None:
    """Raise ConfigError if an option of ``plan_step`` has an unknown value."""
    for name, got, allowed in (
        ("mode", mode, ("packed", "padded", "dynamic_cp")), ("order", order, ORDERS),
        ("balance", balance, ("level", *BALANCES)), ("empty", empty, ("pad", "error")),
    ):  # fmt: skip
        if got not in allowed:
            raise ConfigError(f"{name}: got {got!r}, expected one of {', '.join(allowed)}")


def _sum_of_loss(loss: I64, num_samples: int) -> int:
    """Return the sum of ``loss``, int64 [num_samples]. Raises SampleError for another size or a negative number."""
    if len(loss) != num_samples:
        raise SampleError(
            f"got numbers of loss tokens for {len(loss)} samples, expected one number for each of {num_samples} samples"
        )
    if len(wrong := np.flatnonzero(loss < 0)):
        raise SampleError(f"sample {wrong[0]}: got {loss[wrong[0]]} loss tokens, expected at least 0")
    return int(loss.sum())


def _sums(packs: Sequence[Sequence[int]], values: I64) -> I64:
    """Return the sum of ``values`` (int64 [n], one for each sample) over each pack; int64 [packs]."""
    sums = np.zeros(len(packs), np.int64)
    np.add.at(
        sums, np.repeat(np.arange(len(packs)), [len(pack) for pack in packs]), values[[*chain.from_iterable(packs)]]
    )
    return sums


def _spread(tokens: I64) -> Spread:
    """Summarize tokens per rank, int64 [dp]."""
    return Spread(int(tokens.min()), int(tokens.max()), float(tokens.mean()))
