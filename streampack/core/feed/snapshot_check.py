"""Checks of a snapshot that a trainer sends with its checkpoint: can the feed go on from it?

No field of the snapshot is trusted, and the checks come before any change. ``problem`` finds values that the merge,
FORM or the intake cannot use. Then the feed's history and partitions show whether the snapshot belongs to this run.
"""

from __future__ import annotations

from itertools import pairwise

import msgspec
import numpy as np
from numpy.typing import NDArray

from streampack.core.feed.live_rules import LiveRules
from streampack.core.feed.merged_memory import MergedMemory
from streampack.core.form.auto_window import STEPS
from streampack.core.intake.partitions import Partitions
from streampack.core.journal.history import History
from streampack.core.media.media_counts import wrong_media
from streampack.core.merge.schedule import strides
from streampack.core.model.keys.stage_keys import StageRules
from streampack.core.model.rule_changes import Restream, apply_change
from streampack.core.model.rules import Rules, RulesChange, first_difference
from streampack.core.model.samples import I64, KEEPS, ROW
from streampack.core.model.snapshot import FormState, MergeState, Snapshot
from streampack.core.trees.table_trees import own_lengths, wrong_trees

MAX_COUNT = 2**62
"""Limit of every count and position in a snapshot."""
MAX_AGE = 2**31
"""Limit of a sample's age in the window, in steps."""
MAX_SKIPS = 4096
"""Most ranges of skipped steps in a snapshot."""
_NAME_CHARS = 200
_CHANGING = (*(key for key in StageRules.__struct_fields__ if key != "overlong"), "in_turn", "weights_ramp", "stages")
"""Rules that a change may alter."""


class SnapshotCheck:
    """Checks the snapshots that trainers send to one feed, which began with ``rules``."""

    def __init__(
        self, feed: str, rules: Rules, history: History, live: LiveRules, memory: MergedMemory,
        partitions: Partitions,
    ) -> None:  # fmt: skip
        self._feed, self._rules, self._history = feed, rules, history
        self._live, self._memory, self._partitions = live, memory, partitions
        self._sound: Snapshot | None = None  # the last one without a fault in itself: all ranks send the same

    def fault(self, snapshot: Snapshot) -> str:
        """Return an error text if the feed cannot continue from a snapshot; empty if it can."""
        if snapshot != self._sound:
            room = self._live.num_partitions + self._live.spare_partitions
            if wrong := problem(snapshot, self._rules, self._memory.limit_tokens, room):
                return wrong
            self._sound = snapshot
        return self._other_run(snapshot) or self._other_changes(snapshot) or self._other_streams(snapshot)

    def _other_run(self, snapshot: Snapshot) -> str:
        """Return an error text if the snapshot's lineage or digest of steps is not this run's; empty if it is."""
        history, chain = self._history, self._history.chain_after(snapshot.step - 1)
        nearest = history.nearest(snapshot.step)
        is_first = chain is None and nearest is not None and nearest[0] == snapshot.step  # of the recorded steps
        other = chain != snapshot.form.chain and not is_first
        if snapshot.lineage < history.lineage and snapshot.step > history.lineage_step and other:
            return (
                f"got step {snapshot.step} of lineage {snapshot.lineage}, expected a step up to "
                f"{history.lineage_step}, because trainers went back to that step and began lineage {history.lineage}. "
                f"Start from an earlier checkpoint."
            )
        if chain is not None and chain != snapshot.form.chain and history.knows(snapshot):
            return (
                f"got a digest of the steps before step {snapshot.step} that differs from this run's, expected the "
                f"same digest. The snapshot is from another run.{self._or_lost}"
            )
        return ""

    @property
    def _or_lost(self) -> str:
        """Words added to an error text if the feed has pushed samples; else empty."""
        pushed = any(stream.pushed for stream in self._rules.streams)
        return " Or the log with the pushed samples (in state_dir) was lost or replaced." if pushed else ""

    def _other_changes(self, snapshot: Snapshot) -> str:
        """Return an error text if the snapshot's changes of the rules are not this run's; empty if they are."""
        history = self._history
        for own, change in zip(history.changes, snapshot.placed, strict=False):
            if (own.position, own.rules) != (change.position, change.rules):
                return (
                    f"got a change of the rules at step {change.step} ({change.note}), expected this run's change at "
                    f"step {own.step} ({own.note}). Give the run another state_dir."
                )
        asked = {change.id: change for change in history.asked}
        for other in snapshot.asked:
            same = asked.get(other.id, other)
            if same.ask != other.ask:
                return (
                    f"got a change of the rules at {other.at} ({other.note}), expected this run's change at {same.at} "
                    f"({same.note}). Give the run another state_dir."
                )
        merged = sum(snapshot.merge.merged_samples)
        for own in history.changes[len(snapshot.placed) :]:
            if 0 <= own.position < merged:
                return (
                    f"got no change of the rules at step {own.step} ({own.note}), expected this run's change at "
                    f"that step. Give the broker another state_dir, and request changes after the trainers attach."
                )
        return ""

    def _other_streams(self, snapshot: Snapshot) -> str:
        """Return an error text if another feed has a snapshot's streams, or its pushed samples are lost."""
        asks = [change.ask for change in snapshot.asked]
        added = [stream for ask in asks if isinstance(ask, Restream) for stream in ask.add]
        added += [stream for change in snapshot.changes for stream in change.rules.streams]
        for name in {stream.name for stream in added}:
            opened = self._partitions.streams.get(name)
            if opened is not None and opened.feed != self._feed:
                return f"got stream {name!r}, which belongs to feed {opened.feed!r}, expected only streams of this feed"
        for p, merged in zip(self._partitions.of_feed(self._feed), snapshot.merge.merged_samples, strict=False):
            recorded = self._partitions.intakes[p].recorded.next_seq
            if self._partitions.stream_of[p].terms.pushed and merged > recorded:
                return (
                    f"got {merged} pushed samples, but the log has only {recorded} of these samples. The others were "
                    f"lost with a state_dir. Restore the state_dir that has the lost samples, or start a new run."
                )
        return ""


