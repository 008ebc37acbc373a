"""File descriptors: connections take most of them, and never the last ones.

``hold_back`` keeps some beyond the process's limit of open files. If no other is left, ``open_file`` lifts the limit
for a moment. So a file that the process needs is opened although connections have taken all the rest.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

RESERVED = 64
"""Most descriptors that are held back."""
_lock = threading.Lock()


def hold_back() -> int:
    """Raise the limit of open files to the system's maximum, less a reserve; return ``num_free``.

    Most systems start with 1,024, and every connection needs one.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = most if most == resource.RLIM_INFINITY else most - min(RESERVED, most // 4)
    with contextlib.suppress(ValueError, OSError):  # some systems accept no number for "unlimited"
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))
    return num_free()


def num_free() -> int:
    """Return the number of descriptors that this process may still open, without the reserve."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (1 << 20 if limit == resource.RLIM_INFINITY else limit) - len(os.listdir("/proc/self/fd"))


def open_file(path: Path, flags: int, mode: int = 0o777) -> int:
    """Open a file as ``os.open`` does, with a descriptor of the reserve if there is no other."""
    try:
        return os.open(path, flags, mode)
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
    with reserve():
        return os.open(path, flags, mode)


@contextlib.contextmanager
def reserve() -> Iterator[None]:
    """Let the block open files with descriptors of the reserve."""
    with _lock:
        limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))
