"""A holder of a feed's merge; when the feed restarts, it replaces the merge with a new one.

All users of the merge hold this object. They read ``current`` each time and never keep it, because ``restart`` puts
another merge in its place.
"""

from __future__ import annotations

from streampack.core.merge.schedule import AnyMerge, merge_of
from streampack.core.model.rules import Rules


class FeedMerge:
    """The merge of a feed's streams under ``rules``."""

    def __init__(self, rules: Rules) -> None:
        self._current = merge_of(rules)
        self.awaits_state = False
        """True while the feed goes to another step, and the state there is read from the log. No sample may come then:
        it would be taken for one after the state."""

    @property
    def current(self) -> AnyMerge:
        """The merge in use."""
        return self._current

    def restart(self, rules: Rules, step: int = 0, awaits_state: bool = False) -> AnyMerge:
        """Replace the merge with a new, empty merge under ``rules`` at ``step``, and return the new merge."""
        self._current, self.awaits_state = merge_of(rules, step), awaits_state
        return self._current
