"""Steps kept for readers: dealt over a mesh, and described in messages with one rank's packs.

A step is dealt once for a mesh (``dealt``) and then read any number of times, the same each
time. Knows packs and handles, never tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from streampack.core.dealt import deal_padded, deal_step, packs_of_mesh, split
from streampack.core.dealt_figures import DealtFigures
from streampack.core.frames import frames_for
from streampack.core.messages import Mesh, StepPart
from streampack.core.rules import Rules
from streampack.core.samples import I64, PACK, SampleTable
from streampack.core.steps import Packs, Step
from streampack.core.waste import waste_of, waste_of_packs, waste_of_rows

PART_BYTES = 1 << 20
"""Payload of one message, about: large steps travel as several."""


class Portion(NamedTuple):
    """A pack, or the part of one, that one rank gets: its samples' ``handles`` int64 [n]."""

    handles: I64
    num_loss_tokens: int
    cost: int
    num_tokens: int
    num_slot_tokens: int


@dataclass(slots=True)
class _Kept:
    step: Step
    skipped: bool = False
    sizes: tuple[int, int] = (0, 0)
    """dp and pp of the mesh that it was dealt over."""
    widths: I64 = field(default_factory=lambda: np.zeros(0, np.int64))
    """T of each pack there, int64 [packs]."""
    rows: I64 = field(default_factory=lambda: np.zeros(0, np.int64))
    """Tokens of a row of each, int64 [packs], where they are padded."""
    packs: Sequence[Portion] = ()
    dealt: I64 = field(default_factory=lambda: np.zeros((0, 0), np.int64))


