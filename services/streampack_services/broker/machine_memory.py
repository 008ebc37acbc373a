"""The memory that this process may use: the machine's memory, or its container's limit if that is less.

A container's limit is the limit of its control group, or of a group above it. The kernel has it in ``memory.max``
(cgroups v2) or ``memory.limit_in_bytes`` (v1).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_TOTAL = re.compile(r"^MemTotal:\s+(\d+) kB$", re.MULTILINE)


class Memory(NamedTuple):
    """An amount of memory; ``of`` names its owner for error messages, such as 'this machine'."""

    num_bytes: int
    of: str

    def __str__(self) -> str:
        return f"{self.of} has {self.num_bytes >> 20}MiB"


def machine_memory(root: Path = Path("/")) -> Memory | None:
    """Return the machine's memory, or the least limit of its control groups if that is less; None on macOS."""
    total = _TOTAL.search(_text(root / "proc/meminfo"))
    limited = [Memory(int(total[1]) << 10, "this machine")] if total else []
    limits = ((file, _text(file).strip()) for file in _limit_files(root))
    limited += [Memory(int(limit), f"this container ({file})") for file, limit in limits if limit.isdigit()]
    return min(limited, default=None)


def _limit_files(root: Path) -> Iterator[Path]:
    """Yield the limit files of this process's control group and of the groups above it (cgroups v1 and v2)."""
    groups = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        group = Path(path.lstrip("/"))
        if not controllers:
            yield from (groups / folder / "memory.max" for folder in (group, *group.parents))
        elif "memory" in controllers.split(","):
            yield from (groups / "memory" / folder / "memory.limit_in_bytes" for folder in (group, *group.parents))


def _text(file: Path) -> str:
    """Return a file's text; empty if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
