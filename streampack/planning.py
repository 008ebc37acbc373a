"""``plan_step``: one step's plan with no service, for a program that has a global batch in its hands.

A plan says which samples share a pack, which rank has the pack and as which micro-batch, the step's denominators, and
the way back from results to samples. It is a function of the lengths and the arguments: every rank may call it with
the same lengths and take its own part, with no communication. No tokens move here.

``packed``: by default packs are formed by cost (``core.balanced``). With a packer or a balance of your own, the packer
fills packs up to the budget, the dearest are split in two until every rank has as many micro-batches, and DEAL matches
costs by micro-batch. ``padded``: dynamic batching (``dynamic_batches``). The samples of a step are those that were
given, whatever the mesh: cut a batch of several updates before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from streampack.core.deal.balanced import MAX_SAMPLES, Bounds, balanced_packs
from streampack.core.deal.deal import BALANCES, ORDERS, arrange, deal, num_packs, split_dearest
from streampack.core.deal.dynamic_batches import PaddedBatches, PaddedFigures, padded_batches
from streampack.core.model.rules import Balance
from streampack.core.model.samples import I64
from streampack.core.packers.arguments import aligned_units, check_numbers, integers
from streampack.core.packers.closed import pack_lengths, way_back
from streampack.core.packers.registry import make_packer
from streampack.core.stats.fill import Figures, figures
from streampack.errors import ConfigError, SampleError

Value = TypeVar("Value", bound=np.generic)


@dataclass(frozen=True, slots=True)
class Spread:
    """Tokens of the ranks: the least, the most, and the mean."""

    least: int
    most: int
    mean: float

    @property
    def difference(self) -> int:
        return self.most - self.least


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: ``packs[rank][micro_batch]`` is a list of sample numbers, empty where there is none.

    ``shapes[micro_batch]`` is (rows, tokens), the same on all ranks: one row of the budget where samples are packed,
    one row a sample where they are padded (of which some ranks may have one too few: that is a row of padding). The
    denominators count all ranks and micro-batches; ``num_loss_tokens`` is None where loss tokens were not given.
    ``costs`` int64 [micro_batches, dp], of a padded one that of its shape. ``before`` and ``after``: tokens by rank as
    the samples came, in dp equal parts, and as planned. ``figures`` of the packs on real tokens, ``aligned`` with
    alignment; ``padded`` where they are padded.
    """

    packs: list[list[list[int]]]
    shapes: list[tuple[int, int]]
    num_samples: int
    num_tokens: int
    num_loss_tokens: int | None
    costs: I64
    before: Spread
    after: Spread
    figures: Figures | None = None
    aligned: Figures | None = None
    padded: PaddedFigures | None = None

    @property
    def num_micro_batches(self) -> int:
        """Of every rank."""
        return len(self.shapes)

    @property
    def cost_ratio(self) -> float:
        """The dearest rank over the mean at each micro-batch, mean over them: 1 where no rank waits."""
        means = self.costs.mean(axis=1)
        return float((self.costs.max(axis=1)[means > 0] / means[means > 0]).mean()) if means.any() else 1.0

    def order(self) -> I64:
        """Sample numbers rank after rank, micro-batch after micro-batch, as packs hold them: int64 [n]."""
        return np.fromiter(chain.from_iterable(chain.from_iterable(self.packs)), np.int64, self.num_samples)

    def way_back(self) -> I64:
        """Where in ``order`` each sample is: ``results[way_back()]`` are in the samples' order; int64 [n]."""
        return way_back(chain.from_iterable(self.packs))

    def restore(self, results: NDArray[Value]) -> NDArray[Value]:
        """``results`` [n, ...], one for each sample in ``order``, in the order in which the samples were given."""
        if not hasattr(results, "shape"):
            raise SampleError(
                f"got results of type {type(results).__name__}, expected an array of them: numpy.array(results)"
            )
        if results.shape[:1] != (self.num_samples,):
            shape = list(results.shape)
            raise SampleError(f"got results of shape {shape}, expected [{self.num_samples}, ...], one for each sample")
        return results[self.way_back()]


