"""The folder of keys that may connect to a broker: reading it and changing it.

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
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct

from streampack.config.typed_yaml import convert, parse_tree
from streampack.core.model.bounded import Name, Small
from streampack.core.protocol.rights import Rights, Role
from streampack.errors import ConfigError, UserError
from streampack.transport.curve import new_secret, public_of
from streampack.transport.keys import HEX, NAME, Key, load_key
from streampack.transport.secret_files import read_trusted, write_secret

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
    entries = _parse_entries(read_trusted(path), path)
    names: dict[str, str] = {}
    for name, entry in entries.items():
        _check_entry(f"{path}: {name}", name, entry)
        if other := names.get(entry.key):
            raise ConfigError(f"{path}: {name} has the same key as {other}. Remove one of the two lines")
        names[entry.key] = name
    return entries


def _parse_entries(text: str, path: Path) -> dict[str, KeyEntry]:
    """Return the entries in the text of an allowed.yaml; raise ConfigError naming ``path`` if they are invalid."""
    content = parse_tree(text, path)
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise ConfigError(
            f"{path}: got no mapping of names, expected one line 'name: {{key: ..., role: ...}}' for each key"
        )
    return {name: convert(entry, KeyEntry, f"{path}: {name}") for name, entry in content.items()}


def _check_entry(where: str, name: str, entry: KeyEntry) -> None:
    """Raise ConfigError if the name is not allowed, or a limit does not belong to the role."""
    if not NAME.fullmatch(name) or name == BROKER or parse_tree(name, where) != name:
        raise ConfigError(
            f"{where}: got name {name!r}. Choose a name that begins with a letter and has only letters, digits, '.', "
            f"'-' and '_'. The name {BROKER!r} and words with a meaning in YAML, such as 'yes', are reserved"
        )
    if wrong := [key for key, roles in _LIMITS.items() if entry.role not in roles and getattr(entry, key)]:
        raise ConfigError(
            f"{where}: got {wrong[0]} for a {entry.role}, expected no {wrong[0]}, which only a "
            f"{' or '.join(_LIMITS[wrong[0]])} can have. "
            f"Remove {wrong[0]}"
        )
    if unknown := set(entry.ranks) - {"dp", "cp", "tp", "pp"}:
        raise ConfigError(f"{where}: ranks: got {min(unknown)!r}, expected some of dp, cp, tp, pp")


def rights_of(allowed: Mapping[str, KeyEntry], broker: Key) -> dict[str, Rights]:
    """Return the rights of each public key. The broker's own key has all rights."""
    rights = {
        entry.key: Rights(name, entry.role, entry.streams, entry.feeds, entry.ranks, entry.hosts)  # type: ignore[arg-type]
        for name, entry in allowed.items()
    }
    return {**rights, broker.public: Rights(broker.name, "any")}


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
    entry = {"key": "0" * 64, "role": role, **{key: value for key, value in limits.items() if value}}
    _check_entry("keys", name, convert(entry, KeyEntry, "keys"))
    secret = new_secret()
    broker_file, file = folder / f"{BROKER}.key", folder / f"{name}.key"
    with _locked(folder):
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
        _write_allowed(folder, [*_allowed_lines(folder), _allowed_line(name, entry | {"key": key.public})])
    return written


def revoke(folder: Path, name: str) -> None:
    """Remove the key of ``name`` from allowed.yaml; its key file stays. Raise UserError for an unknown name."""
    check_has_keys(folder)
    with _locked(folder):
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


def check_has_keys(folder: Path) -> None:
    """Raise UserError if the folder has no allowed.yaml, for example because its name was mistyped."""
    if not (folder / ALLOWED).exists():
        raise UserError(f"{folder} has no {ALLOWED}. Pass a folder that 'streampack keys new' created")


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Create the folder if it is missing (mode 0700), and hold a lock on it until the end of the block."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror}. Choose another folder") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _allowed_lines(folder: Path) -> list[str]:
    """Return the lines of allowed.yaml, or a heading if the file is missing."""
    path = folder / ALLOWED
    return read_trusted(path).splitlines() if path.exists() else [_HEAD]


def _allowed_line(name: str, entry: Mapping[str, Any]) -> str:
    """Return an entry as one line of YAML."""
    words = [f"{key}: {value if key in ('key', 'role') else json.dumps(value)}" for key, value in entry.items()]
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

    table = Table("name", "role", "may", "public key")
    for row in rows:
        axes = [f"{axis}_rank={rank}" for axis, rank in row["ranks"].items()]
        may = [*(f"stream {name}" for name in row["streams"]), *(f"feed {name}" for name in row["feeds"]), *axes,
               *(f"host {name}" for name in row["hosts"])]  # fmt: skip
        table.add_row(row["name"], row["role"], ", ".join(may) or "all", f"{row['key'][:16]}...")
    return table
