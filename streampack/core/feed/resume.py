"""Takes and restores snapshots: everything from which a feed's next steps are formed.

A snapshot comes from the log or from a trainer's checkpoint. ``snapshot_check`` must check the latter first.
"""

from __future__ import annotations

from streampack.core.form.former import Former
from streampack.core.merge.schedule import AnyMerge
from streampack.core.model.rules import Rules
from streampack.core.model.snapshot import Floor, Snapshot


def snapshot(rules: Rules, merge: AnyMerge, former: Former, floors: list[Floor] | None = None) -> Snapshot:
    """Return a snapshot of a merge and a ``Former``, which must not wait for a packer's choice.

    Args:
        rules: The rules with which the feed began.
        merge: The feed's merge.
        former: The ``Former``, with the window and the pending packs.
        floors: Place to read each partition from after a restart.
    """
    return Snapshot(rules.digest, merge.state(), former.state(), floors or [])


def restore(taken: Snapshot, rules: Rules, merge: AnyMerge, former: Former) -> None:
    """Restore a snapshot into a new merge and a new ``Former``; raise ValueError if its rules differ."""
    if taken.rules != rules.digest:
        raise ValueError(
            f"got a snapshot with rules digest {taken.rules}, expected {rules.digest}. The snapshot is from another run"
        )
    merge.load(taken.merge)
    former.load(taken.form)
