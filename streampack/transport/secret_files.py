"""Files that hold a secret: written for their user alone, and rejected if other users could read them.

The owner of the file must be the user or root. Its group may read it only if root owns it: Kubernetes mounts a secret
so for a pod with an ``fsGroup`` (root, mode 0440).
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from streampack.errors import UserError

MAX_BYTES = 1 << 20
"""The most bytes of a secret or of a list of allowed keys; larger files are rejected."""


def read_secret(path: str | Path) -> str:
    """Return the text of a file. Raises UserError if other users than its owner could read or change it."""
    return _read(path, "a secret", stat.S_IRWXO | stat.S_IWGRP | stat.S_IRGRP)


def read_trusted(path: str | Path) -> str:
    """Return the text of a file. Raises UserError if other users than its owner could change it."""
    return _read(path, "a list of allowed keys", stat.S_IWOTH | stat.S_IWGRP)


def _read(path: str | Path, noun: str, refused: int) -> str:
    """Return the text of a file. Raises UserError if its mode has a bit of ``refused``; ``noun`` names the file."""
    try:
        with open(os.path.expanduser(path), "rb", opener=_open_nonblocking) as file:
            status = os.fstat(file.fileno())  # of the open file: the path may lead elsewhere by now
            if wrong := _exposed(status, refused):
                raise UserError(
                    f"{path}: got {noun} that {wrong}. Run chown and chmod 600 on the file, and replace any secret "
                    f"that other users may have read"
                )
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UserError(f"{path}: cannot read {noun}: {error.strerror}. Check the path") from None
    try:
        if len(data) <= MAX_BYTES:
            return data.decode()
    except UnicodeDecodeError:
        pass
    raise UserError(f"{path}: got {len(data)} bytes, expected {noun} as UTF-8 text of at most {MAX_BYTES} bytes")


def _open_nonblocking(path: str, flags: int) -> int:
    """Open a file without waiting: opening a pipe would wait for a writer. The pipe is rejected later."""
    return os.open(path, flags | os.O_NONBLOCK)


def _exposed(status: os.stat_result, refused: int) -> str:
    """Return the reason that a file is not safe from other users; empty if it is."""
    if not stat.S_ISREG(status.st_mode):
        return "is not a regular file, expected a regular file"
    if status.st_uid not in (os.geteuid(), 0):
        return f"belongs to user {status.st_uid}, expected user {os.geteuid()} or root"
    if status.st_uid == 0:
        refused &= ~stat.S_IRGRP
    if status.st_mode & refused:
        return f"other users can access (mode {stat.S_IMODE(status.st_mode):04o}), expected mode 0600"
    return ""


def write_secret(path: Path, text: str) -> None:
    """Create a file that only its user can access, and its folder if needed. Raises UserError if the file exists."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
    except FileExistsError:
        raise UserError(f"{path}: got an existing file, expected no file. Move or remove the file first") from None
    except OSError as error:
        raise UserError(f"{path}: cannot write the file: {error.strerror}. Choose another path") from None
