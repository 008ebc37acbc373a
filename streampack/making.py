"""A step's packs, made a few at a time when they are asked for.

What a client derives of a token is six times what comes of it: columns that are made a step ahead of their use leave
every cache and are fetched from memory once more, and that was most of what a client did (RESULTS.md). A few packs made
just before the first of them is used lie in memory that the packs before them have left: it is still in cache. So the
client's thread checks a message when it has come, and what it holds waits there as it came. A trainer that works long
on what it has does not wait for what follows: the client's thread makes that meanwhile (``Ahead``).

Packs of a step are kept once they are made, as any sequence's would be; ``groups`` keeps none. Whoever asks makes them,
one thread at a time.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, overload

from streampack import forks
from streampack.columns import Columns
from streampack.errors import PeerError

if TYPE_CHECKING:
    from streampack.building import Content
    from streampack.packs import Pack

GROUP_TOKENS = 1 << 16
"""Made together, at least a pack: 1.6 MB. With fewer it is Python that takes the time, more leave the cache."""
SLOW_S = 0.01
"""A trainer that works so long on a group has the next one made meanwhile; a faster one would only wait for it."""

Show = Callable[[Columns, list["Pack"]], Sequence[Any]]
"""What a format makes of some packs of a message."""


class Ahead:
    """Groups that one thread is to make while the trainer's works on those before them, where it works for long."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.slow = True
        """The trainer works long on a group: so the first of a step should be made, too, before it is asked for."""
        self._wake = wake
        self._wanted: deque[tuple[Packs, int]] = deque()
        self._handed_out_at = time.perf_counter()

    def asked(self) -> None:
        """The trainer asks for a group, now."""
        self.slow = time.perf_counter() - self._handed_out_at > SLOW_S

    def handed_out(self, packs: Packs, number: int) -> None:
        """The trainer has got a group, and asks for the one behind it next."""
        if self.slow and number + 1 < packs.num_groups:
            self._wanted.append((packs, number + 1))
            self._wake()
        self._handed_out_at = time.perf_counter()

    def make(self) -> None:
        """What is wanted; by the thread that ``wake`` wakes."""
        while self._wanted:
            packs, number = self._wanted.popleft()
            packs.make_group(number)


class Packs(Sequence[Any]):
    """The packs in ``contents``, one message's behind another's; or what ``show`` makes of them.

    Raises PeerError in a forked child for those that its parent had not made: the memory that they came in is lent to
    the parent.
    """

    def __init__(self, contents: Sequence[Content], show: Show | None = None) -> None:
        self._contents, self._show, self._forks = contents, show, forks.passed
        self._groups: list[tuple[Content, int, int]] = []
        self._first = [0]
        for content in contents:
            for first, stop in content.groups(GROUP_TOKENS):
                self._groups.append((content, first, stop))
                self._first.append(self._first[-1] + stop - first)
        self._made: list[Sequence[Any] | None] = [None] * len(self._groups)
        self._next = 0
        """The first group that was not handed out."""
        self._making = threading.RLock()
        self.ahead: Ahead | None = None
        """Who makes groups before they are asked for."""

    @property
    def num_groups(self) -> int:
        return len(self._groups)

    def shown(self, show: Show) -> Packs:
        """What ``show`` makes of the same packs."""
        return Packs(self._contents, show)

    def groups(self) -> Iterator[Sequence[Any]]:
        """All of them in turn, some at a time; none is kept."""
        for number in range(len(self._groups)):
            yield self._handed_out(number, kept=False)

    def make(self) -> None:
        """All of them, now."""
        for number in range(len(self._groups)):
            self.make_group(number)

    def make_group(self, number: int) -> None:
        """One group, unless it has been handed out."""
        with self._making:
            if number >= self._next and self._made[number] is None:
                self._made[number] = self._make(number)

    def _group(self, number: int) -> Sequence[Any]:
        return self._made[number] or self._handed_out(number, kept=True)

    def _handed_out(self, number: int, kept: bool) -> Sequence[Any]:
        if self.ahead is not None:
            self.ahead.asked()
        with self._making:  # two threads would have a pack each of the same number
            made = self._made[number] or self._make(number)
            self._made[number] = made if kept else None
            self._next = max(self._next, number + 1)
        if self.ahead is not None:
            self.ahead.handed_out(self, number)
        return made

    def _make(self, number: int) -> Sequence[Any]:
        if forks.passed != self._forks:
            raise PeerError(
                "got packs of the parent process, which had not made them before the fork, expected made ones: take "
                "tuple(step) there"
            )
        content, first, stop = self._groups[number]
        return content.make(first, stop, self._show)

    def __len__(self) -> int:
        return self._first[-1]

    @overload
    def __getitem__(self, at: int) -> Any: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[Any, ...]: ...
    def __getitem__(self, at: int | slice) -> Any:
        if isinstance(at, slice):
            return tuple(self[i] for i in range(*at.indices(len(self))))
        place = range(len(self))[at]  # from the end, too; raises IndexError
        number = bisect_right(self._first, place) - 1
        return self._group(number)[place - self._first[number]]

    def __iter__(self) -> Iterator[Any]:
        for number in range(len(self._groups)):
            yield from self._group(number)

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return tuple, (tuple(self),)

    def __repr__(self) -> str:
        return f"<{len(self)} packs>"
