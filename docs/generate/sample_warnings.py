"""The warnings about samples as a table, from ``streampack.core.stats.sample_warnings``."""

from __future__ import annotations

from streampack.core.stats.sample_warnings import WARNINGS


def table() -> str:
    """Return a row for each warning: its word, and what it means."""
    rows = [f"| `{word}` | {sentence[0].upper()}{sentence[1:]}. |" for word, sentence in WARNINGS.items()]
    return "\n".join(["| warning | meaning |", "|---|---|", *rows])
