"""What ``streampack plan`` shows a person: the tree of ``advisor.advise``, laid out."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from streampack_services.picture import is_taken, setting_name

Tree = dict[str, Any]


def show_plan(found: Tree) -> None:
    """Print it."""
    console = new_console()
    console.print(Text.assemble((str(found["what"]), "bold"), f"  {lengths_text(found['lengths'])}"), soft_wrap=True)
    for stream in found["streams"]:
        console.print(_read_text(stream, alone=len(found["streams"]) == 1))
    for note in found["notes"]:
        console.print(note)
    console.print()
    print_whole(_table(found))
    refused = [row for row in found["settings"] if row["refused"]]
    for row in refused:
        console.print(f"not shown: {setting_name(row)}: {row['refused']}")
    console.print()
    console.print(
        "useful: the share of the ranks' time, by the rules' cost of a sample, in which real tokens are computed; the "
        "rest is padding and waiting. filled: real tokens of all slots. cost: the dearest rank of a micro-batch by the "
        "mean; attention: of s*s alone. * taken.",
        style="dim",
    )
    console.print()
    for sentence in found["why"]:
        console.print(f"- {sentence}")
    console.print()
    console.print("broker.yaml:", style="bold")
    console.print(found["broker_yaml"], soft_wrap=True)


def new_console() -> Console:
    """One that prints names as they are."""
    return Console(highlight=False, markup=False, emoji=False)


def print_whole(table: Table) -> None:
    """Print a table as wide as it is: a narrow terminal wraps its rows, nothing is cut."""
    console = new_console()
    console.width = Console(width=1000).measure(table).maximum
    console.print(table)


def lengths_text(lengths: Tree) -> str:
    return (
        f"{lengths['samples']:,} samples, {lengths['tokens']:,} tokens: mean {lengths['mean']:.0f}, median "
        f"{lengths['p50']:,}, 99 of 100 to {lengths['p99']:,}, longest {lengths['max']:,}"
    )


def _read_text(stream: Tree, *, alone: bool) -> str:
    name = "" if alone else f"{stream['stream']}: "
    if stream["share"] is None:
        return f"{name}{stream['samples']:,} samples were read; how many there are is not known"
    if stream["share"] == 1:
        return f"{name}all of a pass was read"
    counts = f"{stream['samples']:,} of about {stream['pass_samples']:,.0f} samples"
    return f"{name}{stream['share']:.2%} of a pass was read: {counts}"


def _table(found: Tree) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("setting", no_wrap=True)
    names = ("useful", "filled", "align", "tail", "empty", "cut", "cost", "attention", "steps")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    before = None
    for row in found["settings"]:
        if row["axis"] == "base" or row["refused"]:
            continue
        if before not in (None, row["axis"]):
            table.add_row()
        before = row["axis"]
        taken = is_taken(row, found["take"])
        waste = (f"{row['waste'][cause]:.2%}" for cause in ("alignment", "pack_tail", "empty_pack"))
        table.add_row(
            setting_name(row) + (" *" if taken else ""), f"{row['useful']:.2%}", f"{row['utilisation']:.2%}", *waste,
            f"{row['lost_share']:.2%}", f"{row['cost_max_over_mean']:.3f}", f"{row['attention_max_over_mean']:.3f}",
            steps_text(row), style="bold" if taken else None,
        )  # fmt: skip
    return table


def steps_text(row: Tree) -> str:
    """``385``, ``385 (381-389)``."""
    if row["steps"] is None:
        return "?"
    exact = row["steps_low"] == row["steps_high"]
    return f"{row['steps']:,}" if exact else f"{row['steps']:,} ({row['steps_low']:,}-{row['steps_high']:,})"
