"""Who may come to a broker: a folder of keys, read, added to, and watched while it runs.

::

    keys/                 mode 0700
      broker.key          the broker's own; whoever has it may do everything
      allowed.yaml        who else may come, by name; no secrets, but whoever may change it lets in whom they like
      tokenizers.key      a peer's: to be taken to it, and of no use here

    # allowed.yaml: a line a key; taking one away shuts its owner out within a second
    tokenizers: {key: 58e1..., role: producer, streams: [web, code]}
    trainers: {key: c07a..., role: trainer, feeds: [train]}
    rank-3: {key: 9ad2..., role: trainer, feeds: [train], ranks: {dp: 3}}

The file is looked at twice a second, and read again where it has changed and stands still: half of it may be a list,
too. One that cannot be read, or is empty, or wrong, changes nothing and is said: what was allowed before stays so.
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
from streampack.core.protocol.rights import NO_RIGHTS, Rights, Side, key_of
from streampack.errors import ConfigError, StreampackError, UserError
from streampack.transport.curve import new_secret, public_of
from streampack.transport.keys import HEX, NAME, Key, load_key
from streampack.transport.secret_files import read_trusted, write_secret

log = logging.getLogger("streampack.broker")

LOOK_S = 0.5
CUTS = 3
SHUT_OUT_S = 60.0
"""A key of which so many connections were cut within this time is not let in for as long."""
BROKER = "broker"
ALLOWED = "allowed.yaml"
_HEAD = "# Who may come to this broker, a line a key: 'streampack keys new' adds one, 'keys revoke' takes one away."


class Entry(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A line of allowed.yaml: a public key, and what it may do. Without limits all of its role; an empty one, which
    could mean nothing as well, is refused.
    """

    key: Annotated[str, Meta(pattern=f"^{HEX.pattern}$")]
    role: Side
    streams: Annotated[tuple[Name, ...], Meta(min_length=1)] = ()
    feeds: Annotated[tuple[Name, ...], Meta(min_length=1)] = ()
    ranks: Annotated[dict[Name, Small], Meta(min_length=1)] = {}


def read_allowed(folder: Path) -> dict[str, Entry]:
    """allowed.yaml by name; empty where there is none yet. Raises UserError."""
    path = folder / ALLOWED
    if not path.exists():
        return {}
    found = _entries(read_trusted(path), path)
    names: dict[str, str] = {}
    for name, entry in found.items():
        _check(f"{path}: {name}", name, entry)
        if other := names.get(entry.key):
            raise ConfigError(f"{path}: {name}: got the key of {other}, expected another: each name has its own")
        names[entry.key] = name
    return found


def _entries(text: str, path: Path) -> dict[str, Entry]:
    tree = parse_tree(text, path)
    if not isinstance(tree, dict) or not all(isinstance(name, str) for name in tree):
        raise ConfigError(f"{path}: got no mapping of names, expected 'name: {{key: ..., role: ...}}', a line a key")
    return {name: convert(entry, Entry, f"{path}: {name}") for name, entry in tree.items()}


def _check(where: str, name: str, entry: Entry) -> None:
    """Raises ConfigError."""
    if not NAME.fullmatch(name) or name == BROKER or parse_tree(name, where) != name:
        raise ConfigError(
            f"{where}: got name {name!r}, expected a letter, and letters, digits, '.', '-' and '_', and not {BROKER!r} "
            f"or a word that means something in YAML"
        )
    foreign = ("feeds", "ranks") if entry.role == "producer" else ("streams",)
    if given := [key for key in foreign if getattr(entry, key)]:
        raise ConfigError(f"{where}: got {given[0]} for a {entry.role}, expected none: it is for the other role")
    if unknown := set(entry.ranks) - {"dp", "cp", "tp", "pp"}:
        raise ConfigError(f"{where}: ranks: got {min(unknown)!r}, expected some of dp, cp, tp, pp")


