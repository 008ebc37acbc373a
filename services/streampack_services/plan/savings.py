"""``streampack report``: compare a run with other ways of batching its samples, and print the result.

The comparison counts slots: tokens and padding that GPUs compute for the same samples in the same order.

- ``padding``: each sample is padded to the longest of its micro-batch, as a loader without packing does. A micro-batch
  has as many samples as a pack of the run holds on average.
- ``greedy``: samples are concatenated until the next one does not fit (packer ``concatenative``).
- ``first_fit_decreasing``: first-fit decreasing over blocks of the run's window, as offline packers do.

The other ways share no prefixes, and keep no limits of media. All ways use the run's budget, alignment and shape.
None packs or pads across the end of a batch (``Served.bounds``). GPU hours are slots divided by a rate: the slots
that one GPU computes per second. All ways have the same rate, so GPU hours do not show the cost of attention, which
depends on lengths.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table
from rich.text import Text

from streampack.core.model.rules import Rules
from streampack.core.model.samples import I64
from streampack.errors import UserError
from streampack_services.amounts import counted, media_text
from streampack_services.forecast.forecast import rules_of_lengths, with_packer
from streampack_services.forecast.run_lengths import Served
from streampack_services.ledger.run_hours import FeedHours
from streampack_services.plan.plan_report import new_table, print_whole, width_of
from streampack_services.plan.step_time_fit import sentences_of
from streampack_services.terminal import new_console

Tree = dict[str, Any]
MOST_STREAMS = 6
"""Streams whose shares are printed: those that are furthest from their weights."""
NAMES = {
    "padding": "padding to the longest",
    "greedy": "greedy concatenation",
    "first_fit_decreasing": "first-fit decreasing",
}
"""Names of the other ways of batching."""
_PACKERS = {"greedy": "concatenative", "first_fit_decreasing": "first_fit_decreasing"}


@dataclass(frozen=True, slots=True)
class Rate:
    """Compute rate of the GPUs: ``tokens_per_s`` slots per second and GPU; ``said`` says where the rate comes from."""

    gpus: int
    tokens_per_s: float
    said: str


def padded_slots(lengths: I64, micro_batch: int, align: int, bounds: I64 | None = None) -> int:
    """Return the slots (tokens and padding) of samples that are padded to the longest of their micro-batch.

    ``lengths``: tokens per sample, int64 [samples]. ``align``: multiple of tokens that a sample is padded to.
    ``bounds``: ends of batches as indices into ``lengths``, int64 [batches + 1], from 0; no micro-batch crosses one.

    >>> padded_slots(np.array([4, 1, 3, 2, 5]), 2, 1)
    19
    """
    slots = -(-lengths // align) * align
    spans = pairwise([0, len(slots)] if bounds is None else bounds.tolist())
    starts = np.concatenate([np.arange(begin, end, micro_batch) for begin, end in spans])
    counts = np.diff(np.append(starts, len(slots)))
    return int((np.maximum.reduceat(slots, starts) * counts).sum())


def packed_slots(lengths: I64, rules: Rules, packer: str, bounds: I64 | None = None) -> int:
    """Return the slots (tokens and padding) of the packs that ``packer`` forms of samples with these ``lengths``.

    Each pack is as long as the rules' shape makes it. The samples between two of ``bounds``, int64 [batches + 1], are
    packed without the others. If steps are batches, one window holds all samples of a batch.
    """
    window = rules.max_window if rules.batch is None else max(len(lengths), 1)
    rules = with_packer(rules, packer, batch=None, warmup=None, window=window)
    chooser, align, slots = rules.new_packer(), rules.align.sample, 0
    units = -(-lengths // align)
    for begin, end in pairwise([0, len(lengths)] if bounds is None else bounds.tolist()):
        sizes, ages = units[begin:end], np.full(end - begin, -1, np.int64)
        choice = chooser.choose(sizes, ages, rules.budget // align, end - begin, True, window=window)
        pack_ends = np.concatenate([[0], np.cumsum(sizes[choice.indices])])[choice.bounds]
        slots += int(rules.own_widths(np.diff(pack_ends) * align).sum())
    return slots


def savings(run: Served, micro_batch: int | None, rate: Rate | None, fit: Tree | None = None) -> Tree:
    """Compare a run with other ways of batching; return a tree for JSON.

    ``run`` has the run's slots. ``others`` has the slots of each other way, and what the run saves against it. Savings
    are in slots, as a share, and in GPU hours if there is a ``rate``. ``micro_batch``: samples per micro-batch for
    ``padding``; None uses the mean number of samples per pack. ``fit``: that of the cost to step times.
    """
    rules = _whole(rules_of_lengths(run.rules), run.lengths)
    size = micro_batch or max(round(run.samples / run.filled_packs), 1)
    tokens = run.tokens + run.shared_tokens  # what the other ways compute
    grow = tokens / max(int(run.lengths.sum()), 1)
    slots = {"padding": padded_slots(run.lengths, size, rules.align.sample, run.bounds)}
    slots |= {name: packed_slots(run.lengths, rules, packer, run.bounds) for name, packer in _PACKERS.items()}
    return {
        "what": run.what,
        "note": run.note,
        "samples": run.samples,
        "share": run.share,
        "tokens": run.tokens,
        "shared_tokens": run.shared_tokens,
        "sharing": None if run.sharing is None else run.sharing._asdict() | {"sentence": run.sharing.sentence()},
        "media": run.media,
        "budget": rules.budget,
        "window": rules.window,
        "packer": "padded" if rules.padded else rules.new_packer().name,
        "align": rules.align.sample,
        "batches": len(run.bounds) - 1,
        "micro_batch": size,
        "assumptions": _assumptions(run, size, rate),
        "gpus": rate.gpus if rate is not None else None,
        "hours": None if run.hours is None else _hours(run.hours),
        "fit": fit,
        "order": run.order,
        "stages": run.stages,
        "run": _batching_figures(run.pack_slots, run.tokens, rate),
        "others": {
            name: _batching_figures(round(count * grow), tokens, rate, run.pack_slots) for name, count in slots.items()
        },
    }


def _whole(rules: Rules, lengths: I64) -> Rules:
    """Return ``rules`` with a budget that holds each of the ``lengths``; an earlier stage may have had a larger one."""
    most = -(-int(lengths.max(initial=0)) // rules.align.pack) * rules.align.pack
    return rules if most <= rules.budget else replace(rules, budget=most, warmup=None)


def _hours(hours: FeedHours) -> Tree:
    """Return the hours that ranks spent on real tokens, on padding and on waiting, the last two also by cause."""
    of_token = hours.trained_s / 3600 / max(hours.delivered_tokens, 1)
    padding = {cause: tokens * of_token for cause, tokens in hours.waste_tokens.items()}
    waiting = {cause: seconds / 3600 for cause, seconds in hours.starved_s.items()}
    lost = sum(padding.values())
    return {
        "tokens": hours.trained_s / 3600 - lost, "padding": lost, "waiting": sum(waiting.values()),
        "padding_by_cause": padding, "waiting_by_cause": waiting,
        "mfu": hours.useful_s / hours.timed_s if hours.timed_s else None, "mfu_hours": hours.timed_s / 3600,
    }  # fmt: skip


def rate_of(run: Served, gpus: int | None, tokens_per_s: float | None) -> Rate | None:
    """Return the compute rate of the GPUs: as given, or the broker's current rate divided by the GPUs.

    Return None if neither is known. Raises UserError for a rate that is not a finite number.
    """
    count = gpus or run.ranks or 1
    if tokens_per_s is not None:
        if not math.isfinite(tokens_per_s):
            raise UserError(
                f"--tokens-per-second is {tokens_per_s}, expected a finite number. Pass the rate of one GPU, such as "
                f"9000."
            )
        return Rate(count, tokens_per_s, "as given")
    if not run.tokens_per_s or not (gpus or run.ranks):
        return None
    empty = 0 if run.rules.padded else run.empty_packs * int(run.rules.own_widths(np.zeros(1, np.int64))[0])
    slots = run.tokens_per_s * (run.pack_slots + empty) / run.tokens
    gpus_text = f"{counted(count, 'GPU')} as given" if gpus else f"the {counted(count, 'attached rank')}"
    speed = f"the broker's current {run.tokens_per_s:,.0f} tokens per second, divided by {gpus_text}"
    return Rate(count, slots / count, speed)


def _batching_figures(slots: int, tokens: int, rate: Rate | None, own: int | None = None) -> Tree:
    """Return slots, utilization and GPU hours of a way of batching; with the run's ``own`` slots, also the savings."""
    result: Tree = {"slots": slots, "utilization": tokens / max(slots, 1)}
    if own is not None:
        result |= {"saved_slots": slots - own, "saved_share": (slots - own) / max(slots, 1)}
    if rate is not None:
        per_hour = rate.tokens_per_s * 3600
        result["gpu_hours"] = slots / per_hour
        if own is not None:
            result["saved_gpu_hours"] = (slots - own) / per_hour
            result["saved_hours"] = (slots - own) / per_hour / rate.gpus
    return result


