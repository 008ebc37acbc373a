"""An extension of griffe, which reads docstrings: ``Example:`` begins a section of code, as ``Examples:`` does."""

from __future__ import annotations

import re
from typing import Any

import griffe


class ExampleSections(griffe.Extension):
    """Reads ``Example:`` as ``Examples:``; griffe would take it for a note, and its code for prose."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of an object before anyone parses it."""
        if obj.docstring:
            obj.docstring.value = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)