def rights_of(allowed: Mapping[str, Entry], broker: Key) -> dict[str, Rights]:
    """By public key: what it may do. The broker's own may do everything."""
    found = {
        entry.key: Rights(name, entry.role, entry.streams, entry.feeds, entry.ranks)  # type: ignore[arg-type]
        for name, entry in allowed.items()
    }
    return {**found, broker.public: Rights(broker.name, "any")}


# Making them


def new_key(folder: Path, name: str, role: str, limits: Mapping[str, Any]) -> list[Path]:
    """Make the key of a peer, and the broker's where there is none yet, and allow it; the files that were written.

    Raises UserError where the name is taken or wrong, or ``limits`` (``streams``, ``feeds``, ``ranks``) are.
    """
    tree = {"key": "0" * 64, "role": role, **{key: value for key, value in limits.items() if value}}
    _check("keys", name, convert(tree, Entry, "keys"))
    with _alone_in(folder):
        return _new_key(folder, name, tree)


def _new_key(folder: Path, name: str, tree: dict[str, Any]) -> list[Path]:
    secret = new_secret()
    broker_file, file = folder / f"{BROKER}.key", folder / f"{name}.key"
    allowed = read_allowed(folder)
    if name in allowed or file.exists():
        raise UserError(f"{folder}: got name {name!r}, which has a key, expected another")
    written = [file, folder / ALLOWED]
    if not broker_file.exists():
        own = new_secret()
        write_secret(broker_file, Key(name=BROKER, secret=own, broker=public_of(own)).text())
        written.insert(0, broker_file)
    key = Key(name=name, secret=secret, broker=load_key(broker_file).public)
    write_secret(file, key.text())
    _rewrite(folder, [*_lines(folder), _line(name, tree | {"key": key.public})])
    return written


def revoke(folder: Path, name: str) -> None:
    """Shut a key out: its line goes, its file, if it is here, stays. Raises UserError."""
    must_be_there(folder)
    with _alone_in(folder):
        _revoke(folder, name)


def must_be_there(folder: Path) -> None:
    """Raises UserError for a folder that has no keys: a name that was mistyped is no broker that lets nobody in."""
    if not (folder / ALLOWED).exists():
        raise UserError(f"{folder}: got no {ALLOWED}, expected a folder of 'streampack keys new'")


def _revoke(folder: Path, name: str) -> None:
    before = read_allowed(folder)
    if name not in before:
        raise UserError(
            f"{folder / ALLOWED}: got name {name!r}, expected one of: {', '.join(before) or 'none is there'}"
        )
    lines = [line for line in _lines(folder) if not line.startswith(f"{name}:")]
    left = _entries("\n".join(lines), folder / ALLOWED)
    if left != {other: entry for other, entry in before.items() if other != name}:
        raise UserError(f"{folder / ALLOWED}: {name}: got more than a line of it, expected one: take it out by hand")
    _rewrite(folder, lines)


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Nobody else adds a key meanwhile; the folder is made for its user alone."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written: {error.strerror}: choose another folder") from None
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)


def _lines(folder: Path) -> list[str]:
    path = folder / ALLOWED
    return read_trusted(path).splitlines() if path.exists() else [_HEAD]


def _line(name: str, tree: Mapping[str, Any]) -> str:
    """JSON is YAML."""
    words = [f"{key}: {value if key in ('key', 'role') else json.dumps(value)}" for key, value in tree.items()]
    return f"{name}: {{{', '.join(words)}}}"


def _rewrite(folder: Path, lines: Sequence[str]) -> None:
    part = folder / f".{ALLOWED}.{os.getpid()}"
    part.unlink(missing_ok=True)
    write_secret(part, "".join(f"{line}\n" for line in lines))
    part.replace(folder / ALLOWED)


