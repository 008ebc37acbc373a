"""Format counts, bytes and times as short text for people, with about three digits."""

from __future__ import annotations

import math


def counted(number: int, noun: str) -> str:
    """Return ``1 rank``, ``2,000 ranks`` or ``2 batches``."""
    plural = "es" if noun.endswith(("ch", "s", "x")) else "s"
    return f"{number:,} {noun}{plural * (number != 1)}"


def media_text(items: int, patches: int) -> str:
    """Return media as text: ``2 media items with 512 patches``."""
    return f"{counted(items, 'media item')} with {counted(patches, 'patch')}"


def count_text(value: float) -> str:
    """Return a number as ``9600`` or ``12.3M``."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= size:
            return f"{value / (1e3 if unit == 'k' else size):.1f}{unit}"
    return f"{value:.0f}"


def size_text(value: float) -> str:
    """Return a size in bytes as ``12.3 MiB``."""
    for size, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value:.0f} B"


def seconds_text(seconds: float) -> str:
    """Return a short time in seconds with two digits, as ``1.0 s``, ``0.10 s`` or ``12 s``."""
    digits = 1 - math.floor(math.log10(seconds)) if seconds > 0 else 0
    return f"{seconds:.{min(max(digits, 0), 4)}f} s"


def share_text(share: float) -> str:
    """Return a share in percent, with three digits, as ``5.25%`` or ``25.0%``."""
    return f"{share:.2%}" if share < 0.1 else f"{share:.1%}"


def duration_text(seconds: float) -> str:
    """Return a time in seconds as ``44s``, ``4m09s``, ``3h20m`` or ``2d04h``."""
    if seconds < 60:
        return f"{int(seconds)}s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, more = divmod(hours, 24)
    if days:
        return f"{days}d{more:02d}h"
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s"


def state_text(state: str, stalled_s: float | None) -> str:
    """Return the state of a broker or feed as ``serving`` or ``waiting for 1m15s``.

    ``stalled_s``: seconds since the last step; None for a broker or feed that is not stalled.
    """
    return state if stalled_s is None else f"{state} for {duration_text(stalled_s)}"
