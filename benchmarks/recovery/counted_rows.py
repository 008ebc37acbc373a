"""A tokenizer that counts the rows it is given, for ``on_ray.py``: each call adds a byte to a file."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

COUNTED = Path(tempfile.gettempdir()) / f"streampack-counted-rows-{os.getuid()}"


def tokenized(text: str) -> list[int]:
    """The bytes of a text."""
    with COUNTED.open("ab") as file:
        file.write(b".")
    return list(text.encode())


def count() -> int:
    """Return the number of rows counted so far."""
    return COUNTED.stat().st_size
