"""Figures of the site as SVG, in docs/assets: ``python -m docs.generate.figures`` writes them.

An image on its own follows the system's light or dark colors. The site puts it into the page itself, where the figure
follows the colors that the reader has chosen.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

import streampack
from benchmarks.packing import order
from benchmarks.recovery.timeline import UPDATE_S
from streampack.core.deal.dynamic_cp.cp_plan import CpCosts, CpPlan, plan_groups, plan_uniform
from streampack.core.layout.labels import positions_of
from streampack.core.layout.shards import shard_slices
from streampack.core.shuffle import shuffled

ROOT = Path(__file__).parents[2]
ASSETS = ROOT / "docs/assets"
_LIGHT = "--ink:#1b222b;--quiet:#566170;--line:#b6c0cc;--card:#f4f6f9;--accent:#1f5fd6;--soft:#dbe7fb;--warm:#d9480f"
_DARK = "--ink:#e8edf3;--quiet:#9aa7b5;--line:#46515f;--card:#161b22;--accent:#6aa5ff;--soft:#1d3358;--warm:#ff8c42"
STYLE = (
    f"svg.figure{{{_LIGHT}}}@media(prefers-color-scheme:dark){{svg.figure{{{_DARK}}}}}"
    f"[data-md-color-scheme=default] svg.figure{{{_LIGHT}}}[data-md-color-scheme=slate] svg.figure{{{_DARK}}}"
    "svg.figure text{font-family:system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif;fill:var(--ink)}"
)


WAYS = ((50, "before", "Version 0.1: window 1,024"), (420, "now", "Now: automatic window, in turn"))
"""The left edge, the way of ``benchmarks.packing.order`` and the title of the two charts of a figure."""


def all_figures() -> dict[str, str]:
    """Return the figures by name."""
    return {
        "dataflow": dataflow(), "packs": packs(), "packers": packers(),
        "order_shares": order_shares(), "order_lengths": order_lengths(), "dynamic_cp": dynamic_cp(),
        "learning": learning(), "form_deal": form_deal(), "zigzag": zigzag(), "kill": kill(), "gpu": gpu(),
    }  # fmt: skip


def inlined(html: str) -> str:
    """Return a page's HTML with the figures themselves in place of the images that name them."""

    def figure(match: re.Match[str]) -> str:
        path = ASSETS / f"{match['name']}.svg"
        return f"<figure>{path.read_text()}</figure>" if path.exists() else match[0]

    return re.sub(r'<p><img\b[^>]*\bsrc="[^"]*assets/(?P<name>\w+)\.svg"[^>]*></p>', figure, html)


def _svg(width: int, height: int, label: str, *parts: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="figure" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{label}"><style>{STYLE}</style>{"".join(parts)}</svg>\n'
    )


def _text(
    x: float, y: float, words: str, size: int = 14, anchor: str = "middle", color: str = "ink", bold: bool = False
) -> str:
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}"{weight} '
        f'style="fill:var(--{color})">{words}</text>'
    )


def _box(
    x: float, y: float, width: float, height: float, fill: str = "card", line: str = "line", radius: float = 8
) -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" '
        f'style="fill:var(--{fill});stroke:var(--{line})" stroke-width="1.3"/>'
    )


def _bar(x: float, y: float, width: float, height: float, color: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:.1f}" height="{height:g}" rx="2" style="fill:var(--{color})"/>'


def _arrow(points: Sequence[tuple[float, float]], color: str = "accent", dashed: bool = False) -> str:
    (before_x, before_y), (x, y) = points[-2], points[-1]
    angle = math.degrees(math.atan2(y - before_y, x - before_x))
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    line = " ".join(f"{a:g},{b:g}" for a, b in points)
    return (
        f'<polyline points="{line}" fill="none" style="stroke:var(--{color})" stroke-width="1.8"{dash}/>'
        f'<path d="M0,0 L-9,-4.500 L-9,4.500 Z" transform="translate({x:g} {y:g}) rotate({angle:g})" '
        f'style="fill:var(--{color})"/>'
    )


