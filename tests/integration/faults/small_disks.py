"""Disks that are full soon."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache


@cache
def mounts() -> list[str]:
    """The command before one that may mount, as root of its own or of this machine; none where neither can."""
    for how in (["unshare", "-rm"], ["unshare", "-m"]):
        if shutil.which("unshare") is None:
            break
        probe = [*how, "sh", "-c", "mount -t tmpfs none /mnt"]
        if subprocess.run(probe, capture_output=True, timeout=30, check=False).returncode == 0:
            return how
    return []
