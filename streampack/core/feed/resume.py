"""Taking snapshots of what a feed's steps are formed of, and going on from one.

A snapshot comes from the log, whose records are what this broker has written, or from a trainer's checkpoint: of that
nothing is believed before ``brought`` has found nothing wrong.
"""

from __future__ import annotations

from streampack.core.form.former import Former
from streampack.core.merge.schedule import AnyMerge
from streampack.core.model.rules import Rules
from streampack.core.model.snapshot import Floor, Snapshot


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
