"""Taking snapshots of a feed's planner, and going on from one; and what is wrong with one that somebody has brought.

A snapshot comes from the log, whose records are what this broker has written, or from a trainer's checkpoint, over the
network. Of the latter nothing is believed: ``problem`` finds whatever the merge, FORM or the books could not go on
from, so that it is refused before anything is changed.
"""

from __future__ import annotations

from itertools import pairwise

import msgspec
import numpy as np
from numpy.typing import NDArray

from streampack.core.form import Former
from streampack.core.merge import AnyMerge, strides
from streampack.core.rules import Rules, difference
from streampack.core.samples import ROW
from streampack.core.snapshot import Floor, FormState, MergeState, Snapshot

MAX_COUNT = 2**62
MAX_AGE = 2**31
MAX_SKIPS = 4096
_NAME_CHARS = 200


def snapshot(rules: Rules, merge: AnyMerge, former: Former, floors: list[Floor] | None = None) -> Snapshot:
    """Take one; not while a choice is being made."""
    return Snapshot(rules.digest, merge.state(), former.state(), floors or [])


def restore(taken: Snapshot, rules: Rules, merge: AnyMerge, former: Former) -> None:
    """Put ``taken`` into a merge and a former that have taken nothing.

    Raises ValueError for a snapshot of other rules.
    """
    if taken.rules != rules.digest:
        raise ValueError(f"got a snapshot of rules {taken.rules}, expected {rules.digest}: it is of another run")
    merge.load(taken.merge)
    former.load(taken.form)


def problem(taken: Snapshot, rules: Rules, max_tokens: int, max_partitions: int) -> str:
    """Why a feed that began with ``rules`` cannot go on from ``taken``, one line; empty if it can.

    ``max_tokens`` is what memory holds of samples that are merged, ``max_partitions`` of how many partitions.
    """
    if taken.rules != rules.digest:
        return f"got a snapshot of rules {taken.rules[:64]}, expected {rules.digest}: it is of other rules"
    wrong = _wrong_changes(taken, rules, max_partitions)
    if wrong:
        return wrong
    now = taken.changes[taken.applied - 1].rules if taken.applied else rules
    return _wrong_merge(taken, now) or _wrong_form(taken, now, max_tokens)


def _wrong_changes(taken: Snapshot, rules: Rules, max_partitions: int) -> str:
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
    """What cannot be of a change: all but weights and streams that join stays as it was."""
    replace, known = msgspec.structs.replace, before.streams
    weights = zip(after.streams, known, strict=False)
    kept = tuple(replace(new, weight=old.weight) for new, old in weights)
    wrong = difference(replace(after, streams=kept), before)
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
    if any(merge.at_barrier) and rules.between_passes != "drain" and rules.merge != "arrival":
        return "got a partition at the end of a pass, expected none: passes are not kept apart"
    if merge.stopped and not any(stream.on_exhaust == "stop" for stream in rules.streams):
        return "got a stream that has stopped the others, expected none: no stream's on_exhaust says so"
    return ""


def _wrong_places(taken: Snapshot) -> str:
    """What cannot be of changes and floors, beside what was merged."""
    merged, position = taken.merge.merged_samples, sum(taken.merge.merged_samples)
    if any(change.position > position for change in taken.changes[: taken.applied]):
        return f"got rules that hold from a later sample on, expected changes up to the {position} that are merged"
    for p, ((seq, cursor), count) in enumerate(zip(taken.floors, merged, strict=True)):
        if not 0 <= seq <= count or (seq and cursor is None):
            return f"partition {p}: got sample {seq} to read from, expected one of the {count} merged, and its cursor"
    return ""


def _wrong_form(taken: Snapshot, rules: Rules, max_tokens: int) -> str:
    form = taken.form
    if not 0 <= form.next_step < MAX_COUNT or len(form.chain) != 16:
        return f"got step {form.next_step} and a chain of {len(form.chain)} bytes, expected a step and 16 bytes"
    size = ROW.itemsize
    if len(form.window) % size or len(form.pending) % size:
        return f"got {len(form.window)} and {len(form.pending)} bytes of samples, expected {size} each"
    window, pending = np.frombuffer(form.window, ROW), np.frombuffer(form.pending, ROW)
    if len(form.ages) != len(window) or not all(-1 <= age < MAX_AGE for age in form.ages):
        return f"got {len(form.ages)} ages, expected one, from -1 on, for each of {len(window)} samples"
    if any(count < 0 for count in form.counts) or sum(form.counts) != len(pending) or len(form.counts) >= rules.packs:
        return (
            f"got {len(form.counts)} packs of {sum(form.counts)} samples, expected fewer than the {rules.packs} of a "
            f"step, of {len(pending)} samples"
        )
    rows = np.concatenate([window, pending])
    return _wrong_rows(rows, taken, rules, max_tokens) or _wrong_packs(form, pending, rules)


def _wrong_rows(rows: NDArray[np.void], taken: Snapshot, rules: Rules, max_tokens: int) -> str:
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
    align = rules.align.sample
    slots = np.concatenate([[0], np.cumsum(-(-pending["length"].astype(np.int64) // align) * align)])
    bounds = np.concatenate([[0], np.cumsum(form.counts)]).astype(np.int64).tolist()
    if any(slots[stop] - slots[start] > rules.budget for start, stop in pairwise(bounds)):
        return f"got a pack that is over the budget of {rules.budget} tokens"
    return ""
