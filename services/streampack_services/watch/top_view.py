"""How ``streampack top`` looks: a view of ``view_model`` as lines of text, none wider than the terminal, nor more.

A page is a head and blocks, each a title and its lines; a wide terminal has two columns of them. Blocks are given the
least that they need and then, in order, what is left; one that has no room for all says so. Colour only repeats what
letters and bars say: nothing is lost without.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.text import Text

from streampack_services.amounts import count_text, counted, duration_text, size_text, state_text
from streampack_services.watch.top_ranks import MOST_ROWS, Measure, rank_lines
from streampack_services.watch.top_text import Cell, bar, chart, fitted, printable, row, spark, table, title
from streampack_services.watch.view_model import HISTORY_S, Feed, Stream, View, rates_of

WIDE = 120
"""Columns from which on there are two columns of blocks."""
GAP = 3
LABEL = 13
BAR = 12
CHART = 6
"""Lines of the chart of tokens/s."""
AT_ONCE = 10
"""Events, where there is no end of a page."""
SILENT_S = 10.0
"""A stream whose producers were heard longer ago is marked."""
FULL, LOW, LOW_BYTES = 0.9, 0.05, 2 << 30
"""Memory that is fuller, a stream of which less is buffered and a disk with less space are marked."""
LEVELS = {"info": "", "warning": "yellow", "error": "bold red", "critical": "bold red"}
STATES = {"serving": "bold green", "ended": "bold cyan"} | dict.fromkeys(
    ("draining", "starting", "waiting"), "bold yellow"
)
WORDS = {"pack_tail": "tails", "empty_pack": "empty packs"}
"""Of causes, where a person has another."""


@dataclass(frozen=True, slots=True)
class Look:
    """What a person has chosen to see: which feed, and which figure of the ranks; ``trouble`` is why nothing newer is
    known, ``keys`` whether there is anybody to press one."""

    feed: int = 0
    measure: Measure = "waits"
    trouble: str = ""
    keys: bool = False


@dataclass(frozen=True, slots=True)
class _Block:
    """Lines that are made for a number of them, None for all; fewer than ``least`` say little. What only a page with
    room to spare has is ``extra``, and never part of all."""

    make: Callable[[int | None], list[Text]]
    least: int
    extra: bool = False


def page(view: View, look: Look, width: int, height: int | None = None) -> list[Text]:
    """At most ``height`` lines (None: as many as it takes) of at most ``width`` characters."""
    feed = view.feeds[look.feed % len(view.feeds)]
    streams = [stream for stream in view.streams if stream.feed == feed.name]
    head = _head(view, feed, look, width)
    foot = [_keys(view, feed, look)] if look.keys else []
    room = None if height is None else max(height - len(head) - len(foot), 0)
    wide = (width - GAP) * 11 // 20 if width >= WIDE else width
    narrow = width - wide - GAP if width >= WIDE else width
    facts = _Block(lambda _: _facts(view, feed, wide), 6)
    chart = _Block(lambda _: _chart(feed, wide), 0, extra=True)
    ranks = _Block(lambda lines: rank_lines(feed, look.measure, wide, lines), 6)
    streamed = _Block(lambda lines: _streams(view, streams, narrow, lines), 3)
    shares = _Block(lambda _: _shares(feed, narrow), 0, extra=True)
    events = _Block(lambda lines: _events(view, narrow, lines), 3)
    if width >= WIDE:
        body = _beside(_stacked([facts, chart, ranks], room), _stacked([streamed, shares, events], room), wide)
    else:
        body = _stacked([facts, chart, streamed, ranks, shares, events], room)
    if height is not None:
        body = body[:room] + [Text()] * ((room or 0) - len(body))
    return [fitted(printable(line), width) for line in head + body + foot][:height]


def _stacked(blocks: Sequence[_Block], room: int | None) -> list[Text]:
    """One beneath the other. What is left goes to those that are no extras first, and all of one or none of it."""
    if room is None:
        return [line for block in blocks if not block.extra for line in block.make(None)]
    wanted = [len(block.make(room)) for block in blocks]
    given = [min(want, block.least) for want, block in zip(wanted, blocks, strict=True)]
    for n in sorted(range(len(blocks)), key=lambda n: blocks[n].extra):
        more = wanted[n] - given[n]
        left = room - sum(given)
        given[n] += (more if more <= left else 0) if blocks[n].extra else max(min(more, left), 0)
    return [line for block, lines in zip(blocks, given, strict=True) if lines for line in block.make(lines)[:lines]]


def _beside(left: list[Text], right: list[Text], width: int) -> list[Text]:
    lines = []
    for n in range(max(len(left), len(right))):
        line = Text().append_text(left[n]) if n < len(left) else Text()
        if n < len(right):
            line.append(" " * (width + GAP - line.cell_len)).append_text(right[n])
        lines.append(line)
    return lines


# The head


def _head(view: View, feed: Feed, look: Look, width: int) -> list[Text]:
    state = (
        ("lost", "bold red")
        if look.trouble
        else (state_text(view.state, view.stalled_s), STATES.get(view.state, "bold"))
    )
    clock = time.strftime("%H:%M:%S", time.localtime(view.taken_at))
    first = row((view.run, "bold"), state, f"up {duration_text(view.uptime_s)}")
    about = Text(f"streampack {view.version}  {clock}", style="dim")
    if first.cell_len + about.cell_len + 2 <= width:
        first.pad_right(width - first.cell_len - about.cell_len)
        first.append_text(about)
    steps = [f"{feed.formed:,} formed", f"{feed.returned:,} returned"]
    if feed.end is not None:
        steps.append(f"{feed.end:,} in all")
    if feed.committed is not None:
        steps.append(f"{feed.committed:,} committed")
    if feed.steps_left is not None:
        steps.append(f"about {feed.steps_left.estimate:,.0f} left")
    again = f"iteration {feed.round}" if feed.round else ""
    second = row((f"feed {feed.name}", "bold"), again, "steps " + ", ".join(steps))
    why = look.trouble or feed.waiting_for
    busy = feed.waits_for in ("peers", "forming") and feed.all_attached  # they train, and it packs, as they should
    third = Text(why, style="bold red" if look.trouble else "dim" if busy else "yellow")
    return [first, second, third]


def _keys(view: View, feed: Feed, look: Look) -> Text:
    other = "waits" if look.measure == "cost" else "cost"
    feeds = "f another feed" if len(view.feeds) > 1 else ""
    ranks = f"c ranks by {other}" if len(feed.ranks) > MOST_ROWS else ""  # a table has both
    return Text("  ".join(each for each in ("q quit", feeds, ranks) if each), style="dim")


# The blocks


def _facts(view: View, feed: Feed, width: int) -> list[Text]:
    rest = width - LABEL
    rates = rates_of(feed.rates, max(min(rest - 18, 60), 10))
    wasted = [_share(WORDS.get(cause, cause), share) for cause, share in feed.waste.items() if share]
    starved = sorted(feed.starved.items(), key=lambda each: -each[1])
    named = [_share(f"stream {stream}", share) for stream, share in feed.starved_streams.items()]
    causes = [_share(cause, share) for cause, share in starved if not (cause == "stream" and named)]
    cost = "" if feed.cost_max_over_mean is None else f"cost {feed.cost_max_over_mean:.3f} of the mean"
    oldest = f", oldest {counted(feed.oldest_steps, 'step')}" if feed.oldest_steps else ""
    window = f"window {counted(feed.window_samples, 'sample')}{oldest}"
    rows = [
        ("tokens/s", row((count_text(feed.tokens_per_s).rjust(6), "bold"), spark(rates), f"{HISTORY_S / 60:.0f} min")),
        ("utilisation", row(bar(feed.utilisation, BAR), f"{feed.utilisation:.2%}",
                            f"packing efficiency {feed.packing_efficiency:.2%}")),
        ("waste", Text(", ".join(wasted) or "none")),
        ("starved", Text(", ".join(named + causes) or ("no rank waits" if feed.ranks else "-"),
                         style="yellow" if starved and starved[0][1] >= 0.05 else "")),
        ("balance", Text(", ".join(each for each in (cost, window) if each))),
        ("memory", _storage(view)),
    ]  # fmt: skip
    return [fitted(Text.assemble((label.ljust(LABEL), "dim"), text), width) for label, text in rows]


def _share(what: str, share: float) -> str:
    return f"{what} {share:.2%}" if share < 0.1 else f"{what} {share:.1%}"


def _chart(feed: Feed, width: int) -> list[Text]:
    """Tokens a second, of the last minutes."""
    rates = rates_of(feed.rates, width - LABEL)
    known = [rate for rate in rates if rate is not None]
    if len(known) < 2:
        return []
    labels = [count_text(max(known)), *[""] * (CHART - 2), "0"]
    lines = [
        Text.assemble((label.rjust(LABEL - 2), "dim"), "  ", line)
        for label, line in zip(labels, chart(rates, CHART), strict=True)
    ]
    return [title("tokens/s", f"of the last {HISTORY_S / 60:.0f} minutes", width), *lines]


def _shares(feed: Feed, width: int) -> list[Text]:
    """Bars of what ranks wait for, and of what is wasted."""
    starved = {cause: share for cause, share in feed.starved.items() if cause != "stream"}
    starved |= {f"stream {stream}": share for stream, share in feed.starved_streams.items()}
    wasted = {WORDS.get(cause, cause): share for cause, share in feed.waste.items() if share}
    lines = []
    for name, note, shares in (
        ("starved by", "share of all ranks' time", starved), ("wasted by", "share of what was delivered", wasted)
    ):  # fmt: skip
        rows: list[list[Cell]] = [
            [cause, f"{share:.2%}", bar(share, max(width - 30, 10), "magenta")]
            for cause, share in sorted(shares.items(), key=lambda each: -each[1])[:5]
        ]
        if rows:
            lines += [title(name, note, width), *table(("", "", ""), rows, width, left=(0, 2))[1:]]
    return lines


def _storage(view: View) -> Text:
    used = view.memory_bytes / max(view.memory_limit_bytes, 1)
    memory = f"{size_text(view.memory_bytes)} of {size_text(view.memory_limit_bytes)}"
    line = row(bar(used, BAR, "red" if used > FULL else "cyan"), memory)
    if view.log is None:
        return line
    free = view.log.free_bytes
    line.append(f"  log {size_text(view.log.bytes)}")
    line.append(f", disk {size_text(free)} free", style="bold red" if free < LOW_BYTES else "")
    if view.log.stalled:
        line.append(f", takes no more: {view.log.stalled}", style="bold red")
    return line


def _streams(view: View, streams: Sequence[Stream], width: int, room: int | None) -> list[Text]:
    """Where there is no room for all, those that are not heard come first."""
    note, every = counted(view.producers, "producer"), len(streams)
    if room is not None and every + 2 > room:
        streams = sorted(streams, key=lambda stream: not _is_silent(stream))[: max(room - 3, 1)]
        note = f"{every - len(streams)} more, {note}"
    rows: list[list[Cell]] = [
        [
            stream.name, f"{stream.weight:g}", count_text(stream.tokens),
            "-" if stream.tokens_per_s is None else count_text(stream.tokens_per_s),
            (f"{stream.buffered:.0%}", "yellow" if stream.buffered < LOW and not stream.ended else ""),
            count_text(stream.lag_tokens), _seen(stream),
            (f"{stream.rejected:,}", "yellow" if stream.rejected else ""), ", ".join(stream.hosts),
        ]
        for stream in streams
    ]  # fmt: skip
    header = ("", "weight", "tokens", "tokens/s", "buffered", "lag", "heard", "rejected", "hosts")
    return [title(counted(every, "stream"), note, width), *table(header, rows, width, left=(0, 8))]


def _seen(stream: Stream) -> Cell:
    if stream.ended:
        return "ended"
    if stream.last_seen_s is None:
        return "never", "yellow"
    if not _is_silent(stream):
        return f"{stream.last_seen_s:.0f} s ago"
    return f"{duration_text(stream.last_seen_s)} ago", "bold red"


def _is_silent(stream: Stream) -> bool:
    return not stream.ended and (stream.last_seen_s is None or stream.last_seen_s > SILENT_S)


def _events(view: View, width: int, room: int | None) -> list[Text]:
    wanted = AT_ONCE if room is None else max(room - 1, 0)
    lines = [title("events", f"{view.bad_messages} bad messages" if view.bad_messages else "", width)]
    for event in view.events[len(view.events) - min(wanted, len(view.events)) :]:
        clock = time.strftime("%H:%M:%S", time.localtime(event["time"]))
        text = " ".join(event["text"].split())
        level = event["level"]
        said = "" if level == "info" else f"{level}: "
        lines.append(fitted(Text.assemble((f"{clock}  ", "dim"), (said + text, LEVELS.get(level, ""))), width))
    return lines
