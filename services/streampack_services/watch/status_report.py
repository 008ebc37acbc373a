"""``streampack status``: print the full status of a broker. Streams and ranks look as in ``streampack top``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from streampack.core.stats.sample_warnings import advice
from streampack_services.amounts import count_text, counted, duration_text, size_text, state_text
from streampack_services.broker.status import PADDING_LABELS, BrokerStatus, FeedStatus, PackFigures, StandbyStatus
from streampack_services.figure import row_of, shown_rows
from streampack_services.terminal import new_console
from streampack_services.watch.top_ranks import rank_lines
from streampack_services.watch.top_text import printable
from streampack_services.watch.top_view import late_lines, media_lines, stream_lines
from streampack_services.watch.view_model import FeedView, StreamView, Watch

MIXTURE_COLUMNS = (
    "stream_weight", "share", "recent_share_ratio", "trained_ratio", "trained_tokens", "trained_samples",
    "stream_passes",
)  # fmt: skip
STREAM_COLUMNS = (
    "received_samples", "received_tokens", "buffered", "lag", "heard", "ended", "over-long", "lost", "rejected",
)  # fmt: skip
"""Columns of both tables of streams, for ``stream_lines``."""


def show_status(status: BrokerStatus) -> None:
    """Print a broker's status: the broker, then each feed with its streams and ranks."""
    watch = Watch()
    watch.add(status)
    console, view = new_console(), watch.view()
    state = state_text(status.state, status.stalled_s)
    about = f"  {state}  up {duration_text(status.uptime_s)}  streampack {status.version}"
    console.print(Text.assemble((status.run, "bold"), about))
    facts = Table.grid(Column(), Column(overflow="fold"), padding=(0, 2))  # a long path is shown in full
    facts.add_row("memory", f"{size_text(view.memory_bytes)} of {size_text(status.memory.arena_bytes)}")
    if (log := status.log) is not None:
        safe = f", {log.unsafe_records} records not durable yet" if log.unsafe_records else ""
        free = f"; disk {size_text(log.free_bytes)} free"
        facts.add_row("log", f"{size_text(log.bytes)}, {log.records} records{safe}{free}")
        if log.stalled:
            facts.add_row("", f"The log has stopped accepting records. Cause: {log.stalled}")
        if log.warning:
            facts.add_row("", log.warning)
    if (standby := status.standby) is not None:
        facts.add_row("standby", standby_text(standby))
    if status.messages.bad:
        facts.add_row("bad messages", status.messages.bad_text)
    if unsent := status.messages.unsent:
        facts.add_row("not sent", f"{counted(unsent, 'message')} to peers that were gone")
    for label, text in (row_of(status, "producers_connected"), ("relays", status.relays.text), *shown_rows(status)):
        if text:
            facts.add_row(label, text)
    console.print(facts)
    for feed in view.feeds:
        _show_feed(console, feed)
        _print(console, media_lines(feed, status.held_media_bytes or 0, console.width))
        streams = view.streams_of(feed)
        for columns, note in (
            (MIXTURE_COLUMNS, "recent: last 100 steps; trained: steps that all ranks returned"),
            (STREAM_COLUMNS, "lag: tokens (samples) that producers have not sent yet"),
        ):
            _print(console, stream_lines(streams, columns, note, console.width))
        _print(console, _rejected(streams), _warnings(streams), late_lines(streams, console.width))
        _print(console, rank_lines(feed, "waits", console.width, None))


def show_standby(status: dict[str, Any]) -> None:
    """Print the status of a broker that is not active, as its ``/status`` has it."""
    standby = status["standby"]
    console = new_console()
    console.print(printable(Text.assemble((str(status["run"]), "bold"), f"  standby on {standby['name']}")))
    facts = Table.grid(padding=(0, 2))
    facts.add_row("state", str(standby["waits_for"]))
    facts.add_row("may take over", "yes" if standby["is_member"] else "no")
    unsafe = standby["unsafe_records"]
    facts.add_row("log", f"{standby['records']} records" + (f", {unsafe} not durable yet" if unsafe else ""))
    console.print(facts)


def standby_text(standby: StandbyStatus) -> str:
    """Return a line about the standby."""
    if standby.stalled:
        return f"No new steps are served. Cause: {standby.stalled}"
    if not standby.name:
        return "none is connected"
    behind = f", {counted(standby.lag_records, 'record')} behind" if standby.lag_records else ""
    return f"{standby.name} {'may take over' if standby.is_member else 'copies the log'}{behind}"


def _print(console: Console, *blocks: list[Text]) -> None:
    """Print lines without control characters."""
    for block in blocks:
        for line in block:
            console.print(printable(line))


def _show_feed(console: Console, view: FeedView) -> None:
    """Print the figures of a feed."""
    feed = view.status
    console.print()
    iteration = f", iteration {feed.round}" if feed.round else ""
    state = f"  {state_text(feed.state, feed.stalled_s)}{iteration}"
    console.print(Text.assemble((f"feed {view.name}", "bold"), state))
    console.print(feed.headline.text, style="" if feed.headline.kind == "good" else "yellow")
    facts = Table.grid(padding=(0, 2))
    for name, text in (*_progress(feed), *_packing(feed), *_tokens(feed), *_waits(view), *shown_rows(feed)):
        if text:
            facts.add_row(name, text)
    console.print(facts)