def dataflow() -> str:
    """Draw the way of the data: producers, the stages of the broker, clients and trainers."""
    parts = [
        _box(178, 12, 404, 292), _text(330, 38, "broker", 16, bold=True),
        _text(420, 38, "one per run", 13, color="quiet"), _text(145, 68, "chunks", 13, color="accent"),
        _text(607, 171, "steps", 13, color="accent"),
    ]  # fmt: skip
    for y in (48, 124):
        parts += [
            _box(8, y, 104, 60), _text(60, y + 26, "producer", 15, bold=True),
            _text(60, y + 46, "read, tokenize", 13, color="quiet"),
        ]  # fmt: skip
    parts += [
        _arrow([(112, 78), (194, 78)]),
        _arrow([(112, 154), (150, 154), (150, 78), (194, 78)]),
    ]
    stages = ("intake", "merge", "window", "FORM", "DEAL", "shards")
    notes = ("check, store", "by weight", "of samples", "full packs", "to ranks", "one per rank")
    for index, (name, note) in enumerate(zip(stages, notes, strict=True)):
        x, y = 195 + index % 3 * 132, 50 + index // 3 * 102
        strong = name in ("FORM", "DEAL")
        parts += [
            _box(x, y, 106, 56, fill="soft" if strong else "card", line="accent" if strong else "line"),
            _text(x + 53, y + 24, name, 15, bold=True), _text(x + 53, y + 44, note, 13, color="quiet"),
        ]  # fmt: skip
        if index % 3:
            parts.append(_arrow([(x - 26, y + 28), (x - 1, y + 28)]))
    parts += [
        _arrow([(512, 106), (512, 129), (248, 129), (248, 151)]),
        _box(195, 248, 238, 36), _text(314, 271, "log: every decision, first", 13),
        _arrow([(248, 208), (248, 247)], color="quiet"), _arrow([(380, 208), (380, 247)], color="quiet"),
    ]  # fmt: skip
    for y, rank in ((112, "dp 0"), (188, "dp 1")):
        parts += [
            _arrow([(565, 180), (634, 180), (634, y + 30), (647, y + 30)]),
            _box(648, y, 104, 60), _text(700, y + 26, "trainer", 15, bold=True),
            _text(700, y + 46, f"client, {rank}", 13, color="quiet"),
        ]  # fmt: skip
    parts += [
        _arrow([(700, 248), (700, 330), (540, 330), (540, 305)], color="quiet", dashed=True),
        _text(620, 350, "requests ahead, commits", 13, color="quiet"),
        _arrow([(220, 304), (220, 330), (60, 330), (60, 185)], color="quiet", dashed=True),
        _text(140, 350, "credits: a full broker waits", 13, color="quiet"),
    ]  # fmt: skip
    label = (
        "Producers send chunks to the broker; the broker forms steps and deals them to the ranks; clients fetch them"
    )
    return _svg(760, 360, label, *parts)


def lengths(number: int, stride: int) -> list[int]:
    """Return lognormal lengths, the same on every machine: quantiles, in an order of ``stride`` apart."""
    quantiles = [
        min(4096, max(16, round(math.exp(6.6 + 0.9 * NormalDist().inv_cdf((index + 0.5) / number)))))
        for index in range(number)
    ]
    return [quantiles[index * stride % number] for index in range(number)]


def _row(left: float, top: float, width: float, samples: Sequence[int], capacity: int, fill: str = "soft") -> list[str]:
    """Draw a pack: its capacity, and the samples in it."""
    ends = [round(left + width * end / capacity, 1) for end in accumulate(samples)]
    parts = [_box(left, top, width, 22, fill="card", line="warm", radius=2)]
    parts += [
        _box(a, top, b - a, 22, fill=fill, line="accent", radius=2) for a, b in zip([left, *ends], ends, strict=False)
    ]
    return parts


