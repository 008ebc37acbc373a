"""What ``streampack status`` shows a person: the snapshot of ``status.py``, laid out."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from streampack_services.amounts import count_text, counted, duration_text, size_text
from streampack_services.status import describe

Tree = dict[str, Any]


def show_status(snapshot: Tree) -> None:
    """Print a snapshot."""
    console, memory = _console(), snapshot["memory"]
    about = f"  {snapshot['state']}  up {duration_text(snapshot['uptime_s'])}  streampack {snapshot['version']}"
    console.print(Text.assemble((snapshot["run"], "bold"), about))
    live, arena = memory["live_tokens"] * memory["token_bytes"], memory["arena_bytes"]
    facts = Table.grid(padding=(0, 2))
    facts.add_row("memory", f"{size_text(live)} of {size_text(arena)}")
    if (log := snapshot["log"]) is not None:
        safe = f", {log['unsafe_records']} records not safe yet" if log["unsafe_records"] else ""
        facts.add_row("log", f"{size_text(log['bytes'])}, {log['records']} records{safe}")
        if log["stalled"]:
            facts.add_row("", f"takes no more: {log['stalled']}")
    facts.add_row("bad messages", ", ".join(f"{what} {count}" for what, count in snapshot["messages"].items()))
    console.print(facts)
    console.print(_streams_table(snapshot))
    for name, feed in snapshot["feeds"].items():
        _show_feed(console, name, feed)


def _show_feed(console: Console, name: str, feed: Tree) -> None:
    steps, figures = feed["steps"], feed["figures"]
    console.print()
    again = f", iteration {feed['round']}" if feed["round"] else ""
    console.print(Text.assemble((f"feed {name}", "bold"), f"  {feed['state']}{again}"))
    if feed["waiting_for"]:
        console.print(describe(**feed["waiting_for"]))
    end = "" if steps["end"] is None else f" of {steps['end']}"
    packed = f"{count_text(feed['totals']['tokens'])} tokens in {count_text(feed['totals']['packs'])} packs"
    causes = {"alignment", "pack_tail"}  # and others where there are any
    waste = [
        f"{cause.replace('_', ' ')} {count_text(tokens)}"
        for cause, tokens in feed["waste_tokens"].items()
        if tokens or cause in causes
    ]
    cost = f"{figures['cost_max_over_mean']:.3f}" if figures["cost_max_over_mean"] else "-"  # no rank has come yet
    if cost != "-":
        cost += f" by micro-batch, {figures['step_cost_max_over_mean']:.3f} by step"
    lost = [f"{policy} {count_text(tokens)}" for policy, tokens in feed["lost_tokens"].items()]
    ranks = [
        f"{when} balancing {count_text(each['min'])} to {count_text(each['max'])}"
        for when, each in feed["rank_tokens"].items()
    ]
    waits = feed["waits"]
    bound = "" if waits["bound_steps"] is None else f", none waits beyond {waits['bound_steps']}"
    longest = f"99 of 100 up to {waits['p99_steps']}, all up to {counted(waits['longest_steps'], 'step')}{bound}"
    outliers = "" if waits["outliers"] is None else f"; {counted(waits['outliers'], 'outlier')} there now"
    rows = [
        ("steps", f"{steps['formed']} formed{end}, {steps['returned']} returned by every rank"),
        ("packed", f"{packed}, {count_text(feed['tokens_per_s'])} tokens/s"),
        ("utilisation", f"{_filled(figures)}; with alignment {_filled(feed['padded_figures'])}"),
        ("balance", f"{figures['bin_balance']:.3f} of fill, cost max/mean {cost}"),
        ("rank's tokens", ", ".join(ranks)),
        ("wasted tokens", f"{', '.join(waste)}, of {count_text(feed['delivered_tokens'])} delivered"),
        ("lost tokens", ", ".join(lost)),
        ("window", f"{feed['window']['samples']} samples, {count_text(feed['window']['tokens'])} tokens"),
        ("waited", f"{longest}{outliers}"),
        ("held", f"{count_text(feed['held_tokens'])} of {count_text(feed['held_limit_tokens'])} tokens"),
    ]
    if (padded := feed["dynamic_batching"]) is not None:
        removed = f"{count_text(padded['removed_padding_tokens'])}, {padded['removed_padding_ratio']:.2%}"
        rows.insert(4, ("no padding", f"{removed} of batches as wide as their longest sample"))
    if feed["committed"] is not None:
        rows.insert(1, ("checkpoint", f"step {feed['committed']} is committed"))
    facts = Table.grid(padding=(0, 2))
    for row in rows:
        facts.add_row(*row)
    console.print(facts)
    console.print(_readers_table(feed))


def _filled(figures: Tree) -> str:
    return f"{figures['utilisation']:.2%}, packing efficiency {figures['packing_efficiency']:.2%}"


def _streams_table(snapshot: Tree) -> Table:
    table = _table("stream", "feed", "weight", "samples", "tokens", "over-long", "lost", "rejected", "ended")
    for row in snapshot["streams"]:
        rejected = ", ".join(f"{reason} {count}" for reason, count in row["rejected"].items()) or "0"
        table.add_row(
            row["stream"], row["feed"], f"{row['weight']:g}", count_text(row["samples"]), count_text(row["tokens"]),
            str(row["overlong"]), count_text(row["lost_tokens"]), rejected,
            f"{row['ended_partitions']} of {row['partitions']}",
        )  # fmt: skip
    table.title = counted(snapshot["producers"], "producer")
    return table


def _readers_table(feed: Tree) -> Table:
    table = _table("rank", "where", "returned", "ahead", "starved", "next() p99")
    dimensions = [
        name for name in ("dp", "cp", "tp", "pp") if name == "dp" or any(row[f"{name}_rank"] for row in feed["readers"])
    ]
    for row in feed["readers"]:
        stats = row["stats"]
        rank = " ".join(f"{name}={row[f'{name}_rank']}" for name in dimensions)
        starved = f"{stats['starved_fraction']:.1%}" if "starved_fraction" in stats else "-"
        p99 = f"{stats['next_p99_ms']:.2f} ms" if "next_p99_ms" in stats else "-"
        ahead = max(0, row["have_upto"] - row["done_upto"])
        table.add_row(rank, row["where"], str(row["done_upto"]), str(ahead), starved, p99)
    all_ = "" if feed["all_ranks_attached"] or not feed["readers"] else ", not yet all of their mesh"
    table.title = f"{counted(len(feed['readers']), 'rank')}{all_}"
    table.show_header = bool(feed["readers"])
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, title_justify="left", title_style="bold", padding=(0, 2, 0, 0))
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="left" if name == "where" else "right")
    return table


# For people


def _console() -> Console:
    """One that prints names as they are: what users write in brackets or between colons means nothing to it."""
    return Console(highlight=False, markup=False, emoji=False)
