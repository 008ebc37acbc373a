"""How many steps are left of the pass that is read, and how sure that is.

Producers say how many samples the shards have that they have opened; partitions that have ended, or had in an earlier
iteration, are known for sure. What is left of each stream, in tokens (or samples, where a batch is so many of them),
over what a step has held so far, gives the steps. Shards that nobody has opened, and samples that have not come, are
taken for as many more of those that are known: the bounds are two standard deviations away. Nothing is said of a feed
that does not end, or of a stream whose source does not know its shards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from streampack.core.broker import Broker
from streampack.core.feed.feed import Feed
from streampack.core.model.rules import Rules, StreamRules
from streampack.core.protocol.producer_messages import SourceSize
from streampack_services.broker.status import StepsLeft


class Left(NamedTuple):
    """What is left of a stream: ``samples`` that are not merged, and their ``variance``; each is ``each`` tokens (or
    samples that count) in the mean of the ``seen`` ones. ``share``: of what a step holds, where the stream ends the
    feed with it; else None.
    """

    samples: float
    variance: float
    each: float
    seen: int
    share: float | None = None


def steps_left(core: Broker, feed: Feed) -> StepsLeft | None:
    """Estimate the steps that some rank has yet to return; None where they cannot be estimated."""
    readers, rules, totals = feed.readers, feed.latest_rules, feed.figures.totals
    if readers.steps.end is not None:
        left_now = readers.steps.end.num_steps - readers.steps.released_upto
        return StepsLeft(estimate=left_now, low=left_now, high=left_now)
    if not rules.finite or not totals.steps:
        return None
    every = [_left(core, feed, number, stream) for number, stream in enumerate(rules.streams) if stream.weight]
    left = [each for each in every if each is not None]
    stops = [each for each in left if each.share is not None]
    if len(stops) < sum(stream.on_exhaust == "stop" and stream.weight > 0 for stream in rules.streams):
        return None
    former, spread = feed.planner.former, 0.0 if _in_samples(rules) else _spread(feed)
    held, in_steps = former.queued_tokens, totals.tokens
    if _in_samples(rules):
        held, in_steps = former.queued_samples, totals.samples
    of_step = in_steps / totals.steps
    ways = [estimate([each], held, of_step, spread) for each in stops]  # the feed ends with the first of them
    if len(left) == len(every):
        ways.append(estimate([each._replace(share=None) for each in left], held, of_step, spread))
    if not ways or not of_step:
        return None
    formed = readers.steps.formed_upto - readers.steps.released_upto
    likely, low, high = min(ways)
    return StepsLeft(estimate=formed + likely, low=formed + low, high=formed + high)


def estimate(left: Sequence[Left], held: float, of_step: float, spread: float) -> tuple[int, int, int]:
    """Steps of what is left of streams and of what is ``held`` already: as many as there will be, likely, at least and
    at most. A step holds ``of_step``; ``spread`` is the standard deviation of a sample.
    """
    expected, variance = held, 0.0
    for samples, uncertain, each, seen, share in left:
        expected += samples * each / (share or 1.0)
        varies = uncertain * each**2 + spread**2 * (samples + samples**2 / max(seen, 1))
        variance += varies / (share or 1.0) ** 2
    away = 2 * math.sqrt(variance)
    low, high = math.floor(max(expected - away, 0.0) / of_step), math.ceil((expected + away) / of_step)
    return math.ceil(expected / of_step), low, high + 1


def size_left(size: SourceSize, passes: int) -> tuple[float, float]:
    """Samples of all passes over a source of which some shards are known, and their variance."""
    mean, rest = size.samples / size.opened, max(size.shards - size.opened, 0)
    shard = mean**2  # of one shard alone nobody knows how others are
    if size.opened > 1:
        shard = max(size.squares - size.samples * mean, 0.0) / (size.opened - 1)
    return passes * (size.samples + rest * mean), passes**2 * shard * (rest + rest**2 / size.opened)


def _left(core: Broker, feed: Feed, number: int, stream: StreamRules) -> Left | None:
    """Return what is left of a stream; None where nobody knows."""
    every, merge, counts = core.leases.partitions, feed.planner.merge.current, feed.planner.admission.counts[number]
    mine = every.of_stream(stream.name)
    merged = int(sum(merge.merged_samples[every.stream_of[p].number_in_feed(p)] for p in mine))
    known = [every.intakes[p].known_total for p in mine]
    if None not in known:
        total, variance = float(sum(each or 0 for each in known)), 0.0
    elif stream.passes is not None and (size := core.leases.producers.size(stream.name)) is not None:
        total, variance = size_left(size, stream.passes)
    else:
        return None
    if not counts.samples:
        return None if total > merged else Left(0.0, 0.0, 0.0, 0)
    rules = feed.latest_rules
    kept = counts.samples - sum(counts.rejected.values()) if _in_samples(rules) else counts.tokens
    share = stream.weight / sum(each.weight for each in rules.streams) if stream.on_exhaust == "stop" else None
    return Left(max(total - merged, 0.0), variance, kept / counts.samples, counts.samples, share)


def _in_samples(rules: Rules) -> bool:
    """Is a step so many samples?"""
    return rules.batch is not None and rules.batch.samples is not None


def _spread(feed: Feed) -> float:
    """Standard deviation of the lengths of samples in steps, about."""
    rows = np.array(feed.figures.lengths.rows(), np.float64).reshape(-1, 2)
    count, tokens = rows.sum(axis=0)
    if not count:
        return 0.0
    return float(np.sqrt(max((rows[:, 1] ** 2 / rows[:, 0]).sum() / count - (tokens / count) ** 2, 0.0)))