def table(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Who may come, for a terminal: a ``rich`` table."""
    from rich.table import Table

    found = Table("name", "role", "may", "public key")
    for row in rows:
        axes = [f"{axis}_rank={rank}" for axis, rank in row["ranks"].items()]
        may = [*(f"stream {name}" for name in row["streams"]), *(f"feed {name}" for name in row["feeds"]), *axes]
        found.add_row(row["name"], row["role"], ", ".join(may) or "all", f"{row['key'][:16]}...")
    return found


# Minding the door


class Allowed:
    """The keys of a broker: who may come, now. ``wake`` is called when that has changed.

    ``admits`` and ``rights`` are for the thread that serves the sockets. Raises UserError where the folder has no key
    of a broker.
    """

    def __init__(self, folder: Path, wake: Callable[[], None]) -> None:
        self._folder, self._wake = folder, wake
        path = folder / f"{BROKER}.key"
        if not path.exists():
            raise UserError(
                f"listen.keys: {folder}: got no {path.name}, expected one of 'streampack keys new {folder}'"
            )
        self.key = load_key(path)
        if self.key.public != self.key.broker:
            raise UserError(f"{path}: got the key of a peer, expected the broker's own")
        self._seen = self._moving = self._look()
        self._rights = rights_of(read_allowed(folder), self.key)
        self._changed: deque[bytes] = deque()
        self._cut_at: dict[str, deque[float]] = {}
        """By public key: when its last connections were cut."""
        self.refused = 0
        """Peers that were not let in."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="streampack-keys", daemon=True)
        self._thread.start()

    @property
    def num_keys(self) -> int:
        """That are allowed beside the broker's own."""
        return len(self._rights) - 1

    def admits(self, key: str, address: str) -> bool:
        """Is this key let in? Whoever is not is counted, and said at first."""
        if key in self._rights:
            if not self._is_shut_out(key):
                return True
            self.refused += 1
            return False
        self.refused += 1
        if not self.refused & (self.refused - 1):  # of the 1st, 2nd, 4th, 8th
            log.warning(
                "did not let in a peer at %s: its key %s... is not in %s (%d such so far)",
                address, key[:12], self._folder / ALLOWED, self.refused,
            )  # fmt: skip
        return False

    def note_cut(self, peer: bytes) -> None:
        """A connection of this peer was cut for what it sent."""
        key = key_of(peer).decode("ascii", "replace")
        cuts = self._cut_at.setdefault(key, deque(maxlen=CUTS))
        was_shut_out = self._is_shut_out(key)
        cuts.append(time.monotonic())
        if not was_shut_out and self._is_shut_out(key):
            log.error(
                "key %r is not let in for %.0f s: %d of its connections were cut. Find the process that uses it, or "
                "take the key away with 'streampack keys revoke'", self.rights(peer).name, SHUT_OUT_S, CUTS,
            )  # fmt: skip

    def _is_shut_out(self, key: str) -> bool:
        cuts = self._cut_at.get(key)
        return cuts is not None and len(cuts) == CUTS and cuts[0] > time.monotonic() - SHUT_OUT_S

    def rights(self, peer: bytes) -> Rights:
        """What whoever speaks from there may do now."""
        return self._rights.get(key_of(peer).decode("ascii", "replace"), NO_RIGHTS)

    def changes(self) -> list[bytes]:
        """Keys that may do less than, or other than, when this was last asked."""
        found = []
        while self._changed:
            found.append(self._changed.popleft())
        return found

    def close(self) -> None:
        """End the thread; idempotent."""
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(LOOK_S):
            self.look()

    def look(self) -> None:
        """Read allowed.yaml again if it has changed, and has not since the last look."""
        seen, last = self._look(), self._moving
        self._moving = seen
        if seen == self._seen or seen != last:
            return
        self._seen = seen
        try:
            if not seen or not seen[-1]:
                raise UserError(f"{self._folder / ALLOWED}: is {'empty' if seen else 'gone'}")
            now = rights_of(read_allowed(self._folder), self.key)
        except Exception as error:  # a thread that ended would let in for ever whoever is revoked later
            log.error("%s; what was allowed before stays so", error, exc_info=not isinstance(error, StreampackError))
            return
        before, self._rights = self._rights, now
        self._changed.extend(key.encode() for key, rights in before.items() if now.get(key) != rights)
        log.info("%s has changed: %d keys may come", self._folder / ALLOWED, self.num_keys)
        self._wake()

    def _look(self) -> tuple[int, ...]:
        try:
            found = (self._folder / ALLOWED).stat()
        except OSError:
            return ()
        return found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_size
