"""Lines of text for a terminal: tables, bars and charts of characters."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from streampack_services import logs

Cell = Text | str | tuple[str, str]
"""A text, or a pair of text and style."""
_EIGHTHS = "▁▂▃▄▅▆▇█"
_FULL, _EMPTY = "█", "─"
_PLAIN = str.maketrans("▁▂▃▄▅▆▇█▓▒░─·…→", "_..--==#@+:-.~>")
GAP = 2
"""Spaces between two columns of a table."""


def plain(line: Text) -> Text:
    """Return a line with its block characters replaced by ASCII."""
    ascii_line = Text(line.plain.translate(_PLAIN))
    ascii_line.spans = line.spans
    return ascii_line


def printable(line: Text) -> Text:
    """Remove control characters from a line, and return it."""
    line.plain = logs.printable(line.plain)
    return line


def fitted(line: Text, width: int) -> Text:
    """Cut a line to ``width`` characters, with an ellipsis, and return it."""
    line.truncate(width, overflow="ellipsis")
    return line


def row(*cells: Cell) -> Text:
    """Return the cells that are not empty as one line, with two spaces between them."""
    return Text("  ").join(text for text in map(_text, cells) if text)


def title(name: str, note: str, width: int) -> Text:
    """Return the line ``name ─── note``, ``width`` characters wide."""
    note = f" {note}" if note else ""
    line = _EMPTY * max(width - len(name) - 1 - len(note), 1)
    return fitted(Text.assemble((name, "bold"), " ", (line + note, "dim")), width)


def table(header: Sequence[str], rows: Sequence[Sequence[Cell]], width: int, left: Sequence[int] = (0,)) -> list[Text]:
    """Return the lines of a table: a header, and rows with one cell per column.

    If the table is wider than ``width``, the last columns are left out, then the first column is cut. Columns without
    any text are left out.

    Args:
        header: Names of the columns.
        rows: Cells of each row.
        width: Most characters of a line.
        left: Indices of the columns that are aligned left.
    """
    texts = [[_text((name, "dim")) for name in header]] + [[_text(cell) for cell in row] for row in rows]
    widths = [max(text.cell_len for text in column) for column in zip(*texts, strict=True)]
    shown = [n for n, wide in enumerate(widths) if n == 0 or any(text[n].plain for text in texts[1:]) or not rows]
    least = min(widths[0], 12)
    while len(shown) > 1 and least + sum(widths[n] + GAP for n in shown[1:]) > width:
        shown.pop()
    widths[0] = min(widths[0], width - sum(widths[n] + GAP for n in shown[1:]))
    lines = []
    for cells in texts:
        line = Text()
        for n in shown:
            cell = fitted(cells[n], widths[n])
            space = " " * (widths[n] - cell.cell_len)
            line.append(" " * GAP if n else "")
            line.append_text(cell + Text(space) if n in left else Text(space) + cell)
        line.rstrip()
        lines.append(fitted(line, width))
    return lines


def bar(share: float, width: int, style: str = "cyan") -> Text:
    """Return a bar such as ``██████────``; its filled part is the ``share``, from 0 to 1."""
    full = round(min(max(share, 0.0), 1.0) * width)
    return Text.assemble((_FULL * full, style), (_EMPTY * (width - full), "dim"))


def chart(values: Sequence[float | None], rows: int) -> list[Text]:
    """Return a bar chart ``rows`` lines high, from 0 to the highest value; None values are empty."""
    most = max((value for value in values if value is not None), default=0.0) or 1.0
    heights = [0 if value is None else round(value / most * 8 * rows) for value in values]
    lines = []
    for n in reversed(range(rows)):
        marks = (min(max(height - 8 * n, 0), 8) for height in heights)
        lines.append(Text("".join(" " if mark == 0 else _EIGHTHS[mark - 1] for mark in marks), "cyan"))
    return lines


def spark(values: Sequence[float | None]) -> Text:
    """Return a bar chart of one line such as ``▁▃▇█``, from 0 to the highest value; a dot for None."""
    most = max((value for value in values if value is not None), default=0.0) or 1.0
    marks = ["·" if value is None else _EIGHTHS[min(int(value / most * 8), 7)] for value in values]
    return Text.assemble(*((mark, "dim" if mark == "·" else "cyan") for mark in marks))


def _text(cell: Cell) -> Text:
    """Return a cell as ``rich`` text."""
    if isinstance(cell, Text):
        return cell
    return Text(cell) if isinstance(cell, str) else Text(*cell)