Facts = tuple[tuple[str, str], ...]
"""(name, text) of each row; a row without text is left out."""


def _progress(feed: FeedStatus) -> Facts:
    """Return rows about the steps of a feed."""
    steps, left = feed.steps, feed.steps_left
    end = "" if steps.end is None else f" of {steps.end}"
    about = ""
    if left is not None:
        between = f", between {left.low:,.0f} and {left.high:,.0f}" if left.low != left.high else ""
        about = f"about {left.estimate:,.0f}{between}"
    return (
        ("steps", f"{steps.formed} formed{end}, {steps.returned} returned by every rank"),
        ("steps left", about),
        ("rules", feed.changes.text),
        ("checkpoint", "" if feed.committed is None else f"committed at step {feed.committed}"),
    )


def _packing(feed: FeedStatus) -> Facts:
    """Return rows about how full the packs are, and how evenly they are dealt."""
    totals, figures, padded = feed.totals, feed.figures, feed.dynamic_batching
    packed = f"{count_text(totals.tokens)} tokens in {count_text(totals.packs)} packs"
    sharing = f"{totals.shared_ratio:.2%} of the samples' tokens, {count_text(totals.shared_tokens)} tokens"
    removed = cost = ""
    if padded is not None:
        removed = f"{count_text(padded.removed_padding_tokens)}, {padded.removed_padding_ratio:.2%}"
        removed += " of batches padded to the longest sample"
    if figures.cost_max_over_mean:
        cost = f"{figures.cost_max_over_mean:.3f} by micro-batch, {figures.step_cost_max_over_mean:.3f} by step"
    ranks = [
        f"{when} balancing {count_text(balance.min)} to {count_text(balance.max)}"
        for when, balance in (("before", feed.rank_tokens.before), ("after", feed.rank_tokens.after))
    ]
    return (
        ("packed", f"{packed}, {count_text(feed.tokens_per_s)} tokens/s"),
        ("shared prefixes", sharing if totals.shared_tokens else ""),
        ("utilization", f"{_filled(figures)}; with alignment {_filled(feed.padded_figures)}"),
        row_of(figures, "bin_balance_ratio"),
        ("removed padding", removed),
        ("load imbalance", f"{cost or '-'}; 1.0 is perfect"),  # no step was dealt yet
        ("tokens per rank", ", ".join(ranks)),
    )


def _tokens(feed: FeedStatus) -> Facts:
    """Return rows about padding and lost tokens."""
    always = {"alignment", "pack_tail"}  # other causes only if they have tokens
    padding = [
        f"{PADDING_LABELS.get(cause, cause)} {count_text(tokens)}"
        for cause, tokens in feed.waste_tokens.items()
        if tokens or cause in always
    ]
    policies = msgspec.structs.asdict(feed.lost_tokens).items()
    lost = [f"{policy} {count_text(tokens)}" for policy, tokens in policies if tokens]
    return (
        ("padding", f"{', '.join(padding)}, of {count_text(feed.delivered_tokens)} tokens delivered"),
        ("lost tokens", ", ".join(lost)),
    )


def _waits(view: FeedView) -> Facts:
    """Return rows about the waits of ranks and of samples."""
    feed, waits = view.status, view.status.waits
    bound = "" if waits.bound_steps is None else f", bound {waits.bound_steps}"
    longest = f"p99 {counted(waits.p99_steps, 'step')}, longest {waits.longest_steps}{bound}"
    outliers = "" if waits.outliers is None else f"; {counted(waits.outliers, 'outlier')} waiting now"
    window = f"{counted(feed.window.samples, 'sample')}, {count_text(feed.window.tokens)}"
    memory = f"{count_text(feed.held_tokens)} of {count_text(feed.held_limit_tokens)}"
    return (
        ("data wait", view.waits_text(" of all ranks' time") if view.ranks else "-"),
        ("window", f"{window} tokens; {memory} tokens held"),
        ("window waits", f"{longest}{outliers}"),
        ("displacement", view.displacement),
    )


def _filled(figures: PackFigures) -> str:
    """Return utilization and packing efficiency as text."""
    return f"{figures.utilization:.2%}, packing efficiency {figures.packing_efficiency:.2%}"


def _rejected(streams: Sequence[StreamView]) -> list[Text]:
    """Return a line for each stream with rejected samples: their number by reason."""
    return [
        Text(
            f"{row.stream}: rejected {', '.join(f'{why} {count}' for why, count in row.rejected.items())}",
            overflow="fold",
        )
        for row in (stream.status for stream in streams)
        if row.rejected
    ]


def _warnings(streams: Sequence[StreamView]) -> list[Text]:
    """Return a line for each warning of each stream: the number of samples, and what the warning means."""
    return [
        Text(f"{row.stream}: warning {word}, {counted(count, 'sample')}: {advice(word)}", overflow="fold")
        for row in (stream.status for stream in streams)
        for word, count in row.warnings.items()
    ]