def form_deal() -> str:
    """Draw samples of a window, the packs that FORM makes of them, and where DEAL puts these packs."""
    budget, samples = 4096, lengths(23, 16)
    plan = streampack.plan_step(samples, budget, dp=2)
    formed = sorted((pack for rank in plan.packs for pack in rank), key=min)
    parts = [_text(8, 24, "window", 18, anchor="start", bold=True)]
    left, top = 8.0, 44.0
    for length in samples:
        width = round(190 * length / budget, 1)
        if left + width > 200:
            left, top = 8.0, top + 26
        parts.append(_box(left, top, width, 22, fill="soft", line="accent", radius=2))
        left = round(left + width + 3, 1)
    parts += [_text(270, 24, "FORM: full packs", 18, anchor="start", bold=True), _arrow([(208, 105), (262, 105)])]
    for row, members in enumerate(formed):
        parts += _row(270, 44 + 26 * row, 190, [samples[index] for index in members], budget)
    parts += [_text(530, 24, "DEAL: equal cost", 18, anchor="start", bold=True), _arrow([(468, 105), (522, 105)])]
    for index, micro_batch in enumerate(zip(*plan.packs, strict=True)):
        height = 52 + index * 78
        parts.append(_text(530, height + 8, f"micro-batch {index}", 14, anchor="start", color="quiet"))
        for rank, members in enumerate(micro_batch):
            parts += _row(576, height + 14 + 26 * rank, 176, [samples[i] for i in members], budget)
            parts.append(_text(530, height + 30 + 26 * rank, f"dp {rank}", 14, anchor="start"))
    return _svg(760, 290, "FORM makes full packs of a window; DEAL gives packs of equal cost to the ranks", *parts)


def zigzag() -> str:
    """Draw how a sample is cut over two context-parallel ranks."""
    boundaries, colors = np.array([0, 16]), ("soft", "accent")
    parts = list[str]()
    for row, layout in enumerate(("zigzag", "contiguous")):
        top = 16 + row * 84
        parts.append(_text(8, top + 23, layout, 16, anchor="start", bold=True))
        work = list[int]()
        for rank in range(2):
            positions = positions_of(*shard_slices(boundaries, 2, rank, layout))
            work.append(int((positions + 1).sum()))
            for position in positions.tolist():
                parts.append(_box(120 + position * 30, top, 28, 34, fill=colors[rank], line="accent", radius=2))
        note = " and ".join(map(str, work)) + " pairs of tokens"
        parts.append(_text(120, top + 56, note, 14, anchor="start", color="quiet"))
    for rank in range(2):
        parts += [
            _box(120 + 110 * rank, 172, 16, 16, fill=colors[rank], line="accent", radius=2),
            _text(144 + 110 * rank, 186, f"rank cp {rank}", 14, anchor="start"),
        ]
    return _svg(620, 198, "A sample cut over two ranks: with zigzag both ranks have as many pairs of tokens", *parts)


def packs() -> str:
    """Draw the same samples three times: padded, in greedy packs, in full packs."""
    budget, samples = 4096, lengths(23, 7)
    ways = [
        ("padded to longest", [[index] for index in range(len(samples))], max(samples)),
        ("greedy: in order", streampack.pack_lengths(samples, budget, "concatenative"), budget),
        ("streampack", streampack.pack_lengths(samples, budget), budget),
    ]
    parts = list[str]()
    for column, (name, bins, capacity) in enumerate(ways):
        left, width = 8 + column * 255, 232
        filled = sum(samples) / (capacity * len(bins))
        parts += [_text(left, 24, name, 20, anchor="start", bold=True)]
        parts += [_text(left, 50, f"{filled:.0%} real tokens", 20, anchor="start", color="quiet")]
        height = 9 if column == 0 else 22
        for row, members in enumerate(bins):
            top = 58 + row * (height + 3)
            scale = width / capacity
            parts.append(_box(left, top, width, height, fill="card", line="warm", radius=2))
            ends = list(accumulate(samples[index] for index in members))
            for start, end in zip([0, *ends], ends, strict=False):
                parts.append(
                    _box(left + start * scale, top, (end - start) * scale, height, fill="soft", line="accent", radius=2)
                )
    parts += [
        _box(263, 316, 14, 14, fill="soft", line="accent", radius=2), _text(285, 330, "a sample", 20, anchor="start"),
        _box(400, 316, 14, 14, fill="card", line="warm", radius=2), _text(422, 330, "padding", 20, anchor="start"),
    ]  # fmt: skip
    return _svg(760, 344, "The same 23 samples padded, packed in order, and packed by streampack", *parts)


