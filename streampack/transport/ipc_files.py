"""The files of an ``ipc://`` address: its socket, and the lock beside it.

Binding would silently steal an address from the process that serves it, so that process holds a lock. Users who may
write the socket's file may connect; only its owner may. Users who may write the folder may replace the socket. So a new
folder belongs to the user alone, and nothing is served in a folder of another user.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from streampack.errors import UserError

_SCHEME = "ipc://"


def lock(endpoint: str) -> TextIO:
    """Lock an address, and return the lock file; closing the file unlocks the address.

    Raises UserError if another process holds the lock, the folder cannot be written, or it belongs to another user.
    """
    path = Path(endpoint.removeprefix(_SCHEME))
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = path.parent.stat().st_uid
        if os.geteuid() not in (0, owner) and owner != 0:
            raise UserError(
                f"cannot listen on {endpoint}: got a folder of user {owner}, who could replace the socket, expected a "
                f"folder of this user. Choose another folder"
            )
        file = open(path.parent / f"{path.name}.lock", "w", opener=_open_private)  # noqa: SIM115
    except OSError as error:
        raise UserError(
            f"cannot listen on {endpoint}: {error.strerror}. Choose a folder that this user can write to"
        ) from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise UserError(
            f"cannot listen on {endpoint}: got an address that another process uses, expected a free address. Stop "
            f"that process, or choose another path"
        ) from None
    return file


def _open_private(path: str, flags: int) -> int:
    """Open a file that only its user can access, and reject symbolic links."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


@contextlib.contextmanager
def private_files() -> Iterator[None]:
    """Make files that are created in this context accessible to their user only (umask)."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def can_be_replaced(endpoint: str) -> bool:
    """Return True if other users can replace the socket of this address: they may write its folder."""
    if not endpoint.startswith(_SCHEME):
        return False
    mode = Path(endpoint.removeprefix(_SCHEME)).parent.stat().st_mode
    return bool(mode & stat.S_IWOTH) and not mode & stat.S_ISVTX
