"""The steps kept for readers: each is dealt over a mesh, and described in messages with one rank's packs.

A step is dealt once for a mesh (``assignment``), and then read any number of times with the same result. The contents
of the messages are laid out when the step is dealt, all packs of a rank together. So a rank's messages are slices, and
the cost of a request does not grow with the number of ranks. The module knows packs and handles, never tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from streampack.core.deal.assignment import deal_padded, deal_step, packs_of_mesh, split
from streampack.core.deal.deal_kernels import lay_out
from streampack.core.deal.deal_stats import DealtFigures
from streampack.core.layout.boundaries import Contents
from streampack.core.layout.step_frames import frames_for
from streampack.core.model.mesh import Mesh
from streampack.core.model.rules import Rules
from streampack.core.model.samples import I64, PACK, SampleTable
from streampack.core.model.steps import PlannedPacks, PlannedStep
from streampack.core.protocol.trainer_messages import StepPart
from streampack.core.stats.padding import depends_on_mesh, padding_of, padding_of_rows

PART_BYTES = 2 << 20
"""Bytes of payload in one message, about; a larger step is sent as several messages, its parts."""

NOTHING = Contents(*[np.zeros(0, np.int64)] * 4)


class Portions(NamedTuple):
    """The packs of a step on a mesh, after splitting.

    Pack i holds samples ``handles[bounds[i]:bounds[i + 1]]``, int64 [n] and [packs + 1]. The other arrays, int64
    [packs], are sums over a pack's samples; ``slots`` are aligned tokens.
    """

    handles: I64
    bounds: I64
    loss_tokens: I64
    costs: I64
    tokens: I64
    slots: I64


@dataclass(frozen=True, slots=True)
class _Dealt:
    """A step dealt on a mesh of ``sizes`` (dp, pp): packs rank by rank; every rank has ``each`` packs.

    Pack i holds samples ``bounds[i]`` to ``bounds[i + 1]`` of ``contents`` and of the columns, which are those of
    ``StepPart``.
    """

    sizes: tuple[int, int]
    each: int
    bounds: list[int]
    contents: Contents
    numbers_u32: bytes
    counts_u32: bytes
    loss_tokens_u32: bytes
    lengths_u32: bytes
    streams_u32: bytes
    indices_u64: bytes
    parts_u32: bytes
    widths_u32: bytes
    rows_u32: bytes


@dataclass(slots=True)
class _Kept:
    """A kept step, and the result of dealing it on the mesh that requested it last."""

    step: PlannedStep
    skipped: bool = False
    dealt: _Dealt | None = None


class KeptSteps:
    """The steps of a feed that some rank may still request, by number."""

    def __init__(self, feed: str, rules: Rules, layout: str, table: SampleTable) -> None:
        self._feed, self._rules, self._layout, self._table = feed, rules, layout, table
        self._steps: dict[int, _Kept] = {}
        self.part_bytes = PART_BYTES
        self.lineage = 0
        self.figures = DealtFigures()

    def add(self, step: PlannedStep, skipped: bool = False) -> None:
        """Keep a step; if the step is ``skipped``, readers get its digests and no packs."""
        self._steps[step.number] = _Kept(step, skipped)
        if skipped:
            self.figures.skip(step.packs)

    def skip(self, first: int, last: int) -> None:
        """Mark the steps ``first`` to ``last`` as skipped; from now on readers get no packs of these steps."""
        for number, kept in self._steps.items():
            if first <= number <= last and not kept.skipped:
                kept.skipped = True
                self.figures.skip(kept.step.packs)

    def forget(self, number: int) -> I64:
        """Drop a step; return the handles of all its samples, int64 [n]."""
        return self._steps.pop(number).step.packs.handles

    def num_bytes(self, packs: Contents, mesh: Mesh) -> int:
        """Return the approximate payload bytes of a message with these packs, without fields of axis ``sample``."""
        shares = 1 if self._layout == "whole" else mesh.cp
        return int(packs.widths.sum()) // shares * self._rules.token_bytes

    def parts(self, number: int, mesh: Mesh, begin: int = 0, resend: int = 0) -> Iterator[tuple[StepPart, Contents]]:
        """Yield the messages of a step for one rank, with the packs of each, from message ``begin`` on.

        If the step has fewer messages than ``begin``, all of them are yielded. ``resend`` is copied to the messages.
        """
        kept, rules = self._steps[number], self._rules
        if kept.skipped:
            yield self._skipped_part(kept.step, resend), NOTHING
            return
        step, dealt = kept.step, self._deal(kept, mesh)
        width = rules.budget // (1 if self._layout == "whole" else mesh.cp)
        most = max(1, self.part_bytes // (width * rules.token_bytes))
        frames = frames_for(rules.fields, mesh, self._layout)
        mine, count = mesh.dp_rank * dealt.each, dealt.each
        parts = -(-count // most)
        for part in range(begin if begin < parts else 0, parts):
            first = part * most
            a, b = mine + first, mine + min(first + most, count)
            c, d = dealt.bounds[a], dealt.bounds[b]
            plan = StepPart(
                feed=self._feed, lineage=self.lineage, step=step.number,
                part=part, parts=parts, first=first,
                micro_batches=count, digest=step.digest, chain=step.chain,
                num_loss_tokens=step.num_loss_tokens, num_samples=step.num_samples, frames=frames,
                packs_u32=dealt.numbers_u32[4 * a : 4 * b],
                counts_u32=dealt.counts_u32[4 * a : 4 * b],
                loss_tokens_u32=dealt.loss_tokens_u32[4 * a : 4 * b],
                lengths_u32=dealt.lengths_u32[4 * c : 4 * d],
                streams_u32=dealt.streams_u32[4 * c : 4 * d],
                indices_u64=dealt.indices_u64[8 * c : 8 * d],
                parts_u32=dealt.parts_u32[4 * c : 4 * d],
                widths_u32=dealt.widths_u32[4 * a : 4 * b],
                rows_u32=dealt.rows_u32[4 * a : 4 * b],
                resend=resend,
            )  # fmt: skip
            handles, counts, widths, aligns = dealt.contents
            yield plan, Contents(handles[c:d], counts[a:b], widths[a:b], aligns[a:b])

    def _skipped_part(self, step: PlannedStep, resend: int) -> StepPart:
        """Return the message of a skipped step, which has no packs."""
        return StepPart(
            feed=self._feed, lineage=self.lineage, step=step.number, part=0, parts=1, first=0, micro_batches=0,
            digest=step.digest, chain=step.chain, num_loss_tokens=step.num_loss_tokens, num_samples=step.num_samples,
            frames=[], packs_u32=b"", counts_u32=b"", loss_tokens_u32=b"", lengths_u32=b"", streams_u32=b"",
            indices_u64=b"", parts_u32=b"", resend=resend,
        )  # fmt: skip

    def unfit(self, number: int, mesh: Mesh) -> str:
        """Return the reason that a step cannot be served on ``mesh``; empty if it can.

        If the rules have ``empty: error``, every rank must get a sample.
        """
        kept, batch = self._steps[number], self._rules.batch
        if batch is None or batch.empty == "pad" or kept.skipped:
            return ""
        counts, handles = self._deal(kept, mesh).contents.counts, kept.step.packs.handles
        if counts.all():
            return ""
        count, got = len(counts), int(np.count_nonzero(self._table.keep[handles] != PACK))
        what = "samples" if got == len(handles) else "samples (a group kept in one pack counts once)"
        least = f"at least {count}" if got < count else f"a multiple of {mesh.dp}"
        return (
            f"step {number}: got a batch of {got} {what} for dp={mesh.dp} with {count // mesh.dp} micro-batches per "
            f"rank, expected {least}. Set `rules.step.empty: pad`, make batches larger, or use a smaller mesh"
        )

    def _deal(self, kept: _Kept, mesh: Mesh) -> _Dealt:
        """Return the step as dealt on this mesh; deal it now unless it is dealt already."""
        if kept.dealt is None or kept.dealt.sizes != (mesh.dp, mesh.pp):
            kept.dealt = (self._deal_padded if self._rules.padded else self._deal_packs)(kept, mesh)
        return kept.dealt

    def _deal_packs(self, kept: _Kept, mesh: Mesh) -> _Dealt:
        """Deal a step's packs on ``mesh``, after splitting packs if there are too few; update the statistics."""
        formed, rules, is_first = kept.step.packs, self._rules, kept.dealt is None
        packs: PlannedPacks | Portions = formed
        count = packs_of_mesh(rules, len(formed), mesh.dp, mesh.pp)
        if count > len(formed):
            packs = self._split(formed, count)
            if is_first:
                empty = int(np.count_nonzero(np.diff(packs.bounds) == 0))
                self.figures.empty_packs += empty
                self.figures.split_packs += count - len(formed) - empty
        dealt = deal_step(rules, packs.costs, mesh.dp)
        widths = rules.step_widths(packs.slots, mesh.pp)
        self.figures.add(packs.costs, packs.tokens, dealt)
        if is_first and depends_on_mesh(rules):
            self.figures.deliver(packs.tokens, padding_of(packs.tokens, packs.slots, widths, rules))
        return self._in_order(packs, dealt, widths, np.full(count, rules.align.sample), mesh)

    def _deal_padded(self, kept: _Kept, mesh: Mesh) -> _Dealt:
        """Return a step's samples as padded micro-batches on ``mesh``; update the statistics."""
        formed, rules, is_first = kept.step.packs, self._rules, kept.dealt is None
        found = deal_padded(rules, self._table.length[formed.handles].astype(np.int64), mesh.dp, mesh.pp)
        packs, widths = self._portions(formed.handles, found.packs), found.rows * found.widths
        dealt = np.arange(len(widths)).reshape(-1, mesh.dp)
        self.figures.add(found.rows * rules.balance.costs(found.widths), packs.tokens, dealt)
        if is_first:
            held = np.diff(packs.bounds)
            self.figures.add_padded(found.figures, held, packs.tokens, packs.slots)
            wasted = padding_of_rows(packs.tokens, packs.slots, held, found.rows, found.widths)
            self.figures.deliver(packs.tokens, wasted)
        return self._in_order(packs, dealt, widths, found.widths, mesh)

    def _in_order(self, packs: PlannedPacks | Portions, dealt: I64, widths: I64, aligns: I64, mesh: Mesh) -> _Dealt:
        """Lay out the packs rank by rank, in the form of their messages.

        ``dealt`` int64 [m, dp] are pack numbers by [micro_batch, rank]. ``widths`` and ``aligns``, int64 [packs], are
        the packs' lengths T and the multiples to which their samples are padded.
        """
        numbers, table, rules = dealt.T.ravel(), self._table, self._rules
        bounds, count = np.zeros(len(numbers) + 1, np.int64), len(packs.handles)
        handles, indices = np.empty(count, np.int64), np.empty(count, "<u8")
        lengths, streams, parts = np.empty((3, count), "<u4")
        lay_out(
            numbers, packs.handles, packs.bounds, table.length, table.stream, table.index, table.part, bounds[1:],
            handles, lengths, streams, indices, parts,
        )  # fmt: skip
        counts, widths, aligns = bounds[1:] - bounds[:-1], widths[numbers], aligns[numbers]
        return _Dealt(
            (mesh.dp, mesh.pp), len(dealt), bounds.tolist(), Contents(handles, counts, widths, aligns),
            numbers_u32=_u32(numbers), counts_u32=_u32(counts), loss_tokens_u32=_u32(packs.loss_tokens[numbers]),
            lengths_u32=lengths.tobytes(), streams_u32=streams.tobytes(), indices_u64=indices.tobytes(),
            parts_u32=parts.tobytes(), widths_u32=b"" if rules.shape == "fixed" else _u32(widths),
            rows_u32=_u32(aligns) if rules.padded else b"",
        )  # fmt: skip

    def _split(self, packs: PlannedPacks, count: int) -> Portions:
        """Split packs of FORM into ``count`` packs."""
        slots = self._slots(packs.handles)
        keeps = self._table.keep[packs.handles]
        parts, _ = split(packs.bounds, self._rules.balance.costs(slots), keeps, count)
        return self._portions(packs.handles, parts)

    def _portions(self, handles: I64, packs: list[I64]) -> Portions:
        """Return packs with their sums; each of ``packs`` is positions in ``handles``, int64 [samples]."""
        handles = handles[np.concatenate(packs)]
        bounds = np.concatenate([[0], np.cumsum([len(pack) for pack in packs])])
        slots = self._slots(handles)
        loss_tokens, tokens = self._table.loss_tokens[handles], self._table.length[handles]
        sums = np.zeros((4, len(handles) + 1), np.int64)
        np.cumsum(np.stack([loss_tokens, self._rules.balance.costs(slots), tokens, slots]), axis=1, out=sums[:, 1:])
        return Portions(handles, bounds, *np.diff(sums[:, bounds]))

    def _slots(self, handles: I64) -> I64:
        """Return the aligned tokens of samples, int64 [n]."""
        align = self._rules.align.sample
        return -(-self._table.length[handles].astype(np.int64) // align) * align


def _u32(column: I64) -> bytes:
    """Return the numbers as the bytes of little-endian uint32, the form of a message's columns."""
    return column.astype("<u4").tobytes()