def _assumptions(run: Served, micro_batch: int, rate: Rate | None) -> list[str]:
    """Return the assumptions of the comparison, as sentences."""
    part = "" if run.share == 1 else f"{len(run.lengths):,} of "
    scaled = "" if run.share == 1 else " The results are scaled to all samples."
    sentences = [f"The comparison uses {part}{counted(run.samples, 'sample')}, {run.note}.{scaled}"]
    if len(run.bounds) > 2:
        sentences.append(f"No method puts samples of two of the {counted(len(run.bounds) - 1, 'batch')} into one pack.")
    padding = f"The padding method has {counted(micro_batch, 'sample')} per micro-batch; a pack holds "
    padding += f"{run.samples / run.filled_packs:.1f} samples on average."
    split = " Packs are counted before they are split for a mesh." if run.rules.batch is not None else ""
    sentences.append(f"{padding} Empty packs in last steps are not counted.{split}")
    if run.rules.limits is not None:
        sentences.append("The other ways keep no limits of media, so their packs may hold more patches than fit.")
    if run.stages:
        budget = _whole(run.rules, run.lengths).budget
        sentences.append(f"The rules changed. The other ways have the same budget in all steps, {budget:,} tokens.")
    if rate is None:
        return [*sentences, "GPU hours are not known. Pass --tokens-per-second for one GPU, and --gpus."]
    return [*sentences, f"GPU hours assume {rate.tokens_per_s:,.0f} slots per second on each GPU ({rate.said})."]


