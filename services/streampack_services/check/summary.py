"""The short answer of ``streampack check``: what the user has set, what follows, and whether it is good.

At most ``MOST_LINES`` lines of at most ``WIDTH`` columns, for any number of files and streams.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

from streampack_services.amounts import count_text, counted, size_text

WIDTH = 80
MOST_LINES = 40
MOST_STREAMS = 6
"""Streams of a file that are listed."""
_INDENT = 14
Tree = dict[str, Any]


def summary(checked: Tree) -> list[str]:
    """Return the lines about one file; ``checked`` is the result of ``check`` for it."""
    file = checked["file"]
    lines = [file if len(file) <= WIDTH else f"...{file[3 - WIDTH :]}"]
    for title, text in _set(checked["values"]):
        lines += _wrapped(title, text)
    follows = {row["path"]: row["value"] for row in checked["follows"]}
    lines.append("  what follows")
    for title, text in _of_broker(follows) if checked["command"] == "broker" else _of_producer(follows):
        lines += _wrapped(title, text)
    return lines


def fitted(lines: list[str], others: int) -> list[str]:
    """Return the lines, cut to ``MOST_LINES`` with so many others that follow; the lines that are cut are counted."""
    room = max(MOST_LINES - others, 2)
    return lines if len(lines) <= room else [*lines[: room - 1], f"... {len(lines) - room + 1} more lines with --all"]


def warned(text: str) -> list[str]:
    """Return a warning as lines."""
    return textwrap.wrap(
        f"warning: {text}", WIDTH, subsequent_indent=" " * 4, break_on_hyphens=False, break_long_words=False
    )


def _wrapped(title: str, text: str) -> list[str]:
    """Return a title and its text, with the text in a column of its own."""
    begin = f"    {title:<{_INDENT - 1}} " if len(title) < _INDENT else f"    {title} "
    return textwrap.wrap(
        text, WIDTH, initial_indent=begin, subsequent_indent=" " * (_INDENT + 4), break_on_hyphens=False
    )


def _set(values: list[Tree]) -> Iterator[tuple[str, str]]:
    """Yield what the file sets, a line for each top-level key, and one for each stream."""
    groups: dict[str, list[str]] = {}
    streams: dict[str, None] = {}
    for row in values:
        parts = row["path"].split(".")
        if row["source"] != "file" or "stages" in (parts[0], *parts[2:3]):  # they have a table of their own
            continue
        title, rest = (parts[1], parts[2:]) if parts[0] == "streams" and len(parts) > 1 else (parts[0], parts[1:])
        if parts[0] == "streams":
            streams[title] = None
            title = f"stream {title}"
        name = ".".join(rest)
        value = _value(row["path"], row["value"])
        groups.setdefault(title, []).append(f"{name} {value}" if name else value)
    left_out = [f"stream {name}" for name in list(streams)[MOST_STREAMS:]]
    for title, texts in groups.items():
        if title not in left_out:
            yield title, ", ".join(texts)
    if left_out:
        yield "streams", f"and {counted(len(left_out), 'more stream')}"


def _value(path: str, value: Any) -> str:
    """Return a value as text."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ", ".join(map(str, value[:8])) + (", ..." if len(value) > 8 else "") + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_value(path, item)}" for key, item in value.items()) + "}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _of_broker(follows: Tree) -> Iterator[tuple[str, str]]:
    """Yield what follows from a broker.yaml."""
    feeds = list(dict.fromkeys(path.split(".")[1] for path in follows if path.startswith("feeds.")))
    for feed in feeds[:3]:
        at, suffix = f"feeds.{feed}.", f" of {feed}" if len(feeds) > 1 else ""
        if f"{at}step_tokens" in follows:
            yield (
                f"step{suffix}",
                (f"{follows[at + 'step_tokens']:,} tokens, {follows[at + 'micro_batches']} micro-batches a rank"),
            )
        elif f"{at}batch_tokens" in follows:
            yield f"step{suffix}", f"at most {count_text(follows[at + 'batch_tokens'])} tokens in memory"
        yield f"mesh{suffix}", f"dp {_few(follows[at + 'dp_sizes'])}; cp {_few(follows[at + 'cp_sizes'])}"
        shares = {path.removeprefix(f"{at}share."): value for path, value in follows.items() if f"{at}share." in path}
        listed = ", ".join(f"{name} {value:.1%}" for name, value in list(shares.items())[:MOST_STREAMS])
        more = f" and {len(shares) - MOST_STREAMS} more" if len(shares) > MOST_STREAMS else ""
        yield f"mixture{suffix}", listed + more
        if follows.get(f"{at}padding"):
            yield f"padding{suffix}", f"{follows[at + 'padding']:g} tokens a sample, for alignment"
        if f"{at}patience" in follows:
            late, early = counted(follows[at + "patience"], "step"), counted(follows[at + "early_steps"], "step")
            yield f"wait{suffix}", f"a sample is at most about {late} late and {early} early"
    if len(feeds) > 3:
        yield "feeds", f"and {counted(len(feeds) - 3, 'more feed')}"
    yield (
        "memory",
        (
            f"{size_text(follows['process.peak_bytes'])} at its peak; limit a container to "
            f"{size_text(follows['process.most_bytes'])}, and 512 MiB more while kernels compile"
        ),
    )


def _few(sizes: list[int]) -> str:
    """Return sizes as text, the first ones and the last."""
    return ", ".join(map(str, sizes)) if len(sizes) < 9 else f"{', '.join(map(str, sizes[:6]))} ... {sizes[-1]}"


def _of_producer(follows: Tree) -> Iterator[tuple[str, str]]:
    """Yield what follows from a producer.yaml."""
    streams = list(dict.fromkeys(path.split(".")[1] for path in follows))
    for name in streams[:MOST_STREAMS]:
        at = f"streams.{name}."
        shards, files = counted(follows[f"{at}num_shards"], "partition"), counted(follows[f"{at}files"], "file")
        keys = [value for path, value in follows.items() if f"{at}keys." in path]
        chats = ", chats" * follows[f"{at}tokenizer.has_chat_template"]
        read = "; reads " + ", ".join(name for group in keys for name in group) if keys else ""
        size = follows[f"{at}tokenizer.vocab_size"]
        yield f"stream {name}", f"{files}, at most {shards}; vocabulary of {size}{chats}{read}"
    if len(streams) > MOST_STREAMS:
        yield "streams", f"and {counted(len(streams) - MOST_STREAMS, 'more stream')}"
