"""Charts of the results of ``streampack plan`` and ``report``, drawn by matplotlib."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from streampack.core.model.samples import I64
from streampack.errors import UserError
from streampack_services.amounts import counted
from streampack_services.plan.advice import forecast_rows, is_taken, setting_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Tree = dict[str, Any]
CAUSES = {
    "alignment": "#8da0cb", "pack_tail": "#fc8d62", "shape": "#e8c468", "pipeline": "#b07aa1", "empty_pack": "#bbbbbb",
}  # fmt: skip
FAR = 0.5
"""Bars longer than this share of the capacity are cut off in the chart of a plan."""
REAL, PADDING, LOST = "#3b8f6b", "#fc8d62", "#c0392b"


def draw_plan(plan: Tree, lengths: I64, file: Path) -> None:
    """Draw the result of ``advisor.advise`` to ``file``: padding by cause of each setting, and the lengths."""
    rows, take = forecast_rows(plan), plan["take"]
    parts = {cause: (color, [row["waste"][cause] for row in rows]) for cause, color in CAUSES.items()}
    parts["tokens cut off"] = LOST, [row["lost_share"] for row in rows]
    idle = [1 - row["useful"] for row in rows]
    ends = np.maximum(np.sum([shares for _, shares in parts.values()], axis=0), idle)

    def finish(axes: Axes, places: I64) -> None:
        """Mark idle time, separate the axes of settings, and cut long bars off, so that short ones stay visible."""
        axes.plot(idle, places, "kD", markersize=4, label="ranks' time without real tokens")
        for at in np.flatnonzero([row["axis"] != below["axis"] for row, below in pairwise(rows)]):
            axes.axhline(places[at] - 0.5, color="#cccccc", linewidth=0.8)
        edge = 1.2 * float(ends[ends <= FAR].max(initial=0)) or 1.03 * float(ends.max())
        axes.set_xlim(0, min(edge, 1.03 * float(ends.max())))
        for at in np.flatnonzero(ends > edge):
            axes.annotate(f"{ends[at]:.0%} ", (edge, places[at]), ha="right", va="center", size=8, color="white")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:.1%}")
        axes.set_title("padding by cause (* recommended)", loc="left", fontsize=10)

    names = [setting_name(row) + "  *" * is_taken(row, take) for row in rows]
    title = f"{plan['what']}: {counted(plan['lengths']['samples'], 'sample')}"
    _draw(title, names, parts, finish, lengths, take["budget"], file)


def draw_savings(report: Tree, rows: dict[str, Tree], lengths: I64, file: Path) -> None:
    """Draw the result of ``savings.savings`` to ``file``: tokens and padding of each way of batching, and the lengths.

    ``rows``: the ways of batching, by the name to call them (``savings.named_rows``).
    """
    tokens, slots = report["tokens"], [row["slots"] for row in rows.values()]
    parts = {"tokens": (REAL, [tokens] * len(rows)), "padding": (PADDING, [count - tokens for count in slots])}

    def finish(axes: Axes, places: I64) -> None:
        """Write the share of tokens that each bar saves, to the right of the bar."""
        for place, row in zip(places, rows.values(), strict=True):
            text = f"utilization {row['utilization']:.2%}"
            if "saved_share" in row:
                hours = f", {row['saved_gpu_hours']:,.3g} GPU hours" if "saved_gpu_hours" in row else ""
                text = f"saved {row['saved_share']:.1%}{hours}" if row["saved_slots"] >= 0 else "saved nothing"
            axes.annotate(f" {text}", (row["slots"], place), va="center", size=8)
        axes.set_xlim(0, 1.4 * max(slots))
        millions = max(slots) >= 1e7
        axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1e6:,.0f}M" if millions else f"{value:,.0f}")
        axes.set_xlabel("slots computed, tokens and padding")

    title = f"{report['what']}: {counted(report['samples'], 'sample')}"
    _draw(title, list(rows), parts, finish, lengths, report["budget"], file)


def import_figures() -> Any:
    """Import matplotlib's figures. Raises UserError if matplotlib is missing."""
    try:
        return importlib.import_module("matplotlib.figure")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "matplotlib":
            raise
        raise UserError("--png needs matplotlib, which is not installed. Run: pip install matplotlib") from None


def _draw(
    title: str, names: list[str], parts: Mapping[str, tuple[str, Sequence[float]]],
    finish: Callable[[Axes, I64], None], lengths: I64, budget: int, file: Path,
) -> None:  # fmt: skip
    """Draw bars, one for each of ``names``, beside a histogram of ``lengths``; write them as a PNG file.

    ``parts``: the parts that follow each other in a bar, by label: color, and length in each bar. The function
    ``finish`` draws what else belongs to the bars, at their places from the top down. Raises UserError if matplotlib is
    missing, or the file cannot be written.
    """
    figure = import_figures().Figure(figsize=(11, 2.2 + 0.26 * len(names)), layout="constrained")
    bars, histogram = figure.subplots(1, 2, width_ratios=[1.7, 1.0])
    places, left = np.arange(len(names))[::-1], np.zeros(len(names))
    for label, (color, sizes) in parts.items():
        if any(sizes):
            bars.barh(places, sizes, 0.7, left, color=color, label=label.replace("_", " "))
        left += sizes
    bars.set_yticks(places, names, fontsize=8)
    finish(bars, places)
    figure.legend(*bars.get_legend_handles_labels(), fontsize=8, loc="outside lower left", ncols=7)
    _draw_lengths(histogram, lengths, budget)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    try:
        figure.savefig(file, format="png", dpi=120)
    except OSError as error:
        raise UserError(f"{file} cannot be written: {error.strerror}. Pass another file to --png.") from None


def _draw_lengths(axes: Axes, lengths: I64, budget: int) -> None:
    """Draw a histogram of the tokens by the length of their sample, with a line at the budget."""
    edges = np.unique(np.geomspace(1, max(int(lengths.max()), budget) + 1, 60).astype(int))
    axes.hist(lengths, edges.tolist(), weights=lengths / lengths.sum(), color=REAL)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1024:g}k" if value >= 1024 else f"{value:g}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.axvline(budget, color="black", linewidth=1)
    axes.set_title(f"share of tokens by sample length (line: budget {budget:,})", loc="left", fontsize=10)
    axes.set_xlabel("sample length, tokens")
