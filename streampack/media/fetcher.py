"""Fetches and decodes the media of steps in threads, ahead of use.

The client's thread calls ``begin`` when a step arrives, and the thread that makes packs takes the values. An item that
several samples of the steps at hand refer to is fetched and decoded once. Fetching runs ahead of use as far as the
decoded bytes that wait stay below ``memory_bytes``. An item that someone waits for is fetched in any case.
"""

from __future__ import annotations

import errno
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
from streampack.core.stats.media_figures import MEDIA_DROPPED
from streampack.errors import ConfigError, MediaError
from streampack.sources.files.read_bytes import TooLarge, WrongBytes, read_bytes
from streampack.sources.files.retries import Retries, kind_of, status_of, text_of, without_queries

log = logging.getLogger("streampack.client")

Decode = Callable[[bytes, Reference], Any]
_Kind = tuple[np.dtype[Any], tuple[int, ...]]
EXPECTED_BYTES = 1 << 20
"""Decoded bytes of an item, as long as none is decoded."""
SAID = 10
"""Dropped items of a reason that are warned of; later ones are counted alone."""


class _Item:
    """One item to fetch: its reference, and its value or error once it is fetched.

    ``users``: messages that need it. ``cause``: why the last try failed.
    """

    __slots__ = ("__weakref__", "cause", "done", "error", "needed", "patches", "reference", "users", "value", "where")

    def __init__(self, reference: Reference, patches: int, where: str) -> None:
        self.reference, self.patches, self.where = reference, patches, where
        self.value: NDArray[Any] | None = None
        self.error: Exception | None = None
        self.done = self.needed = False
        self.users, self.cause = 0, ""


class Undecodable(ValueError):
    """The decoder raised, or returned an array that does not fit the item."""


class OtherShape(ValueError):
    """The decoder returned patches of another dtype or shape than for the items before."""


class Late(TimeoutError):
    """The bytes did not come in time."""


REASONS: dict[str, type[Exception] | tuple[type[Exception], ...]] = {
    "missing": (FileNotFoundError, IsADirectoryError),
    "too_large": TooLarge,
    "wrong_bytes": WrongBytes,
    "undecodable": Undecodable,
    "late": Late,
    "unreadable": Exception,
}
"""Reasons for which items are dropped, and the errors that each stands for; the first that fits counts."""
_NOT_THE_ITEMS = (ConfigError, ImportError, MemoryError, OtherShape)
"""Errors of the machine, of its settings or of the decoder: no item is dropped for them."""
_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC)
"""Numbers of system errors that are not the item's either."""


class PendingItems:
    """The media items of one message, one for each place where samples refer to them.

    Values are kept as long as this object is: packs may be made again after an error.
    """

    def __init__(self, fetcher: Fetcher, field: str, items: list[_Item], places: Sequence[str]) -> None:
        self._fetcher, self._items, self._places = fetcher, items, places
        self.field = field
        self.counted = set[int]()
        """Items that were counted as dropped."""

    def __del__(self) -> None:
        self._fetcher.release(set(self._items))

    def take(self, first: int, stop: int) -> tuple[NDArray[Any], list[int]]:
        """Wait for the items [first, stop). Return their values one after another, [patches, ...], and what is dropped.

        Raises:
            MediaError: An item cannot be fetched or decoded, and such items are not dropped, or nothing is known that
                may stand for it.
        """
        errors = self._fetcher.wait(self.field, self._items[first:stop])
        dropped = [first + at for at, error in enumerate(errors) if error is not None]
        for at in dropped:
            self._fetcher.note_failed(self, at, self._items[at], self._places[at], errors[at - first])
        return self._fetcher.joined(self.field, self._items[first:stop], errors), dropped


