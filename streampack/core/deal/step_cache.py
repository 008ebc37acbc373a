"""The steps kept for readers: each is dealt over a mesh, and described in messages for one rank or one host.

A step is dealt once for a mesh (``dealt_steps``), and then read any number of times with the same result. The contents
of the messages are laid out when the step is dealt, all packs of a rank together. So a rank's messages are slices, and
the cost of a request does not grow with the number of ranks. The module knows packs and handles, never tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec import UNSET, UnsetType
from msgspec.structs import asdict, replace

from streampack.core.columns.step_columns import fields_of
from streampack.core.deal.deal_stats import DealtFigures
from streampack.core.deal.dealt_steps import DealtStep, StepDealer, dealer_of
from streampack.core.deal.dynamic_cp.cp_plan import GroupRequest
from streampack.core.deal.node_parts import NodeRanks
from streampack.core.layout.boundaries import Contents
from streampack.core.layout.step_frames import INPUT_IDS, frames_for
from streampack.core.model.fields import MEDIA
from streampack.core.model.mesh import DynamicCp, Mesh
from streampack.core.model.rules import Rules
from streampack.core.model.samples import I64, PACK, SampleTable
from streampack.core.model.steps import PlannedStep
from streampack.core.protocol.relay_messages import NodePart
from streampack.core.protocol.step_part import Deal, StepPart, StepStage

PART_BYTES = 2 << 20
"""Bytes of payload in one message, about; a larger step is sent as several messages, its parts."""

NOTHING = Contents(*[np.zeros(0, np.int64)] * 4)


@dataclass(slots=True)
class _Kept:
    """A kept step, and the result of dealing it on the mesh that requested it last."""

    step: PlannedStep
    dealer: StepDealer
    stage: StepStage | UnsetType
    skipped: bool = False
    request: GroupRequest | None = None
    dealt: DealtStep | None = None


class KeptSteps:
    """The steps of a feed that some rank may still request, by number.

    A step is dealt by its own rules. ``rules`` are those of the feed, for tokens and fields, which no step changes.
    """

    def __init__(self, feed: str, rules: Rules, layout: str, table: SampleTable) -> None:
        self._feed, self._rules, self._layout, self._table = feed, rules, layout, table
        self._steps: dict[int, _Kept] = {}
        self._id_bytes = np.dtype(rules.tokens).itemsize
        self._by_row = [field for field in rules.fields if rules.share and field.align == "target"]
        """Fields with a value for each token of each sample, although samples share tokens."""
        self.part_bytes = PART_BYTES
        self.lineage = 0
        self.figures = DealtFigures()
        self._dynamic = DynamicCp.of(layout)
        self._dealer = dealer_of(rules, table, self.figures, layout)
        self._first = _without_streams(rules)

    def request(self, step: PlannedStep, mesh: Mesh) -> GroupRequest | None:
        """Return the request for the plan of a step that is not kept yet; None if its mesh needs no plan ahead."""
        dealer = self._dealer_of(step)
        return None if dealer.refusal(mesh, self._layout, step.number) else dealer.request(step, mesh)

    def add(self, step: PlannedStep, skipped: bool = False, request: GroupRequest | None = None) -> None:
        """Keep a step; if the step is ``skipped``, readers get its digests and no packs.

        ``request``: the request for its plan, with the plan.
        """
        self._steps[step.number] = _Kept(step, self._dealer_of(step), self._stage_of(step), skipped, request)
        if skipped:
            self.figures.skip(step.packs)

    def _dealer_of(self, step: PlannedStep) -> StepDealer:
        """Return the dealer for the rules of a step, which most steps share with the step before."""
        if step.rules is not self._dealer.rules:
            self._dealer = dealer_of(step.rules, self._table, self.figures, self._layout)
        return self._dealer

    def _stage_of(self, step: PlannedStep) -> StepStage | UnsetType:
        """Return the stage of a step, as messages have it."""
        if not step.stage.number:
            return UNSET
        rules = _without_streams(step.rules)
        return StepStage(step.stage.number, step.stage.name, UNSET if rules == self._first else rules)

    def stage_of(self, number: int) -> StepStage | UnsetType:
        """Return the stage of a kept step; UNSET for the first stage."""
        return self._steps[number].stage

    def has(self, number: int) -> bool:
        """Return whether a step is kept."""
        return number in self._steps

    def skip(self, first: int, last: int) -> None:
        """Mark the steps ``first`` to ``last`` as skipped; from now on readers get no packs of these steps."""
        for number, kept in self._steps.items():
            if first <= number <= last and not kept.skipped:
                kept.skipped = True
                self.figures.skip(kept.step.packs)

    def forget(self, number: int) -> I64:
        """Drop a step; return the handles of all its samples, int64 [n]."""
        return self._steps.pop(number).step.packs.handles

    def num_bytes(self, packs: Contents, mesh: Mesh, frames: list[str], shards: int = 1) -> int:
        """Return the payload bytes of a message with these packs and the payload ``frames``, for ``shards`` cp ranks.

        Fields of axis ``sample`` and ``edges`` are not counted.
        """
        tokens, (cut, whole) = int(packs.widths.sum()), self._token_bytes(frames)
        if packs.sizes is None:
            of_shards = tokens // self._shares(mesh) * shards
        else:
            of_shards = int((packs.widths // packs.sizes).sum())
        of_rows = sum(field.value_bytes for field in self._by_row if field.name in frames)
        rows = int(self._table.length[packs.handles].sum()) if of_rows else 0
        media = int(self._table.extra_bytes[packs.handles].sum()) if MEDIA in frames else 0
        return of_shards * cut + tokens * whole + rows * of_rows + media

    def node_bytes(self, packs: Contents, node: NodeRanks) -> int:
        """Return the payload bytes of a message with these packs for a host, as ``num_bytes`` does."""
        return self.num_bytes(packs, node.mesh, node.frames, self._shards(node))

    def parts(self, number: int, mesh: Mesh, begin: int = 0, request: int = 0) -> Iterator[tuple[StepPart, Contents]]:
        """Yield the messages of a step for one rank, with the packs of each, from message ``begin`` on.

        If the step has fewer messages than ``begin``, all of them are yielded. The messages name the ``request``.
        """
        kept = self._steps[number]
        if kept.skipped:
            yield self._skipped_part(kept, request), NOTHING
            return
        dealt, frames = self._deal(kept, mesh), frames_for(self._rules.all_fields, mesh, self._layout)
        per_rank, most = dealt.each, self._most(kept, mesh)
        own, parts = self._line(mesh)[1] * per_rank, -(-per_rank // most)
        for part in range(begin if begin < parts else 0, parts):
            first = part * most
            spans = [(own + first, own + min(first + most, per_rank))]
            yield self._part(kept, dealt, spans, part, parts, first, frames, request)

    def node_parts(
        self, number: int, node: NodeRanks, begin: int = 0, request: int = 0
    ) -> Iterator[tuple[NodePart, Contents]]:
        """Yield the messages of a step for the ranks of a host, as ``parts`` does for one rank.

        A message has one part of ``parts`` for some of ``node.dp_ranks``, so that it holds about ``part_bytes`` of
        payload in all. The messages of all these ranks come before the next part. A skipped step is one message.
        """
        kept, ranks = self._steps[number], node.dp_ranks
        if kept.skipped:
            yield _for_node(self._skipped_part(kept, request), node, ranks, 0, 1), NOTHING
            return
        dealt = self._deal(kept, node.mesh)
        per_rank, most = dealt.each, self._most(kept, node.mesh)
        size = max(1, self.part_bytes // (min(most, per_rank) * self._pack_bytes(kept, node.mesh) * self._shards(node)))
        groups = [ranks[i : i + size] for i in range(0, len(ranks), size)]
        rank_parts = -(-per_rank // most)
        parts = rank_parts * len(groups)
        for part in range(begin if begin < parts else 0, parts):
            rank_part, group = divmod(part, len(groups))
            first = rank_part * most
            stop = min(first + most, per_rank)
            spans = [(rank * per_rank + first, rank * per_rank + stop) for rank in groups[group]]
            plan, packs = self._part(kept, dealt, spans, part, parts, first, node.frames, request)
            yield _for_node(plan, node, groups[group], rank_part, rank_parts), packs

    def _part(
        self,
        kept: _Kept,
        dealt: DealtStep,
        spans: list[tuple[int, int]],
        part: int,
        parts: int,
        first: int,
        frames: list[str],
        request: int,
    ) -> tuple[StepPart, Contents]:
        """Return the message with the packs [a, b) of each span, and the packs."""
        columns, packs = dealt.cut(spans)
        plan = StepPart(
            **self._head(kept, request), part=part, parts=parts, first=first, micro_batches=dealt.each, frames=frames,
            deal=Deal(0, dealt.digest) if dealt.digest else UNSET, **fields_of(columns),
        )  # fmt: skip
        return plan, packs

    def _skipped_part(self, kept: _Kept, request: int) -> StepPart:
        """Return the message of a skipped step, which has no packs."""
        return StepPart(**self._head(kept, request), part=0, parts=1, first=0, micro_batches=0, frames=[])

    def _head(self, kept: _Kept, request: int) -> dict[str, Any]:
        """Return what all messages of a step say of it."""
        step = kept.step
        return {
            "feed": self._feed, "lineage": self.lineage, "step": step.number, "digest": step.digest,
            "chain": step.chain, "num_loss_tokens": step.num_loss_tokens, "num_samples": step.num_samples,
            "request": request, "stage": kept.stage,
        }  # fmt: skip

    def _token_bytes(self, frames: list[str]) -> tuple[int, int]:
        """Return the bytes of a token that is cut among cp ranks, and those of a replicated one, in payload ``frames``.

        A middle pipeline stage gets no token ids.
        """
        cut, whole = self._id_bytes if INPUT_IDS in frames else 0, 0
        for field in self._rules.fields:
            if field.axis == "token" and field.name in frames and field not in self._by_row:
                if field.cp == "replicate":
                    whole += field.value_bytes
                else:
                    cut += field.value_bytes
        return cut, whole

    def _pack_bytes(self, kept: _Kept, mesh: Mesh) -> int:
        """Return the most payload bytes of a step's pack for one rank, without fields of axis ``sample``."""
        if self._dynamic is not None:
            return self._dynamic.rank_tokens * self._rules.token_bytes
        return kept.step.rules.budget // self._shares(mesh) * self._rules.token_bytes

    def _most(self, kept: _Kept, mesh: Mesh) -> int:
        """Return the most micro-batches of one rank in a message; one if samples have bytes beside tokens."""
        return 1 if self._rules.has_extra_bytes else max(1, self.part_bytes // self._pack_bytes(kept, mesh))

    def _shares(self, mesh: Mesh) -> int:
        """Return the number of cp ranks that share the tokens of a pack."""
        return 1 if self._layout == "whole" else mesh.cp

    def _shards(self, node: NodeRanks) -> int:
        """Return the number of different shards of a pack that the ranks of a host hold."""
        return 1 if self._layout == "whole" else len(node.cp_ranks)

    def ids_of(self, number: int, mesh: Mesh) -> I64 | None:
        """Return the ids of a rank's samples in a step, int64 [n, 3]; None if the step is not dealt on this mesh."""
        kept = self._steps.get(number)
        ranks, rank = self._line(mesh)
        if kept is None or kept.dealt is None or kept.dealt.sizes != (ranks, mesh.pp):
            return None
        first = rank * kept.dealt.each
        columns, _ = kept.dealt.cut([(first, first + kept.dealt.each)])
        ids = {"streams_u32": "<u4", "indices_u64": "<u8", "parts_u32": "<u4"}
        return np.stack([np.frombuffer(columns[name], kind).astype(np.int64) for name, kind in ids.items()], axis=1)

    def refusal(self, number: int, mesh: Mesh) -> str:
        """Return the reason that the rules of a step cannot serve ``mesh``; empty if they can."""
        kept = self._steps[number]
        return "" if kept.skipped else kept.dealer.refusal(mesh, self._layout, number)

    def unfit(self, number: int, mesh: Mesh) -> str:
        """Return the reason that a step cannot be served on ``mesh``, by its samples; empty if it can.

        If the rules have ``empty: error``, every rank must get a sample. Groups of ranks break up groups of samples.
        """
        kept = self._steps[number]
        batch, handles = kept.step.rules.batch, kept.step.packs.handles
        if self._dynamic is not None and not kept.skipped and (self._table.keep[handles] == PACK).any():
            return (
                f"step {number}: got a group of samples that keep='pack' puts into one pack, with `cp: dynamic`, which "
                f"puts samples into the packs of other ranks. Push groups without keep='pack', or set `cp: static`"
            )
        if batch is None or batch.empty == "pad" or kept.skipped:
            return ""
        counts = self._deal(kept, mesh).contents.counts
        if counts.all():
            return ""
        count, num_groups = len(counts), int(np.count_nonzero(self._table.keep[handles] != PACK))
        unit = "samples" if num_groups == len(handles) else "samples (a group kept in one pack counts once)"
        least = f"at least {count}" if num_groups < count else f"a multiple of {mesh.dp}"
        return (
            f"step {number}: got a batch of {num_groups} {unit} for dp={mesh.dp} with {count // mesh.dp} micro-batches "
            f"per rank, expected {least}. Set `rules.step.empty: pad`, make batches larger, or use a smaller mesh"
        )

    def _line(self, mesh: Mesh) -> tuple[int, int]:
        """Return the number of ranks that packs are dealt to, and the rank of ``mesh`` among them.

        Packs are dealt to the dp ranks; with dynamic context parallelism, to the dp x cp ranks.
        """
        if self._dynamic is None:
            return mesh.dp, mesh.dp_rank
        return mesh.dp * mesh.cp, mesh.dp_cp_rank

    def _deal(self, kept: _Kept, mesh: Mesh) -> DealtStep:
        """Return the step as dealt on this mesh; deal it now unless it is dealt already."""
        if kept.dealt is None or kept.dealt.sizes != (self._line(mesh)[0], mesh.pp):
            kept.dealt = kept.dealer.deal(kept.step, mesh, kept.dealt is None, kept.request)
        return kept.dealt


def _without_streams(rules: Rules) -> Rules:
    """Return the rules to build packs with: without streams, and without the stages that follow."""
    return replace(rules, streams=(), weights_ramp=None, stages=())


def _for_node(
    plan: StepPart, node: NodeRanks, dp_ranks: tuple[int, ...], rank_part: int, rank_parts: int
) -> NodePart:  # fmt: skip
    """Return the message ``plan`` as one for the ranks of a host."""
    return NodePart(
        **asdict(plan), dp_ranks=dp_ranks, cp_ranks=node.cp_ranks, cp=node.mesh.cp, rank_part=rank_part,
        rank_parts=rank_parts,
    )  # fmt: skip
