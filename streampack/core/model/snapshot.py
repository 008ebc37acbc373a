"""A snapshot: the state of a feed that decides all later steps, apart from samples that are not merged yet.

A snapshot holds the merge's clocks, the window with its ages and the packs that wait for their step. Samples are
references with checksums, about 28 bytes each (R10). Resuming reads each partition again from its *floor*. The floor is
at or before the first sample that is in the snapshot or not merged. It includes the cursor from which the source
resumes.
"""

from __future__ import annotations

import hashlib
from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType

from streampack.core.model.rules import RulesChange
from streampack.core.model.samples import ExtraColumns

Count = Annotated[int, Meta(ge=0, lt=2**62)]
Cursor = tuple[Count, Count, Count]
"""(pass, shard, sample): the place where a source resumes; only the source interprets it."""
MIXED = 1 << 40
"""Added to the pass in cursors of sources that mix shards. So each cursor tells which order it belongs to."""
Floor = tuple[int, Cursor | None]
"""(sequence number, cursor): the place from which a partition is read again."""


class MergeState(Struct, frozen=True):
    """The state of a merge between two samples.

    Attributes:
        clock: Clock of each stream; empty in order of arrival.
        turn: For each stream, the number within the stream of the partition whose turn is next. In order of arrival:
            for each partition, the number of barriers that it passed.
        live: True for each stream that has not ended; empty in order of arrival.
        ended: True for each partition that has ended and whose samples are all merged.
        merged_samples: Samples taken from each partition.
        merged_tokens: Tokens taken from each partition.
        at_barrier: True for each partition that waits at a barrier.
        stopped: True once a stream that ended has stopped the merge.
        fresh: True while no sample of this pass has been taken.
        passes: Number of passes before this one.
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


class FormState(ExtraColumns, frozen=True):
    """The state of FORM between two choices of packs. Samples are ``samples.ROW``, never tokens.

    ``ExtraColumns`` has the window's samples, then those of the pending packs.

    Attributes:
        next_step: The number of the next step.
        chain: Digest of all steps before it.
        closed: True if no more samples will come.
        window: The samples outside packs, in merge order, as bytes.
        ages: The ages of the window's samples: see ``packers.packer.Choice``.
        pending: The samples of packs that are not in a step yet, as bytes.
        counts: Number of samples in each pending pack.
        recent: Number of items in each of the last steps, for the automatic window; UNSET for other windows.
    """

    next_step: int
    chain: bytes
    closed: bool
    window: bytes
    ages: list[int]
    pending: bytes
    counts: list[int]
    recent: tuple[int, ...] | UnsetType = UNSET

    @property
    def num_samples(self) -> int:
        """Number of samples in the window and in pending packs."""
        return len(self.ages) + sum(self.counts)


class Snapshot(Struct, frozen=True):
    """The whole state of a feed; plain data that may be stored in any way.

    Attributes:
        rules: Digest of the feed's rules.
        merge: State of the merge.
        form: State of FORM.
        floors: Floor of each partition.
        lineage: Number of the lineage.
        changes: Changes to the rules.
        applied: Number of ``changes`` that have taken effect.
        skips: Steps that every rank skips, as (first, last).
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
        """The first step that the snapshot decides."""
        return self.form.next_step

    @property
    def digest(self) -> bytes:
        """16 bytes that identify the snapshot: a hash of all its values, the same in every process and version."""
        values = repr(self).replace(", recent=UNSET", "")
        return hashlib.blake2b(values.encode(), digest_size=16).digest()
