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

    @property
    def current(self) -> AnyMerge:
        """The merge in use."""
        return self._current

    def restart(self, rules: Rules) -> AnyMerge:
        """Replace the merge with a new, empty merge under ``rules``, and return the new merge."""
        self._current = merge_of(rules)
        return self._current