def plan_step(
    lengths: Sequence[int] | I64,
    budget: int,
    dp: int = 1,
    *,
    mode: Literal["packed", "padded"] = "packed",
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
    pp: int = 1,
    variable_lengths: bool = False,
    **parameters: Any,
) -> StepPlan:
    """Plan one optimizer update over ``lengths``, integers [n], in tokens.

    ``budget``: tokens of a pack, or of a rank's micro-batch where padded. ``align``: multiple to which each sample
    (where padded: each micro-batch) is padded, what cp and tp need. ``micro_batch_multiple``: a rank's micro-batches
    are its multiple, by default ``pp``'s. ``order``: ``largest_first``, ``small_at_edges`` (for pipelines), ``packer``.
    ``balance``: ``level`` shares samples out so that the step's critical path is short: the cost of the dearest rank's
    pack at each micro-batch, summed (``packer`` then names what it falls back on). ``deal``, ``karmarkar_karp`` and
    ``none`` (packs in turn) deal packs as they were formed. The default is ``level``, or ``deal`` where a ``packer`` is
    given, dp is 1, or there are more than 8,192 samples. ``packer``: a name that ``pack_lengths`` knows, ``exact_fill``
    by default; ``parameters`` are that packer's. ``loss_tokens``: of each sample, summed up.
    ``empty``: where there are too few samples some micro-batches of some ranks are empty (``pad``), or it is an
    ``error``. A sample of s padded tokens costs a * s + b * s * s, or with a ``hidden_size`` h, 6 * h * s + s * s.
    ``pp`` > 1 and padded needs ``variable_lengths``: a trainer that takes another length with each micro-batch.

    Raises SampleError (a ValueError) naming the sample whose length cannot be; ConfigError.

    >>> plan = plan_step([5, 3, 8, 2, 6], budget=8, dp=2)
    >>> plan.packs
    [[[3, 4], [0]], [[2], [1]]]
    """
    found = integers(lengths)
    check_numbers(budget=budget, dp=dp, align=align, min_micro_batches=min_micro_batches, pp=pp)
    multiple = pp if micro_batch_multiple is None else micro_batch_multiple
    check_numbers(micro_batch_multiple=multiple)
    check_numbers(0, a=a, b=b)
    if hidden_size is not None:
        check_numbers(hidden_size=hidden_size)
    if balance is None:
        balance = "level" if packer is None and dp > 1 and len(found) <= MAX_SAMPLES else "deal"
    _check_names(mode, order, balance, empty)
    num_loss_tokens = None if loss_tokens is None else _sum_of_loss(integers(loss_tokens), len(found))
    balanced = Balance(hidden_size=hidden_size, a=a, b=b)
    slots = -(-found // align) * align
    work = balanced.costs(slots)
    if mode == "padded":
        if packer is not None or parameters:
            raise ConfigError(
                f"packer: got {packer!r}, {sorted(parameters)}, expected none: what is padded is not packed"
            )
        drawn = padded_batches(
            found, budget, dp, length_round=align, micro_batch_multiple=multiple, min_micro_batches=min_micro_batches,
            pp=pp, variable_lengths=variable_lengths,
        )  # fmt: skip
        packs, dealt, shapes = _by_rank(drawn, dp)
        costs = np.repeat([rows * int(balanced.costs(np.array(length))) for rows, length in shapes], dp)
    else:
        if packer == "karmarkar_karp":  # its costs are in units of the alignment
            parameters = {"a": a * align, "b": b * align * align} | parameters
        aligned_units(found, budget, align)
        chosen = make_packer(packer or "exact_fill", **parameters)
        cap = getattr(chosen, "max_samples_per_pack", None) or max(len(found), 1)
        count = partial(num_packs, dp=dp, micro_batch_multiple=multiple, min_micro_batches=min_micro_batches)

        def full() -> list[list[int]]:
            formed = pack_lengths(found, budget, packer or "exact_fill", max(len(found), 1), align, **parameters)
            return split_dearest(formed, work, count(len(formed)))

        if balance == "level":
            fewest = max(-(-int(slots.sum()) // budget), -(-len(found) // cap))
            packs = balanced_packs(work, slots, Bounds(dp, budget, cap), count(fewest), full)
        else:
            packs = full()
        costs = _sums(packs, work)
        dealt = deal(costs, dp, "none" if balance == "level" else balance)
        shapes = [(1, budget)] * len(dealt)
    if empty == "error" and (none := sum(not pack for pack in packs)):
        raise SampleError(
            f"got {len(found)} samples, which leaves {none} of {len(packs)} micro-batches of {dp} ranks empty, "
            "expected one for each at least: ask for fewer micro-batches, or for empty='pad'"
        )
    rows = arrange(dealt, costs, order)
    tokens = _sums(packs, found)
    return StepPlan(
        packs=[[packs[i] for i in column] for column in rows.T.tolist()],
        shapes=shapes if mode == "packed" else [shapes[i] for i in (rows[:, 0] // dp).tolist()],
        num_samples=len(found),
        num_tokens=int(found.sum()),
        num_loss_tokens=num_loss_tokens,
        costs=costs[rows],
        before=_spread(np.array([part.sum() for part in np.array_split(found, dp)])),
        after=_spread(tokens[rows].sum(axis=0)),
        figures=figures(tokens, budget) if mode == "packed" else None,
        aligned=figures(_sums(packs, slots), budget) if mode == "packed" else None,
        padded=drawn.figures if mode == "padded" else None,
    )


def _check_names(mode: str, order: str, balance: str, empty: str) -> None:
    for name, got, known in (
        ("mode", mode, ("packed", "padded")), ("order", order, ORDERS), ("balance", balance, ("level", *BALANCES)),
        ("empty", empty, ("pad", "error")),
    ):  # fmt: skip
        if got not in known:
            raise ConfigError(f"{name}: got {got!r}, expected one of {', '.join(known)}")


def _sum_of_loss(loss: I64, num_samples: int) -> int:
    """Of ``loss`` tokens, int64 [num_samples]. Raises SampleError for another count, and naming a negative one."""
    if len(loss) != num_samples:
        raise SampleError(f"got loss tokens of {len(loss)} samples, expected one number for each of {num_samples}")
    if len(wrong := np.flatnonzero(loss < 0)):
        raise SampleError(f"sample {wrong[0]}: got {loss[wrong[0]]} loss tokens, expected at least 0")
    return int(loss.sum())


def _by_rank(drawn: PaddedBatches, dp: int) -> tuple[list[list[int]], I64, list[tuple[int, int]]]:
    """The samples of each micro-batch and rank, their numbers by [micro_batch, rank], and the shapes."""
    spans = list(pairwise(drawn.bounds.tolist()))
    columns = [drawn.places[start:stop, rank] for start, stop in spans for rank in range(dp)]
    shapes = [(stop - start, length) for (start, stop), length in zip(spans, drawn.lengths.tolist(), strict=True)]
    packs = [column[column >= 0].tolist() for column in columns]
    return packs, np.arange(len(packs), dtype=np.int64).reshape(-1, dp), shapes


def _sums(packs: Sequence[Sequence[int]], values: I64) -> I64:
    sums = np.zeros(len(packs), np.int64)
    np.add.at(
        sums, np.repeat(np.arange(len(packs)), [len(pack) for pack in packs]), values[[*chain.from_iterable(packs)]]
    )
    return sums


def _spread(tokens: I64) -> Spread:
    return Spread(int(tokens.min()), int(tokens.max()), float(tokens.mean()))
