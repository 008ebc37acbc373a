"""The tree of errors as a table, from ``streampack.errors``."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from streampack.errors import StreampackError


def table() -> str:
    """Return a row for each class, base classes first, indented by depth."""
    rows = ["| error | exit code | meaning |", "|---|---|---|"]
    for kind, depth in _tree(StreampackError):
        link = f"[`{kind.__name__}`][streampack.errors.{kind.__name__}]"
        rows.append(f"| {'&emsp;' * depth}{link} | {kind.exit_code} | {_summary(kind)} |")
    return "\n".join(rows)


def _tree(kind: type[StreampackError], depth: int = 0) -> Iterator[tuple[type[StreampackError], int]]:
    yield kind, depth
    for below in kind.__subclasses__():
        if below.__module__ == StreampackError.__module__ and below.__bases__[0] is kind:
            yield from _tree(below, depth + 1)


def _summary(kind: type) -> str:
    return (inspect.getdoc(kind) or "").splitlines()[0]
