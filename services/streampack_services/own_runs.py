"""The brokers that run on this host for this user, so that a command without an address finds them.

Each broker keeps a file with its run and its addresses in a folder of the user, and holds a lock on the file. A file
without a lock belongs to a broker that has ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from streampack.errors import UserError


class OwnRun(NamedTuple):
    """A broker of this user on this host: the run's name, its HTTP address and its state_dir (empty: none)."""

    run: str
    http: str
    state_dir: str


def _folder(make: bool = False) -> Path:
    """Return the folder with the files of this user's brokers. Raises OSError if it is missing or unsafe.

    A folder is unsafe if another user owns it or may write to it. With ``make``, a missing folder is made.
    """
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    path = Path(base) / f"streampack-{os.getuid()}-runs"
    if make:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(f"{path} is not a folder of this user alone")
    return path


@contextlib.contextmanager
def noted(run: str, http: str, state_dir: str | None) -> Iterator[None]:
    """Let other processes find this broker until the end of the block; do nothing if there is no folder for it."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            path = _folder(make=True) / f"{socket.gethostname()}-{secrets.token_hex(8)}.json"
            file = stack.enter_context(open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "w"))
            stack.callback(path.unlink, missing_ok=True)
            fcntl.flock(file, fcntl.LOCK_EX)
            own = OwnRun(run, http, str(Path(state_dir).resolve()) if state_dir else "")
            file.write(json.dumps(own._asdict()))
            file.flush()
        yield


def own_runs() -> list[OwnRun]:
    """Return the brokers of this user on this host, by address. Files of brokers that have ended are removed."""
    runs = set()
    with contextlib.suppress(OSError):
        for path in _folder().glob(f"{socket.gethostname()}-*.json"):
            with contextlib.suppress(OSError, ValueError, TypeError):
                runs |= _read(path)
    return sorted(runs, key=lambda run: run.http)


def _read(path: Path) -> set[OwnRun]:
    """Return the run in a file, as a set; empty if its broker has ended."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW)) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return {OwnRun(**json.load(file))}
        path.unlink(missing_ok=True)
    return set()


def claim_port(port: int) -> contextlib.ExitStack | None:
    """Claim a port among runs of this user that start at the same time; close the result to give it back.

    Returns None if another run has claimed it. Programs that do not ask here may use the port.
    """
    with contextlib.ExitStack() as stack:
        try:
            path = _folder(make=True) / f"{port}.lock"
            lock = stack.enter_context(open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return None
        return stack.pop_all()


def listed(but: str = "") -> str:
    """Return the addresses of the user's brokers on this host as text, without the address ``but``."""
    return ", ".join(f"{run.http} (run {run.run})" for run in own_runs() if run.http != but)


def only_address(run: str | None = None, state_dir: str | None = None) -> str | None:
    """Return the HTTP address of the only broker of this user on this host; None if there is none.

    ``run``: only a broker of this run counts, with the same ``state_dir`` if it has one. Raises UserError if there are
    several.
    """
    runs = own_runs()
    if run is not None:
        same = str(Path(state_dir).resolve()) if state_dir else ""
        runs = [other for other in runs if (other.run, other.state_dir) == (run, same)]
    if len(runs) > 1:
        raise UserError(
            f"{len(runs)} brokers of yours run on this host: {listed()}. Pass the address of one of them, or -c with "
            f"its broker.yaml"
        )
    return runs[0].http if runs else None
