"""Print the result of ``streampack report`` for a person: a table, the assumptions, and one sentence."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from streampack_services.amounts import media_text
from streampack_services.forecast.lengths import samples_text
from streampack_services.plan.plan_report import new_console, print_whole, width_of

Tree = dict[str, Any]
NAMES = {
    "padding": "padding to the longest",
    "greedy": "greedy concatenation",
    "first_fit_decreasing": "first-fit decreasing",
}


def show_savings(found: Tree) -> None:
    """Print the result of ``savings.savings``."""
    console = new_console()
    about = f"  {samples_text(found['samples'])}, {found['tokens']:,} tokens, budget {found['budget']:,}"
    console.print(Text.assemble((str(found["what"]), "bold"), about), soft_wrap=True)
    console.print()
    table = _table(found)
    print_whole(_table(found, narrow=console.is_terminal and width_of(table) > console.width))
    console.print()
    for sentence in found["assumptions"]:
        console.print(f"- {sentence}", style="dim")
    if found["sharing"] is not None:
        console.print()
        console.print(found["sharing"]["sentence"])
    if found["media"] is not None:
        console.print()
        console.print(f"Media: {media_text(found['media']['items'], found['media']['patches'])}. {_bound_text(found)}")
    console.print()
    console.print(headline(found), style="bold")


def headline(found: Tree) -> str:
    """Return the savings against each other way of batching, in one sentence."""
    parts = []
    for name, row in found["others"].items():
        hours = f" ({row['saved_gpu_hours']:,.3g} GPU hours)" if "saved_gpu_hours" in row else ""
        saved = f"{row['saved_share']:.1%}{hours}" if row["saved_slots"] >= 0 else "nothing"
        few = f", which has {row['slots']:,} slots" if row["saved_slots"] < 0 else ""
        parts.append(f"{saved} against {NAMES[name]}{few}")
    return f"Saved: {', '.join(parts)}."


def _bound_text(found: Tree) -> str:
    """Return the number of packs by the axis that is fullest, as a sentence."""
    packs = (f"{axis} in {number:,}" for axis, number in found["media"]["bound_by"].items())
    return f"The fullest axis of packs: {', '.join(packs)}."


def _table(found: Tree, *, narrow: bool = False) -> Table:
    """Return the table of slots and savings; ``narrow``: without the columns that follow from the others."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("way of batching", no_wrap=True)
    run = {f"this run: {found['packer']}": found["run"]}
    rows = {NAMES[name]: row for name, row in found["others"].items()} | run
    columns = [
        ("slots", [f"{row['slots']:,}" for row in rows.values()]),
        ("utilization", [f"{row['utilization']:.2%}" for row in rows.values()]),
        ("saved slots", [f"{row['saved_slots']:,}" if "saved_slots" in row else "" for row in rows.values()]),
        ("saved %", [_saved_share(row) for row in rows.values()]),
    ]
    if found["gpus"] is not None:
        on_all = f"saved h on {found['gpus']} GPU{'s' * (found['gpus'] != 1)}"
        hours = {"gpu_hours": "GPU hours", "saved_gpu_hours": "saved", "saved_hours": on_all}
        for key, name in hours.items():
            columns.append((name, [f"{row[key]:,.3g}" if key in row else "" for row in rows.values()]))
    if narrow:
        del columns[6:], columns[2]
    for name, _ in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for at, (name, row) in enumerate(rows.items()):
        cells = (cells[at] for _, cells in columns)
        table.add_row(name, *cells, style="bold" if row is found["run"] else None)
    return table


def _saved_share(row: Tree) -> str:
    """Return the saved share of a row as text: ``80.02%``, ``none``, or nothing for the run itself."""
    if "saved_share" not in row:
        return ""
    return f"{row['saved_share']:.2%}" if row["saved_slots"] >= 0 else "none"