def named_rows(report: Tree) -> dict[str, Tree]:
    """Return the figures of each way of batching by its name, those of the run last."""
    others = {NAMES[name]: row for name, row in report["others"].items()}
    return others | {f"this run: {report['packer']}": report["run"]}


def show_savings(report: Tree) -> None:
    """Print the result of ``savings``: a table, the assumptions, and one sentence."""
    console = new_console()
    about = f"  {counted(report['samples'], 'sample')}, {report['tokens']:,} tokens, budget {report['budget']:,}"
    console.print(Text.assemble((str(report["what"]), "bold"), about), soft_wrap=True)
    console.print()
    columns = _columns(report)
    table = _table(report, columns)
    if console.is_terminal and width_of(table) > console.width:  # leave out those that follow from the others
        table = _table(report, [column for at, column in enumerate(columns) if at != 2 and at < 6])
    print_whole(table)
    console.print()
    if report["stages"]:
        print_whole(_stages_table(report["stages"]))
        console.print()
    if report["order"]:
        _show_order(console, report["order"])
    for sentence in report["assumptions"]:
        console.print(f"- {sentence}", style="dim")
    sentences = [report["sharing"]["sentence"]] if report["sharing"] is not None else []
    if report["media"] is not None:
        media = report["media"]
        fullest = ", ".join(f"{axis} in {number:,}" for axis, number in media["bound_by"].items())
        counts = media_text(media["items"], media["patches"])
        sentences.append(f"Media: {counts}. The fullest axis of packs: {fullest}.")
    if report["hours"] is not None:
        sentences += _hours_text(report["hours"])
    sentences += sentences_of(report["fit"])
    for sentence in sentences:
        console.print()
        console.print(sentence)
    console.print()
    console.print(headline(report), style="bold")


def _stages_table(rows: list[Tree]) -> Table:
    """Return a table with the steps and packs of each stage."""
    table = new_table(["stage", "steps", "budget", "packs", "samples", "tokens", "utilization"], no_wrap=True)
    for row in rows:
        steps = " to ".join(f"{step:,}" for step in row["steps"])
        numbers = (f"{row[name]:,}" for name in ("budget", "packs", "samples", "tokens"))
        table.add_row(row["name"], steps, *numbers, f"{row['tokens'] / max(row['capacity'], 1):.2%}")
    return table


