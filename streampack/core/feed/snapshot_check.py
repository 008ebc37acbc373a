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
from streampack.core.intake.partitions import Partitions
from streampack.core.journal.history import History
from streampack.core.merge.schedule import strides
from streampack.core.model.rules import Rules, first_difference
from streampack.core.model.samples import KEEPS, ROW
from streampack.core.model.snapshot import FormState, MergeState, Snapshot

MAX_COUNT = 2**62
"""Limit of every count and position in a snapshot."""
MAX_AGE = 2**31
"""Limit of a sample's age in the window, in steps."""
MAX_SKIPS = 4096
"""Most ranges of skipped steps in a snapshot."""
_NAME_CHARS = 200


class SnapshotCheck:
    """Checks the snapshots that trainers send to one feed, which began with ``rules``."""

    def __init__(
        self, feed: str, rules: Rules, history: History, live: LiveRules, memory: MergedMemory,
        partitions: Partitions,
    ) -> None:  # fmt: skip
        self._feed, self._rules, self._history = feed, rules, history
        self._live, self._memory, self._partitions = live, memory, partitions
        self._sound: Snapshot | None = None  # the last one without a fault in itself: all ranks send the same

    def fault(self, given: Snapshot) -> str:
        """Return an error text if the feed cannot continue from a snapshot; empty if it can."""
        if given != self._sound:
            room = self._live.num_partitions + self._live.spare_partitions
            if wrong := problem(given, self._rules, self._memory.limit_tokens, room):
                return wrong
            self._sound = given
        return self._other_run(given) or self._other_changes(given) or self._other_streams(given)

    def _other_run(self, given: Snapshot) -> str:
        """Return an error text if the snapshot's lineage or digest of steps is not this run's; empty if it is."""
        history, chain = self._history, self._history.chain_after(given.step - 1)
        found = history.nearest(given.step)
        begins = chain is None and found is not None and found[0] == given.step  # the recorded steps begin with it
        other = chain != given.form.chain and not begins
        if given.lineage < history.lineage and given.step > history.lineage_step and other:
            return (
                f"got step {given.step} of lineage {given.lineage}, expected one up to {history.lineage_step}, where "
                f"trainers went back to and lineage {history.lineage} began: start from an earlier checkpoint"
            )
        if chain is not None and chain != given.form.chain and history.knows(given):
            return (
                f"got other steps before {given.step} than this run has, expected the same: it is of another "
                f"run{self._or_lost}"
            )
        return ""

    @property
    def _or_lost(self) -> str:
        """Words added to an error text if the feed has pushed samples; else empty."""
        pushed = any(stream.pushed for stream in self._rules.streams)
        return ", or the log that holds the pushed samples was lost or replaced (state_dir)" if pushed else ""

    def _other_changes(self, given: Snapshot) -> str:
        """Return an error text if the snapshot's changes of the rules are not this run's; empty if they are."""
        history = self._history
        for known, change in zip(history.changes, given.changes, strict=False):
            moved = known.position != change.position and min(known.position, change.position) >= 0
            if moved or known.rules != change.rules:
                return (
                    f"got a change of the rules at step {change.step} ({change.note}), expected the one of this run at "
                    f"step {known.step} ({known.note}). Give the run another state_dir."
                )
        merged = sum(given.merge.merged_samples)
        for known in history.changes[len(given.changes) :]:
            if 0 <= known.position < merged:
                return (
                    f"got one without the change at step {known.step} ({known.note}), expected one of this run. Give "
                    f"the broker another state_dir, and ask for changes once the trainers are attached."
                )
        return ""

    def _other_streams(self, given: Snapshot) -> str:
        """Return an error text if another feed has a snapshot's streams, or its pushed samples are lost."""
        for name in {stream.name for change in given.changes for stream in change.rules.streams}:
            of = self._partitions.streams.get(name)
            if of is not None and of.feed != self._feed:
                return f"got a stream {name!r}, which feed {of.feed!r} has, expected one of this feed"
        for p, merged in zip(self._partitions.of_feed(self._feed), given.merge.merged_samples, strict=False):
            recorded = self._partitions.intakes[p].recorded_seq
            if self._partitions.stream_of[p].terms.pushed and merged > recorded:
                return (
                    f"got {merged} samples that were pushed, but only {recorded} of them are in the log. The others "
                    f"were lost with a state_dir: put back the one that has them, or start a new run."
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
        return f"got a snapshot of rules {taken.rules[:64]}, expected {rules.digest}: it is of other rules"
    wrong = _wrong_changes(taken, rules, max_partitions)
    if wrong:
        return wrong
    now = taken.changes[taken.applied - 1].rules if taken.applied else rules
    return _wrong_merge(taken, now) or _wrong_form(taken, now, max_tokens)


def _wrong_changes(taken: Snapshot, rules: Rules, max_partitions: int) -> str:
    """Return an error text if changes of the rules or skipped steps are out of range or order; empty if not."""
    if not 0 <= taken.applied <= len(taken.changes):
        return f"got {taken.applied} changes of the rules that hold, expected 0 to the {len(taken.changes)} there are"
    if len(taken.skips) > MAX_SKIPS or any(not 0 <= first <= last < MAX_COUNT for first, last in taken.skips):
        return f"got steps to pass over that are none, expected at most {MAX_SKIPS} of (first, last)"
    before = rules
    for change in taken.changes:
        wrong = _wrong_change(before, change.rules)
        if wrong:
            return f"a change of the rules: {wrong}"
        before = change.rules
    positions = [change.position for change in taken.changes]
    if not all(0 <= change.step < MAX_COUNT and -1 <= change.position < MAX_COUNT for change in taken.changes):
        return "got a change of the rules at no step or position, expected one from 0 on"
    if positions[: taken.applied] != sorted(positions[: taken.applied]) or -1 in positions[: taken.applied]:
        return f"got changes of the rules at positions {positions[:8]}, expected them in their order"
    count = sum(stream.partitions for stream in before.streams)
    if count > max_partitions:
        return f"got {count} partitions, expected at most {max_partitions}: start the broker with more memory"
    return ""


def _wrong_change(before: Rules, after: Rules) -> str:
    """Return an error text if a change alters more than weights and new streams; empty if it does not."""
    replace, known = msgspec.structs.replace, before.streams
    weights = zip(after.streams, known, strict=False)
    kept = tuple(replace(new, weight=old.weight) for new, old in weights)
    wrong = first_difference(replace(after, streams=kept), before)
    if wrong:
        return wrong
    names = [stream.name for stream in after.streams]
    for stream in after.streams[len(known) :]:
        fits = 0 < len(stream.name) <= _NAME_CHARS and names.count(stream.name) == 1
        if not fits or stream.partitions < 1 or not (stream.passes is None or 1 <= stream.passes < MAX_COUNT):
            return f"got a stream {stream.name[:64]!r} that cannot be, expected a new name, partitions and passes"
    try:
        strides([stream.weight for stream in after.streams if stream.weight] or [0.0])
    except (ValueError, OverflowError) as error:
        return f"weights: {error}"
    return ""


def _wrong_merge(taken: Snapshot, rules: Rules) -> str:
    """Return an error text if the merge's columns have wrong lengths or values out of range; empty if not."""
    merge, streams = taken.merge, rules.streams
    partitions = sum(stream.partitions for stream in streams)
    clocks, turns = (0, partitions) if rules.merge == "arrival" else (len(streams), len(streams))
    got = (
        len(merge.clock), len(merge.turn), len(merge.live), len(merge.ended), len(merge.merged_samples),
        len(merge.merged_tokens), len(merge.at_barrier), len(taken.floors),
    )  # fmt: skip
    expected = (clocks, turns, clocks, partitions, partitions, partitions, partitions, partitions)
    if got != expected:
        return f"got columns of {got} values, expected {expected} for {len(streams)} streams, {partitions} partitions"
    turn_stops = [stream.partitions for stream in streams] if clocks else [MAX_COUNT] * turns
    in_range = (
        all(abs(clock) < MAX_COUNT for clock in merge.clock)
        and all(0 <= turn < stop for turn, stop in zip(merge.turn, turn_stops, strict=True))
        and all(count >= 0 for count in [*merge.merged_samples, *merge.merged_tokens, merge.passes])
        and max(sum(merge.merged_samples), sum(merge.merged_tokens), merge.passes) < MAX_COUNT
    )
    if not in_range:
        return "got clocks, turns or counts of a merge that cannot be, expected counts from 0 on"
    return _wrong_ends(merge, rules) or _wrong_places(taken)


def _wrong_ends(merge: MergeState, rules: Rules) -> str:
    """Return an error text if ends of passes or of streams contradict the rules; empty if they do not."""
    if any(merge.at_barrier) and rules.between_passes != "drain" and rules.merge != "arrival":
        return "got a partition at the end of a pass, expected none: passes are not kept apart"
    if merge.stopped and not any(stream.on_exhaust == "stop" for stream in rules.streams):
        return "got a stream that has stopped the others, expected none: no stream's on_exhaust says so"
    return ""


def _wrong_places(taken: Snapshot) -> str:
    """Return an error text if changes or floors contradict the number of merged samples; empty if they do not."""
    merged, position = taken.merge.merged_samples, sum(taken.merge.merged_samples)
    if any(change.position > position for change in taken.changes[: taken.applied]):
        return f"got rules that hold from a later sample on, expected changes up to the {position} that are merged"
    for p, ((seq, cursor), count) in enumerate(zip(taken.floors, merged, strict=True)):
        if not 0 <= seq <= count or (seq and cursor is None):
            return f"partition {p}: got sample {seq} to read from, expected one of the {count} merged, and its cursor"
    return ""


def _wrong_form(taken: Snapshot, rules: Rules, max_tokens: int) -> str:
    """Return an error text if the window or the pending packs break the format or the rules; empty if not."""
    form = taken.form
    if not 0 <= form.next_step < MAX_COUNT or len(form.chain) != 16:
        return f"got step {form.next_step} and a chain of {len(form.chain)} bytes, expected a step and 16 bytes"
    size = ROW.itemsize
    if len(form.window) % size or len(form.pending) % size:
        return f"got {len(form.window)} and {len(form.pending)} bytes of samples, expected {size} each"
    window, pending = np.frombuffer(form.window, ROW), np.frombuffer(form.pending, ROW)
    if len(form.ages) != len(window) or not all(-1 <= age < MAX_AGE for age in form.ages):
        return f"got {len(form.ages)} ages, expected one, from -1 on, for each of {len(window)} samples"
    said = form.keeps or b""
    if len(said) not in (0, len(window) + len(pending)) or any(keep not in (0, *KEEPS.values()) for keep in said):
        return f"got {len(said)} bytes of groups, expected none, or one of each of {len(window) + len(pending)} samples"
    most = rules.packs if rules.batch is None else 1  # a batch is packed whole, and leaves no packs
    if any(count < 0 for count in form.counts) or sum(form.counts) != len(pending) or len(form.counts) >= most:
        return (
            f"got {len(form.counts)} packs of {sum(form.counts)} samples, expected fewer than the {most} of a "
            f"step, of {len(pending)} samples"
        )
    rows = np.concatenate([window, pending])
    return _wrong_rows(rows, taken, rules, max_tokens) or _wrong_packs(form, pending, rules)


def _wrong_rows(rows: NDArray[np.void], taken: Snapshot, rules: Rules, max_tokens: int) -> str:
    """Return an error text if a sample of the window or of a pack has values out of range; empty if none has."""
    lengths, loss, stream = rows["length"].astype(np.int64), rows["loss_tokens"], rows["stream"]
    if ((lengths < 1) | (lengths > rules.budget) | (loss < 0) | (loss >= lengths)).any():
        return f"got samples of {lengths.min()} to {lengths.max()} tokens, expected 1 to {rules.budget}, one never lost"
    if int(lengths.sum()) > max_tokens:
        return f"got samples of {lengths.sum()} tokens, expected at most {max_tokens}: give the broker more memory"
    if ((stream < 0) | (stream >= len(rules.streams)) | (rows["index"] < 0) | (rows["part"] < 0)).any():
        return f"got a sample that cannot be, expected one of {len(rules.streams)} streams"
    if len(np.unique(rows[["stream", "index", "part"]])) < len(rows):
        return "got a sample twice, expected each of them once"
    counts = np.array([each.partitions for each in rules.streams])
    at = (np.cumsum(counts) - counts)[stream] + rows["index"] % counts[stream]
    seq = rows["index"] // counts[stream]
    floors = np.array([seq for seq, _ in taken.floors])
    if ((seq < floors[at]) | (seq >= np.array(taken.merge.merged_samples)[at])).any():
        return "got a sample that is not merged, or that would not be read again, expected none"
    return ""


def _wrong_packs(form: FormState, pending: NDArray[np.void], rules: Rules) -> str:
    """Return an error text if a pending pack is over the budget; empty if none is."""
    align = rules.align.sample
    slots = np.concatenate([[0], np.cumsum(-(-pending["length"].astype(np.int64) // align) * align)])
    bounds = np.concatenate([[0], np.cumsum(form.counts)]).astype(np.int64).tolist()
    if any(slots[stop] - slots[start] > rules.budget for start, stop in pairwise(bounds)):
        return f"got a pack that is over the budget of {rules.budget} tokens"
    return ""
