"""A step's packs, made a few at a time when they are asked for.

What a client derives of a token is six times what comes of it: columns that are made a step ahead of their use leave
every cache and are fetched from memory once more, and that was most of what a client did (RESULTS.md). A few packs made
just before the first of them is used lie in memory that the packs before them have left: it is still in cache. So the
client's thread checks a message when it has come, and what it holds waits there as it came. A trainer that works long
on what it has does not wait for what follows: the client's thread makes that meanwhile (``Ahead``).

Packs of a step are kept once they are made, as any sequence's would be, and the message that they came in is let go
with the last of them; what ``take`` hands out is not kept. Whoever asks makes them, one thread at a time.
"""

from __future__ import annotations

import contextlib
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, Protocol, overload

from streampack.errors import InternalError, PeerError, UserError
from streampack.packs import forks
from streampack.packs.columns import Columns
from streampack.packs.pack import Pack

GROUP_TOKENS = 1 << 16
"""Made together, at least a pack: 1.6 MB. With fewer it is Python that takes the time, more leave the cache."""
SLOW_S = 0.01
"""A trainer that works so long on a group has the next one made meanwhile; a faster one would only wait for it."""

Show = Callable[[Columns, list[Pack]], Sequence[Any]]
"""Function of a format that turns some packs of a message into its views."""


class PackMaker(Protocol):
    """A checked message that makes its packs on request."""

    def groups(self, num_tokens: int) -> list[tuple[int, int]]:
        """Return packs [first, stop) of up to ``num_tokens`` tokens, or one pack of more, in turn."""

    def make(self, first: int, stop: int, show: Show | None) -> Sequence[Any]:
        """Return packs [first, stop), or what ``show`` makes of them."""


class Ahead:
    """Groups that one thread is to make while the trainer's works on those before them, where it works for long.

    What cannot be made ahead is left to the trainer's thread, where the error belongs.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self.slow = True
        """The trainer works long on a group: so the first of a step should be made, too, before it is asked for."""
        self._wake = wake
        self._wanted: tuple[LazyPacks, int] | None = None
        self._stopped = False
        self._handed_out_at = time.perf_counter()

    def asked(self) -> None:
        """Note that the trainer requests a group now."""
        self.slow = time.perf_counter() - self._handed_out_at > SLOW_S

    def handed_out(self, packs: LazyPacks, number: int) -> None:
        """Note that the trainer has a group, and have the next one made if the trainer is slow."""
        if self.slow and number + 1 < packs.num_groups and not self._stopped:
            self._wanted = packs, number + 1
            self._wake()
        self._handed_out_at = time.perf_counter()

    def make(self) -> None:
        """Make the wanted group. The thread that ``wake`` wakes calls this."""
        wanted, self._wanted = self._wanted, None
        if wanted is not None:
            self.make_group(*wanted)

    def make_group(self, packs: LazyPacks, number: int) -> None:
        """Make one group; ignore errors, which the trainer's thread meets again."""
        with contextlib.suppress(Exception):
            packs.make_group(number)

    def stop(self) -> None:
        """Note that the thread has ended: want no more groups."""
        self._stopped, self._wanted = True, None


_Group = tuple[PackMaker, int, int]


class LazyPacks(Sequence[Any]):
    """A step's packs, made group by group on request, or the views that ``show`` makes of them.

    A group is (content of a message, first pack, end). This is a sequence but no tuple: a function that walks nested
    collections of tensors needs ``tuple(step)``. Raises PeerError in a forked child for packs that the parent had not
    made, since the message's memory belongs to the parent.
    """

    def __init__(self, groups: Sequence[_Group], show: Show | None = None) -> None:
        if not all(isinstance(group, tuple) for group in groups):
            raise UserError(
                "got packs to put into a step's sequence of packs, expected a tuple there: take tuple(step)"
            )
        self._groups: list[_Group | None] = list(groups)
        """Groups not made yet; None for the others."""
        self._first = [0, *accumulate(stop - first for _, first, stop in groups)]
        self._made: list[Sequence[Any] | None] = [None] * len(groups)
        self._show, self._forks = show, forks.passed
        self._making = threading.RLock()
        self._handed_out = [False] * len(groups)
        self.ahead: Ahead | None = None
        """Makes groups before the trainer requests them; None if nothing does."""

    @classmethod
    def of(cls, contents: Sequence[PackMaker]) -> LazyPacks:
        """Return the packs of several messages, in the messages' order."""
        return cls([(content, *span) for content in contents for span in content.groups(GROUP_TOKENS)])

    def shown(self, show: Show) -> LazyPacks:
        """Return the same packs as views made by ``show``. None of the packs may be made yet."""
        groups = [group for group in self._groups if group is not None]
        if len(groups) < len(self._groups):
            raise InternalError("got a step some of whose packs are made, expected one that nobody has looked into")
        return LazyPacks(groups, show)

    @property
    def num_groups(self) -> int:
        return len(self._groups)

    def take(self, number: int) -> Sequence[Any]:
        """Return a group and do not keep it: it must not be requested again."""
        return self._hand_out(number, kept=False)

    def make(self) -> None:
        """Make all groups now."""
        for number in range(len(self._groups)):
            self.make_group(number)

    def make_group(self, number: int) -> None:
        """Make one group, unless it has been handed out."""
        with self._making:
            if not self._handed_out[number] and self._made[number] is None:
                self._made[number] = self._make(number)

    def _group(self, number: int) -> Sequence[Any]:
        made = self._made[number]
        return made if made is not None and self._handed_out[number] else self._hand_out(number, kept=True)

    def _hand_out(self, number: int, kept: bool) -> Sequence[Any]:
        """Return a group of packs, and make it if it is not made yet; keep it for later requests if ``kept``."""
        if forks.passed != self._forks:  # whoever holds the lock may be a thread of the parent
            return self._of_parent(number)
        if self.ahead is not None:
            self.ahead.asked()
        with self._making:  # two threads would have a pack each of the same number
            made = self._made[number]
            made = made if made is not None else self._make(number)
            self._made[number] = made if kept else None
            self._groups[number] = None
            self._handed_out[number] = True
        if self.ahead is not None:
            self.ahead.handed_out(self, number)
        return made

    def _of_parent(self, number: int) -> Sequence[Any]:
        made = self._made[number]
        if made is None:
            raise PeerError(
                "got packs of the parent process, which had not made them before the fork, expected made ones: take "
                "tuple(step) there"
            )
        return made

    def _make(self, number: int) -> Sequence[Any]:
        group = self._groups[number]
        if group is None:
            raise InternalError(f"got group {number} of a step's packs, which was taken already")
        content, first, stop = group
        made = content.make(first, stop, self._show)
        self._groups[number] = None  # and with the last one of a message what it lay in
        return made

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

    def __eq__(self, other: object) -> bool:
        return tuple(self) == (tuple(other) if isinstance(other, LazyPacks) else other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return tuple, (tuple(self),)

    def __repr__(self) -> str:
        return f"<{len(self)} packs>"
