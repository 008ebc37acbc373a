"""Steps dealt on a mesh: the packs of every rank, laid out in the form of their messages.

A dealt step has all packs of a rank together, so the messages of a rank are slices of its columns. ``dealer_of``
chooses the dealer by the rules of a step: ``PackDealer`` deals packs, ``PaddedDealer`` deals padded micro-batches, and
``GroupDealer`` deals samples to groups of ranks. The module knows packs and handles, never tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from streampack.core.columns.step_columns import StepColumns, columns_by_rules, cut, joined
from streampack.core.deal.assignment import deal_padded, deal_step, packs_of_mesh, split
from streampack.core.deal.deal import arrange
from streampack.core.deal.deal_kernels import lay_out
from streampack.core.deal.deal_stats import DealtFigures, GroupFigures
from streampack.core.deal.dynamic_batches import PaddedFigures
from streampack.core.deal.dynamic_cp.cp_plan import CpCosts, CpPlan, GroupRequest
from streampack.core.deal.mesh_validation import mesh_refusal
from streampack.core.layout.boundaries import Contents
from streampack.core.model.mesh import DynamicCp, Mesh
from streampack.core.model.rules import Rules
from streampack.core.model.samples import I32, I64, SampleTable
from streampack.core.model.steps import PlannedPacks, PlannedStep
from streampack.core.stats.padding import depends_on_mesh, padding_of, padding_of_groups, padding_of_rows
from streampack.core.trees.table_trees import depths_of


class Portions(NamedTuple):
    """The packs of a step on a mesh, after splitting.

    Pack i holds samples ``handles[bounds[i]:bounds[i + 1]]``, int64 [n] and [packs + 1]. The other arrays, int64
    [packs], are sums over a pack's samples; ``slots`` are aligned tokens. Shared tokens count once.
    """

    handles: I64
    bounds: I64
    loss_tokens: I64
    costs: I64
    tokens: I64
    slots: I64


@dataclass(frozen=True, slots=True)
class DealtStep:
    """A step dealt on a mesh of ``sizes`` (dp, pp): packs rank by rank; every rank has ``each`` packs.

    Pack i holds samples ``bounds[i]`` to ``bounds[i + 1]`` of ``contents`` and of the columns. With dynamic context
    parallelism, dp counts the dp x cp ranks, each rank of a group has the group's pack, and ``digest`` is the plan's.
    """

    sizes: tuple[int, int]
    each: int
    bounds: list[int]
    contents: Contents
    columns: StepColumns
    digest: bytes = b""

    def cut(self, spans: list[tuple[int, int]]) -> tuple[StepColumns, Contents]:
        """Return the columns of the packs [a, b) of each span, one span after another, and the packs.

        ``spans`` are ascending. Spans that meet are one slice of each column.
        """
        if len(spans) == 1:
            return self._slice(*spans[0])
        slices = [self._slice(a, b) for a, b in _joined(spans)]
        if len(slices) == 1:
            return slices[0]
        columns, packs = zip(*slices, strict=True)
        values = {
            name: np.concatenate(parts)
            for name, parts in zip(Contents._fields, zip(*packs, strict=True), strict=True)
            if parts[0] is not None
        }
        return joined(columns), Contents(**values)

    def _slice(self, a: int, b: int) -> tuple[StepColumns, Contents]:
        """Return the columns of packs [a, b), and the packs."""
        c, d = self.bounds[a], self.bounds[b]
        handles, counts, widths, aligns, depths, *groups = self.contents
        depths = None if depths is None else depths[c:d]
        sizes, ranks = (None if values is None else values[a:b] for values in groups)
        contents = Contents(handles[c:d], counts[a:b], widths[a:b], aligns[a:b], depths, sizes, ranks)
        return cut(self.columns, (a, b), (c, d)), contents


class _Placed(NamedTuple):
    """The packs of a step, and their places on a mesh.

    ``dealt`` int64 [m, dp] are pack numbers by [micro_batch, rank]. ``widths`` and ``aligns``, int64 [packs], are the
    packs' lengths T and the multiples to which their samples are padded. With dynamic context
    parallelism, ``groups`` are the first rank and the size of each pack's group, int64 [packs] each. ``digest`` is that
    of their plan.
    """

    packs: PlannedPacks | Portions
    dealt: I64
    widths: I64
    aligns: I64
    groups: tuple[I64, I64] | None = None
    digest: bytes = b""


class StepDealer(ABC):
    """Deals the steps that were formed under some rules, and counts their statistics in ``figures``.

    ``dealer_of`` chooses the dealer by the rules.
    """

    def __init__(self, rules: Rules, table: SampleTable, figures: DealtFigures) -> None:
        self.rules, self._table, self.figures = rules, table, figures
        self._refusals: dict[tuple[tuple[int, ...], int], str] = {}

    def refusal(self, mesh: Mesh, layout: str, step: int) -> str:
        """Return the reason that the rules cannot serve ``mesh`` at ``step``; empty if they can."""
        key = mesh.sizes, self.rules.packs_unit_from(step)
        if key not in self._refusals:
            self._refusals[key] = mesh_refusal(mesh, self.rules, layout, step=step)
        return self._refusals[key]

    def request(self, step: PlannedStep, mesh: Mesh) -> GroupRequest | None:
        """Return the request for a plan that should be made before the step is dealt; None if ``deal`` is quick."""
        return None

    def deal(self, step: PlannedStep, mesh: Mesh, is_first: bool, request: GroupRequest | None = None) -> DealtStep:
        """Deal a step on ``mesh``, by the plan of its ``request`` if that is for this mesh.

        ``is_first`` tells if the step is dealt for the first time.
        """
        return self._in_order(self._place(step.packs, mesh, is_first, request), mesh)

    @abstractmethod
    def _place(self, formed: PlannedPacks, mesh: Mesh, is_first: bool, request: GroupRequest | None) -> _Placed:
        """Return the places of a step's samples on ``mesh``; update the statistics."""

    def _in_order(self, placed: _Placed, mesh: Mesh) -> DealtStep:
        """Lay out the packs rank by rank, in the form of their messages."""
        packs, dealt, widths, aligns, groups, digest = placed
        numbers, table, rules = dealt.T.ravel(), self._table, self.rules
        bounds, count = np.zeros(len(numbers) + 1, np.int64), int(np.diff(packs.bounds)[numbers].sum())
        handles, indices = np.empty(count, np.int64), np.empty(count, "<u8")
        lengths, streams, parts = np.empty((3, count), "<u4")
        lay_out(
            numbers, packs.handles, packs.bounds, table.length, table.stream, table.index, table.part, bounds[1:],
            handles, lengths, streams, indices, parts,
        )  # fmt: skip
        counts, widths, aligns = bounds[1:] - bounds[:-1], widths[numbers], aligns[numbers]
        columns = {
            "packs_u32": _u32(numbers), "counts_u32": _u32(counts),
            "loss_tokens_u32": _u32(packs.loss_tokens[numbers]), "lengths_u32": lengths.tobytes(),
            "streams_u32": streams.tobytes(), "indices_u64": indices.tobytes(), "parts_u32": parts.tobytes(),
        }  # fmt: skip
        if rules.shape != "fixed":
            columns["widths_u32"] = _u32(widths)
        columns |= self._own_columns(aligns, lengths, bounds[:: len(dealt)]) | columns_by_rules(rules, table, handles)
        contents = Contents(handles, counts, widths, aligns, depths_of(rules, table, handles))
        if groups is not None:
            firsts, sizes = (values[numbers] for values in groups)
            contents = contents._replace(sizes=sizes, ranks=np.repeat(np.arange(dealt.shape[1]), len(dealt)) - firsts)
            columns |= {
                "widths_u32": _u32(widths), "group_firsts_u32": _u32(firsts), "group_sizes_u32": _u32(sizes)
            }  # fmt: skip
        return DealtStep((dealt.shape[1], mesh.pp), len(dealt), bounds.tolist(), contents, columns, digest)

    def _own_columns(self, aligns: I64, lengths: NDArray[np.uint32], of_ranks: I64) -> dict[str, bytes]:
        """Return the columns that only this dealer's packs have.

        ``aligns`` int64 [packs]. ``lengths`` uint32 [samples]: rank r has those from ``of_ranks[r]`` to
        ``of_ranks[r + 1]``.
        """
        return {}

    def _portions(self, handles: I64, order: I64, bounds: I64) -> Portions:
        """Return packs with their sums.

        Pack i has the samples at ``order[bounds[i]:bounds[i + 1]]`` of ``handles``, int64 [samples].
        """
        handles = handles[order]
        slots = self._slots(handles)
        loss_tokens, tokens = self._table.loss_tokens[handles], self._table.own_lengths(handles)
        costs = self._costs(handles, slots)
        sums = np.zeros((4, len(handles) + 1), np.int64)
        np.cumsum(np.stack([loss_tokens, costs, tokens, slots]), axis=1, out=sums[:, 1:])
        return Portions(handles, bounds, *np.diff(sums[:, bounds]))

    def _costs(self, handles: I64, slots: I64) -> I64:
        """Return the cost of samples with aligned tokens ``slots``; all int64 [n]."""
        return self.rules.balance.sample_costs(slots, partial(self._table.column_or_0, handles=handles))

    def _slots(self, handles: I64) -> I64:
        """Return the aligned tokens of samples, int64 [n]."""
        align = self.rules.align.sample
        return -(-self._table.own_lengths(handles) // align) * align


class PackDealer(StepDealer):
    """Deals the packs of FORM, after splitting packs if there are too few for the mesh."""

    def _place(self, formed: PlannedPacks, mesh: Mesh, is_first: bool, request: GroupRequest | None) -> _Placed:
        rules = self.rules
        packs: PlannedPacks | Portions = formed
        count = packs_of_mesh(rules, len(formed), mesh.dp, mesh.pp)
        if count > len(formed):
            handles, keeps = formed.handles, self._table.keep[formed.handles]
            parts, _ = split(formed.bounds, self._costs(handles, self._slots(handles)), keeps, count)
            packs = self._portions(handles, *_in_turn(parts))
            if is_first:
                empty = int(np.count_nonzero(np.diff(packs.bounds) == 0))
                self.figures.empty_packs += empty
                self.figures.split_packs += count - len(formed) - empty
        dealt = deal_step(rules, packs.costs, mesh.dp)
        widths = rules.step_widths(packs.slots, mesh.pp)
        self.figures.add(packs.costs, packs.tokens, dealt)
        if is_first and depends_on_mesh(rules):
            self.figures.deliver(packs.tokens, padding_of(packs.tokens, packs.slots, widths, rules))
        return _Placed(packs, dealt, widths, np.full(count, rules.align.sample))


class PaddedDealer(StepDealer):
    """Deals the samples of a step as padded micro-batches: see ``dynamic_batches``."""

    def __init__(self, rules: Rules, table: SampleTable, figures: DealtFigures) -> None:
        super().__init__(rules, table, figures)
        figures.padded = figures.padded or PaddedFigures()

    def _place(self, formed: PlannedPacks, mesh: Mesh, is_first: bool, request: GroupRequest | None) -> _Placed:
        made = deal_padded(self.rules, self._table.length[formed.handles].astype(np.int64), mesh.dp, mesh.pp)
        packs, widths = self._portions(formed.handles, *_in_turn(made.packs)), made.rows * made.widths
        dealt = np.arange(len(widths)).reshape(-1, mesh.dp)
        self.figures.add(made.rows * self.rules.balance.costs(made.widths), packs.tokens, dealt)
        if is_first:
            counts = np.diff(packs.bounds)
            self.figures.add_padded(made.figures, counts, packs.tokens, packs.slots, self.rules.budget)
            wasted = padding_of_rows(packs.tokens, packs.slots, counts, made.rows, made.widths)
            self.figures.deliver(packs.tokens, wasted)
        return _Placed(packs, dealt, widths, made.widths)

    def _own_columns(self, aligns: I64, lengths: NDArray[np.uint32], of_ranks: I64) -> dict[str, bytes]:
        of_rank = np.split(lengths, of_ranks[1:-1])
        longest = np.zeros(int(np.diff(of_ranks).max()), "<u4")  # of each place
        for own in of_rank:
            np.maximum(longest[: len(own)], own, out=longest[: len(own)])
        of_samples = np.concatenate([longest[: len(own)] for own in of_rank])
        return {"rows_u32": _u32(aligns), "longest_u32": of_samples.tobytes()}


class GroupDealer(StepDealer):
    """Deals the samples of a step to groups of dp x cp ranks: see ``dynamic_cp``."""

    def __init__(self, rules: Rules, table: SampleTable, figures: DealtFigures, dynamic: DynamicCp) -> None:
        super().__init__(rules, table, figures)
        self._dynamic = dynamic
        figures.groups = figures.groups or GroupFigures()

    def request(self, step: PlannedStep, mesh: Mesh) -> GroupRequest | None:
        return self._request(step.packs, mesh.dp * mesh.cp)

    def _request(self, formed: PlannedPacks, ranks: int) -> GroupRequest:
        """Return the request for the groups of a step on so many ranks."""
        dynamic, lengths = self._dynamic, self._table.own_lengths(formed.handles)
        costs = CpCosts(*self.rules.balance.factors, dynamic.node, dynamic.across, dynamic.node_ranks)
        return GroupRequest(
            lengths, ranks, dynamic.rank_tokens, dynamic.max_group, costs, self.rules.align.sample
        )  # fmt: skip

    def _place(self, formed: PlannedPacks, mesh: Mesh, is_first: bool, request: GroupRequest | None) -> _Placed:
        dynamic, align, handles, ranks = self._dynamic, self.rules.align, formed.handles, mesh.dp * mesh.cp
        if request is None or request.ranks != ranks:
            request = self._request(formed, ranks)
        plan, lengths = request.choose(), request.lengths
        order, bounds = plan.samples()
        packs, aligns = self._portions(handles, order, bounds), dynamic.aligns(plan.size, align.sample)
        units, filled = aligns[plan.group_of[order]], np.zeros(len(order) + 1, np.int64)
        np.cumsum(-(-lengths[order] // units) * units, out=filled[1:])
        slots = np.diff(filled[bounds])
        widths = dynamic.widths(slots, plan.size, self.rules.shape, align.pack)
        if is_first:
            laid = dynamic.widths(slots, plan.size, "exact" if self.rules.shape != "fixed" else "fixed", align.pack)
            self.figures.deliver(packs.tokens, padding_of_groups(packs.tokens, slots, widths, laid))
            self._count_groups(plan, lengths, ranks)
        dealt = arrange(plan.dealt(ranks), plan.costs, self.rules.balance.order or "largest_first")
        in_turn = np.arange(dealt.size).reshape(dealt.shape)
        self.figures.add(plan.costs[dealt].ravel(), (packs.tokens // plan.size)[dealt].ravel(), in_turn)
        return _Placed(packs, dealt, widths, aligns, (plan.first, plan.size), _digest(packs, plan, dealt))

    def _count_groups(self, plan: CpPlan, lengths: I64, ranks: int) -> None:
        """Count the groups of a step when it is first dealt."""
        assert self.figures.groups is not None
        dynamic, align = self._dynamic, self.rules.align.sample
        with_samples = np.unique(plan.group_of)
        counts = np.bincount(np.log2(plan.size[with_samples]).astype(np.int64), minlength=1)
        static = dynamic.least_group(int(lengths.max(initial=1)), ranks, align)
        sizes = np.stack([plan.size[plan.group_of], np.full(len(lengths), static)])
        self.figures.groups.add(lengths, sizes, counts, dynamic.aligns(sizes, align))


def _digest(packs: Portions, plan: CpPlan, dealt: I64) -> bytes:
    """Return the digest of the groups of a step: 16 bytes."""
    columns = (packs.bounds, plan.group_of, plan.first, plan.size, dealt)
    return blake2b(b"".join(column.astype("<i8").tobytes() for column in columns), digest_size=16).digest()


def dealer_of(rules: Rules, table: SampleTable, figures: DealtFigures, layout: str = "zigzag") -> StepDealer:
    """Return the dealer of steps that are formed under ``rules``; their samples are in ``table``.

    ``layout``: the layout of the feed, which may name the settings of dynamic context parallelism.
    """
    if (dynamic := DynamicCp.of(layout)) is not None:
        return GroupDealer(rules, table, figures, dynamic)
    return (PaddedDealer if rules.padded else PackDealer)(rules, table, figures)


def _in_turn(packs: list[I64]) -> tuple[I64, I64]:
    """Return the samples of packs one pack after another, int64 [samples], and where each begins, [packs + 1]."""
    return np.concatenate(packs), np.concatenate([[0], np.cumsum([len(pack) for pack in packs])])


def _joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ascending spans [a, b) with those that meet as one.

    >>> _joined([(0, 2), (2, 4), (6, 8)])
    [(0, 4), (6, 8)]
    """
    apart = spans[:1]
    for a, b in spans[1:]:
        if a == apart[-1][1]:
            apart[-1] = (apart[-1][0], b)
        else:
            apart.append((a, b))
    return apart


def _u32(column: I64 | I32) -> bytes:
    """Return the numbers as the bytes of little-endian uint32, the form of a message's columns."""
    return column.astype("<u4").tobytes()
