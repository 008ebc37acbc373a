"""What ``streampack status`` and ``health`` show: fetched, then laid out for a person; and changes asked for.

Knows the snapshot's keys (``status.py``); starts nothing.
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from streampack.client import read_rendezvous
from streampack.errors import PeerError, Rejected, Unreachable, UserError
from streampack_services.status import describe

DEFAULT_ENDPOINT = "http://127.0.0.1:7400"
Tree = dict[str, Any]


# Fetching


def _base(endpoint: str | None, timeout_s: float) -> str:
    found = endpoint or os.environ.get("STREAMPACK_HTTP") or DEFAULT_ENDPOINT
    if found.startswith("file://"):
        found = read_rendezvous(Path(found.removeprefix("file://")), "http", timeout_s)
    if "://" not in found:
        found = f"http://{found}"
    if not found.startswith(("http://", "https://")):
        raise UserError(f"got endpoint {found!r}, expected the broker's HTTP address such as {DEFAULT_ENDPOINT}")
    return found.rstrip("/")


def _fetch(base: str, path: str, timeout_s: float, body: bytes | None = None) -> tuple[int, str]:
    """(HTTP status, text); a ``body`` is posted. Raises Unreachable. Proxies of the environment are not used: a broker
    is near."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(urllib.request.Request(base + path, body), timeout=timeout_s) as answer:
            return int(answer.status), answer.read().decode("utf-8", "replace")
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode("utf-8", "replace")
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        what = getattr(reason, "strerror", None) or str(reason)
        raise Unreachable(
            f"{base}: got no answer ({what.lower()}), expected a broker: is 'streampack broker' running, "
            f"with listen.http there?"
        ) from None


def fetch_status(endpoint: str | None, timeout_s: float) -> Tree:
    """The broker's snapshot. Raises Unreachable, or PeerError if something else answers there."""
    base = _base(endpoint, timeout_s)
    code, text = _fetch(base, "/status", timeout_s)
    try:
        found = json.loads(text)
        if code == 200 and isinstance(found, dict) and "run" in found:
            return found
    except ValueError:
        pass
    raise PeerError(f"{base}/status: got an answer {code} that is no broker's, expected one: check the address")


def fetch_health(endpoint: str | None, path: str, timeout_s: float) -> tuple[bool, str]:
    """(good, what was said)."""
    try:
        code, text = _fetch(_base(endpoint, timeout_s), path, timeout_s)
    except Unreachable as error:
        return False, f"streampack: {error}"
    return code == 200, text.strip() or f"got an answer {code}"


def ask_change(endpoint: str | None, path: str, body: Tree, timeout_s: float) -> Tree:
    """What the broker says to a change that is asked for: ``feed`` and ``step``, from which it holds.

    Raises UserError for what cannot be, Rejected where it is refused, Unreachable if no answer comes in time.
    """
    base = _base(endpoint, timeout_s)
    code, text = _fetch(base, path, timeout_s, json.dumps(body).encode())
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if code == 200 and isinstance(found, dict) and "step" in found:
        return found
    if not isinstance(found, dict) or "error" not in found:
        raise PeerError(f"{base}{path}: got an answer {code} that is no broker's, expected one: check the address")
    if code in (503, 504):
        raise Unreachable(f"{base}: {found['error']}")
    raise UserError(found["error"]) if code == 400 else Rejected("refused", found["error"])


# status


def show_status(snapshot: Tree) -> None:
    """Print a snapshot."""
    console, memory = _console(), snapshot["memory"]
    about = f"  {snapshot['state']}  up {_duration(snapshot['uptime_s'])}  streampack {snapshot['version']}"
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
    packed = f"{_count(feed['totals']['tokens'])} tokens in {_count(feed['totals']['packs'])} packs"
    waste = [f"{cause.replace('_', ' ')} {_count(tokens)}" for cause, tokens in feed["waste_tokens"].items()]
    cost = f"{figures['cost_max_over_mean']:.3f}" if figures["cost_max_over_mean"] else "-"  # no rank has come yet
    rows = [
        ("steps", f"{steps['formed']} formed{end}, {steps['returned']} returned by every rank"),
        ("packed", f"{packed}, {_count(feed['tokens_per_s'])} tokens/s"),
        ("utilisation", f"{figures['utilisation']:.2%}, packing efficiency {figures['packing_efficiency']:.2%}"),
        ("balance", f"{figures['bin_balance']:.3f} of fill, cost max/mean {cost}"),
        ("wasted tokens", ", ".join(waste)),
        ("window", f"{feed['window']['samples']} samples, {_count(feed['window']['tokens'])} tokens"),
        ("held", f"{_count(feed['held_tokens'])} of {_count(feed['held_limit_tokens'])} tokens"),
    ]
    if feed["committed"] is not None:
        rows.insert(1, ("checkpoint", f"step {feed['committed']} is committed"))
    facts = Table.grid(padding=(0, 2))
    for row in rows:
        facts.add_row(*row)
    console.print(facts)
    console.print(_readers_table(feed))


def _streams_table(snapshot: Tree) -> Table:
    table = _table("stream", "feed", "weight", "samples", "tokens", "over-long", "lost", "rejected", "ended")
    for row in snapshot["streams"]:
        rejected = ", ".join(f"{reason} {count}" for reason, count in row["rejected"].items()) or "0"
        table.add_row(
            row["stream"], row["feed"], f"{row['weight']:g}", _count(row["samples"]), _count(row["tokens"]),
            str(row["overlong"]), _count(row["lost_tokens"]), rejected,
            f"{row['ended_partitions']} of {row['partitions']}",
        )  # fmt: skip
    table.title = _counted(snapshot["producers"], "producer")
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
    table.title = f"{_counted(len(feed['readers']), 'rank')}{all_}"
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


def _counted(number: int, what: str) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{number} {what}{'s' * (number != 1)}"


def _count(value: float) -> str:
    """``12.3M``."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= size:
            return f"{value / (1e3 if unit == 'k' else size):.1f}{unit}"
    return f"{value:.0f}"


def size_text(value: float) -> str:
    """``12.3 MiB``."""
    for size, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value:.0f} B"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s"
