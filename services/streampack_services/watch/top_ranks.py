"""The ranks of a feed in a terminal: a table, a map with the worst ranks, or a table of the worst nodes."""

from __future__ import annotations

from typing import Literal

from rich.text import Text

from streampack_services.amounts import counted, duration_text, seconds_text
from streampack_services.watch.top_text import Cell, fitted, table, title
from streampack_services.watch.view_model import FeedView, Rank

Measure = Literal["waits", "cost"]
MOST_ROWS = 16
"""Most ranks of a table; more ranks are a map."""
LEAST = 0.001
"""The cause of a rank's wait is shown if the rank waits for at least this share of its time."""
_SHADES = ("·", "░", "▒", "▓", "█")
_COLOURS = ("green", "green", "yellow", "dark_orange", "red")
_BOUNDS: dict[Measure, tuple[float, ...]] = {"waits": (0.01, 0.05, 0.15, 0.40), "cost": (0.95, 1.02, 1.05, 1.15)}
"""Least value for each shade of a cell but the first."""
_TITLES = {"waits": "data wait, share of the last minute", "cost": "cost of the last step / mean of all ranks"}
_WORST = 8


def rank_lines(feed: FeedView, measure: Measure, width: int, room: int | None) -> list[Text]:
    """Return a title and the ranks, as a table or a map.

    Args:
        feed: The feed.
        measure: The figure that the cells of a map show.
        width: Most characters of a line.
        room: Most lines, at least 2; None for any number.
    """
    ranks, missing = (
        feed.ranks,
        "" if feed.status.all_ranks_attached or not feed.ranks else "; other ranks are not attached yet",
    )
    if feed.status.ranks.left_out:
        return _node_lines(feed, missing, width, room)
    name, nodes = counted(len(ranks), "rank") + missing, feed.status.ranks.nodes
    if len(nodes) == 1 and len(ranks) < feed.status.ranks.attached:  # the user asked for one node
        name = f"{len(ranks)} of {counted(nodes[0].ranks, 'rank')} on {nodes[0].host}"
    if not ranks:
        return [title(name, "", width)]
    if len(ranks) <= MOST_ROWS and (room is None or len(ranks) + 2 <= room):
        return [title(name, "data wait: share of the last minute", width), *_table(ranks, width)]
    head = title(name, _TITLES[measure], width)
    left = None if room is None else room - 1
    worst = _worst(feed, measure, width)[: _WORST if left is None else max(min(_WORST, left // 2), 1)]
    rows = None if left is None else left - len(worst) - 1
    cells = _map(ranks, measure, width, rows) if rows is None or rows > 0 else []
    return [head, *cells, *worst][:room]


def _node_lines(feed: FeedView, missing: str, width: int, room: int | None) -> list[Text]:
    """Return a title and a table of the worst nodes; ``room``: most lines, at least 2; None for any number."""
    ranks = feed.status.ranks
    shown = ranks.nodes[: MOST_ROWS if room is None else max(min(MOST_ROWS, room - 3), 0)]
    rows: list[list[Cell]] = [
        [
            node.host, (f"{node.attached} of {node.ranks}", "" if node.attached == node.ranks else "bold red"),
            _cell(node.data_wait, "waits"),
            (f"stream {node.stream}" if node.cause == "stream" and node.stream else node.cause)
            if (node.data_wait or 0) >= LEAST else "",
            "-" if node.done_upto is None else f"{node.done_upto:,}",
            "-" if node.silent_s is None else duration_text(node.silent_s),
            "-" if node.step_s is None else f"{node.step_s:.2f} s", "-" if node.cost is None else f"{node.cost:.3f}",
        ]
        for node in shown
    ]  # fmt: skip
    head = title(
        f"{counted(ranks.attached, 'rank')} on {counted(ranks.num_nodes, 'node')}{missing}", "worst first", width
    )
    header = ("node", "ranks", "data wait", "cause", "step", "silent", "step time", "cost")
    lines = [head, *(table(header, rows, width, left=(0, 3)) if rows else [])]
    more = f"{counted(ranks.num_nodes - len(shown), 'more node')}; --node HOST shows the ranks of one"
    return [*lines, fitted(Text(more, style="dim"), width)][:room]


def shade(value: float | None, measure: Measure) -> tuple[str, str]:
    """Return the character and the style of a cell; ``?`` if the value is not known."""
    if value is None:
        return "?", "dim"
    n = sum(value >= bound for bound in _BOUNDS[measure])
    return _SHADES[n], _COLOURS[n]


def _cell(value: float | None, measure: Measure) -> tuple[str, str]:
    """Return a figure as text in its style; ``-`` if it is not known."""
    text = "-" if value is None else f"{value:.1%}" if measure == "waits" else f"{value:.3f}"
    return text, shade(value, measure)[1]


def _value(rank: Rank, measure: Measure) -> float | None:
    """Return the figure of a rank that the cells of the map show."""
    return rank.waits if measure == "waits" else rank.cost


def _table(ranks: tuple[Rank, ...], width: int) -> list[Text]:
    """Return the lines of a table with a row for each rank."""
    header = ("rank", "host:pid", "step", "ahead", "data wait", "cause", "a step takes", "cost", "next() p99")
    rows: list[list[Cell]] = [
        [
            rank.name, rank.where, f"{rank.step:,}", str(rank.ahead),
            _cell(rank.waits, "waits"), _cause(rank), "-" if rank.work_s is None else seconds_text(rank.work_s),
            _cell(rank.cost, "cost"),
            "-" if rank.p99_ms is None else f"{rank.p99_ms:.1f} ms",
        ]
        for rank in ranks
    ]  # fmt: skip
    return table(header, rows, width, left=(0, 1, 5))


def _cause(rank: Rank) -> Cell:
    """Return the cause of a rank's wait, or that the others wait for the rank."""
    if rank.is_slow:
        return f"slow: {seconds_text(rank.work_s or 0.0)} a step", "bold red"
    return rank.cause if (rank.waits or 0) >= LEAST else ""


def _map(ranks: tuple[Rank, ...], measure: Measure, width: int, room: int | None) -> list[Text]:
    """Return lines of cells, each line named by its first rank, and a legend.

    Without room for a cell per rank, a cell shows the worst of several consecutive ranks.
    """
    label = max(len(rank.name) for rank in ranks) + 2
    for group, cell in ((1, 2), *((2**n, 1) for n in range(20))):
        cells = -(-len(ranks) // group)
        a_line = max(2 ** ((width - label) // cell).bit_length() // 2, 1)
        lines = -(-cells // a_line)
        if (room is None or lines <= room) and (cell == 1 or lines <= MOST_ROWS):
            break
    rows = []
    for first in range(0, cells, a_line):
        line = Text(ranks[first * group].name.ljust(label), style="dim")
        for n in range(first, min(first + a_line, cells)):
            values = (_value(rank, measure) for rank in ranks[n * group : (n + 1) * group])
            mark, style = shade(max((value for value in values if value is not None), default=None), measure)
            line.append(mark * cell, style="not dim " + style)
        rows.append(fitted(line, width))
    return [*rows[: None if room is None else room], _legend(measure, group, width)]


def _legend(measure: Measure, group: int, width: int) -> Text:
    """Return a line that explains the shades; ``group``: number of ranks that a cell shows."""
    bounds = _BOUNDS[measure]
    named = [f"{bound:.0%}" if measure == "waits" else f"{bound:g}" for bound in bounds]
    line = Text("", style="dim")
    for n, (mark, style) in enumerate(zip(_SHADES, _COLOURS, strict=True)):
        line.append(mark, style="not dim " + style)
        line.append(f" below {named[n]}  " if n == 0 else f" {named[n - 1]}+  ")
    line.append("" if group == 1 else f"a cell shows the worst of {group} ranks")
    line.rstrip()
    return fitted(line, width)


def _worst(feed: FeedView, measure: Measure, width: int) -> list[Text]:
    """Return a line for each of the ranks with the largest values of ``measure``, worst first."""
    if measure == "cost":
        costly = sorted((rank for rank in feed.ranks if rank.cost is not None), key=lambda rank: -(rank.cost or 0.0))
        rows: list[list[Cell]] = [[rank.name, _cell(rank.cost, measure), rank.where] for rank in costly]
    else:
        rows = [[rank.name, _cell(rank.waits, measure), rank.cause, rank.where] for rank in feed.worst]
        if (least := feed.waited_for) is not None:
            text = (_cell(least.waits, measure)[0], "bold")
            rows.insert(0, [least.name, text, _cause(least), least.where])
    return table(("", "", "", "")[: len(rows[0])], rows, width, left=(0, 2, 3))[1:] if rows else []
