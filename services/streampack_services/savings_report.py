"""What ``streampack report`` shows a person: the tree of ``savings.savings``, laid out."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from streampack_services.lengths import samples_said
from streampack_services.plan_report import new_console, print_whole

Tree = dict[str, Any]
NAMES = {
    "padding": "padding to the longest",
    "greedy": "greedy concatenation",
    "first_fit_decreasing": "first fit decreasing",
}


def show_savings(found: Tree) -> None:
    """Print it."""
    console = new_console()
    about = f"  {samples_said(found['samples'])}, {found['tokens']:,} tokens, budget {found['budget']:,}"
    console.print(Text.assemble((str(found["what"]), "bold"), about), soft_wrap=True)
    console.print()
    print_whole(_table(found))
    console.print()
    for sentence in found["assumptions"]:
        console.print(f"- {sentence}", style="dim")
    console.print()
    console.print(headline(found), style="bold")


def headline(found: Tree) -> str:
    """The report in a sentence."""
    parts = []
    for name, row in found["others"].items():
        hours = f" ({row['saved_gpu_hours']:,.3g} GPU hours)" if "saved_gpu_hours" in row else ""
        saved = f"{row['saved_share']:.1%}{hours}" if row["saved_slots"] >= 0 else "nothing"
        few = f", which has {row['slots']:,} slots" if row["saved_slots"] < 0 else ""
        parts.append(f"{saved} against {NAMES[name]}{few}")
    return f"Saved: {', '.join(parts)}."


def _table(found: Tree) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("way of batching", no_wrap=True)
    rated = ("GPU hours", "saved", f"hours on {found['gpus']}") if found["gpus"] is not None else ()
    for name in ("slots", "filled", "saved", "of its slots", *rated):
        table.add_column(name, justify="right", no_wrap=True)
    for name, row in found["others"].items():
        cells = [
            f"{row['slots']:,}",
            f"{row['utilisation']:.2%}",
            f"{row['saved_slots']:,}",
            f"{row['saved_share']:.2%}" if row["saved_slots"] >= 0 else "none",
        ]
        hours = ("gpu_hours", "saved_gpu_hours", "saved_hours") if rated else ()
        table.add_row(NAMES[name], *cells, *(f"{row[key]:,.3g}" for key in hours))
    run = found["run"]
    cells = [f"{run['slots']:,}", f"{run['utilisation']:.2%}", "", "", *([f"{run['gpu_hours']:,.3g}"] if rated else ())]
    table.add_row(f"this run: {found['packer']}", *cells, style="bold")
    return table
