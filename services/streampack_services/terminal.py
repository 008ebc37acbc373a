"""Consoles and tables in which commands print their reports."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.table import Table


def new_console() -> Console:
    """Return a console that prints names unchanged, without markup or highlighting."""
    return Console(highlight=False, markup=False, emoji=False)


@contextmanager
def progress_line(text: str) -> Iterator[Callable[[str], None]]:
    """Show a line on standard error, if it is a terminal; yield a function that sets the line's text."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    with Console(stderr=True, highlight=False, markup=False).status(text) as status:
        yield status.update


def new_table() -> Table:
    """Return a table without lines, whose columns are two spaces apart."""
    return Table(box=None, padding=(0, 2, 0, 0))


def add_numbers(table: Table, names: Iterable[str]) -> None:
    """Add a column of numbers to a table for each of ``names``."""
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
