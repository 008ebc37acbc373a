"""The page of ``streampack top``: a view of ``view_model`` as lines of text that fit the terminal.

A page is a head and blocks of lines; a wide terminal has two columns of blocks. Each block first gets its least number
of lines. The lines left go to the blocks in order. A block that leaves something out says so. Color is never the only
sign of a state.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.text import Text

from streampack.core.model.keys.planning_keys import MediaLimits
from streampack.core.staging.staged_chunk import LATE_TIMEOUT
from streampack_services.amounts import count_text, counted, duration_text, share_text, size_text, state_text
from streampack_services.broker.status import StreamStatus
from streampack_services.figure import places_in, row_of, shown_in, shown_rows
from streampack_services.watch.top_ranks import MOST_ROWS, Measure, rank_lines
from streampack_services.watch.top_text import Cell, bar, chart, fitted, printable, row, spark, table, title
from streampack_services.watch.view_model import HISTORY_S, BrokerView, FeedView, StreamView, rates_of

WIDE = 120
"""Characters of a line from which on the page has two columns of blocks."""
GAP = 3
"""Spaces between two columns of blocks."""
LABEL = 16
"""Characters of the labels at the left."""
BAR = 12
"""Characters of a bar."""
HEADLINE = 4
"""Most lines of the headline."""
CHART = 6
"""Lines of the chart of tokens/s."""
AT_ONCE = 10
"""Events on a page without a height."""
FULL, LOW, LOW_BYTES = 0.9, 0.05, 2 << 30
"""Memory that is fuller than this, streams with a smaller buffered share, and disks with fewer bytes are marked."""
LEVELS = {"info": "", "warning": "yellow", "error": "bold red", "critical": "bold red"}
KINDS = {"good": "dim", "waiting": "yellow", "bad": "bold red"}
"""Styles of headlines."""
STATES = {"serving": "bold green", "ended": "bold cyan"} | dict.fromkeys(
    ("draining", "starting", "waiting"), "bold yellow"
)


@dataclass(frozen=True, slots=True)
class PageOptions:
    """Options of a page."""

    feed: int = 0
    """Index of the feed to show; larger indices begin again at the first feed."""
    measure: Measure = "waits"
    """The figure that the map of ranks shows."""
    trouble: str = ""
    """The reason that there is no newer status, or an empty string."""
    keys: bool = False
    """Show the keys that the user can press."""


@dataclass(frozen=True, slots=True)
class _Block:
    """A block of lines."""

    make: Callable[[int | None], list[Text]]
    """Returns the lines, given the most lines that the block may have (None for any number)."""
    least: int
    """Lines that the block needs."""
    extra: bool = False
    """Show the block only if all other blocks are complete and all its lines fit, and never without a height."""


def page(view: BrokerView, options: PageOptions, width: int, height: int | None = None) -> list[Text]:
    """Return the lines of a page: at most ``height`` lines (None for any number) of at most ``width`` characters."""
    feed, now = view.feeds[options.feed % len(view.feeds)], view.status
    streams = view.streams_of(feed)
    head = _head(view, feed, options, width)
    foot = [_keys(view, feed, options)] if options.keys else []
    room = None if height is None else max(height - len(head) - len(foot), 0)
    wide = (width - GAP) * 11 // 20 if width >= WIDE else width
    narrow = width - wide - GAP if width >= WIDE else width
    facts = _Block(lambda _: _facts(view, feed, wide), 7 + len(_shown(view, feed)))
    chart = _Block(lambda _: _chart(feed, wide), 0, extra=True)
    ranks = _Block(lambda lines: rank_lines(feed, options.measure, wide, lines), 6)
    streamed = _Block(
        lambda lines: stream_lines(streams, STREAM_COLUMNS, counted(now.producers, "producer"), narrow, lines), 3
    )
    late = _Block(lambda lines: late_lines(streams, narrow, lines), 3)
    media = _Block(lambda _: media_lines(feed, view.status.held_media_bytes or 0, wide), 6)
    shares = _Block(lambda _: _shares(feed, narrow), 0, extra=True)
    events = _Block(lambda lines: _events(view, narrow, lines), 2)
    if width >= WIDE:
        left, right = [facts, media, chart, ranks], [streamed, late, shares, events]
        body = _beside(_stacked(left, room), _stacked(right, room), wide)
    else:
        body = _stacked([facts, media, chart, streamed, late, ranks, shares, events], room)
    if height is not None:
        body = body[:room] + [Text()] * ((room or 0) - len(body))
    return [fitted(printable(line), width) for line in head + body + foot][:height]


def _stacked(blocks: Sequence[_Block], room: int | None) -> list[Text]:
    """Return the lines of blocks one below the other, at most ``room`` (None for any number)."""
    if room is None:
        return [line for block in blocks if not block.extra for line in block.make(None)]
    wanted = [len(block.make(room)) for block in blocks]
    sizes = [min(want, block.least) for want, block in zip(wanted, blocks, strict=True)]
    for n in sorted(range(len(blocks)), key=lambda n: blocks[n].extra):
        more = wanted[n] - sizes[n]
        left = room - sum(sizes)
        sizes[n] += (more if more <= left else 0) if blocks[n].extra else max(min(more, left), 0)
    return [line for block, lines in zip(blocks, sizes, strict=True) if lines for line in block.make(lines)[:lines]]


def _beside(left: list[Text], right: list[Text], width: int) -> list[Text]:
    """Return lines of two columns; the left column is ``width`` characters wide."""
    lines = []
    for n in range(max(len(left), len(right))):
        line = Text().append_text(left[n]) if n < len(left) else Text()
        if n < len(right):
            line.append(" " * (width + GAP - line.cell_len)).append_text(right[n])
        lines.append(line)
    return lines


# The head


def _head(view: BrokerView, feed: FeedView, options: PageOptions, width: int) -> list[Text]:
    """Return lines: the broker and its state, the feed and its steps, and the headline, in up to ``HEADLINE`` lines."""
    now, served = view.status, feed.status
    state = (
        ("lost", "bold red")
        if options.trouble
        else (state_text(now.state, now.stalled_s), STATES.get(now.state, "bold"))
    )
    clock = time.strftime("%H:%M:%S", time.localtime(now.taken_at))
    relays = (now.relays.text, "bold red" if now.relays.lost else "")
    first = row((now.run, "bold"), state, f"up {duration_text(now.uptime_s)}", relays)
    about = Text(f"streampack {now.version}  {clock}", style="dim")
    if first.cell_len + about.cell_len + 2 <= width:
        first.pad_right(width - first.cell_len - about.cell_len)
        first.append_text(about)
    steps = [f"{served.steps.formed:,} formed", f"{served.steps.returned:,} returned"]
    if served.steps.end is not None:
        steps.append(f"{served.steps.end:,} in total")
    if served.committed is not None:
        steps.append(f"{served.committed:,} committed")
    if served.steps_left is not None:
        steps.append(f"about {served.steps_left.estimate:,.0f} left")
    iteration = f"iteration {served.round}" if served.round else ""
    second = row((f"feed {feed.name}", "bold"), iteration, "steps " + ", ".join(steps))
    kind = "bad" if options.trouble else served.headline.kind
    text = printable(Text(options.trouble or served.headline.text)).plain
    lines = textwrap.wrap(text, max(width, 1), max_lines=HEADLINE, placeholder="…") or [""]
    return [first, second, *(Text(line, style=KINDS[kind]) for line in lines)]


def _keys(view: BrokerView, feed: FeedView, options: PageOptions) -> Text:
    """Return a line with the keys that the user can press."""
    other = "data wait" if options.measure == "cost" else "cost"
    feeds = "f next feed" if len(view.feeds) > 1 else ""
    ranks = f"c ranks by {other}" if len(feed.ranks) > MOST_ROWS and not feed.status.ranks.left_out else ""
    return Text("  ".join(part for part in ("q quit", feeds, ranks) if part), style="dim")


# The blocks


def _facts(view: BrokerView, feed: FeedView, width: int) -> list[Text]:
    """Return seven lines, from throughput to the use of memory, then ``_shown``."""
    rest = width - LABEL
    rates = rates_of(feed.rates, max(min(rest - 18, 60), 10))
    now = feed.status
    cost = f"{now.figures.cost_max_over_mean:.3f} max / mean cost" if now.figures.cost_max_over_mean else "-"
    oldest = f", oldest {counted(now.window.oldest_steps, 'step')}" if now.window.oldest_steps else ""
    window = f"window {counted(now.window.samples, 'sample')}{oldest}"
    rows = [
        ("tokens/s", row((count_text(now.tokens_per_s).rjust(6), "bold"), spark(rates), f"{HISTORY_S / 60:.0f} min")),
        ("utilization", row(bar(now.figures.utilization, BAR), f"{now.figures.utilization:.2%}",
                            f"packing efficiency {now.figures.packing_efficiency:.2%}")),
        ("padding", Text(", ".join(f"{cause} {share_text(part)}" for cause, part in feed.padding_by_cause) or "none")),
        ("data wait", Text(feed.waits_text() if feed.ranks else "-",
                         style="yellow" if max(feed.starved.values(), default=0.0) >= 0.05 else "")),
        ("load imbalance", row(cost, window)),
        ("displacement", Text(feed.displacement)),
        ("memory", _storage(view)),
        *((label, Text(text)) for label, text in _shown(view, feed)),
    ]  # fmt: skip
    return [fitted(Text.assemble((label.ljust(LABEL - 1) + " ", "dim"), text), width) for label, text in rows]


def _shown(view: BrokerView, feed: FeedView) -> list[tuple[str, str]]:
    """Return (label, text) of changed rules, and of each figure of the broker and feed with a row of its own."""
    rules = [("rules", text)] if (text := feed.status.changes.text) else []
    return [*rules, *shown_rows(view.status), *shown_rows(feed.status)]


def _chart(feed: FeedView, width: int) -> list[Text]:
    """Return a title and a chart of the tokens per second over the last minutes; nothing without two known values."""
    rates = rates_of(feed.rates, width - LABEL)
    known_rates = [rate for rate in rates if rate is not None]
    if len(known_rates) < 2:
        return []
    labels = [count_text(max(known_rates)), *[""] * (CHART - 2), "0"]
    lines = [
        Text.assemble((label.rjust(LABEL - 2), "dim"), "  ", line)
        for label, line in zip(labels, chart(rates, CHART), strict=True)
    ]
    return [title("tokens/s", f"last {HISTORY_S / 60:.0f} minutes", width), *lines]


def _shares(feed: FeedView, width: int) -> list[Text]:
    """Return bars of data wait by cause and of padding by cause."""
    lines = []
    for name, note, shares in (
        ("data wait", "share of all ranks' time", feed.waits_by_cause),
        ("padding", "share of delivered tokens", sorted(feed.padding_by_cause, key=lambda cause: -cause[1])),
    ):
        rows: list[list[Cell]] = [
            [cause, f"{share:.2%}", bar(share, max(width - 30, 10), "magenta")] for cause, share in shares[:5]
        ]
        if rows:
            lines += [title(name, note, width), *table(("", "", ""), rows, width, left=(0, 2))[1:]]
    return lines


def _storage(view: BrokerView) -> Text:
    """Return a line about memory, log and disk."""
    limit, log = view.status.memory.arena_bytes, view.status.log
    used = view.memory_bytes / max(limit, 1)
    memory = f"{size_text(view.memory_bytes)} of {size_text(limit)}"
    line = row(bar(used, BAR // 2, "red" if used > FULL else "cyan"), memory)
    if log is None:
        return line
    free = log.free_bytes
    line.append(f"  log {size_text(log.bytes)}")
    line.append(f", disk {size_text(free)} free", style="bold red" if free < LOW_BYTES else "")
    if log.stalled:
        line.append(f", has stopped accepting records: {log.stalled}", style="bold red")
    elif log.warning:
        line.append(f", {log.warning}", style="bold red")
    if (standby := view.status.standby) is not None:
        member = standby.is_member and not standby.stalled
        line.append(f"  standby {standby.name or 'none'}", style="" if member else "bold red")
    return line


def _heard(stream: StreamView) -> Cell:
    """Return the time since the broker heard a producer of the stream."""
    seen = stream.status.last_seen_s
    if stream.ended:
        return "ended"
    if seen is None:
        return "never", "yellow"
    return (f"{duration_text(seen)} ago", "bold red" if stream.is_silent else "")


def _share_now(stream: StreamView) -> Cell:
    """Return the share that the weights in force give a stream; ``ended`` once all its samples are merged."""
    return ("ended", "bold cyan") if stream.status.ended else row_of(stream.status, "stream_share_ratio")[1]


def _warned(count: int) -> Cell:
    """Return a count that a person should look at; empty for 0."""
    return (f"{count:,}", "yellow") if count else ""


_CELLS: dict[str, Callable[[StreamView], Cell]] = {
    "tokens/s": lambda stream: "-" if stream.tokens_per_s is None else count_text(stream.tokens_per_s),
    "buffered": lambda stream: (
        f"{stream.buffered:.0%}", "yellow" if stream.buffered < LOW and not stream.ended else "",
    ),
    "share": _share_now,
    "lag": lambda stream: f"{count_text(stream.status.lag.tokens)} ({count_text(stream.status.lag.samples)})",
    "heard": _heard,
    "ended": lambda stream: f"{stream.status.ended_partitions} of {stream.status.partitions}",
    "over-long": lambda stream: str(stream.status.overlong or ""),
    "lost": lambda stream: count_text(stream.status.lost_tokens) if stream.status.lost_tokens else "",
    "rejected": lambda stream: _warned(stream.rejected),
    "warnings": lambda stream: _warned(stream.warnings),
    "hosts": lambda stream: ", ".join(stream.status.hosts),
}  # fmt: skip
"""The cell of a stream in each column of the table of streams that is not one declared figure."""
STREAM_COLUMNS = (
    "stream_weight", "share", "recent_share_ratio", "trained_ratio", "buffered", "heard", "rejected", "warnings",
    "tokens/s", "lag", "hosts",
)  # fmt: skip


def stream_lines(
    streams: Sequence[StreamView], columns: Sequence[str], note: str, width: int, room: int | None = None
) -> list[Text]:
    """Return a title and a row for each stream; without room for all, silent streams come first.

    Args:
        streams: The streams.
        columns: Names of the columns, keys of ``_CELLS`` or names of figures. Figures that are ``shown`` follow.
        note: Text at the right of the title.
        width: Most characters of a line.
        room: Most lines; None for any number.
    """
    total = len(streams)
    if room is not None and total + 2 > room:
        streams = sorted(streams, key=lambda stream: not stream.is_silent)[: max(room - 2, 1)]
        note = f"{total - len(streams)} more, {note}"
    columns = [*columns, *(place.figure.name for place in shown_in(StreamStatus))]
    rows = [[stream.status.stream, *(_cell(stream, name) for name in columns)] for stream in streams]
    header = ["", *(name if name in _CELLS else places_in(StreamStatus)[name].figure.label for name in columns)]
    left = [n for n, name in enumerate(header) if name in ("", "hosts")]
    return [title(counted(total, "stream"), note, width), *table(header, rows, width, left)]


def _cell(stream: StreamView, name: str) -> Cell:
    """Return the cell of a stream in the column ``name``."""
    return _CELLS[name](stream) if name in _CELLS else row_of(stream.status, name)[1]


def late_lines(streams: Sequence[StreamView], width: int, room: int | None = None) -> list[Text]:
    """Return a title and a row for each stream with late fields, the longest wait first; nothing without late fields.

    Args:
        streams: The streams.
        width: Most characters of a line.
        room: Most lines; None for any number.
    """
    late_streams = [(stream, late) for stream in streams if (late := stream.status.late) is not None]
    late_streams.sort(key=lambda stream: -stream[1].oldest_s)
    shown = late_streams if room is None or len(late_streams) + 2 <= room else late_streams[: max(room - 2, 1)]
    rows: list[list[Cell]] = [
        [
            stream.status.stream, f"{late.samples:,}", duration_text(late.oldest_s) if late.samples else "-",
            ", ".join(late.fields), _warned(stream.status.rejected.get(LATE_TIMEOUT, 0)),
        ]
        for stream, late in shown
    ]  # fmt: skip
    if not rows:
        return []
    note = (
        f"{len(late_streams) - len(shown)} more" if len(shown) < len(late_streams) else "samples that wait for values"
    )
    header = ("", "samples", "oldest", "lacks", "dropped")
    return [title("late fields", note, width), *table(header, rows, width, left=(0, 3))]


def media_lines(feed: FeedView, held_bytes: int, width: int) -> list[Text]:
    """Return a title and a row for each axis of a feed with media; nothing without media.

    Args:
        feed: The feed.
        held_bytes: Bytes of media that the broker holds, for all feeds.
        width: Most characters of a line.
    """
    media, rules, totals = feed.status.media, feed.status.changes.in_force, feed.status.totals
    if media is None:
        return []
    limits = rules.limits or MediaLimits()
    bound = sum(media.bound_by.values())
    rows: list[list[Cell]] = []
    for axis, total, most, limit in (
        ("tokens", totals.tokens, "", rules.budget),
        ("patches", media.patches, f"{media.most_patches:,}", limits.patches),
        ("items", media.items, f"{media.most_items:,}", limits.items),
    ):
        packs = media.bound_by.get(axis)
        share = "" if packs is None else f"{packs / max(bound, 1):.1%}"
        rows.append([axis, count_text(total), most, "none" if limit is None else f"{limit:,}", share])
    note = f"{size_text(held_bytes)} of media held"
    lines = [title("media", note, width), *table(("", "total", "most per pack", "limit", "fills packs"), rows, width)]
    if media.dropped:
        reasons = ", ".join(f"{count:,} {reason.replace('_', ' ')}" for reason, count in media.dropped.items())
        lines.append(Text(f"{sum(media.dropped.values()):,} items dropped by trainers: {reasons}", style="yellow"))
    return lines


def _events(view: BrokerView, width: int, room: int | None) -> list[Text]:
    """Return a title and the last log events, oldest first."""
    wanted = AT_ONCE if room is None else max(room - 1, 0)
    lines = [title("events", f"{view.bad_messages} bad messages" if view.bad_messages else "", width)]
    for event in view.events[len(view.events) - min(wanted, len(view.events)) :]:
        clock = time.strftime("%H:%M:%S", time.localtime(event["time"]))
        text = " ".join(event["text"].split())
        level = event["level"]
        prefix = "" if level == "info" else f"{level}: "
        lines.append(fitted(Text.assemble((f"{clock}  ", "dim"), (prefix + text, LEVELS.get(level, ""))), width))
    return lines
