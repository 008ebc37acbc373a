"""What adapters ask before they attach: the framework's version, and which ranks read the same packs."""

from __future__ import annotations

import logging
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from torch import distributed

log = logging.getLogger("streampack.client")


def warn_untried(package: str, tried: str) -> None:
    """Warn if the installed version of ``package`` is not ``tried``; adapters call this when they are imported."""
    try:
        got = version(package)
    except PackageNotFoundError:
        got = "without a version"
    if got != tried:
        log.warning(
            "%s %s is untried with streampack. Tests ran %s: install that version, or compare the losses of some steps",
            package, got, tried,
        )  # fmt: skip


def copies_of(dp: int, dp_rank: int) -> tuple[int, int]:
    """Return how many ranks share this data-parallel rank, and this rank's number among them; may communicate."""
    if not distributed.is_initialized() or distributed.get_world_size() == dp:
        return 1, 0
    ranks: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(ranks, dp_rank)
    return ranks.count(dp_rank), ranks[: distributed.get_rank()].count(dp_rank)
