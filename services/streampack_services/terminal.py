"""Consoles and tables in which commands print their reports."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table


def new_console() -> Console:
    """Return a console that prints names unchanged, without markup or highlighting."""
    return Console(highlight=False, markup=False, emoji=False)


def add_numbers(table: Table, names: Iterable[str]) -> None:
    """Add a column of numbers to a table for each of ``names``."""
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
