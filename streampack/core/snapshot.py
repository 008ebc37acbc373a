"""A snapshot: what decides every later step, beside samples that have not been merged yet.

It holds the merge's clocks, the window with its ages and the packs that wait for their step, as
references with checksums, about 28 bytes a sample. Whoever restores it reads the samples that
it names again, and each partition from its first sample that was not merged.
"""

from __future__ import annotations

from msgspec import Struct

from streampack.core.form import Former, FormState
from streampack.core.merge import Merge, MergeState
from streampack.core.rules import Rules


class Snapshot(Struct, frozen=True):
    """The planner's whole state under the rules of digest ``rules``; plain data, to be stored anyhow."""

    rules: str
    merge: MergeState
    form: FormState


def snapshot(rules: Rules, merge: Merge, former: Former) -> Snapshot:
    """Take one; not while a choice is being made."""
    return Snapshot(rules.digest, merge.state(), former.state())


def restore(taken: Snapshot, rules: Rules, merge: Merge, former: Former) -> None:
    """Put ``taken`` into a merge and a former that have taken nothing.

    Raises ValueError for a snapshot of other rules.
    """
    if taken.rules != rules.digest:
        raise ValueError(f"got a snapshot of rules {taken.rules}, expected {rules.digest}: it is of another run")
    merge.load(taken.merge)
    former.load(taken.form)