SHOWN = (
    "exact_fill*", "joint*", "buffer_first_fit", "sliding_ffd", "best_fit_decreasing", "first_fit_decreasing",
    "greedy_knapsack", "first_fit_shuffle", "karmarkar_karp", "concatenative",
)  # fmt: skip
"""Packers as the tables of the results name them."""


def packers() -> str:
    """Draw padding by packer and window, from the tables of the benchmarks' results."""
    results = (ROOT / "benchmarks/results/2026-11/packing.md").read_text()
    text = results.partition("\n## Every packer on the same streams")[2]
    tables = [
        {
            cells[0].strip(): float(cells[2].split("/")[0])
            for cells in re.findall(r"^\|([^|]+)\|([^|]+)\|([^|]+)\|", table, re.M)[2:]
        }
        for table in re.findall(r"(?:^\|.*\n)+", text, re.M)[:2]
    ]
    of_1024, of_256 = tables
    parts = [_text(16, 24, "Padding by packer, percent of all tokens", 15, anchor="start", bold=True)]
    scale = 480 / 17
    for row, name in enumerate(SHOWN):
        top = 44 + row * 38
        parts.append(_text(180, top + 21, name.strip("*"), 13, anchor="end", bold=row == 0))
        for place, (used, color) in enumerate(((of_1024[name], "accent"), (of_256[name], "warm"))):
            width = max(1.5, (100 - used) * scale)
            parts += [
                _bar(190, top + place * 15, width, 13, color),
                _text(196 + width, top + 11 + place * 15, f"{100 - used:.2f}", 12, anchor="start", color="quiet"),
            ]
    for x, words, color in ((500, "window 1,024", "accent"), (640, "window 256", "warm")):
        parts += [_bar(x, 12, 14, 14, color), _text(x + 20, 24, words, 13, anchor="start")]
    return _svg(760, 430, "Padding of each packer with windows of 1,024 and 256 samples", *parts)


def _documents(stream: int, count: int, mean: float, spread: float) -> NDArray[np.int64]:
    """Return lognormal lengths in a shuffled order, int64 [count], the same on every machine."""
    normal = NormalDist(mean, spread)
    quantiles = [max(1, round(math.exp(normal.inv_cdf((index + 0.5) / count)))) for index in range(count)]
    return np.array(quantiles, np.int64)[shuffled(count, stream)]


