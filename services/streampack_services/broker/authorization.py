"""The folder of keys that may connect to a broker: reading it, changing it, and watching it while the broker runs.

::

    keys/                 mode 0700
      broker.key          the broker's own key; its owner may do everything
      allowed.yaml        the public keys that may connect, by name; no secrets, but it must be writable by you alone
      tokenizers.key      the key of a peer: copy it to the peer's machine; the broker does not use it

    # allowed.yaml: one line for each key; removing a line disconnects its owner within a second
    tokenizers: {key: 58e1..., role: producer, streams: [web, code]}
    trainers: {key: c07a..., role: trainer, feeds: [train]}
    rank-3: {key: 9ad2..., role: trainer, feeds: [train], ranks: {dp: 3}}
    relay-0: {key: 41b3..., role: relay, hosts: [gpu0]}

The broker looks at allowed.yaml twice a second. It reads a changed file once two checks in a row find the same file, so
that it does not read half of a file. A file that is missing, empty or invalid is logged, and the last valid keys stay
allowed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct

from streampack.config.typed_yaml import convert, parse_tree
from streampack.core.model.bounded import Name, Small
from streampack.core.protocol.rights import NO_RIGHTS, Rights, Role, key_of
from streampack.errors import ConfigError, StreampackError, UserError
from streampack.transport.curve import new_secret, public_of
from streampack.transport.keys import HEX, NAME, Key, load_key
from streampack.transport.secret_files import read_trusted, write_secret
from streampack_services.descriptors import reserve

log = logging.getLogger("streampack.broker")

LOOK_S = 0.5
"""Time between two looks at allowed.yaml, in seconds."""
CUTS = 3
"""Cut connections of one key within ``SHUT_OUT_S`` after which the key is shut out."""
SHUT_OUT_S = 60.0
"""Seconds for which a key is shut out."""
BROKER = "broker"
ALLOWED = "allowed.yaml"
_HEAD = (
    "# Keys that may connect to this broker. 'streampack keys new' adds a line, 'streampack keys revoke' removes a "
    "line."
)


class KeyEntry(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A line of allowed.yaml: a public key and its rights.

    Without ``streams``, ``feeds``, ``ranks`` and ``hosts`` the key may do all that its role allows. An empty list is an
    error.
    """

    key: Annotated[str, Meta(pattern=f"^{HEX.pattern}$")]
    role: Role
    streams: Annotated[tuple[Name, ...], Meta(min_length=1)] = ()
    feeds: Annotated[tuple[Name, ...], Meta(min_length=1)] = ()
    ranks: Annotated[dict[Name, Small], Meta(min_length=1)] = {}
    hosts: Annotated[tuple[Name, ...], Meta(min_length=1)] = ()


_LIMITS: dict[str, tuple[Role, ...]] = {
    "streams": ("producer",), "feeds": ("trainer", "relay"), "ranks": ("trainer", "relay"), "hosts": ("relay",),
}  # fmt: skip
"""The roles whose keys may have each limit."""


def read_allowed(folder: Path) -> dict[str, KeyEntry]:
    """Return the entries of allowed.yaml by name; empty if the file is missing. Raise UserError if it is invalid."""
    path = folder / ALLOWED
    if not path.exists():
        return {}
    found = _parse_entries(read_trusted(path), path)
    names: dict[str, str] = {}
    for name, entry in found.items():
        _check_entry(f"{path}: {name}", name, entry)
        if other := names.get(entry.key):
            raise ConfigError(f"{path}: {name} has the same key as {other}. Remove one of the two lines")
        names[entry.key] = name
    return found


def _parse_entries(text: str, path: Path) -> dict[str, KeyEntry]:
    """Return the entries in the text of an allowed.yaml; raise ConfigError naming ``path`` if they are invalid."""
    tree = parse_tree(text, path)
    if not isinstance(tree, dict) or not all(isinstance(name, str) for name in tree):
        raise ConfigError(
            f"{path}: got no mapping of names, expected one line 'name: {{key: ..., role: ...}}' for each key"
        )
    return {name: convert(entry, KeyEntry, f"{path}: {name}") for name, entry in tree.items()}


def _check_entry(where: str, name: str, entry: KeyEntry) -> None:
    """Raise ConfigError if the name is not allowed, or a limit does not belong to the role."""
    if not NAME.fullmatch(name) or name == BROKER or parse_tree(name, where) != name:
        raise ConfigError(
            f"{where}: got name {name!r}. Choose a name that begins with a letter and has only letters, digits, '.', "
            f"'-' and '_'. The name {BROKER!r} and words with a meaning in YAML, such as 'yes', are reserved"
        )
    if given := [key for key, roles in _LIMITS.items() if entry.role not in roles and getattr(entry, key)]:
        raise ConfigError(
            f"{where}: got {given[0]} for a {entry.role}, expected no {given[0]}, which only a "
            f"{' or '.join(_LIMITS[given[0]])} can have. "
            f"Remove {given[0]}"
        )
    if unknown := set(entry.ranks) - {"dp", "cp", "tp", "pp"}:
        raise ConfigError(f"{where}: ranks: got {min(unknown)!r}, expected some of dp, cp, tp, pp")


def rights_of(allowed: Mapping[str, KeyEntry], broker: Key) -> dict[str, Rights]:
    """Return the rights of each public key. The broker's own key has all rights."""
    found = {
        entry.key: Rights(name, entry.role, entry.streams, entry.feeds, entry.ranks, entry.hosts)  # type: ignore[arg-type]
        for name, entry in allowed.items()
    }
    return {**found, broker.public: Rights(broker.name, "any")}


