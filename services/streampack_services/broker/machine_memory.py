"""The memory that this process may use: that of the machine, or of its container where that is less.

A container's limit is that of its control group (cgroups v2: ``memory.max``; v1: ``memory.limit_in_bytes``) or of a
group above it. Knows files of the kernel, not what the memory is for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_TOTAL = re.compile(r"^MemTotal:\s+(\d+) kB$", re.MULTILINE)


class Memory(NamedTuple):
    """``of``: what has ``num_bytes``, as a sentence's subject."""

    num_bytes: int
    of: str

    def __str__(self) -> str:
        return f"{self.of} has {self.num_bytes >> 20}MiB"


def machine_memory(root: Path = Path("/")) -> Memory | None:
    """The least of the machine's memory and its control groups' limits; None where the kernel does not say (macOS)."""
    total = _TOTAL.search(_text(root / "proc/meminfo"))
    found = [Memory(int(total[1]) << 10, "this machine")] if total else []
    limits = ((file, _text(file).strip()) for file in _limit_files(root))
    found += [Memory(int(limit), f"this container ({file})") for file, limit in limits if limit.isdigit()]
    return min(found, default=None)


def _limit_files(root: Path) -> Iterator[Path]:
    """Where the limits of this process's control group and of those above it are, in both versions of cgroups."""
    groups = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        group = Path(path.lstrip("/"))
        if not controllers:
            yield from (groups / each / "memory.max" for each in (group, *group.parents))
        elif "memory" in controllers.split(","):
            yield from (groups / "memory" / each / "memory.limit_in_bytes" for each in (group, *group.parents))


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
