"""``LazyPacks``: a step's packs, made on request in groups of a few packs.

Derived arrays take six times the bytes of a received token. Arrays made a step ahead of their use would leave the CPU
caches, and fetching them again would take most of a client's time (RESULTS.md). Packs made just before use lie in the
memory of the packs before, which is still in cache. The client's thread therefore only checks a message when it
arrives. If the trainer works long on a group, the client's thread makes the next group meanwhile (``Ahead``).

A step keeps its packs once they are made, and drops the message with the last of them. Packs handed out by ``take`` are
not kept. The requesting thread makes the packs; a lock admits one thread at a time.
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
"""Tokens of a group, which has at least one pack. Smaller groups cost Python time; larger ones leave the cache."""
SLOW_S = 0.01
"""If work on a group takes this many seconds, the next group is made ahead. A faster trainer would wait for it."""

Show = Callable[[Columns, list[Pack]], Sequence[Any]]
"""Function of a format that turns some packs of a message into its views."""


class PackMaker(Protocol):
    """A checked message that makes its packs on request."""

    def groups(self, num_tokens: int) -> list[tuple[int, int]]:
        """Return groups of packs as [first, stop), each of up to ``num_tokens`` tokens or of a single longer pack."""

    def make(self, first: int, stop: int, show: Show | None) -> Sequence[Any]:
        """Return packs [first, stop), or the views that ``show`` makes of them."""


class Ahead:
    """Requests to make groups of packs ahead, for a trainer that works long on a group.

    The trainer's thread makes the requests, and the client's thread makes the groups. Errors are left to the trainer's
    thread, which makes the group again.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self.slow = True
        """True if the trainer works long on a group; then the first group of a step is made ahead, too."""
        self._wake = wake
        self._wanted: tuple[LazyPacks, int] | None = None
        self._stopped = False
        self._handed_out_at = time.perf_counter()

    def note_request(self) -> None:
        """Measure how long the trainer worked on its last group, when it requests the next one."""
        self.slow = time.perf_counter() - self._handed_out_at > SLOW_S

    def note_handed_out(self, packs: LazyPacks, number: int) -> None:
        """Note that the trainer has group ``number``, and request the next group if the trainer is slow."""
        if self.slow and number + 1 < packs.num_groups and not self._stopped:
            self._wanted = packs, number + 1
            self._wake()
        self._handed_out_at = time.perf_counter()

    def make(self) -> None:
        """Make the requested group, if any. The client's thread calls this after ``wake``."""
        wanted, self._wanted = self._wanted, None
        if wanted is not None:
            self.make_group(*wanted)

    def make_group(self, packs: LazyPacks, number: int) -> None:
        """Make group ``number`` of ``packs``; ignore errors, which the trainer's thread will raise."""
        with contextlib.suppress(Exception):
            packs.make_group(number)

    def stop(self) -> None:
        """Drop the request and accept no more: the client's thread has ended."""
        self._stopped, self._wanted = True, None


_Group = tuple[PackMaker, int, int]


class LazyPacks(Sequence[Any]):
    """A step's packs, made group by group on request, or the views that ``show`` makes of them.

    A group is (content of a message, first pack, end). The class is a sequence but not a tuple: functions that walk
    nested collections of tensors need ``tuple(step)``. In a forked child, packs that the parent had not made raise
    PeerError, since the message's memory belongs to the parent.
    """

    def __init__(self, groups: Sequence[_Group], show: Show | None = None) -> None:
        if not all(isinstance(group, tuple) for group in groups):
            raise UserError(
                "got packs to rebuild a step's sequence of packs, expected a tuple of packs instead of the step. Use "
                "tuple(step)"
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
            raise InternalError("got a step with packs that are already made, expected a step without made packs")
        return LazyPacks(groups, show)

    @property
    def num_groups(self) -> int:
        """Number of groups of packs."""
        return len(self._groups)

    def take(self, number: int) -> Sequence[Any]:
        """Return group ``number`` and do not keep it: no call may request the group again."""
        return self._hand_out(number, kept=False)

    def make(self) -> None:
        """Make all groups now."""
        for number in range(len(self._groups)):
            self.make_group(number)

    def make_group(self, number: int) -> None:
        """Make group ``number`` and keep it, unless it is made or handed out."""
        with self._making:
            if not self._handed_out[number] and self._made[number] is None:
                self._made[number] = self._make(number)

    def _group(self, number: int) -> Sequence[Any]:
        """Return group ``number`` and keep it."""
        made = self._made[number]
        return made if made is not None and self._handed_out[number] else self._hand_out(number, kept=True)

    def _hand_out(self, number: int, kept: bool) -> Sequence[Any]:
        """Return a group of packs, and make it if it is not made yet; keep it for later requests if ``kept``."""
        if forks.passed != self._forks:  # a thread of the parent may hold the lock
            return self._made_by_parent(number)
        if self.ahead is not None:
            self.ahead.note_request()
        with self._making:  # two threads must not make two packs of one number
            made = self._made[number]
            made = made if made is not None else self._make(number)
            self._made[number] = made if kept else None
            self._groups[number] = None
            self._handed_out[number] = True
        if self.ahead is not None:
            self.ahead.note_handed_out(self, number)
        return made

    def _made_by_parent(self, number: int) -> Sequence[Any]:
        """Return group ``number`` in a forked child. Raises PeerError if the parent had not made the group."""
        made = self._made[number]
        if made is None:
            raise PeerError(
                "got packs that the parent process had not made before the fork, expected packs that are already "
                "made. Call tuple(step) in the parent process before the fork"
            )
        return made

    def _make(self, number: int) -> Sequence[Any]:
        """Make group ``number`` from its message, and drop the reference to the message."""
        group = self._groups[number]
        if group is None:
            raise InternalError(f"got a second request for group {number} of a step's packs, expected only one request")
        content, first, stop = group
        made = content.make(first, stop, self._show)
        self._groups[number] = None  # the last group of a message frees the message
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
        place = range(len(self))[at]  # handles negative indices and raises IndexError
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