class KeptSteps:
    """The steps of a feed that some rank may still ask for."""

    def __init__(self, feed: str, rules: Rules, layout: str, table: SampleTable) -> None:
        self._feed, self._rules, self._layout, self._table = feed, rules, layout, table
        self._steps: dict[int, _Kept] = {}
        self.lineage = 0
        self.figures = DealtFigures()

    def add(self, step: Step, skipped: bool = False) -> None:
        """Keep a step; of one that is ``skipped`` readers get the digests and no packs."""
        self._steps[step.number] = _Kept(step, skipped)
        if skipped:
            self.figures.skip(step.packs)

    def skip(self, first: int, last: int) -> None:
        """Steps ``first`` to ``last`` are passed over by whoever asks for them from now on."""
        for number, kept in self._steps.items():
            if first <= number <= last and not kept.skipped:
                kept.skipped = True
                self.figures.skip(kept.step.packs)

    def forget(self, number: int) -> I64:
        """Drop a step; the handles of all its samples, int64 [n]."""
        return self._steps.pop(number).step.packs.handles

    def parts(self, number: int, mesh: Mesh) -> Iterator[tuple[StepPart, tuple[I64, ...]]]:
        """A step's messages for one rank, in order, each with the handles of its packs' samples."""
        kept = self._steps[number]
        step, table = kept.step, self._table
        if kept.skipped:
            yield self._passed_over(step), ()
            return
        if kept.sizes != (mesh.dp, mesh.pp):
            self._deal(kept, mesh)
        column = kept.dealt[:, mesh.dp_rank]
        width = self._rules.budget // (1 if self._layout == "whole" else mesh.cp)
        each = max(1, PART_BYTES // (width * self._rules.token_bytes))
        frames = frames_for(self._rules.fields, mesh, self._layout)
        for part, first in enumerate(range(0, len(column), each)):
            numbers = column[first : first + each]
            packs = [kept.packs[n] for n in numbers.tolist()]
            handles = np.concatenate([pack.handles for pack in packs])
            plan = StepPart(
                feed=self._feed, lineage=self.lineage, step=step.number,
                part=part, parts=-(-len(column) // each), first=first,
                micro_batches=len(column), digest=step.digest, chain=step.chain,
                num_loss_tokens=step.num_loss_tokens, num_samples=step.num_samples, frames=frames,
                packs_u32=numbers.astype("<u4").tobytes(),
                counts_u32=np.array([len(pack.handles) for pack in packs], "<u4").tobytes(),
                loss_tokens_u32=np.array([pack.num_loss_tokens for pack in packs], "<u4").tobytes(),
                lengths_u32=table.length[handles].astype("<u4").tobytes(),
                streams_u32=table.stream[handles].astype("<u4").tobytes(),
                indices_u64=table.index[handles].astype("<u8").tobytes(),
                parts_u32=table.part[handles].astype("<u4").tobytes(),
                widths_u32=b"" if self._rules.shape == "fixed" else kept.widths[numbers].astype("<u4").tobytes(),
                rows_u32=kept.rows[numbers].astype("<u4").tobytes() if self._rules.padded else b"",
            )  # fmt: skip
            yield plan, tuple(pack.handles for pack in packs)

    def _passed_over(self, step: Step) -> StepPart:
        return StepPart(
            feed=self._feed, lineage=self.lineage, step=step.number, part=0, parts=1, first=0, micro_batches=0,
            digest=step.digest, chain=step.chain, num_loss_tokens=step.num_loss_tokens, num_samples=step.num_samples,
            frames=[], packs_u32=b"", counts_u32=b"", loss_tokens_u32=b"", lengths_u32=b"", streams_u32=b"",
            indices_u64=b"", parts_u32=b"",
        )  # fmt: skip

    def unfit(self, number: int, mesh: Mesh) -> str:
        """Why a step cannot be served on a mesh: a rank would have no sample, and the policy forbids it. Or empty."""
        kept, batch = self._steps[number], self._rules.batch
        if batch is None or batch.empty == "pad" or kept.skipped:
            return ""
        if kept.sizes != (mesh.dp, mesh.pp):
            self._deal(kept, mesh)
        if all(len(pack.handles) for pack in kept.packs):
            return ""
        count, handles = len(kept.packs), kept.step.packs.handles
        got = int(np.count_nonzero(self._table.keep[handles] != PACK))
        what = "samples" if got == len(handles) else "samples and groups kept in one pack"
        least = f"{count} at least" if got < count else f"a multiple of {mesh.dp}"
        return (
            f"step {number}: got a batch of {got} {what} for dp={mesh.dp}, {count // mesh.dp} micro-batches each, "
            f"expected {least}: set rules.step.empty to pad, make batches larger, or use a smaller mesh"
        )

    def _deal(self, kept: _Kept, mesh: Mesh) -> None:
        if self._rules.padded:
            self._deal_padded(kept, mesh)
            return
        formed, rules, is_first = kept.step.packs, self._rules, not any(kept.sizes)
        kept.packs = [
            Portion(pack.handles, pack.num_loss_tokens, pack.cost, pack.num_tokens, pack.num_slot_tokens)
            for pack in formed
        ]
        count = packs_of_mesh(rules, len(formed), mesh.dp, mesh.pp)
        if count > len(formed):
            kept.packs = self._split(formed, count)
            if is_first:
                self.figures.empty_packs += (empty := sum(not len(pack.handles) for pack in kept.packs))
                self.figures.split_packs += count - len(formed) - empty
        columns = np.array([(pack.cost, pack.num_tokens, pack.num_slot_tokens) for pack in kept.packs], np.int64)
        costs, tokens, slots = columns.T
        kept.sizes, kept.dealt = (mesh.dp, mesh.pp), deal_step(rules, costs, mesh.dp)
        kept.widths = rules.step_widths(slots, mesh.pp)
        self.figures.add(costs, tokens, kept.dealt)
        if is_first:
            self.figures.more_waste += waste_of(tokens, slots, kept.widths, rules)
            self.figures.more_waste -= waste_of_packs(formed, rules)

    def _deal_padded(self, kept: _Kept, mesh: Mesh) -> None:
        formed, rules, is_first = kept.step.packs, self._rules, not any(kept.sizes)
        handles = formed.handles
        columns = self._columns(handles)
        dealt = deal_padded(rules, columns[:, 2], mesh.dp, mesh.pp)
        kept.packs = [Portion(handles[rows], *columns[rows].sum(axis=0).tolist()) for rows in dealt.packs]
        kept.rows, kept.widths = dealt.widths, dealt.rows * dealt.widths
        kept.sizes, kept.dealt = (mesh.dp, mesh.pp), np.arange(len(dealt.packs)).reshape(-1, mesh.dp)
        sums = np.array([(len(pack.handles), pack.num_tokens, pack.num_slot_tokens) for pack in kept.packs], np.int64)
        held, tokens, slots = sums.T
        self.figures.add(dealt.rows * rules.balance.costs(dealt.widths), tokens, kept.dealt)
        if is_first:
            self.figures.add_padded(dealt.figures, held, tokens, slots)
            self.figures.more_waste += waste_of_rows(tokens, slots, held, dealt.rows, dealt.widths)
            self.figures.more_waste -= waste_of_packs(formed, rules)

    def _split(self, packs: Packs, count: int) -> list[Portion]:
        handles = packs.handles
        columns = self._columns(handles)
        parts, _ = split(packs.bounds, columns[:, 1], self._table.keep[handles], count)
        return [Portion(handles[part], *columns[part].sum(axis=0).tolist()) for part in parts]

    def _columns(self, handles: I64) -> I64:
        """Of samples, what a ``Portion`` sums up, int64 [n, 4]: loss tokens, cost, tokens, slot tokens."""
        table, align = self._table, self._rules.align.sample
        lengths = table.length[handles].astype(np.int64)
        slots = -(-lengths // align) * align
        return np.stack([table.loss_tokens[handles], self._rules.balance.costs(slots), lengths, slots], axis=1)


def mesh_refusal(mesh: Mesh, rules: Rules, layout: str) -> str:
    """Why these rules cannot serve a mesh, naming both; empty if they can."""
    if rules.batch is not None:
        if wrong := batch_refusal(mesh, rules):
            return wrong
    elif rules.packs % mesh.dp:
        divisors = ", ".join(str(d) for d in range(1, min(rules.packs, 512) + 1) if rules.packs % d == 0)
        return (
            f"got dp={mesh.dp}, expected one that divides the {rules.packs} packs of a step "
            f"({divisors}): change the mesh or rules.step.packs"
        )
    if mesh.cp == 1 or layout == "whole":
        return ""
    if rules.padded and layout != "zigzag":
        return (
            f"got cp={mesh.cp} and cp_layout: {layout} with padded: true, expected zigzag, which cuts each row by "
            f"itself, or whole"
        )
    parts = mesh.cp if layout == "contiguous" else 2 * mesh.cp
    how = f"{'' if layout == 'contiguous' else '2 * '}cp = {parts}"
    if layout == "zigzag" and (rules.align.sample % parts or rules.align.pack % parts):
        return (
            f"got cp={mesh.cp} and align sample={rules.align.sample} pack={rules.align.pack}, expected multiples "
            f"of {how}: set rules.align or planned_mesh.cp before the run starts"
        )
    if rules.width_unit % parts:
        what = f"a budget of {rules.budget}" if rules.shape == "fixed" else f"packs of multiples of {rules.width_unit}"
        keys = "rules.budget" if rules.shape == "fixed" else "rules.align.pack, rules.shape"
        return (
            f"got cp={mesh.cp} and {what}, expected a multiple of {how}, which the layout {layout} cuts it into: "
            f"change {keys} or the mesh"
        )
    return ""


def batch_refusal(mesh: Mesh, rules: Rules) -> str:
    """Why batches of these rules would leave ranks of a mesh without a sample, if they must not; or empty."""
    batch = rules.batch
    least = packs_of_mesh(rules, 1, mesh.dp, mesh.pp)
    if batch is None or batch.empty == "pad" or least <= (samples := batch.samples or batch.min_samples):
        return ""
    key = "samples" if batch.samples else "min_samples"
    return (
        f"got dp={mesh.dp} and batches of {samples} samples with empty: error, expected {least} at least, for "
        f"{least // mesh.dp} micro-batches of each rank: change the mesh, rules.step.{key} or rules.step.empty"
    )
