"""The known keys of rows as a table, from ``streampack.sources.row_keys``."""

from __future__ import annotations

from streampack.sources.row_keys import KNOWN, MEANINGS


def table() -> str:
    """Return a row for each meaning, with the keys that have it."""
    rows = list[str]()
    for kind, meaning in MEANINGS.items():
        keys = ", ".join(f"`{key}`" for key, own in KNOWN.items() if own == kind)
        rows.append(f"| {keys} | {meaning}. |")
    return "\n".join(["| keys | meaning |", "|---|---|", *rows])
