"""The keys that may connect to a running broker, and those that are shut out for a while.

The broker looks at allowed.yaml twice a second. It reads a changed file once two checks in a row find the same file, so
that it does not read half of a file. A file that is missing, empty or invalid is logged, and the last valid keys stay
allowed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from streampack.core.protocol.rights import NO_RIGHTS, Rights, key_of
from streampack.errors import StreampackError, UserError
from streampack.transport.keys import load_key
from streampack_services.broker.authorization import ALLOWED, BROKER, read_allowed, rights_of
from streampack_services.descriptors import reserve

log = logging.getLogger("streampack.broker")

LOOK_S = 0.5
"""Time between two looks at allowed.yaml, in seconds."""
CUTS = 3
"""Cut connections of one key within ``SHUT_OUT_S`` after which the key is shut out."""
SHUT_OUT_S = 60.0
"""Seconds for which a key is shut out."""


class Allowed:
    """The keys that may connect to a running broker; a thread of its own watches allowed.yaml.

    ``admits``, ``rights``, ``note_cut`` and ``take_changed_keys`` may be called only in the thread that serves the
    sockets.

    Args:
        folder: The folder of keys.
        wake: Called in the watching thread after the keys have changed.

    Raises:
        UserError: The folder has no ``broker.key``, or the key in it is not a broker's.
    """

    def __init__(self, folder: Path, wake: Callable[[], None]) -> None:
        self.folder, self._wake = folder, wake
        path = folder / f"{BROKER}.key"
        if not path.exists():
            raise UserError(
                f"listen.keys: {folder} has no {path.name}. Create it with 'streampack keys new {folder} NAME "
                f"--role ROLE'"
            )
        self.key = load_key(path)
        if self.key.public != self.key.broker:
            raise UserError(f"{path} is the key of a peer. Replace this file with the broker's own key")
        self._seen = self._moving = self._file_stamp()
        self._rights = rights_of(read_allowed(folder), self.key)
        self._names = {key: rights.name for key, rights in self._rights.items()}
        """Name of each key that was ever allowed."""
        self._unread: tuple[tuple[int, ...], str] = (), ""
        """The file that cannot be read, and why; it is tried at each look, and logged once."""
        self._changed: deque[bytes] = deque()
        self._cut_at: dict[str, deque[float]] = {}
        """Times of the last cut connections of each public key, by the monotonic clock."""
        self.refused = 0
        """Rejected connections since the start."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="streampack-keys", daemon=True)
        self._thread.start()

    @property
    def num_keys(self) -> int:
        """Number of allowed keys, without the broker's own."""
        return len(self._rights) - 1

    def admits(self, key: str, address: str) -> bool:
        """Return True if this public key may connect. Count a rejected peer, and log it if its key is unknown."""
        if key in self._rights:
            if not self.is_shut_out(key):
                return True
            self.refused += 1
            return False
        self.refused += 1
        if not self.refused & (self.refused - 1):  # log the 1st, 2nd, 4th, 8th, ...
            log.warning(
                "rejected a peer at %s: its key %s... is not in %s (%d rejected so far)",
                address, key[:12], self.folder / ALLOWED, self.refused,
            )  # fmt: skip
        return False

    def note_cut(self, peer: bytes, why: str) -> None:
        """Count a cut connection of this peer; shut its key out at the ``CUTS``th within ``SHUT_OUT_S``.

        Args:
            peer: The connection.
            why: The reason, for the log.
        """
        key = key_of(peer).decode("ascii", "replace")
        cuts = self._cut_at.setdefault(key, deque(maxlen=CUTS))
        was_shut_out = self.is_shut_out(key)
        cuts.append(time.monotonic())
        if not was_shut_out and self.is_shut_out(key):
            name = self.name(peer)
            log.error(
                "blocked key %r for %.0f s, because %d of its connections were cut, the last one because %s. Find the "
                "process that uses the key, or run 'streampack keys revoke %s %s'", name, SHUT_OUT_S, CUTS, why,
                self.folder, name,
            )  # fmt: skip

    def is_shut_out(self, key: str) -> bool:
        """Return True if connections of this public key were cut ``CUTS`` times within ``SHUT_OUT_S``."""
        cuts = self._cut_at.get(key)
        return cuts is not None and len(cuts) == CUTS and cuts[0] > time.monotonic() - SHUT_OUT_S

    def rights(self, peer: bytes) -> Rights:
        """Return the rights of the key behind the connection ``peer``; no rights if the key is not allowed any more."""
        return self._rights.get(key_of(peer).decode("ascii", "replace"), NO_RIGHTS)

    def name(self, peer: bytes) -> str:
        """Return the name of the key behind the connection ``peer``, also if the key is not allowed any more."""
        return self._names.get(key_of(peer).decode("ascii", "replace"), "")

    def take_changed_keys(self) -> list[bytes]:
        """Return the keys whose rights have changed since the last call, or that were removed."""
        return [self._changed.popleft() for _ in range(len(self._changed))]

    def close(self) -> None:
        """Stop the watching thread; idempotent."""
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        """Reload allowed.yaml when it changes; run in a thread, look every ``LOOK_S`` seconds until ``close``."""
        while not self._over.wait(LOOK_S):
            self.reload_if_changed()

    def reload_if_changed(self) -> None:
        """Read allowed.yaml if the file has changed since the last reading, but not since the last check."""
        seen, last = self._file_stamp(), self._moving
        self._moving = seen
        if seen == self._seen or seen != last:
            return
        try:
            if not seen or not seen[-1]:
                raise UserError(f"{self.folder / ALLOWED} is {'empty' if seen else 'missing'}")
            with reserve():  # connections may have taken all other descriptors
                now = rights_of(read_allowed(self.folder), self.key)
        except Exception as error:  # the thread must go on, or keys revoked later would stay allowed
            if self._unread != (seen, str(error)):
                log.error(
                    "cannot reload the allowed keys: %s. The previously allowed keys stay allowed; the broker tries "
                    "again", error, exc_info=not isinstance(error, StreampackError),
                )  # fmt: skip
            self._unread = seen, str(error)
            return
        self._seen = seen
        before, self._rights = self._rights, now
        self._names |= {key: rights.name for key, rights in now.items()}
        self._changed.extend(key.encode() for key, rights in before.items() if now.get(key) != rights)
        log.info("read %s again: %d keys may connect", self.folder / ALLOWED, self.num_keys)
        self._wake()

    def _file_stamp(self) -> tuple[int, ...]:
        """Return allowed.yaml's times, inode and size, which differ after a change; empty if it is missing."""
        try:
            stat = (self.folder / ALLOWED).stat()
        except OSError:
            return ()
        return stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_size