def _show_order(console: Console, rows: list[Tree]) -> None:
    """Print the order of the samples as a table, a row for each part of the steps."""
    streams = [row["streams"] for row in rows]
    off = {name: max(abs((row[name]["share"] or 0.0) - (row[name]["weight_share"] or 0.0)) for row in streams)
           for name in streams[0]}  # fmt: skip
    furthest = sorted(off, key=lambda name: -off[name])[:MOST_STREAMS]
    table = _order_table(rows, furthest)
    while furthest and console.is_terminal and width_of(table) > console.width:
        furthest.pop()
        table = _order_table(rows, furthest)
    print_whole(table)
    more = f"{counted(len(off) - len(furthest), 'more stream')} are nearer to their weights. "
    for line in (
        "mean: tokens / samples. p50 to late: displacement, the steps between a sample and its turn.",
        "streams: share in these steps, and share by weight. " + more * (len(off) > len(furthest)),
        "The weight of a stream that has ended goes to the others.",
    ):
        console.print(line, style="dim")
    if all(row["displacement"] is None for row in rows):
        console.print(
            "Displacement is not known, because the log does not have the order in which samples came.", style="dim"
        )
    console.print()


def _order_table(rows: list[Tree], furthest: list[str]) -> Table:
    """Return the table of the order of samples, with these streams in the order of their numbers."""
    figures = ("p50", "p99", "early", "late")
    names = [name for name in rows[0]["streams"] if name in furthest]
    table = new_table(["steps", "mean", *figures, *names], no_wrap=True)
    for row in rows:
        moved, streams = row["displacement"], [row["streams"][name] for name in names]
        table.add_row(
            "{:,} to {:,}".format(*row["steps"]), f"{row['mean_length']:,.0f}",
            *("-" if moved is None else f"{moved[figure]:,}" for figure in figures),
            *(f"{_percent(row['share'])} of {_percent(row['weight_share'])}" for row in streams),
        )  # fmt: skip
    return table


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _hours_text(hours: Tree) -> list[str]:
    """Return the hours of the ranks as sentences."""
    total = hours["tokens"] + hours["padding"] + hours["waiting"]
    if not total:
        return []

    def lost(to: str) -> str:
        """Return the hours lost, as ``0.31 (3.2%: stream 0.2, peers 0.11)``, without causes that lost nothing."""
        causes = sorted(hours[f"{to}_by_cause"].items(), key=lambda named: -named[1])
        named = ", ".join(f"{cause} {value:,.3g}" for cause, value in causes if value)
        return f"{hours[to]:,.3g} ({hours[to] / total:.1%}{': ' if named else ''}{named})"

    spent = f"{hours['tokens']:,.3g} on real tokens, {lost('padding')} lost to padding, {lost('waiting')} lost to waits"
    texts = [f"Hours of all ranks: {spent}. Training hours include all that trainers do between two steps."]
    if hours["mfu"] is None:
        return [*texts, "The useful MFU is not known. Pass model= and peak_tflops= to streampack.connect."]
    mfu = f"Useful MFU, of real tokens: {hours['mfu']:.1%} over {hours['mfu_hours']:,.3g} hours of ranks."
    return [*texts, mfu]


def headline(report: Tree) -> str:
    """Return the savings against each other way of batching, in one sentence."""
    parts = []
    for name, row in report["others"].items():
        hours = f" ({row['saved_gpu_hours']:,.3g} GPU hours)" if "saved_gpu_hours" in row else ""
        saved = f"{row['saved_share']:.1%}{hours}" if row["saved_slots"] >= 0 else "nothing"
        few = f", which has {row['slots']:,} slots" if row["saved_slots"] < 0 else ""
        parts.append(f"{saved} against {NAMES[name]}{few}")
    return f"Saved: {', '.join(parts)}."


def _columns(report: Tree) -> list[tuple[str, str, str]]:
    """Return the columns of the table: name, key and format of the figures."""
    columns = [
        ("slots", "slots", ","), ("utilization", "utilization", ".2%"), ("saved slots", "saved_slots", ","),
        ("saved %", "saved_share", ".2%"),
    ]  # fmt: skip
    if report["gpus"] is not None:
        on_all = f"saved h on {counted(report['gpus'], 'GPU')}"
        hours = {"GPU hours": "gpu_hours", "saved": "saved_gpu_hours", on_all: "saved_hours"}
        columns += [(name, key, ",.3g") for name, key in hours.items()]
    return columns


def _table(report: Tree, columns: list[tuple[str, str, str]]) -> Table:
    """Return the table of slots and savings."""
    table = new_table(["way of batching", *(name for name, _, _ in columns)], no_wrap=True)
    for name, row in named_rows(report).items():
        cells = [format(row[key], form) if key in row else "" for _, key, form in columns]
        if row.get("saved_slots", 0) < 0:
            cells[[key for _, key, _ in columns].index("saved_share")] = "none"
        table.add_row(name, *cells, style="bold" if row is report["run"] else None)
    return table