def _chart(
    left: float, title: str, lines: Sequence[tuple[Sequence[float], str]], most: float,
    ticks: Sequence[tuple[float, str]], steps: int, unit: str = "step",
) -> list[str]:  # fmt: skip
    """Draw lines of values over ``steps`` steps in a field of 300 x 180, with marks at heights on the left."""
    top, width, height = 44, 300, 180
    parts = [_text(left, 26, title, 14, anchor="start", bold=True)]
    for value, words in ticks:
        y = top + height * (1 - value / most)
        parts += [
            f'<path d="M{left:g} {y:.1f}h{width}" style="stroke:var(--line)" stroke-dasharray="3 4"/>',
            _text(left - 6, y + 4, words, 11, anchor="end", color="quiet"),
        ]
    for values, color in lines:
        points = " ".join(
            f"{left + width * k / (len(values) - 1):.1f},{top + height * (1 - value / most):.1f}"
            for k, value in enumerate(values)
        )
        parts.append(f'<polyline points="{points}" fill="none" style="stroke:var(--{color})" stroke-width="1.8"/>')
    for k in (0, steps // 2, steps):
        parts.append(_text(left + width * k / steps, top + height + 18, str(k), 11, color="quiet"))
    return [*parts, _text(left + width / 2, top + height + 36, unit, 11, color="quiet")]


def order_shares() -> str:
    """Draw the shares of three streams over the first steps, with the packing of 0.1 and of today."""
    steps, span = 100, 4
    streams_lengths = [order.split(_documents(s, 8000, mean, 1.1)) for s, mean in enumerate((6.3, 7.0, 5.5))]
    lengths, streams, _ = order.merged_parts(streams_lengths, seed=1)
    parts = list[str]()
    for left, way, title in WAYS:
        tokens = order.shares(order.steps_of(lengths, way), lengths, streams)[:steps].reshape(-1, span, 3).sum(axis=1)
        shares = tokens / tokens.sum(axis=1, keepdims=True)
        lines = [(shares[:, s].tolist(), color) for s, color in enumerate(("accent", "warm", "ink"))]
        parts += _chart(left, title, lines, 0.8, [(weight, f"{weight:.0%}") for weight in order.WEIGHTS], steps)
    keys = ((50, "weight 0.5", "accent"), (180, "weight 0.3, longest documents", "warm"), (440, "weight 0.2", "ink"))
    for x, words, color in keys:
        parts += [_bar(x, 282, 14, 14, color), _text(x + 20, 294, words, 13, anchor="start")]
    return _svg(760, 308, "Shares of three streams over the first 100 steps, before and now", *parts)


def order_lengths() -> str:
    """Draw the mean length of samples over a run of 2,000 rows, with the packing of 0.1 and of today."""
    lengths = np.minimum(_documents(9, 2000, 5.8, 1.0), order.BUDGET)
    ticks = [(float(mean), f"{mean:.0f}") for mean in (lengths.mean(), order.BUDGET)]
    parts = list[str]()
    for left, way, title in WAYS:
        means = [float(lengths[step].mean()) for step in order.steps_of(lengths, way)]
        parts += _chart(left, title, [(means, "accent")], order.BUDGET, ticks, len(means))
    return _svg(760, 270, "Mean length of the samples of each step, before and now", *parts)


def learning() -> str:
    """Draw the loss of held-out samples over training, padded and packed, from the table of the benchmark's results."""
    results = (ROOT / "benchmarks/results/2026-11/training.md").read_text()
    table = results.partition("| samples trained |")[2].partition("\n\n")[0]
    rows = [[float(cell.replace(",", "")) for cell in row.strip("|").split("|")] for row in table.splitlines()[2:]]
    trained, padded, packed, full, unbounded = map(list, zip(*(row[:5] for row in rows), strict=True))
    ticks = [(float(loss), str(loss)) for loss in range(4)]
    last, unit = int(trained[-1]), "samples trained"
    parts = _chart(50, "The same 16 samples in each update", [(packed, "accent")], 4, ticks, last, unit)
    for samples, loss in zip(trained, padded, strict=True):
        x, y = 50 + 300 * samples / last, 44 + 180 * (1 - loss / 4)
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="none" style="stroke:var(--warm)"/>')
    lines = [(full, "accent"), (unbounded, "warm")]
    parts += _chart(420, "Full packs, with boundaries and without", lines, 4, ticks, last, unit)
    for x, words, color in (
        (50, "packed", "accent"), (150, "padded", "warm"),
        (420, "full packs", "accent"), (530, "no boundaries", "warm"),
    ):  # fmt: skip
        parts += [_bar(x, 282, 14, 14, color), _text(x + 20, 294, words, 13, anchor="start")]
    return _svg(760, 308, "Loss of held-out samples over training, padded and packed", *parts)


def gpu() -> str:
    """Draw tokens per second of padded rows, greedy packs and streampack on a GPU, from the table of the results."""
    results = (ROOT / "benchmarks/results/2026-11/training.md").read_text()
    table = results.partition("| lengths | way | real tokens/s |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()[2:]]
    groups = (("source code", rows[:3]), ("short SFT", rows[4:7]))
    parts = [
        _text(16, 24, "Real tokens per second, one H100, a Llama with 1.04B parameters", 15, anchor="start", bold=True)
    ]
    scale = 400 / 70_000
    for group, (name, ways) in enumerate(groups):
        top = 46 + group * 132
        parts.append(_text(16, top + 16, name, 14, anchor="start", bold=True))
        for row, (_, way, rate, ratio, mfu, *_) in enumerate(ways):
            y, width = top + 26 + row * 30, float(rate.replace(",", "")) * scale
            parts += [
                _text(
                    150, y + 16, "padded rows" if way == "padded" else way, 13, anchor="end", bold=way == "streampack"
                ),
                _bar(160, y, width, 22, "accent" if way == "streampack" else "line"),
                _text(168 + width, y + 16, f"{rate}, {ratio}x, MFU {mfu}", 13, anchor="start", color="quiet"),
            ]
    return _svg(
        760, 312, "Tokens per second on one H100 with padded rows, greedy packs and packs of streampack", *parts
    )


def kill() -> str:
    """Draw steps of four ranks while the broker is killed, from the times in the table of the results."""
    results = (ROOT / "benchmarks/results/2026-11/recovery.md").read_text()
    text = results.partition("| step | rank 0 |")[2]
    rows = [[float(cell) for cell in row.strip("|").split("|")] for row in text.partition("\n\n")[0].splitlines()[2:]]
    killed, started = map(float, re.findall(r"(?:killed|again) at ([\d.]+)", text)[:2])
    last = rows[-1][1] + UPDATE_S
    left, row_height, top = 92, 36, 62
    scale = 650 / last
    after = next(index for index, row in enumerate(rows) if row[1] > killed + 2 * UPDATE_S)
    served = min(rows[after][1:])
    parts = [_text(16, top + 20, "broker", 14, anchor="start", bold=True)]
    for begin, end, fill in ((0.0, killed, "soft"), (started, last, "soft")):
        parts.append(_box(left + begin * scale, top, (end - begin) * scale, 26, fill=fill, line="accent", radius=2))
    for rank in range(4):
        y = top + (rank + 1) * row_height
        parts.append(_text(16, y + 19, f"rank {rank}", 14, anchor="start"))
        parts.append(_box(left, y, last * scale, 26, fill="card", line="warm", radius=2))
        for row in rows:
            x, width = left + row[rank + 1] * scale, UPDATE_S * scale
            parts.append(_box(x, y, width, 26, fill="soft", line="accent", radius=1))
            if width > 16:
                parts.append(_text(x + width / 2, y + 17, f"{row[0]:.0f}", 10, color="quiet"))
    bottom = top + 5 * row_height
    for at, words, anchor in ((killed, "kill -9", "end"), (started, "started again", "start")):
        x = left + at * scale
        parts.append(f'<path d="M{x:.1f} 44V{bottom}" style="stroke:var(--warm)" stroke-width="1.6"/>')
        parts.append(_text(x + (4 if anchor == "start" else -4), 54, words, 13, anchor=anchor, color="warm"))
    anchor = "end" if served > last / 2 else "start"
    parts.append(_text(left + served * scale, 34, f"step {after}, the same bytes", 13, anchor=anchor))
    parts.append(f'<path d="M{left + served * scale:.1f} 40V{bottom}" style="stroke:var(--ink)" stroke-width="1.2"/>')
    seconds = range(0, math.floor(last) + 1, max(1, round(last / 8)))
    parts += [_text(left + second * scale, bottom + 18, f"{second} s", 12, color="quiet") for second in seconds]
    for x, words, fill, line in ((left, "a step", "soft", "accent"), (left + 90, "waiting", "card", "warm")):
        parts += [
            _box(x, bottom + 30, 14, 14, fill=fill, line=line, radius=2),
            _text(x + 20, bottom + 42, words, 13, anchor="start"),
        ]  # fmt: skip
    return _svg(760, bottom + 52, "Four ranks wait while the broker is killed, and go on with the same bytes", *parts)


RANKS = 16
"""Ranks of the step that ``dynamic_cp`` draws."""
SHADES = {1: 0.12, 2: 0.3, 4: 0.55, 8: 0.9}
"""Opacity of a pack by the ranks that share it."""


def dynamic_cp() -> str:
    """Draw a step on 16 ranks with groups of one size, and with groups of the size that each sample needs."""
    samples = np.concatenate([[64_000, 28_000, 16_000, 12_000], np.minimum(_documents(0, 339, 6.6, 0.9), 4096)])
    costs = CpCosts(node=0.05, across=0.2)
    static = plan_uniform(samples, RANKS, 8192, 8, costs)
    dynamic = plan_groups(samples, RANKS, 8192, RANKS, costs)
    scale = 340 / static.critical_path
    share = dynamic.critical_path / static.critical_path
    parts = _micro_batches(46, "static: cp = 8 for all samples", static, scale)
    parts += _micro_batches(410, f"dynamic: {share:.0%} of the time", dynamic, scale)
    parts += [
        f'<g transform="rotate(-90 24 148)">{_text(24, 148, "rank", 12, color="quiet")}</g>',
        _text(38, 58, "0", 11, anchor="end", color="quiet"), _text(38, 241, "15", 11, anchor="end", color="quiet"),
        _text(46, 264, "time, one column for each micro-batch", 12, anchor="start", color="quiet"),
    ]  # fmt: skip
    for x, (size, shade) in zip((46, 166, 276, 386), SHADES.items(), strict=True):
        label = f"{size} rank{'s' if size > 1 else ''}"
        parts += [_shaded(x, 280, 14, 14, shade), _text(x + 20, 292, label, 13, anchor="start")]
    parts += [
        _box(496, 280, 14, 14, fill="card", line="warm", radius=0), _text(516, 292, "waiting", 13, anchor="start")
    ]  # fmt: skip
    label = f"The same step on {RANKS} ranks with static and with dynamic context parallelism"
    return _svg(760, 306, label, *parts)


def _shaded(x: float, y: float, width: float, height: float, opacity: float) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
        f'style="fill:var(--accent);fill-opacity:{opacity};stroke:var(--accent)" stroke-width="0.8"/>'
    )


def _micro_batches(left: float, title: str, plan: CpPlan, scale: float) -> list[str]:
    """Draw the micro-batches of a plan side by side; each is as wide as its costliest rank."""
    top, row = 46, 12.5
    parts = [_text(left, 26, title, 15, anchor="start", bold=True)]
    for micro_batch in range(plan.num_micro_batches):
        groups = np.flatnonzero(plan.micro_batch == micro_batch)
        width = float(plan.costs[groups].max()) * scale
        parts.append(_box(left, top, width, row * RANKS, fill="card", line="warm", radius=0))
        parts += [
            _shaded(
                left, top + float(plan.first[i]) * row, float(plan.costs[i]) * scale, float(plan.size[i]) * row,
                SHADES[int(plan.size[i])],
            )
            for i in groups
        ]  # fmt: skip
        left += width
    return parts


if __name__ == "__main__":
    for name, svg in all_figures().items():
        (ASSETS / f"{name}.svg").write_text(svg)