def problem(taken: Snapshot, rules: Rules, max_tokens: int, max_partitions: int) -> str:
    """Return an error text if a snapshot has values that no feed with these rules can use; else empty.

    Args:
        taken: The snapshot.
        rules: The rules with which the feed began.
        max_tokens: Tokens of merged samples that fit in the memory.
        max_partitions: Partitions that fit in the memory.
    """
    if taken.rules != rules.digest:
        return f"got a snapshot with rules digest {taken.rules[:64]}, expected {rules.digest}, the digest of this run"
    wrong = _wrong_changes(taken, rules, max_partitions)
    if wrong:
        return wrong
    followed = taken.applied if taken.followed is msgspec.UNSET else taken.followed
    if not 0 <= followed <= taken.applied:
        return f"got {followed} changes that packs follow, expected 0 to {taken.applied}"
    merged_by, formed_by = (taken.changes[n - 1].rules if n else rules for n in (taken.applied, followed))
    return _wrong_merge(taken, merged_by) or _wrong_form(taken, merged_by, formed_by, max_tokens)


def _wrong_changes(taken: Snapshot, rules: Rules, max_partitions: int) -> str:
    """Return an error text if changes of the rules or skipped steps are out of range or order; empty if not."""
    if not 0 <= taken.applied <= len(taken.changes):
        return f"got {taken.applied} applied changes of the rules, expected 0 to {len(taken.changes)}"
    if len(taken.skips) > MAX_SKIPS or any(not 0 <= first <= last < MAX_COUNT for first, last in taken.skips):
        return f"got invalid ranges of skipped steps, expected at most {MAX_SKIPS} pairs (first, last)"
    before = rules
    for change in taken.changes:
        wrong = _wrong_change(before, change)
        if wrong:
            return f"a change of the rules: {wrong}"
        before = change.rules
    for request in taken.asked:
        try:
            before = apply_change(before, request.ask, request.at.step or 0)
        except (ValueError, OverflowError) as error:
            return f"a change of the rules that waits: {error}"
    positions = [change.position for change in taken.changes]
    if not all(0 <= change.step < MAX_COUNT and -1 <= change.position < MAX_COUNT for change in taken.changes):
        return "got a change of the rules with a step or position out of range, expected non-negative numbers"
    if positions[: taken.applied] != sorted(positions[: taken.applied]) or -1 in positions[: taken.applied]:
        return f"got changes of the rules at positions {positions[:8]}, expected ascending positions from 0"
    count = sum(stream.partitions for stream in before.streams)
    if count > max_partitions:
        return f"got {count} partitions, expected at most {max_partitions}. Start the broker with more memory"
    return ""


