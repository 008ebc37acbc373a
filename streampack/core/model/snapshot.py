"""A snapshot: the state of a feed that decides all later steps, apart from samples that are not merged yet.

A snapshot holds the merge's clocks, the window with its ages and the packs that wait for their step. Samples are
references with checksums, about 28 bytes each (R10). Resuming reads each partition again from its *floor*. The floor is
at or before the first sample that is in the snapshot or not merged. It includes the cursor from which the source
resumes.
"""

from __future__ import annotations

import hashlib
import re
from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType

from streampack.core.model.keys.stage_keys import StageBegin
from streampack.core.model.rule_changes import Schedule, Scheduled, WholeRules
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
        reach: Items outside steps up to which samples may be admitted, while a change of the rules is to come: see
            ``Former.may_admit``. UNSET without one.
    """

    next_step: int
    chain: bytes
    closed: bool
    window: bytes
    ages: list[int]
    pending: bytes
    counts: list[int]
    recent: tuple[int, ...] | UnsetType = UNSET
    reach: int | UnsetType = UNSET

    @property
    def num_samples(self) -> int:
        """Number of samples in the window and in pending packs."""
        return len(self.ages) + sum(self.counts)


_LATER = re.compile(
    r", (?:(?:recent|reach|followed|schedule|id|merged)=UNSET|paused=False|begin=0|(?:packs|weights)_ramp=None"
    r"|stages=\(\))"
)
"""Values that earlier versions did not have; they are no part of a digest where they say nothing."""


class Snapshot(Struct, frozen=True):
    """The whole state of a feed; plain data that may be stored in any way.

    Attributes:
        rules: Digest of the feed's rules.
        merge: State of the merge.
        form: State of FORM.
        floors: Floor of each partition.
        lineage: Number of the lineage.
        changes: Changes of the rules that have their places.
        applied: Number of ``changes`` that the merge follows.
        skips: Steps that every rank skips, as (first, last).
        followed: Number of ``changes`` that FORM follows; UNSET if it is ``applied``.
        schedule: Changes that were asked for, beside the stages of the rules; UNSET without any.
    """

    rules: str
    merge: MergeState
    form: FormState
    floors: list[Floor] = []
    lineage: int = 0
    changes: list[RulesChange] = []
    applied: int = 0
    skips: list[tuple[int, int]] = []
    followed: int | UnsetType = UNSET
    schedule: Schedule | UnsetType = UNSET

    @property
    def step(self) -> int:
        """The first step that the snapshot decides."""
        return self.form.next_step

    @property
    def placed(self) -> list[RulesChange]:
        """The changes that have their places."""
        return [change for change in self.changes if change.position >= 0]

    @property
    def asked(self) -> list[Scheduled]:
        """The changes that were asked for and have no place; versions before 0.2 have them among ``changes``."""
        old = [
            Scheduled(number, WholeRules(change.rules), StageBegin(step=max(change.step, 0)), change.note)
            for number, change in enumerate(self.changes)
            if change.position < 0
        ]
        return [*old, *(self.schedule.asked if self.schedule else ())]

    @property
    def canceled(self) -> list[int]:
        """Numbers of the changes that were canceled."""
        return self.schedule.canceled if self.schedule else []

    @property
    def digest(self) -> bytes:
        """16 bytes that identify the snapshot: a hash of all its values, the same in every process and version."""
        values = _LATER.sub("", repr(self))
        return hashlib.blake2b(values.encode(), digest_size=16).digest()
