"""Print the result of ``streampack plan`` for a person: the lengths, a table of settings, the reasons, broker.yaml."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from streampack_services.amounts import counted, media_text
from streampack_services.plan.advice import forecast_rows, is_taken, setting_name
from streampack_services.terminal import add_numbers, new_console

Tree = dict[str, Any]


def print_lengths(plan: Tree, console: Console) -> None:
    """Print what the lengths of a plan are: ``Workload.about``."""
    console.print(Text.assemble((str(plan["what"]), "bold"), f"  {_lengths_text(plan['lengths'])}"), soft_wrap=True)
    if plan["media"] is not None:
        console.print(_media_text(plan["media"]), soft_wrap=True)
    for stream in plan["streams"]:
        console.print(_read_text(stream, alone=len(plan["streams"]) == 1))
    for note in plan["notes"]:
        console.print(note)


def show_plan(plan: Tree) -> None:
    """Print the result of ``advisor.advise``, with the ``why`` and ``broker_yaml`` of ``advice``."""
    console = new_console()
    print_lengths(plan, console)
    console.print()
    _print_table(plan)
    for row in plan["settings"]:
        if row["refused"]:
            console.print(f"not possible: {setting_name(row)}: {row['refused']}")
    console.print()
    console.print(_legend(plan), style="dim")
    console.print()
    for sentence in plan["why"]:
        console.print(f"- {sentence}")
    console.print()
    console.print("broker.yaml:", style="bold")
    console.print(plan["broker_yaml"], soft_wrap=True)


def new_table(columns: list[str], gap: int = 2, **first: Any) -> Table:
    """Return a table without lines, with ``gap`` spaces between columns: names, then ``columns[1:]`` of numbers.

    ``first``: options of the column of names.
    """
    table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="bold")
    table.add_column(columns[0], **first)
    add_numbers(table, columns[1:])
    return table


def print_whole(table: Table) -> None:
    """Print a table in its full width: a narrow terminal wraps its rows, nothing is cut."""
    console = new_console()
    console.width = width_of(table)
    console.print(table)


def width_of(table: Table) -> int:
    """Return the width of a table, in characters."""
    return Console(width=1000).measure(table).maximum


def _lengths_text(lengths: Tree) -> str:
    """Return ``6,000 samples, 3,966,192 tokens: mean 661, median 394, p99 4,066, longest 9,000``."""
    counts = f"{counted(lengths['samples'], 'sample')}, {lengths['tokens']:,} tokens"
    return f"{counts}: {_spread_text(lengths)}, longest {lengths['max']:,}"


def _media_text(media: Tree) -> str:
    """Return ``media: 90 media items with 800 patches in 60 samples; patches of these: mean 13, median 9, ...``."""
    patches = media["patches"]
    counts = f"{media_text(media['items'], patches['total'])} in {counted(media['samples'], 'sample')}"
    return f"media: {counts}; patches of these: {_spread_text(patches)}, most {patches['max']:,}"


def _spread_text(sizes: Tree) -> str:
    """Return ``mean 661, median 394, p99 4,066``."""
    return f"mean {sizes['mean']:.0f}, median {sizes['p50']:,}, p99 {sizes['p99']:,}"


def _read_text(stream: Tree, *, alone: bool) -> str:
    """Describe how much of a pass was read from a stream; ``alone``: without the stream's name."""
    name = "" if alone else f"{stream['stream']}: "
    if stream["share"] is None:
        were = "was" if stream["samples"] == 1 else "were"
        return f"{name}{counted(stream['samples'], 'sample')} {were} read; the size of a pass is not known"
    if stream["share"] == 1:
        return f"{name}all of a pass was read"
    counts = f"{stream['samples']:,} of about {stream['pass_samples']:,.0f} samples"
    return f"{name}{stream['share']:.2%} of a pass was read: {counts}"


WASTE = {
    "align": ("alignment", "samples are padded to multiples"),
    "tail": ("pack_tail", "space after a pack's last sample"),
    "shape": ("shape", "packs are padded to a multiple or a bucket"),
    "pipe": ("pipeline", "packs are padded to the longest pack of the step"),
    "empty": ("empty_pack", "packs without samples"),
}
"""By column: the cause of padding in a forecast, and its meaning."""
NAME = 20
"""Least width of a setting's name, in characters."""
LEAST = ("attention", "by tokens", "align", "utilization", "cut", "micro", "empty", "displaced")
"""Columns to leave out on a narrow terminal, the first one first."""


