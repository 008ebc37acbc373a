"""Fetches and decodes the media of steps in threads, ahead of use.

The client's thread calls ``begin`` when a step arrives, and the thread that makes packs takes the values. An item that
several samples of the steps at hand refer to is fetched and decoded once. Fetching runs ahead of use as far as the
decoded bytes that wait stay below ``memory_bytes``. An item that someone waits for is fetched in any case.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from streampack.core.media.references import Reference
from streampack.errors import ConfigError, MediaError
from streampack.media.read_bytes import read_bytes

log = logging.getLogger("streampack.client")

Decode = Callable[[bytes, Reference], Any]
WAITS_S = (0.1, 0.4, 1.0, 2.5)
"""Seconds between the tries to fetch an item."""
EXPECTED_BYTES = 1 << 20
"""Decoded bytes of an item, as long as none is decoded."""


class _Item:
    """One item to fetch: its reference, and its value or error once it is there. ``users``: messages that need it."""

    __slots__ = ("__weakref__", "done", "error", "needed", "patches", "reference", "users", "value", "where")

    def __init__(self, reference: Reference, patches: int, where: str) -> None:
        self.reference, self.patches, self.where = reference, patches, where
        self.value: NDArray[Any] | None = None
        self.error: Exception | None = None
        self.done = self.needed = False
        self.users = 0


class PendingItems:
    """The media items of one message, one for each place where samples refer to them.

    Values are kept as long as this object is: packs may be made again after an error.
    """

    def __init__(self, fetcher: Fetcher, items: list[_Item]) -> None:
        self._fetcher, self._items = fetcher, items

    def __del__(self) -> None:
        self._fetcher.release(set(self._items))

    def take(self, first: int, stop: int) -> NDArray[Any]:
        """Wait for the items [first, stop) and return their values, one after another: [patches, ...].

        Raises:
            MediaError: An item cannot be fetched or decoded.
        """
        return self._fetcher.take(self._items[first:stop])


class Fetcher:
    """Threads that fetch and decode. ``close`` ends them."""

    def __init__(self, decode: Decode, threads: int, timeout_s: float, memory_bytes: int) -> None:
        self._decode, self._timeout_s, self._memory_bytes = decode, timeout_s, memory_bytes
        self._changed = threading.Condition()
        self._queue: deque[_Item] = deque()
        self._known: WeakValueDictionary[tuple[Reference, int], _Item] = WeakValueDictionary()
        self._held_bytes = 0  # decoded and not taken
        self._running = 0
        self._mean_bytes = float(EXPECTED_BYTES)
        self._closed = False
        self.fetched = 0
        """Number of items that were fetched and decoded."""
        self.fetched_bytes = 0
        """Bytes of these items as they were fetched."""
        for number in range(threads):
            threading.Thread(target=self._run, name=f"streampack-media-{number}", daemon=True).start()

    def begin(self, references: Sequence[Reference], patches: Sequence[int], places: Sequence[str]) -> PendingItems:
        """Queue the items of a message.

        Args:
            references: Reference of each item.
            patches: Patches of each item, the rows of its value.
            places: Sample that each item belongs to, for error messages.
        """
        items, mine = list[_Item](), set[_Item]()
        with self._changed:
            for reference, count, where in zip(references, patches, places, strict=True):
                item = self._known.get((reference, count))
                if item is None or not item.users or item.error is not None:
                    item = self._known[reference, count] = _Item(reference, count, where)
                    self._queue.append(item)
                item.users += item not in mine
                mine.add(item)
                items.append(item)
            self._changed.notify_all()
        return PendingItems(self, items)

    def take(self, items: Sequence[_Item]) -> NDArray[Any]:
        """Wait for items, and return their values one after another."""
        deadline = time.monotonic() + self._timeout_s
        with self._changed:
            for item in items:
                item.needed = True
            self._changed.notify_all()
            for item in items:
                while not item.done:
                    left = deadline - time.monotonic()
                    if self._closed:
                        raise MediaError(f"{item.where}: got no media, because the loader was closed")
                    if left <= 0:
                        raise MediaError(
                            f"{item.where}: got no answer for {_shown(item.reference)} in {self._timeout_s:g} s. "
                            f"Check the store, or raise `timeout_s` of `Media`"
                        )
                    self._changed.wait(left)
            for each in dict.fromkeys(items):
                if each.error is not None:
                    raise MediaError(f"{each.where}: {_shown(each.reference)}: {each.error}") from each.error
            values = [item.value for item in items if item.value is not None]
        return _joined(values)

    def release(self, items: Iterable[_Item]) -> None:
        """Note that a message does not need these items any more, and drop the values that no other one needs."""
        with self._changed:
            for item in items:
                item.users -= 1
                if item.users:
                    continue
                if not item.done and item in self._queue:
                    self._queue.remove(item)
                self._drop(item)
            self._changed.notify_all()

    def _drop(self, item: _Item) -> None:
        """Forget the value of an item."""
        if item.value is not None:
            self._held_bytes -= item.value.nbytes
            item.value = None

    def close(self) -> None:
        """End the threads; items that wait stay unfetched."""
        with self._changed:
            self._closed = True
            self._queue.clear()
            self._changed.notify_all()

    def _run(self) -> None:
        """Fetch and decode items until ``close``."""
        while (item := self._next()) is not None:
            try:
                value = self._fetch(item)
            except Exception as error:
                value, item.error = None, error
            with self._changed:
                self._running -= 1
                item.value, item.done = value, True
                if value is not None:
                    self._held_bytes += value.nbytes
                    self._mean_bytes += (value.nbytes - self._mean_bytes) / min(self.fetched + 1, 64)
                    self.fetched += 1
                if not item.users:
                    self._drop(item)
                self._changed.notify_all()

    def _next(self) -> _Item | None:
        """Wait until an item may be fetched, and return it; None after ``close``."""
        with self._changed:
            while not self._closed:
                wanted = next((item for item in self._queue if item.needed), None)
                if wanted is None and self._queue:
                    expected = self._held_bytes + (self._running + 1) * self._mean_bytes
                    wanted = self._queue[0] if expected <= self._memory_bytes else None
                if wanted is not None:
                    self._queue.remove(wanted)
                    self._running += 1
                    return wanted
                self._changed.wait()
        return None

    def _fetch(self, item: _Item) -> NDArray[Any]:
        """Fetch an item, again after an error, and decode it."""
        waits = list(WAITS_S)
        while True:
            try:
                data = read_bytes(item.reference)
                break
            except (FileNotFoundError, PermissionError, IsADirectoryError, ConfigError):
                raise
            except Exception as error:
                if not waits or self._closed or item.reference.is_inline:
                    raise
                log.info("%s: %s: %s. Trying again", item.where, _shown(item.reference), _text(error))
                time.sleep(waits.pop(0))
        self.fetched_bytes += len(data)
        try:
            value = np.asarray(self._decode(data, item.reference))
        except Exception as error:
            raise ValueError(f"the decoder raised {type(error).__name__}: {_text(error)}") from error
        if value.ndim < 1 or len(value) != item.patches:
            raise ValueError(
                f"the decoder returned an array of shape {list(value.shape)}, expected {item.patches} rows, one for "
                f"each patch of the item"
            )
        return value


def _joined(values: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Return the values of items one after another. Raises MediaError if their shapes differ."""
    if not values:
        return np.zeros((0,), np.float32)
    kinds = {(value.dtype, value.shape[1:]) for value in values}
    if len(kinds) > 1:
        shown = " and ".join(sorted(f"{kind} {list(shape)}" for kind, shape in kinds)[:2])
        raise MediaError(f"got items whose patches are {shown}, expected the decoder to return one shape and dtype")
    return np.concatenate(values)


def _shown(reference: Reference) -> str:
    """Return a reference for messages."""
    at = f" at byte {reference.offset}" if reference.offset else ""
    return reference.shown + at


def _text(error: Exception) -> str:
    """Return the message of an error on one line."""
    return " ".join(str(error).split()) or type(error).__name__
