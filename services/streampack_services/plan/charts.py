"""Charts of the results of ``streampack plan`` and ``report``, drawn by matplotlib."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from streampack.core.model.samples import I64
from streampack.errors import UserError
from streampack_services.forecast.lengths import samples_text
from streampack_services.plan.advice import shape_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Tree = dict[str, Any]
CAUSES = {
    "alignment": "#8da0cb", "pack_tail": "#fc8d62", "shape": "#e8c468", "pipeline": "#b07aa1", "empty_pack": "#bbbbbb",
}  # fmt: skip
FAR = 0.5
"""Bars longer than this share of the capacity are cut off in the chart of a plan."""
F64 = NDArray[np.float64]
REAL, PADDING = "#3b8f6b", "#fc8d62"


def new_figure(width: float, height: float, rows: int, columns: list[float]) -> tuple[Figure, Any]:
    """Return a figure without a window, ``width`` by ``height`` inches, and its axes [rows, columns].

    ``columns``: relative widths. Raises UserError if matplotlib is not installed.
    """
    try:
        figure = importlib.import_module("matplotlib.figure")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "matplotlib":
            raise
        raise UserError("--png needs matplotlib, which is not installed. Run: pip install matplotlib") from None
    made = figure.Figure(figsize=(width, height), layout="constrained")
    return made, made.subplots(rows, len(columns), squeeze=False, width_ratios=columns)


def save(figure: Figure, file: Path) -> None:
    """Write a figure as a PNG file. Raises UserError if the file cannot be written."""
    try:
        figure.savefig(file, format="png", dpi=120)
    except OSError as error:
        raise UserError(f"{file} cannot be written: {error.strerror}. Pass another file to --png.") from None


def draw_lengths(axes: Axes, lengths: I64, marks: dict[str, int]) -> None:
    """Draw a histogram of the tokens by the length of their sample, with a named line at each length of ``marks``."""
    edges = np.unique(np.geomspace(1, max(int(lengths.max()), *marks.values()) + 1, 60).astype(int))
    counts, _ = np.histogram(lengths, edges, weights=lengths)
    axes.bar(edges[:-1], counts / lengths.sum(), np.diff(edges), align="edge", color=REAL, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1024:g}k" if value >= 1024 else f"{value:g}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    for name, at in marks.items():
        axes.axvline(at, color="black", linewidth=1)
        axes.annotate(
            name, (at, 0.98), xycoords=("data", "axes fraction"), rotation=90, va="top", ha="right", fontsize=8
        )
    axes.set_title("share of tokens by sample length", loc="left", fontsize=10)
    axes.set_xlabel("sample length, tokens")


def draw_plan(found: Tree, lengths: I64, file: Path) -> None:
    """Draw the result of ``advisor.advise`` to ``file``: padding by cause of each setting, and the lengths."""
    rows = [row for row in found["settings"] if row["axis"] != "base" and not row["refused"]]
    figure, grid = new_figure(11, 2.2 + 0.26 * len(rows), 1, [1.7, 1.0])
    axes: Axes = grid[0, 0]
    places = np.arange(len(rows))[::-1]
    left = np.zeros(len(rows))
    for cause, color in CAUSES.items():
        shares = np.array([row["waste"][cause] for row in rows])
        if shares.any():
            axes.barh(places, shares, 0.7, left, color=color, label=cause.replace("_", " "))
        left += shares
    lost = np.array([row["lost_share"] for row in rows])
    cut = lost > 0
    if cut.any():
        how: dict[str, Any] = {"color": "white", "edgecolor": "#c0392b", "hatch": "////", "label": "tokens cut off"}
        axes.barh(places[cut], lost[cut], 0.7, left[cut], **how)
    idle = np.array([1 - row["useful"] for row in rows])
    axes.plot(idle, places, "kD", markersize=4, label="ranks' time without real tokens")
    axes.set_xlim(0, 1.03 * float(np.maximum(left + lost, idle).max()))
    _cut_at(axes, np.maximum(left + lost, idle), places)
    take = found["take"]
    names = [setting_name(row) + ("  *" if is_taken(row, take) else "") for row in rows]
    axes.set_yticks(places, names, fontsize=8)
    for at, row in enumerate(rows[1:], 1):
        if row["axis"] != rows[at - 1]["axis"]:
            axes.axhline(places[at] + 0.5, color="#cccccc", linewidth=0.8)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.1%}")
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.set_title("padding by cause (* recommended)", loc="left", fontsize=10)
    figure.legend(*axes.get_legend_handles_labels(), fontsize=8, loc="outside lower left", ncols=7)
    draw_lengths(grid[0, 1], lengths, {f"budget {take['budget']:,}": take["budget"]})
    figure.suptitle(f"{found['what']}: {samples_text(found['lengths']['samples'])}", x=0.01, ha="left", fontsize=11)
    save(figure, file)


def _cut_at(axes: Axes, ends: F64, places: I64) -> None:
    """Cut bars longer than FAR off and write their length beside them, so that short bars stay visible."""
    if not (ends > FAR).any() or (ends > FAR).all():
        return
    edge = 1.2 * float(ends[ends <= FAR].max())
    axes.set_xlim(0, edge)
    for place, end in zip(places.tolist(), ends.tolist(), strict=True):
        if end > edge:
            axes.annotate(f"{end:.0%} ", (edge, place), ha="right", va="center", size=8, color="white")


def setting_name(row: Tree) -> str:
    """Return the value that a setting has on its axis, as text: ``window 256``."""
    if row["axis"] == "shape":
        return shape_text(row["shape"])
    if row["axis"] == "mesh":
        mesh = " ".join(f"{name}={size}" for name, size in row["mesh"].items() if size > 1 or name == "dp")
        align = row["align"]["sample"]
        return f"{mesh}, align {align}" if align > 1 else mesh
    return f"{row['axis']} {row[row['axis']]:,}" if row["axis"] != "packer" else str(row["packer"])


def is_taken(row: Tree, take: Tree) -> bool:
    """Return whether a setting has the recommended value on its axis."""
    return bool(row[row["axis"]] == take[row["axis"]] and row["align"] == take["align"])


def draw_savings(found: Tree, names: dict[str, str], lengths: I64, file: Path) -> None:
    """Draw the result of ``savings.savings`` to ``file``: tokens and padding of each way of batching, and the lengths.

    ``names``: what to call each way of batching.
    """
    figure, grid = new_figure(11, 3.4, 1, [1.7, 1.0])
    axes: Axes = grid[0, 0]
    rows = {**{names[name]: row for name, row in found["others"].items()}, f"this run: {found['packer']}": found["run"]}
    places = np.arange(len(rows))[::-1]
    slots = np.array([row["slots"] for row in rows.values()], np.float64)
    axes.barh(places, np.full(len(rows), found["tokens"]), 0.6, color=REAL, label="tokens")
    axes.barh(places, slots - found["tokens"], 0.6, found["tokens"], color=PADDING, label="padding")
    for place, row in zip(places, rows.values(), strict=True):
        said = f"utilization {row['utilization']:.2%}"
        if "saved_share" in row:
            hours = f", {row['saved_gpu_hours']:,.3g} GPU hours" if "saved_gpu_hours" in row else ""
            said = f"saved {row['saved_share']:.1%}{hours}" if row["saved_slots"] >= 0 else "saved nothing"
        axes.annotate(f" {said}", (row["slots"], place), va="center", size=8)
    axes.set_yticks(places, list(rows), fontsize=8)
    axes.set_xlim(0, float(slots.max()) * 1.4)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1e6:,.0f}M" if slots.max() >= 1e7 else f"{value:,.0f}")
    axes.set_xlabel("slots computed, tokens and padding")
    axes.legend(fontsize=8, loc="lower right")
    draw_lengths(grid[0, 1], lengths, {f"budget {found['budget']:,}": found["budget"]})
    figure.suptitle(f"{found['what']}: {samples_text(found['samples'])}", x=0.01, ha="left", fontsize=11)
    save(figure, file)
