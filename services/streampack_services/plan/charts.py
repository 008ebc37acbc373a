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
from streampack_services.plan.advice import forecast_rows, is_taken, setting_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Tree = dict[str, Any]
CAUSES = {
    "alignment": "#8da0cb", "pack_tail": "#fc8d62", "shape": "#e8c468", "pipeline": "#b07aa1", "empty_pack": "#bbbbbb",
}  # fmt: skip
FAR = 0.5
"""Bars longer than this share of the capacity are cut off in the chart of a plan."""
REAL, PADDING = "#3b8f6b", "#fc8d62"


class _Chart:
    """A figure without a window: bars on the left, ``height`` inches high, and a histogram of lengths on the right."""

    def __init__(self, height: float) -> None:
        try:
            figure = importlib.import_module("matplotlib.figure")
        except ModuleNotFoundError as error:
            if error.name is None or error.name.split(".")[0] != "matplotlib":
                raise
            raise UserError("--png needs matplotlib, which is not installed. Run: pip install matplotlib") from None
        self.figure = figure.Figure(figsize=(11, height), layout="constrained")
        self.bars, self._right = self.figure.subplots(1, 2, width_ratios=[1.7, 1.0])

    def save(self, what: str, samples: int, lengths: I64, budget: int, file: Path) -> None:
        """Draw the title and the histogram, and write a PNG file. Raises UserError if it cannot be written."""
        _draw_lengths(self._right, lengths, budget)
        self.figure.suptitle(f"{what}: {samples_text(samples)}", x=0.01, ha="left", fontsize=11)
        try:
            self.figure.savefig(file, format="png", dpi=120)
        except OSError as error:
            raise UserError(f"{file} cannot be written: {error.strerror}. Pass another file to --png.") from None


def _draw_lengths(axes: Axes, lengths: I64, budget: int) -> None:
    """Draw a histogram of the tokens by the length of their sample, with a line at the budget."""
    edges = np.unique(np.geomspace(1, max(int(lengths.max()), budget) + 1, 60).astype(int))
    counts, _ = np.histogram(lengths, edges, weights=lengths)
    axes.bar(edges[:-1], counts / lengths.sum(), np.diff(edges), align="edge", color=REAL, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1024:g}k" if value >= 1024 else f"{value:g}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.axvline(budget, color="black", linewidth=1)
    beside: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "rotation": 90, "va": "top", "ha": "right"}
    axes.annotate(f"budget {budget:,}", (budget, 0.98), **beside, fontsize=8)
    axes.set_title("share of tokens by sample length", loc="left", fontsize=10)
    axes.set_xlabel("sample length, tokens")


def draw_plan(plan: Tree, lengths: I64, file: Path) -> None:
    """Draw the result of ``advisor.advise`` to ``file``: padding by cause of each setting, and the lengths."""
    rows, take = forecast_rows(plan), plan["take"]
    chart = _Chart(2.2 + 0.26 * len(rows))
    axes: Axes = chart.bars
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
    ends = np.maximum(left + lost, idle)
    axes.set_xlim(0, 1.03 * float(ends.max()))
    _cut_at(axes, ends, places)
    axes.set_yticks(places, [setting_name(row) + "  *" * is_taken(row, take) for row in rows], fontsize=8)
    for at, row in enumerate(rows[1:], 1):
        if row["axis"] != rows[at - 1]["axis"]:
            axes.axhline(places[at] + 0.5, color="#cccccc", linewidth=0.8)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.1%}")
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.set_title("padding by cause (* recommended)", loc="left", fontsize=10)
    chart.figure.legend(*axes.get_legend_handles_labels(), fontsize=8, loc="outside lower left", ncols=7)
    chart.save(plan["what"], plan["lengths"]["samples"], lengths, take["budget"], file)


def _cut_at(axes: Axes, ends: NDArray[np.float64], places: I64) -> None:
    """Cut bars longer than FAR off and write their length beside them, so that short bars stay visible."""
    if not (ends > FAR).any() or (ends > FAR).all():
        return
    edge = 1.2 * float(ends[ends <= FAR].max())
    axes.set_xlim(0, edge)
    for place, end in zip(places.tolist(), ends.tolist(), strict=True):
        if end > edge:
            axes.annotate(f"{end:.0%} ", (edge, place), ha="right", va="center", size=8, color="white")


def draw_savings(report: Tree, rows: dict[str, Tree], lengths: I64, file: Path) -> None:
    """Draw the result of ``savings.savings`` to ``file``: tokens and padding of each way of batching, and the lengths.

    ``rows``: the ways of batching, by the name to call them (``savings.named_rows``).
    """
    chart, tokens = _Chart(3.4), report["tokens"]
    axes: Axes = chart.bars
    places = np.arange(len(rows))[::-1]
    slots = np.array([row["slots"] for row in rows.values()], np.float64)
    axes.barh(places, np.full(len(rows), tokens), 0.6, color=REAL, label="tokens")
    axes.barh(places, slots - tokens, 0.6, tokens, color=PADDING, label="padding")
    for place, row in zip(places, rows.values(), strict=True):
        text = f"utilization {row['utilization']:.2%}"
        if "saved_share" in row:
            hours = f", {row['saved_gpu_hours']:,.3g} GPU hours" if "saved_gpu_hours" in row else ""
            text = f"saved {row['saved_share']:.1%}{hours}" if row["saved_slots"] >= 0 else "saved nothing"
        axes.annotate(f" {text}", (row["slots"], place), va="center", size=8)
    axes.set_yticks(places, list(rows), fontsize=8)
    axes.set_xlim(0, float(slots.max()) * 1.4)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1e6:,.0f}M" if slots.max() >= 1e7 else f"{value:,.0f}")
    axes.set_xlabel("slots computed, tokens and padding")
    axes.legend(fontsize=8, loc="lower right")
    chart.save(report["what"], report["samples"], lengths, report["budget"], file)