# Changing the folder


def new_key(folder: Path, name: str, role: str, limits: Mapping[str, Any]) -> list[Path]:
    """Create the key of a peer, add it to allowed.yaml, and return the paths of the files written.

    Creates the folder and the broker's own key if they are missing.

    Args:
        folder: The folder of keys.
        name: Name of the peer.
        role: ``producer``, ``trainer``, ``relay`` or ``standby``.
        limits: Values for ``streams``, ``feeds``, ``ranks`` and ``hosts``; empty ones are left out.

    Raises:
        UserError: The name is taken or not allowed, or a limit is invalid.
    """
    tree = {"key": "0" * 64, "role": role, **{key: value for key, value in limits.items() if value}}
    _check_entry("keys", name, convert(tree, KeyEntry, "keys"))
    with _locked(folder):
        return _create_key(folder, name, tree)


def _create_key(folder: Path, name: str, tree: dict[str, Any]) -> list[Path]:
    """Create a key, write its files and its entry in allowed.yaml; return the paths. The caller locks the folder.

    ``tree`` is the entry for allowed.yaml without the key.
    """
    secret = new_secret()
    broker_file, file = folder / f"{BROKER}.key", folder / f"{name}.key"
    allowed = read_allowed(folder)
    if name in allowed or file.exists():
        raise UserError(f"{folder}: {name!r} already has a key. Choose another name")
    written = [file, folder / ALLOWED]
    if not broker_file.exists():
        own = new_secret()
        write_secret(broker_file, Key(name=BROKER, secret=own, broker=public_of(own)).text())
        written.insert(0, broker_file)
    key = Key(name=name, secret=secret, broker=load_key(broker_file).public)
    write_secret(file, key.text())
    _write_allowed(folder, [*_allowed_lines(folder), _allowed_line(name, tree | {"key": key.public})])
    return written


def revoke(folder: Path, name: str) -> None:
    """Remove the key of ``name`` from allowed.yaml; its key file stays. Raise UserError for an unknown name."""
    check_has_keys(folder)
    with _locked(folder):
        _revoke(folder, name)


def check_has_keys(folder: Path) -> None:
    """Raise UserError if the folder has no allowed.yaml, for example because its name was mistyped."""
    if not (folder / ALLOWED).exists():
        raise UserError(f"{folder} has no {ALLOWED}. Pass a folder that 'streampack keys new' created")


def _revoke(folder: Path, name: str) -> None:
    """Do the work of ``revoke`` while the caller holds the lock of the folder."""
    before = read_allowed(folder)
    if name not in before:
        raise UserError(
            f"{folder / ALLOWED}: got name {name!r}, expected one of: {', '.join(before) or 'the file has no keys'}"
        )
    lines = [line for line in _allowed_lines(folder) if not line.startswith(f"{name}:")]
    left = _parse_entries("\n".join(lines), folder / ALLOWED)
    if left != {other: entry for other, entry in before.items() if other != name}:
        raise UserError(
            f"{folder / ALLOWED}: the entry of {name!r} takes more than one line. Remove the entry with an editor"
        )
    _write_allowed(folder, lines)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Create the folder if it is missing (mode 0700), and hold a lock on it until the end of the block."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror}. Choose another folder") from None
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)


def _allowed_lines(folder: Path) -> list[str]:
    """Return the lines of allowed.yaml, or a heading if the file is missing."""
    path = folder / ALLOWED
    return read_trusted(path).splitlines() if path.exists() else [_HEAD]


def _allowed_line(name: str, tree: Mapping[str, Any]) -> str:
    """Return an entry as one line of YAML."""
    words = [f"{key}: {value if key in ('key', 'role') else json.dumps(value)}" for key, value in tree.items()]
    return f"{name}: {{{', '.join(words)}}}"


def _write_allowed(folder: Path, lines: Sequence[str]) -> None:
    """Replace allowed.yaml atomically, so that no reader sees a partly written file."""
    part = folder / f".{ALLOWED}.{os.getpid()}"
    part.unlink(missing_ok=True)
    write_secret(part, "".join(f"{line}\n" for line in lines))
    part.replace(folder / ALLOWED)


def keys_table(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Return the allowed keys as a ``rich`` table: name, role, limits, and the beginning of the public key."""
    from rich.table import Table

    found = Table("name", "role", "may", "public key")
    for row in rows:
        axes = [f"{axis}_rank={rank}" for axis, rank in row["ranks"].items()]
        may = [*(f"stream {name}" for name in row["streams"]), *(f"feed {name}" for name in row["feeds"]), *axes,
               *(f"host {name}" for name in row["hosts"])]  # fmt: skip
        found.add_row(row["name"], row["role"], ", ".join(may) or "all", f"{row['key'][:16]}...")
    return found


# Watching the folder


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
        self._folder, self._wake = folder, wake
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
                address, key[:12], self._folder / ALLOWED, self.refused,
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
                self._folder, name,
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
        found = []
        while self._changed:
            found.append(self._changed.popleft())
        return found

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
                raise UserError(f"{self._folder / ALLOWED} is {'empty' if seen else 'missing'}")
            with reserve():  # connections may have taken all other descriptors
                now = rights_of(read_allowed(self._folder), self.key)
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
        log.info("read %s again: %d keys may connect", self._folder / ALLOWED, self.num_keys)
        self._wake()

    def _file_stamp(self) -> tuple[int, ...]:
        """Return allowed.yaml's times, inode and size, which differ after a change; empty if it is missing."""
        try:
            found = (self._folder / ALLOWED).stat()
        except OSError:
            return ()
        return found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_size
