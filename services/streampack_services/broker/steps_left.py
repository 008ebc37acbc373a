"""An estimate of the steps left of a feed's current iteration, with bounds.

Producers report the samples of the shards that they have opened. The sizes of partitions that have ended, now or in an
earlier iteration, are exact. Shards that are not opened are assumed to be like the opened ones, and samples that have
not come like those that have. The steps left are the tokens left of each stream / the mean tokens of a step so far. For
batches of a fixed number of samples, both count samples instead. The bounds are two standard deviations away.

There is no estimate for a feed that does not end, or for a stream whose source does not know its shards. If the rules
change, the steps to come have the room of the stages that will hold then (``changes.begin_estimate``). There is no
estimate while a stage is to come that other streams give samples to: nobody knows what is left of them then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from streampack.core.broker import Broker
from streampack.core.feed.feed import Feed
from streampack.core.model.keys.stage_keys import Stage
from streampack.core.model.rules import Rules, StreamRules
from streampack.core.protocol.producer_messages import SourceSize
from streampack_services.broker.changes.begin_estimate import pace_of, steps_of
from streampack_services.broker.status import StepsLeft


class Left(NamedTuple):
    """The samples left of a stream.

    "Units" are tokens, or samples if steps are batches of a fixed number of samples.
    """

    samples: float
    """Samples that are not merged yet, about."""
    variance: float
    """Variance of ``samples``."""
    each: float
    """Mean units of a sample, over the samples that have come."""
    seen: int
    """Samples that have come."""
    share: float | None = None
    """The stream's share of the units of a step, if the feed ends with this stream; else None."""


def steps_left(core: Broker, feed: Feed) -> StepsLeft | None:
    """Estimate the steps that some rank has yet to return; return None if there is no estimate."""
    readers, rules, totals = feed.readers, feed.latest_rules, feed.figures.totals
    if readers.steps.end is not None:
        left_now = readers.steps.end.num_steps - readers.steps.released_upto
        return StepsLeft(estimate=left_now, low=left_now, high=left_now)
    if not rules.finite or not totals.steps:
        return None
    if _streams_change(feed, rules):
        return None
    streams = [_stream_left(core, feed, number, stream) for number, stream in enumerate(rules.streams) if stream.gives]
    left = [stream for stream in streams if stream is not None]
    stops = [stream for stream in left if stream.share is not None]
    if len(stops) < sum(stream.on_exhaust == "stop" and stream.gives for stream in rules.streams):
        return None
    former, spread = feed.planner.former, 0.0 if _in_samples(rules) else _spread(feed)
    in_window, in_steps = former.queued_tokens, totals.tokens
    if _in_samples(rules):
        in_window, in_steps = former.queued_samples, totals.samples
    of_step, pace = in_steps / totals.steps, None
    if not _in_samples(rules) and (feed.history.changes or feed.history.pending):
        of_step, pace = 1.0, pace_of(feed)  # estimate tokens first
        if pace is None:
            return None
    ways = [
        estimate([stream], in_window, of_step, spread) for stream in stops
    ]  # the feed ends with the first of these streams
    if len(left) == len(streams):
        ways.append(estimate([stream._replace(share=None) for stream in left], in_window, of_step, spread))
    if not ways or not of_step:
        return None
    formed = readers.steps.formed_upto - readers.steps.released_upto
    likely, low, high = min(ways)
    if pace is not None:
        likely, low, high = (steps_of(feed, pace, tokens) for tokens in (likely, low, high))
    return StepsLeft(estimate=formed + likely, low=formed + low, high=formed + high)


def _streams_change(feed: Feed, rules: Rules) -> bool:
    """Return True if other streams give samples in a stage to come than after all stages, by ``rules``."""
    giving = {stream.name for stream in rules.streams if stream.gives}
    mixtures = [
        change.ask.weights for change in feed.history.pending if isinstance(change.ask, Stage) and change.ask.weights
    ]
    current = {stream.name for stream in feed.planner.live.current.streams if stream.gives}
    return bool(mixtures) and any(giving != set(mixture) for mixture in [current, *mixtures])


def estimate(left: Sequence[Left], held: float, of_step: float, spread: float) -> tuple[int, int, int]:
    """Estimate the steps that are not formed yet.

    Args:
        left: The samples left of each stream.
        held: Units of samples that are merged and not in a step yet (see ``Left`` for units).
        of_step: Mean units of a step.
        spread: Standard deviation of the units of a sample.

    Returns:
        (most likely number of steps, lower bound, upper bound).
    """
    expected, variance = held, 0.0
    for samples, uncertain, mean, seen, share in left:
        expected += samples * mean / (share or 1.0)
        varies = uncertain * mean**2 + spread**2 * (samples + samples**2 / max(seen, 1))
        variance += varies / (share or 1.0) ** 2
    away = 2 * math.sqrt(variance)
    low, high = math.floor(max(expected - away, 0.0) / of_step), math.ceil((expected + away) / of_step)
    return math.ceil(expected / of_step), low, high + 1


def size_left(size: SourceSize, passes: int) -> tuple[float, float]:
    """Estimate the samples of ``passes`` passes over a source from its opened shards; return (samples, variance)."""
    mean, rest = size.samples / size.opened, max(size.shards - size.opened, 0)
    shard = mean**2  # with one opened shard the spread is unknown: assume the mean
    if size.opened > 1:
        shard = max(size.squares - size.samples * mean, 0.0) / (size.opened - 1)
    return passes * (size.samples + rest * mean), passes**2 * shard * (rest + rest**2 / size.opened)


def _stream_left(core: Broker, feed: Feed, number: int, stream: StreamRules) -> Left | None:
    """Return the samples left of stream ``number`` of the feed; None if their number is unknown."""
    partitions, planner = core.leases.partitions, feed.planner
    merge, counts = planner.merge.current, planner.admission.counts[number]
    numbers = partitions.of_stream(stream.name)
    merged = int(sum(merge.merged_samples[partitions.stream_of[p].number_in_feed(p)] for p in numbers))
    totals = [partitions.intakes[p].recorded.known_total for p in numbers]
    if None not in totals:
        total, variance = float(sum(count or 0 for count in totals)), 0.0
    elif stream.passes is not None and (size := core.leases.producers.size(stream.name)) is not None:
        total, variance = size_left(size, stream.passes)
    else:
        return None
    if not counts.samples:
        return None if total > merged else Left(0.0, 0.0, 0.0, 0)
    rules = feed.latest_rules
    kept = counts.samples - sum(counts.rejected.values()) if _in_samples(rules) else counts.tokens
    share = (
        stream.weight / sum(other.weight for other in rules.streams if other.gives)
        if stream.on_exhaust == "stop"
        else None
    )
    return Left(max(total - merged, 0.0), variance, kept / counts.samples, counts.samples, share)


def _in_samples(rules: Rules) -> bool:
    """Return True if steps are batches of a fixed number of samples."""
    return rules.batch is not None and rules.batch.samples is not None


def _spread(feed: Feed) -> float:
    """Return the approximate standard deviation of the lengths of samples in steps, in tokens."""
    rows = np.array(feed.figures.lengths.rows(), np.float64).reshape(-1, 2)
    count, tokens = rows.sum(axis=0)
    if not count:
        return 0.0
    return float(np.sqrt(max((rows[:, 1] ** 2 / rows[:, 0]).sum() / count - (tokens / count) ** 2, 0.0)))
