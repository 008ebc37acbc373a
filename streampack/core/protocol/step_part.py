"""The message that brings a part of a step to a rank, and what its columns say of packs."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec
import numpy as np
from msgspec import UNSET, Meta, Struct, UnsetType

from streampack.core.columns.step_columns import OptionalColumns
from streampack.core.model.bounded import Digest, Name, Small, Text
from streampack.core.model.fields import MAX_FIELDS
from streampack.core.model.mesh import DynamicCp
from streampack.core.model.rules import Rules
from streampack.core.model.samples import I64
from streampack.core.model.shapes import check_widths
from streampack.core.model.snapshot import Count
from streampack.core.protocol.message import FeedMessage


class StepStage(Struct, frozen=True, omit_defaults=True):
    """The stage of a step, if it is not the first stage of the run.

    Attributes:
        number, name: Number and name of the stage; the name may be empty.
        rules: The rules of the step without streams, if packs are built in another way than by the run's first rules.
    """

    number: Count
    name: Text = ""
    rules: Rules | UnsetType = UNSET

    @property
    def text(self) -> str:
        """The name of the stage, or its number."""
        return self.name or str(self.number)


class Deal(Struct, frozen=True):
    """The plan by which a step was dealt to groups of ranks, with dynamic context parallelism.

    Attributes:
        number: Number of the deal: steps that are dealt anew for other ranks have a higher one.
        digest: Digest of the groups, and of the samples in each.
    """

    number: Count
    digest: Digest


class StepPart(OptionalColumns, FeedMessage, frozen=True):  # not kw_only: so OptionalColumns come last
    """A step's plan for one rank, and the payload of some of its micro-batches.

    The part holds p packs, one for each micro-batch, with n samples in all. A pack has T tokens, over all cp ranks.
    Payload: a frame for each name in ``frames``.

    - ``input_ids``: [p, T / cp].
    - ``edges``: int32 [slices], the token after each slice, if the layout cuts samples.
    - fields of axis ``token``: [p, T / cp, ...], or [p, T, ...] if replicated.
    - fields of axis ``sample``: [n, ...].
    - fields with ``align: target``, if the feed may have trees: [tokens of all samples, ...], without padding.
    - ``media``: the media bytes of each sample, one sample after another (``media_format``).

    Attributes:
        part, parts: Number of the part, and of all parts of the step.
        first: Number of the first micro-batch in the part.
        micro_batches: Micro-batches of the step; 0 if the step is skipped.
        digest: Digest of the step.
        chain: Digest of all steps up to this one.
        num_loss_tokens, num_samples: Totals of the whole step.
        packs_u32: [p], number of each pack in the step.
        counts_u32: [p], samples of each pack.
        loss_tokens_u32: [p], labels of each pack that count in the loss.
        lengths_u32, streams_u32, indices_u64, parts_u32: [n], tokens, stream, index and piece of each sample.
        widths_u32: [p], T of each pack; empty if the rules' shape is ``fixed``, and T is the budget.
        rows_u32: [p], tokens of a row of each pack, if the rules are ``padded``: a row for each sample, and at most
            one more of padding.
        group_firsts_u32, group_sizes_u32: [p], the first dp x cp rank and the number of ranks that share each pack,
            with dynamic context parallelism; else absent.
        request: Number of the Get that this part answers. Parts of one request come in order, so a part before its
            turn shows that others are lost.
        stage: The stage of the step; UNSET for the first. Each part has it, so that it can be read alone.
        deal: The plan of the groups; UNSET without dynamic context parallelism. All parts of a step have the same.
    """

    TYPE: ClassVar[int] = 31
    lineage: Count
    step: Count
    part: Small
    parts: Small
    first: Small
    micro_batches: Small
    digest: bytes
    chain: bytes
    num_loss_tokens: Count
    num_samples: Count
    frames: Annotated[list[Name], Meta(max_length=MAX_FIELDS + 3)]
    packs_u32: bytes = b""
    counts_u32: bytes = b""
    loss_tokens_u32: bytes = b""
    lengths_u32: bytes = b""
    streams_u32: bytes = b""
    indices_u64: bytes = b""
    parts_u32: bytes = b""
    widths_u32: bytes = b""
    rows_u32: bytes = b""
    request: Count = msgspec.field(default=0, name="resend")
    stage: StepStage | UnsetType = UNSET
    group_firsts_u32: bytes | UnsetType = UNSET
    group_sizes_u32: bytes | UnsetType = UNSET
    deal: Deal | UnsetType = UNSET

    def groups(self, dynamic: DynamicCp, ranks: int) -> tuple[I64, I64]:
        """Return the first rank and the size of each pack's group, int64 [p] each, of ``ranks`` dp x cp ranks.

        Raises ValueError for groups that are not aligned powers of two within the ranks.
        """
        columns = self.group_firsts_u32 or b"", self.group_sizes_u32 or b""
        if any(len(column) != len(self.counts_u32) for column in columns) or self.deal is UNSET:
            raise ValueError(f"got {[*map(len, columns)]} bytes of groups, expected {len(self.counts_u32)} and a deal")
        firsts, sizes = (np.frombuffer(column, "<u4").astype(np.int64) for column in columns)
        wrong = (sizes < 1) | (sizes & (sizes - 1) != 0) | (sizes > dynamic.max_group) | (firsts + sizes > ranks)
        if (wrong | (firsts % np.maximum(sizes, 1) != 0)).any():
            raise ValueError(
                f"got groups of {sizes.tolist()[:8]} ranks from ranks {firsts.tolist()[:8]} on, expected aligned "
                f"powers of two up to {dynamic.max_group} within {ranks} ranks"
            )
        return firsts, sizes

    def rules_of(self, first: Rules) -> Rules:
        """Return the rules to build the packs with; ``first`` are the run's first rules."""
        return first if self.stage is UNSET or self.stage.rules is UNSET else self.stage.rules

    def widths(self, rules: Rules) -> I64:
        """Return T of each pack, int64 [p]; raise ValueError for a width that the rules do not allow."""
        count = len(self.counts_u32) // 4
        if rules.shape == "fixed" and not self.widths_u32:
            return np.full(count, rules.budget, np.int64)
        if len(self.widths_u32) != 4 * count:
            raise ValueError(f"got {len(self.widths_u32)} bytes of widths, expected {4 * count}")
        widths = np.frombuffer(self.widths_u32, "<u4").astype(np.int64)
        check_widths(widths, rules.shape, rules.budget, rules.align.pack)
        return widths

    def aligns(self, rules: Rules) -> I64:
        """Return the multiple of tokens to which the samples of each pack are padded, int64 [p].

        For padded packs, this multiple is the length of their rows. Raise ValueError for rows that the rules do not
        allow.
        """
        counts = np.frombuffer(self.counts_u32, "<u4").astype(np.int64)
        if not rules.padded:
            return np.full(len(counts), rules.align.sample, np.int64)
        if len(self.rows_u32) != len(self.counts_u32):
            raise ValueError(f"got {len(self.rows_u32)} bytes of rows, expected {len(self.counts_u32)}")
        rows, widths = np.frombuffer(self.rows_u32, "<u4").astype(np.int64), self.widths(rules)
        lengths = np.frombuffer(self.lengths_u32, "<u4")
        wrong = (rows < 1) | (rows % rules.align.pack != 0)
        spare = widths - counts * rows
        wrong |= (spare != 0) & (spare != rows)
        if wrong.any() or len(lengths) != counts.sum() or (lengths > np.repeat(rows, counts)).any():
            raise ValueError(
                f"got padded micro-batches of {widths.tolist()[:8]} tokens with {counts.tolist()[:8]} samples and rows "
                f"of {rows.tolist()[:8]} tokens, expected one row per sample and at most one extra row"
            )
        return rows

    def longest(self, rules: Rules) -> I64 | None:
        """Return the tokens of the longest sample at each sample's place over all ranks, int64 [n].

        Return None unless the rules are ``padded``, and for a broker of version 0.1, which does not tell them. Raise
        ValueError for tokens that rows cannot have.
        """
        if not rules.padded or (self.longest_u32 is UNSET and self.lengths_u32):
            return None
        column, counts = self.longest_u32 or b"", np.frombuffer(self.counts_u32, "<u4")
        if len(column) != len(self.lengths_u32):
            raise ValueError(f"got {len(column)} bytes of longest samples, expected {len(self.lengths_u32)}")
        longest = np.frombuffer(column, "<u4").astype(np.int64)
        lengths, rows = np.frombuffer(self.lengths_u32, "<u4"), np.repeat(self.aligns(rules), counts)
        if (longest < lengths).any() or (longest > rows).any():
            raise ValueError(
                f"got longest samples of {longest.tolist()[:8]} tokens, expected at least those of this rank, "
                f"{lengths.tolist()[:8]}, and at most those of the rows, {rows.tolist()[:8]}"
            )
        return longest
