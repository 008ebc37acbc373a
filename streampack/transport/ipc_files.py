"""The files of an ``ipc://`` address: its socket, and the lock beside it.

Binding would silently steal an address from its server, so whoever serves it holds the lock. Who may connect is who may
write the socket's file: its user alone. Who may put another in its place is who may write its folder: one that is made
here is its user's, and in one that belongs to somebody else nothing is served.
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
    """Take the lock of an address, until it is closed. Raises UserError where that cannot be, or is not safe."""
    path = Path(endpoint.removeprefix(_SCHEME))
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = path.parent.stat().st_uid
        if os.geteuid() not in (0, owner) and owner != 0:
            raise UserError(
                f"cannot listen on {endpoint}: got a folder of user {owner}, who could answer in our place, expected "
                f"one of this user: choose another"
            )
        file = open(path.parent / f"{path.name}.lock", "w", opener=_own)  # noqa: SIM115
    except OSError as error:
        raise UserError(f"cannot listen on {endpoint}: {error.strerror}: choose a folder that can be written") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise UserError(
            f"cannot listen on {endpoint}: got an address that another process serves, expected a free one: "
            f"stop that process or choose another path"
        ) from None
    return file


def _own(path: str, flags: int) -> int:
    """A file that others can neither lock nor have put a link in the place of: it is emptied."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


@contextlib.contextmanager
def for_its_user_alone() -> Iterator[None]:
    """Files that are made meanwhile are."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def anybody_may_replace(endpoint: str) -> bool:
    """May other users put a socket of theirs in the place of the one that is served?"""
    if not endpoint.startswith(_SCHEME):
        return False
    mode = Path(endpoint.removeprefix(_SCHEME)).parent.stat().st_mode
    return bool(mode & stat.S_IWOTH) and not mode & stat.S_ISVTX