class Fetcher:
    """Threads that fetch and decode. ``close`` ends them.

    Args:
        decode: Function from the bytes of an item and its reference to an array [patches, ...].
        threads: Number of threads.
        timeout_s: Seconds that ``take`` waits for items.
        memory_bytes: Decoded bytes that may wait.
        largest: Bytes of an item, as it is stored.
        drops: True if items that cannot be had are dropped, so that zeros stand for them.
    """

    def __init__(
        self, decode: Decode, threads: int, timeout_s: float, memory_bytes: int, largest: int, drops: bool = False
    ) -> None:  # fmt: skip
        self._decode, self._timeout_s, self._memory_bytes, self._largest = decode, timeout_s, memory_bytes, largest
        self.drops = drops
        self._changed = threading.Condition()
        self._queue: deque[_Item] = deque()
        self._known: WeakValueDictionary[tuple[Reference, int], _Item] = WeakValueDictionary()
        self._kinds: dict[str, _Kind] = {}
        self._held_bytes = 0  # decoded and not taken
        self._running = 0
        self._mean_bytes = float(EXPECTED_BYTES)
        self._closed = threading.Event()
        self.fetched = 0
        """Number of items that were fetched and decoded."""
        self.fetched_bytes = 0
        """Bytes of these items as they were fetched."""
        self.dropped = dict.fromkeys(REASONS, 0)
        """Number of items that were dropped, by reason."""
        for number in range(threads):
            threading.Thread(target=self._run, name=f"streampack-media-{number}", daemon=True).start()

    def begin(
        self, field: str, references: Sequence[Reference], patches: Sequence[int], places: Sequence[str]
    ) -> PendingItems:
        """Queue the items of a message.

        Args:
            field: Name of the field. All of its items have the same dtype and trailing shape.
            references: Reference of each item.
            patches: Patches of each item, the rows of its value.
            places: Sample that each item belongs to, for error messages.
        """
        items, of_message = list[_Item](), set[_Item]()
        with self._changed:
            for reference, count, where in zip(references, patches, places, strict=True):
                item = self._known.get((reference, count))
                if item is None or not item.users or item.error is not None:
                    item = self._known[reference, count] = _Item(reference, count, where)
                    self._queue.append(item)
                item.users += item not in of_message
                of_message.add(item)
                items.append(item)
            self._changed.notify_all()
        return PendingItems(self, field, items, places)

    def wait(self, field: str, items: Sequence[_Item]) -> list[Exception | None]:
        """Wait for items, and return the error of each; None for an item without an error.

        The first item of a field sets the dtype and shape of the patches of all others.

        Raises:
            MediaError: The loader was closed.
        """
        deadline = time.monotonic() + self._timeout_s
        with self._changed:
            for item in items:
                item.needed = True
            self._changed.notify_all()
            for item in items:
                while not item.done and (left := deadline - time.monotonic()) > 0:
                    if self._closed.is_set():
                        raise MediaError(f"{item.where}: got no media, because the loader was closed")
                    self._changed.wait(left)
            return [(item.error or self._misfit(field, item)) if item.done else self._late(item) for item in items]

    def _late(self, item: _Item) -> Late:
        """Return the error of an item that did not come in time."""
        cause = f" ({item.cause})" if item.cause else ""
        return Late(
            f"got no answer in {self._timeout_s:g} s{cause}. Check the store, or raise `timeout_s` of `Media`"
        )  # fmt: skip

    def _misfit(self, field: str, item: _Item) -> Exception | None:
        """Return an error for an item whose patches differ in dtype or shape from those of the items before."""
        if item.value is None:
            return None
        kind = item.value.dtype, item.value.shape[1:]
        expected = self._kinds.setdefault(field, kind)
        if kind == expected:
            return None
        got, wanted = (f"{dtype} {list(shape)}" for dtype, shape in (kind, expected))
        return OtherShape(f"the decoder returned patches of {got}, expected {wanted}, as of items before")

    def note_failed(self, pending: PendingItems, at: int, item: _Item, place: str, error: Exception | None) -> None:
        """Count an item that is dropped, once for each place that refers to it.

        Raises:
            MediaError: Items are not dropped, or this one is not to blame. Or nothing says what may stand for it: no
                item of its field was decoded yet.
        """
        text = f"{place}: {_shown(item.reference)}: {_text(error, item.reference)}"
        full = isinstance(error, OSError) and error.errno in _FULL
        if not self.drops or full or isinstance(error, _NOT_THE_ITEMS):
            raise MediaError(text) from error
        if pending.field not in self._kinds:
            raise MediaError(
                f"{text}. No item of {pending.field} was decoded yet, so it cannot be dropped: nothing says the shape "
                f"of its patches"
            ) from error
        if at in pending.counted:
            return
        pending.counted.add(at)
        reason = next(reason for reason, kinds in REASONS.items() if isinstance(error, kinds))
        with self._changed:
            self.dropped[reason] += 1
            loud = self.dropped[reason] <= SAID
        log.log(logging.WARNING if loud else logging.INFO, "%s. The sample does not count in the loss", text)
        if self.dropped[reason] == SAID:
            log.warning("more items that are dropped (%s) are only counted, in stats() of the loader", reason)

    def joined(self, field: str, items: Sequence[_Item], errors: Sequence[Exception | None]) -> NDArray[Any]:
        """Return the values of items one after another, with zeros for those that failed."""
        if not items:
            return np.zeros((0,), np.float32)
        dtype, shape = self._kinds[field]
        values = [
            item.value if error is None and item.value is not None else np.zeros((item.patches, *shape), dtype)
            for item, error in zip(items, errors, strict=True)
        ]
        return np.concatenate(values)

    def stats(self) -> dict[str, float]:
        """Return the number of items and bytes fetched, and of items dropped by reason; see ``Client.stats``."""
        with self._changed:
            dropped = {f"{MEDIA_DROPPED}{reason}": float(count) for reason, count in self.dropped.items()}
            return {"media_items": self.fetched, "media_bytes": self.fetched_bytes, **(dropped if self.drops else {})}

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
            self._closed.set()
            self._queue.clear()
            self._changed.notify_all()

    def _run(self) -> None:
        """Fetch and decode items until ``close``."""
        while (item := self._next()) is not None:
            try:
                value = self._fetch(item)
            except Exception as error:
                value, item.error = None, error
                if self.drops:  # the trainer goes on; frames of the traceback would keep the bytes of the item
                    error.__traceback__ = error.__cause__ = error.__context__ = None
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
            while not self._closed.is_set():
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
        retries = Retries(_shown(item.reference), self._closed, self._timeout_s)
        while True:
            try:
                data = read_bytes(item.reference, self._largest)
                break
            except (ConfigError, TooLarge):
                raise
            except Exception as error:
                item.cause = text_of(error)
                if not item.reference.is_inline and retries.again(error):
                    continue
                if kind_of(error) != "final" and status_of(error) is not None:  # fsspec calls it a missing file
                    raise OSError(f"{item.cause}, in {retries.tries} tries") from error
                raise
        self.fetched_bytes += len(data)
        try:
            value = np.asarray(self._decode(data, item.reference))
        except (ConfigError, ImportError, MemoryError):
            raise
        except Exception as error:
            raise Undecodable(f"the decoder raised {type(error).__name__}: {_text(error)}") from error
        if value.ndim < 1 or len(value) != item.patches:
            raise Undecodable(
                f"the decoder returned an array of shape {list(value.shape)}, expected {item.patches} rows, one for "
                f"each patch of the item"
            )
        return value


def _shown(reference: Reference) -> str:
    """Return a reference for messages."""
    at = f" at byte {reference.offset}" if reference.offset else ""
    return reference.shown + at


def _text(error: Exception | None, reference: Reference | None = None) -> str:
    """Return the message of an error on one line, without a path that ``reference`` says."""
    if isinstance(error, OSError) and error.strerror and reference is not None and error.filename == reference.uri:
        return error.strerror
    if error is not None and status_of(error) is not None:
        return text_of(error)
    return without_queries(" ".join(str(error).split())) or type(error).__name__