def _wrong_change(before: Rules, change: RulesChange) -> str:
    """Return an error text if a change alters rules that stay for the whole run; empty if it does not."""
    replace, streams, after = msgspec.structs.replace, before.streams, change.rules
    merged = change.merged or []
    if not all(0 <= count < MAX_COUNT for count in merged):
        return f"got {merged[:9]} as merged samples of each partition, expected numbers of at least 0"
    weights = zip(after.streams, streams, strict=False)
    kept = tuple(replace(new, weight=old.weight, paused=old.paused, overlong=old.overlong) for new, old in weights)
    try:
        same = {key: getattr(before, key) for key in _CHANGING}
        wrong = first_difference(replace(after, streams=kept, **same), before)
    except ValueError as error:
        return str(error)
    if wrong:
        return wrong
    names = [stream.name for stream in after.streams]
    for stream in after.streams[len(streams) :]:
        fits = 0 < len(stream.name) <= _NAME_CHARS and names.count(stream.name) == 1
        if not fits or stream.partitions < 1 or not (stream.passes is None or 1 <= stream.passes < MAX_COUNT):
            return (
                f"got an invalid new stream {stream.name[:64]!r}, expected an unused name, at least 1 partition, and "
                f"no limit of passes or at least 1 pass"
            )
    try:
        strides([stream.weight for stream in after.streams if stream.gives] or [0.0])
    except (ValueError, OverflowError) as error:
        return f"weights: {error}"
    return ""


def _wrong_merge(taken: Snapshot, rules: Rules) -> str:
    """Return an error text if the merge's columns have wrong lengths or values out of range; empty if not."""
    merge, streams = taken.merge, rules.streams
    partitions = sum(stream.partitions for stream in streams)
    clocks, turns = (0, partitions) if rules.merge == "arrival" else (len(streams), len(streams))
    lengths = (
        len(merge.clock), len(merge.turn), len(merge.live), len(merge.ended), len(merge.merged_samples),
        len(merge.merged_tokens), len(merge.at_barrier), len(taken.floors),
    )  # fmt: skip
    expected = (clocks, turns, clocks, partitions, partitions, partitions, partitions, partitions)
    if lengths != expected:
        counts = f"{len(streams)} streams and {partitions} partitions"
        return f"got columns of lengths {lengths}, expected {expected} for {counts}"
    turn_stops = [stream.partitions for stream in streams] if clocks else [MAX_COUNT] * turns
    in_range = (
        all(abs(clock) < MAX_COUNT for clock in merge.clock)
        and all(0 <= turn < stop for turn, stop in zip(merge.turn, turn_stops, strict=True))
        and all(count >= 0 for count in [*merge.merged_samples, *merge.merged_tokens, merge.passes])
        and max(sum(merge.merged_samples), sum(merge.merged_tokens), merge.passes) < MAX_COUNT
    )
    if not in_range:
        return "got clocks, turns or counts of the merge that are out of range, expected non-negative turns and counts"
    return _wrong_ends(merge, rules) or _wrong_places(taken)


def _wrong_ends(merge: MergeState, rules: Rules) -> str:
    """Return an error text if ends of passes or of streams contradict the rules; empty if they do not."""
    if any(merge.at_barrier) and rules.between_passes != "drain" and rules.merge != "arrival":
        return "got a partition that waits at the end of a pass, expected none without `between_passes: drain`"
    if merge.stopped and not any(stream.on_exhaust == "stop" for stream in rules.streams):
        return "got a stream that has stopped the others, expected none, because no stream has `on_exhaust: stop`"
    return ""


def _wrong_places(taken: Snapshot) -> str:
    """Return an error text if changes or floors contradict the number of merged samples; empty if they do not."""
    merged, position = taken.merge.merged_samples, sum(taken.merge.merged_samples)
    if any(change.position > position for change in taken.changes[: taken.applied]):
        return f"got applied changes after sample {position}, expected no change after the {position} merged samples"
    for p, ((seq, cursor), count) in enumerate(zip(taken.floors, merged, strict=True)):
        if not 0 <= seq <= count or (seq and cursor is None):
            return f"partition {p}: got sample {seq} as the first to read, expected 0 to {count}, with a cursor above 0"
    return ""


