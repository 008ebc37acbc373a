"""The one owner of a feed's merge, which begins anew wherever the feed goes.

All who need the merge hold this object. They take ``current`` from it each time and never keep it, because
``restart`` puts another merge in its place.
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
        """The merge that holds what waits now."""
        return self._current

    def restart(self, rules: Rules) -> AnyMerge:
        """Begin under ``rules`` with an empty merge, at the first sample, and return it."""
        self._current = merge_of(rules)
        return self._current
