"""A snapshot: what decides every later step, beside samples that have not been merged yet.

It holds the merge's clocks, the window with its ages and the packs that wait for their step, as
references with checksums, about 28 bytes a sample (R10). Whoever restores it reads the samples that
it names again, and each partition from its *floor*: a place at or before the first sample that is named
or not merged, with the cursor that the source goes on from.
"""

from __future__ import annotations

import hashlib
from typing import Annotated

import msgspec
from msgspec import Meta, Struct, UnsetType

from streampack.core.model.rules import RulesChange

Count = Annotated[int, Meta(ge=0, lt=2**62)]
Cursor = tuple[Count, Count, Count]
"""(pass, shard, sample): where a source goes on; only the source reads it."""
Floor = tuple[int, Cursor | None]
"""(sequence number, cursor): where a partition is read again from."""


class MergeState(Struct, frozen=True):
    """A merge between two samples: by stream clock, turn, live; by partition ended, samples and tokens taken,
    and whether it is at a barrier; whether a stream that ended has stopped it all, whether nothing of this pass
    was taken, and how many there were before it. In order of arrival there are no clocks, and ``turn`` counts the
    barriers gone over by partition.
    """

    clock: list[int]
    turn: list[int]
    live: list[bool]
    ended: list[bool]
    merged_samples: list[int]
    merged_tokens: list[int]
    at_barrier: list[bool]
    stopped: bool
    fresh: bool = True
    passes: int = 0


class FormState(Struct, frozen=True):
    """FORM between two choices: samples as references with checksums (``samples.ROW``), never tokens.

    ``window`` are those held, in merge order, with their ``ages``; ``pending`` those of the packs not
    in a step yet, ``counts`` of them each.
    """

    next_step: int
    chain: bytes
    closed: bool
    window: bytes
    ages: list[int]
    pending: bytes
    counts: list[int]
    keeps: bytes | UnsetType = msgspec.UNSET

    @property
    def num_samples(self) -> int:
        """Those held."""
        return len(self.ages) + sum(self.counts)


class Snapshot(Struct, frozen=True):
    """A feed's whole state, under the rules of digest ``rules`` and the first ``applied`` of the ``changes`` to them;
    plain data, to be stored anyhow. ``floors`` by partition; ``skips`` are steps that are passed over (first, last).
    """

    rules: str
    merge: MergeState
    form: FormState
    floors: list[Floor] = []
    lineage: int = 0
    changes: list[RulesChange] = []
    applied: int = 0
    skips: list[tuple[int, int]] = []

    @property
    def step(self) -> int:
        """The first step that it decides."""
        return self.form.next_step

    @property
    def digest(self) -> bytes:
        """16 bytes that differ between snapshots: of all that it holds, whatever process decoded it."""
        return hashlib.blake2b(repr(self).encode(), digest_size=16).digest()