def _wrong_form(taken: Snapshot, merged_by: Rules, rules: Rules, max_tokens: int) -> str:
    """Return an error text if the window or the pending packs break the format or the rules; empty if not.

    The samples were merged under ``merged_by``, and the packs formed under ``rules``.
    """
    form = taken.form
    if not 0 <= form.next_step < MAX_COUNT or len(form.chain) != 16:
        return (
            f"got step {form.next_step} and a chain of {len(form.chain)} bytes, expected a non-negative step and a "
            f"chain of 16 bytes"
        )
    size = ROW.itemsize
    if len(form.window) % size or len(form.pending) % size:
        return (
            f"got {len(form.window)} bytes of window samples and {len(form.pending)} bytes of pending samples, "
            f"expected {size} bytes per sample"
        )
    window, pending = np.frombuffer(form.window, ROW), np.frombuffer(form.pending, ROW)
    if len(form.ages) != len(window) or not all(-1 <= age < MAX_AGE for age in form.ages):
        return f"got {len(form.ages)} ages, expected {len(window)}, one age of at least -1 for each sample"
    recent = form.recent or ()
    if len(recent) > STEPS or not all(0 <= count < MAX_COUNT for count in recent):
        return f"got {recent[:9]} as samples in the last steps, expected at most {STEPS} numbers of at least 0"
    rows = np.concatenate([window, pending])
    keeps = form.keeps or b""
    if len(keeps) not in (0, len(rows)) or any(keep not in (0, *KEEPS.values()) for keep in keeps):
        return (
            f"got {len(keeps)} bytes of group settings, expected 0, or one valid byte for each of the {len(rows)} "
            f"samples"
        )
    try:
        extras = form.extra_rows(len(rows))
    except ValueError as error:
        return str(error)
    reach = form.reach or 0
    if not 0 <= reach < MAX_COUNT:
        return f"got {reach} as the number of samples that may be admitted, expected a number of at least 0"
    most = len(pending) if rules.batch is None else 0  # a batch leaves no packs
    if any(count <= 0 for count in form.counts) or sum(form.counts) != len(pending) or len(form.counts) > most:
        return (
            f"got {len(form.counts)} pending packs with {sum(form.counts)} samples, expected at most {most} packs "
            f"with {len(pending)} samples, and none without samples"
        )
    starts = len(window) + np.cumsum([0, *form.counts])
    return (
        _wrong_rows(rows, taken, merged_by, rules, max_tokens)
        or wrong_trees(rows, extras, starts, rules)
        or (wrong_media(rows, extras, starts, rules, max_tokens, MAX_COUNT) if form.media is not msgspec.UNSET else "")
        or _wrong_packs(form, own_lengths(rows, extras)[len(window) :], rules)
    )


def _wrong_rows(
    rows: NDArray[np.void], taken: Snapshot, rules: Rules, formed_by: Rules, max_tokens: int
) -> str:  # fmt: skip
    """Return an error text if a sample of the window or of a pack has values out of range; empty if none has."""
    lengths, loss, stream = rows["length"].astype(np.int64), rows["loss_tokens"], rows["stream"]
    budget = formed_by.budget
    if ((lengths < 1) | (lengths > budget) | (loss < 0) | (loss >= lengths)).any():
        return (
            f"got samples of {lengths.min()} to {lengths.max()} tokens, expected 1 to {budget} tokens, and fewer "
            f"loss tokens than tokens in each sample"
        )
    if int(lengths.sum()) > max_tokens:
        return f"got {lengths.sum()} tokens in all samples, expected at most {max_tokens}. Give the broker more memory"
    if ((stream < 0) | (stream >= len(rules.streams)) | (rows["index"] < 0) | (rows["part"] < 0)).any():
        return (
            f"got a sample with an invalid stream, index or part, expected a sample of the {len(rules.streams)} streams"
        )
    if len(np.unique(rows[["stream", "index", "part"]])) < len(rows):
        return "got the same sample twice, expected each sample once"
    counts = np.array([stream.partitions for stream in rules.streams])
    at = (np.cumsum(counts) - counts)[stream] + rows["index"] % counts[stream]
    seq = rows["index"] // counts[stream]
    floors = np.array([seq for seq, _ in taken.floors])
    if ((seq < floors[at]) | (seq >= np.array(taken.merge.merged_samples)[at])).any():
        return "got a sample that is not merged or that a resumed feed does not read again, expected no such sample"
    return ""


def _wrong_packs(form: FormState, pending: I64, rules: Rules) -> str:
    """Return an error text if a pending pack is over the budget; empty if none is.

    ``pending`` int64 [n]: tokens of each sample in a pack, without those that it shares.
    """
    align = rules.align.sample
    slots = np.concatenate([[0], np.cumsum(-(-pending.astype(np.int64) // align) * align)])
    bounds = np.concatenate([[0], np.cumsum(form.counts)]).astype(np.int64).tolist()
    if any(slots[stop] - slots[start] > rules.budget for start, stop in pairwise(bounds)):
        return f"got a pack that exceeds the budget of {rules.budget} tokens"
    return ""