def _columns(rows: list[Tree]) -> dict[str, list[str]]:
    """Return the cells of each column as text; leave out shares that are 0 in every row."""
    shares = {name: [row["waste"][cause] for row in rows] for name, (cause, _) in WASTE.items()}
    shares["cut"] = [row["lost_share"] for row in rows]
    shares = {name: values for name, values in shares.items() if max(values) > 0.5e-4}
    shares = {"useful": [row["useful"] for row in rows], "utilization": [row["filled"] for row in rows], **shares}
    columns = {name: [f"{value:.2%}" for value in values] for name, values in shares.items()}
    axes = rows[0]["bound_by"]
    ratios = {"imbalance": "cost", "attention": "attention"} | ({"patches": "patches"} if axes else {})
    for name, key in ratios.items():
        columns[name] = [f"{row[f'{key}_max_over_mean']:.3f}" for row in rows]
    for axis in axes if len(axes) > 1 else ():
        if any(row["bound_by"][axis] for row in rows):
            columns[f"by {axis}"] = [f"{row['bound_by'][axis]:.0%}" for row in rows]
    if any(row["displacement_p99"] for row in rows):  # batches have none
        columns["displaced"] = [f"{row['displacement_p99']:,}" for row in rows]
    if rows[0]["step_samples"]:
        columns["micro"] = [_range(row["micro_batches_low"], row["micro_batches_high"]) for row in rows]
    return columns


def _print_table(plan: Tree) -> None:
    """Print the table of settings in its full width.

    On a narrower terminal, leave out the interval of steps, which the reasons repeat. Then leave out columns of LEAST
    until there is room for the settings' names.
    """
    rows = forecast_rows(plan)
    columns, console = _columns(rows), new_console()
    wide = _table(plan, columns | {"steps": [steps_text(row) for row in rows]}, 2)
    if not console.is_terminal or width_of(wide) <= console.width:
        print_whole(wide)
        return
    columns["steps"] = ["?" if row["steps"] is None else f"{row['steps']:,}" for row in rows]
    missing, left = list[str](), [name for name in LEAST if name in columns]
    while left and NAME + sum(1 + max(map(len, [name, *columns[name]])) for name in columns) > console.width:
        missing.append(left.pop(0))
        del columns[missing[-1]]
    console.print(_table(plan, columns, 1))
    if missing:
        console.print(f"a wider terminal shows {', '.join(missing)}, too", style="dim")


def _table(plan: Tree, columns: dict[str, list[str]], gap: int) -> Table:
    """Return the table of settings, with ``gap`` spaces between columns and an empty row between axes."""
    table, rows = new_table(["setting", *columns], gap, overflow="fold"), forecast_rows(plan)
    for at, row in enumerate(rows):
        if at and row["axis"] != rows[at - 1]["axis"]:
            table.add_row()
        taken = is_taken(row, plan["take"])
        cells = (cells[at] for cells in columns.values())
        table.add_row(setting_name(row) + " *" * taken, *cells, style="bold" if taken else None)
    return table


def _legend(plan: Tree) -> str:
    """Explain the columns of the table, one line each."""
    columns = _columns(forecast_rows(plan))
    causes = "; ".join(f"{name} ({meaning})" for name, (_, meaning) in WASTE.items() if name in columns)
    work = "real tokens" if plan["media"] is None else "real tokens and media"
    lines = {
        "useful": f"share of the ranks' time that is spent on {work}, computed with the rules' sample costs; the rest "
        f"is padding and waiting",
        "utilization": "real tokens / capacity" + (f"; the rest is padding: {causes}" if causes else ""),
        "cut": "tokens over the budget, as a share of all tokens",
        "imbalance": "max / mean cost of the ranks in a micro-batch; attention: the same for costs of length squared",
        "patches": "max / mean patches of the ranks in a micro-batch",
        "by AXIS": "packs in which the axis is fullest, compared with its limit",
        "displaced": "99% of the samples leave at most this many steps before or after their turn",
        "micro": "micro-batches per rank and step",
    }
    shown = {"by AXIS" if name.startswith("by ") else name for name in columns}
    return "\n".join([*(f"{name}: {line}" for name, line in lines.items() if name in shown), "*: recommended"])


def steps_text(row: Tree) -> str:
    """Return the steps of a pass as text, with the 95% interval if they are not exact: ``385 (381-389)``."""
    if row["steps"] is None:
        return "?"
    exact = row["steps_low"] == row["steps_high"]
    return f"{row['steps']:,}" if exact else f"{row['steps']:,} ({row['steps_low']:,}-{row['steps_high']:,})"


def _range(low: int, high: int) -> str:
    """Return ``3`` or ``3-4``."""
    return f"{low:,}" if low == high else f"{low:,}-{high:,}"
