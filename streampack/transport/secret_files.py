"""Files that hold a secret: written for their user alone, and read only where nobody else could have.

A secret that others could read is none, so it is refused in words rather than used. Who owns the file, or root, may
have written it; its group may read it only where root owns it: such is a secret that Kubernetes mounts for a pod with
an ``fsGroup`` (root, mode 0440).
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from streampack.errors import UserError

MAX_BYTES = 1 << 20
"""A file of a secret, or of who may come, is small: this is no such file."""


def read_secret(path: str | Path) -> str:
    """The text of a file that nobody but its user can read or change. Raises UserError."""
    return _read(path, "a secret", stat.S_IRWXO | stat.S_IWGRP | stat.S_IRGRP)


def read_trusted(path: str | Path) -> str:
    """The text of a file that others may read, but not change. Raises UserError."""
    return _read(path, "a file that decides who may come", stat.S_IWOTH | stat.S_IWGRP)


def _read(path: str | Path, what: str, refused: int) -> str:
    try:
        with open(path, "rb", opener=_at_once) as file:
            found = os.fstat(file.fileno())  # of what is read, whatever the path means a moment later
            if wrong := _exposed(found, refused):
                raise UserError(f"{path}: got {what} that {wrong}: chown it, chmod 600, and think of it as known")
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UserError(f"{path}: got {error.strerror}, expected {what}: does the path say where it is?") from None
    try:
        if len(data) <= MAX_BYTES:
            return data.decode()
    except UnicodeDecodeError:
        pass
    raise UserError(f"{path}: got {len(data)} bytes that are no short text, expected {what}")


def _at_once(path: str, flags: int) -> int:
    """A pipe is opened, too, and refused then: nobody may ever write to it."""
    return os.open(path, flags | os.O_NONBLOCK)


def _exposed(found: os.stat_result, refused: int) -> str:
    """Who else has a hold on a file; empty if nobody."""
    if not stat.S_ISREG(found.st_mode):
        return "is no plain file, expected one"
    if found.st_uid not in (os.geteuid(), 0):
        return f"belongs to user {found.st_uid}, expected user {os.geteuid()} or root"
    if found.st_uid == 0:
        refused &= ~stat.S_IRGRP
    if found.st_mode & refused:
        return f"others can reach (mode {stat.S_IMODE(found.st_mode):04o}), expected its user alone (mode 0600)"
    return ""


def write_secret(path: Path, text: str) -> None:
    """A new file for its user alone, in a folder that is made so. Raises UserError if there is one already."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
    except FileExistsError:
        raise UserError(f"{path}: got a file that is there already, expected none: take it away first") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}: choose another path") from None
