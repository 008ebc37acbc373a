"""``streampack ledger compare``: find the first step in which two runs differ, and say why.

The runs are compared step by step, in the lineages that count: a step's digest covers its samples, their order and
their checksums. A step that only one of the runs skips differs, too, because the updates after it do. The comparison
goes on after such a step, since the samples of all steps may still be the same.

The reasons are the facts that decide steps: the rules, the data of each stream, skips, and the order in which pushed
samples came. A stage of the rules, or a change that a person asked for, also differs if it begins elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, zip_longest
from typing import Any

from msgspec.structs import replace

from streampack.errors import UserError
from streampack_services.audit.why import differences, feed_of, raise_if_damaged
from streampack_services.ledger.ledger import Ledger
from streampack_services.ledger.run_history import FeedHistory, RulesFrom
from streampack_services.ledger.step_rows import StepRows

Tree = dict[str, Any]
Ledgers = tuple[Ledger, Ledger]
Feeds = tuple[FeedHistory, FeedHistory]
MOST = 5
"""Samples to name that only one of the runs has in the step."""


def compare(one: Ledger, other: Ledger, feed: str | None) -> Tree:
    """Compare two runs; return a tree for JSON, whose ``equal`` is True if all steps that both have are the same.

    ``step`` is the first step that differs, None if none does; ``why`` lists the reasons as sentences. ``digests`` are
    those of step ``last``, the first with other samples; None if the runs differ by skips alone. ``feed``: name of the
    feed in both runs, None for the first one. Raises UserError if the runs have no step in common.
    """
    ledgers = one, other
    feeds = feed_of(one, feed), feed_of(other, feed)
    for ledger in ledgers:
        raise_if_damaged(ledger, "steps", "records")
    compared, last, differing, digests, reasons = 0, -1, list[int](), None, list[str]()
    skips: tuple[list[int], list[int]] = [], []  # steps that only this run skips
    for own_feed, other_feed in _pairs(ledgers, feeds):
        compared, last = compared + 1, own_feed.step
        skipped = [feed.is_skipped(last) for feed in feeds]
        if skipped[0] != skipped[1]:
            skips[skipped[1]].append(last)
            differing.append(last)
        if own_feed.digest != other_feed.digest:
            digests = [own_feed.digest.hex(), other_feed.digest.hex()]
            reasons = _reasons(ledgers, feeds, (own_feed, other_feed))
            differing.append(last)
            break
    if not compared:
        raise UserError(f"The runs have no step of feed {feeds[0].name!r} in common. Pass the state_dirs of two runs.")
    ends = [feed.end.num_steps if feed.end is not None else None for feed in feeds]
    steps = [ledger.last_before(feed.name, 1 << 62) + 1 for ledger, feed in zip(ledgers, feeds, strict=True)]
    why = [*_skips(feeds[0], "first", skips[0]), *_skips(feeds[1], "second", skips[1]), *reasons]
    return {
        "runs": [ledger.state.run for ledger in ledgers], "feed": feeds[0].name, "equal": not differing,
        "step": differing[0] if differing else None, "digests": digests, "why": why, "compared": compared, "last": last,
        "steps": steps, "ends": ends,
    }  # fmt: skip


def _pairs(ledgers: Ledgers, feeds: Feeds) -> Iterator[tuple[StepRows, StepRows]]:
    """Yield the records of each step that both runs have, in the lineages that count."""
    counts, other_counts = (_counting(ledger, feed) for ledger, feed in zip(ledgers, feeds, strict=True))
    left, right = next(counts, None), next(other_counts, None)
    while left is not None and right is not None:
        if left.step == right.step:
            yield left, right
        behind = left.step - right.step
        left = next(counts, None) if behind <= 0 else left
        right = next(other_counts, None) if behind >= 0 else right


def _counting(ledger: Ledger, feed: FeedHistory) -> Iterator[StepRows]:
    """Yield the steps of a feed in the lineages that count."""
    return (step for step in ledger.steps(feed.name) if feed.effective(step.step) == step.lineage)


def _skips(feed: FeedHistory, which: str, steps: list[int]) -> list[str]:
    """Describe the steps that only one run skips: a sentence for consecutive steps with the same notes."""
    sentences = []
    for (_, notes), group in groupby(enumerate(steps), lambda pair: (pair[1] - pair[0], feed.skip_notes(pair[1]))):
        first, *others = (step for _, step in group)
        span = f"steps {first} to {others[-1]}" if others else f"step {first}"
        sentences.append(f"Only the {which} run skips {span}{''.join(f' ({note})' for note in notes)}.")
    return sentences


def _reasons(ledgers: Ledgers, feeds: Feeds, steps: tuple[StepRows, StepRows]) -> list[str]:
    """Return the reasons for which a step has other samples, as sentences."""
    number = steps[0].step
    rules = [
        replace(feed.rules_at(number, step.lsn), stages=feed.stages) for feed, step in zip(feeds, steps, strict=True)
    ]
    reasons = [f"The rules differ: {line}." for line in differences(*rules)]
    reasons += _changes([feed.changes_at(number, step.lsn)[1:] for feed, step in zip(feeds, steps, strict=True)], feeds)
    for stream in feeds[0].streams.keys() & feeds[1].streams.keys():
        sources, other_sources = (ledger.history.sources.get(stream, []) for ledger in ledgers)
        if sources and other_sources and set(sources) != set(other_sources):
            digests = f"{sources[-1]:.12} and {other_sources[-1]:.12}"
            reasons.append(f"Stream {stream} has other data: the digests of its source are {digests}.")
    reasons += _samples(feeds, steps)
    pushed = [name for name, stream in feeds[0].streams.items() if stream.pushed]
    if pushed:
        reasons.append(f"Programs push samples of {', '.join(pushed)}: steps depend on the order in which they came.")
    return reasons


def _changes(changes: list[list[RulesFrom]], feeds: Feeds) -> list[str]:
    """Describe the first change of the rules that has another place in the second run, as a sentence."""
    for one, other in zip_longest(*changes):
        if one is None or other is None:
            which, feed, change = ("second", feeds[1], other) if one is None else ("first", feeds[0], one)
            return [f"Only the {which} run changed its rules at step {change.step}: {feed.name_of(change)}."]
        if (one.step, one.position) != (other.step, other.position):
            places = [f"step {branch.step} ({branch.position} merged samples)" for branch in (one, other)]
            return [f"{feeds[0].name_of(one)} began at {places[0]} in the first run, and {places[1]} in the second."]
    return []


def _samples(feeds: Feeds, steps: tuple[StepRows, StepRows]) -> list[str]:
    """Describe the samples of a step that differ between both runs, as sentences."""
    crcs, other_crcs = (_crcs(feed, step) for feed, step in zip(feeds, steps, strict=True))
    sentences = []
    if changed := sorted(sample for sample, crc in crcs.items() if other_crcs.get(sample, crc) != crc):
        sentences.append(f"Samples have other tokens or fields: {_names(changed)}.")
    for which, alone in (("first", crcs.keys() - other_crcs.keys()), ("second", other_crcs.keys() - crcs.keys())):
        if alone:
            sentences.append(f"Only the {which} run has these samples in the step: {_names(sorted(alone))}.")
    return sentences or ["Both runs have the same samples in the step, in other packs or in another order."]


def _crcs(feed: FeedHistory, step: StepRows) -> dict[tuple[str, int, int], int]:
    """Return the checksum of each sample of a step by its stream, index and part."""
    by_stream = feed.by_stream(step.rows, step.step, step.lsn)
    return {
        (name, int(row["index"]), int(row["part"])): int(row["crc"]) for name, rows in by_stream.items() for row in rows
    }


def _names(samples: list[tuple[str, int, int]]) -> str:
    """Return the first names of samples as text: ``web:3, web:7.1 and 12 more``."""
    names = [f"{stream}:{index}" + (f".{part}" if part else "") for stream, index, part in samples[:MOST]]
    more = f" and {len(samples) - MOST} more" if len(samples) > MOST else ""
    return ", ".join(names) + more
