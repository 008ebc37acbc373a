"""Where the snapshot has the series of each metric: functions that ``metrics`` lays out in its table."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable
from typing import Any

from streampack_services.broker.reporter import Snapshot

Rows = Iterable[tuple[tuple[str, ...], Any]]
"""(label values, value) of each series; the value of a histogram is its bounds, counts and sum."""
RANKS = ("dp_rank", "cp_rank", "tp_rank", "pp_rank", "host")


def at(*path: str) -> Callable[[Snapshot], Rows]:
    def rows(snapshot: Snapshot) -> Rows:
        value: object = snapshot
        for key in path:
            assert isinstance(value, dict)
            value = value[key]
        assert isinstance(value, (bool, int, float))
        return [((), float(value))]

    return rows


def by(path: str) -> Callable[[Snapshot], Rows]:
    return lambda snapshot: [((key,), float(value)) for key, value in snapshot[path].items()]


def of_feeds(*path: str) -> Callable[[Snapshot], Rows]:
    """A figure of every feed."""
    each = at(*path)
    return lambda snapshot: [((name,), value) for name, feed in snapshot["feeds"].items() for _, value in each(feed)]


def ended(snapshot: Snapshot) -> Rows:
    for name, feed in snapshot["feeds"].items():
        steps = feed["steps"]
        yield (name,), float(steps["end"] is not None and steps["returned"] >= steps["end"])


def of_log(key: str) -> Callable[[Snapshot], Rows]:
    """A figure of the log, where there is one; of words whether there are any."""

    def rows(snapshot: Snapshot) -> Rows:
        figures = snapshot["log"]
        if figures is not None:
            yield (), float(bool(figures[key]) if isinstance(figures[key], str) else figures[key])

    return rows


def waste(snapshot: Snapshot) -> Rows:
    return [
        ((name, cause), float(tokens))
        for name, feed in snapshot["feeds"].items()
        for cause, tokens in feed["waste_tokens"].items()
    ]


def padding(snapshot: Snapshot) -> Rows:
    """Tokens of padded micro-batches, of the feeds that have such."""
    for name, feed in snapshot["feeds"].items():
        for key, tokens in (feed["dynamic_batching"] or {}).items():
            if key.endswith("_tokens"):
                yield (name, key.removesuffix("_tokens")), float(tokens)


def removed_ratio(snapshot: Snapshot) -> Rows:
    for name, feed in snapshot["feeds"].items():
        if feed["dynamic_batching"] is not None:
            yield (name,), feed["dynamic_batching"]["removed_padding_ratio"]


def lost(snapshot: Snapshot) -> Rows:
    return [
        ((name, policy), float(tokens))
        for name, feed in snapshot["feeds"].items()
        for policy, tokens in feed["lost_tokens"].items()
    ]


def rank_tokens(snapshot: Snapshot) -> Rows:
    return [
        ((name, when, figure), tokens)
        for name, feed in snapshot["feeds"].items()
        for when, figures in feed["rank_tokens"].items()
        for figure, tokens in figures.items()
    ]


def histograms(key: str) -> Callable[[Snapshot], Rows]:
    return lambda snapshot: [((name,), feed["histograms"][key]) for name, feed in snapshot["feeds"].items()]


def of_waits(key: str) -> Callable[[Snapshot], Rows]:
    """A figure of how long samples wait, of the feeds whose packers have it."""

    def rows(snapshot: Snapshot) -> Rows:
        for name, feed in snapshot["feeds"].items():
            if (found := feed["waits"][key]) is not None:
                yield (name,), float(found)

    return rows


def of_streams(*path: str) -> Callable[[Snapshot], Rows]:
    """A figure of every stream."""
    each = at(*path)
    return lambda snapshot: [((row["stream"],), value) for row in snapshot["streams"] for _, value in each(row)]


def last_seen(snapshot: Snapshot) -> Rows:
    for row in snapshot["streams"]:
        if row["last_seen_s"] is not None:
            yield (row["stream"],), snapshot["taken_at"] - row["last_seen_s"]


def committed(snapshot: Snapshot) -> Rows:
    for name, feed in snapshot["feeds"].items():
        if feed["committed"] is not None:
            yield (name,), float(feed["committed"])


def steps_left(snapshot: Snapshot) -> Rows:
    for name, feed in snapshot["feeds"].items():
        for which, steps in (feed["steps_left"] or {}).items():
            yield (name, which), float(steps)


def rejected(snapshot: Snapshot) -> Rows:
    return [
        ((row["stream"], reason), float(count))
        for row in snapshot["streams"]
        for reason, count in row["rejected"].items()
    ]


def of_readers(value: Callable[[Snapshot], float | None]) -> Callable[[Snapshot], Rows]:
    """A figure of every rank of every feed, where it has one."""

    def rows(snapshot: Snapshot) -> Rows:
        for name, feed in snapshot["feeds"].items():
            for row in feed["readers"]:
                found = value(row)
                if found is not None:
                    yield (name, *(str(row[rank]) for rank in RANKS)), found

    return rows


def starved(snapshot: Snapshot) -> Rows:
    """By cause, and of the cause ``stream`` by stream: each second of a wait is in one series.

    A rank that has said nothing yet has none, as it may have waited for hours under the broker before: a count that
    falls to nothing and comes back is taken for as many hours anew."""
    for name, feed in snapshot["feeds"].items():
        for row in filter(has_spoken, feed["readers"]):
            rank = (name, *(str(row[rank]) for rank in RANKS))
            of_streams = row["starved_streams"]
            for cause, seconds in row["starved_s"].items():
                unknown = round(max(seconds - sum(of_streams.values()), 0.0), 3) if cause == "stream" else seconds
                yield (*rank, cause, ""), unknown
            for stream, seconds in of_streams.items():
                yield (*rank, "stream", stream), seconds


def has_spoken(row: dict[str, Any]) -> bool:
    """Has a rank said what it has waited for, since it took its place?"""
    return bool(row["stats"])


def trainer_seconds(row: dict[str, Any]) -> float | None:
    return float(row["trainer_s"]) if has_spoken(row) else None


def stat(key: str, scale: float = 1.0) -> Callable[[Snapshot], Rows]:
    """A figure that the clients send with their pings."""
    return of_readers(lambda row: row["stats"][key] * scale if key in row["stats"] else None)


def build(snapshot: Snapshot) -> Rows:
    return [((snapshot["version"], platform.python_version()), 1.0)]


def run(snapshot: Snapshot) -> Rows:
    return [((snapshot["run"], name, feed["rules"]["digest"]), 1.0) for name, feed in snapshot["feeds"].items()]
