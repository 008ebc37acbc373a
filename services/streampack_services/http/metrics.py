"""The broker's metrics for Prometheus, read from its snapshot.

Names follow https://prometheus.io/docs/practices/naming: one prefix, base units, ``_total`` for
counters, few labels whose sum means something. Tokens, samples, packs and steps are things that
are counted and have no unit. Ratios are of 1. All is read from the snapshot when it is scraped, so
nothing is updated, locked or kept twice. ``deploy/prometheus/METRICS.md`` lists them:
``python -m streampack_services.http.metrics`` prints it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, ProcessCollector, generate_latest

from streampack_services.broker.status import BrokerStatus, Histogram
from streampack_services.http.metric_rows import (
    RANKS,
    Labels,
    at,
    bad_messages,
    build,
    client_figure,
    ended,
    histograms,
    last_seen,
    lost,
    of_feeds,
    of_log,
    of_readers,
    of_streams,
    padding,
    rank_tokens,
    rejected,
    removed_ratio,
    run,
    starved,
    steps_left,
    trainer_seconds,
    waste,
)


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: its name without prefix and ``_total``, its help text, and its series in a broker's status."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    text: str
    rows: Callable[[BrokerStatus], Iterable[tuple[Labels, float | Histogram]]]
    labels: tuple[str, ...] = ()


METRICS: tuple[Metric, ...] = (
    Metric("build_info", "gauge", "1, with the broker's version and that of its Python.", build,
           ("version", "python")),
    Metric("run_info", "gauge", "1, with the run, a feed of it and the digest of its rules.", run,
           ("run", "feed", "rules")),
    Metric("ready", "gauge", "1 while the broker serves, 0 while it starts or drains.",
           at(lambda status: status.ready)),
    # What came in
    Metric("received_samples", "counter", "Samples taken from producers.",
           of_streams(lambda row: row.samples), ("stream",)),
    Metric("received_tokens", "counter", "Tokens taken from producers and kept.",
           of_streams(lambda row: row.tokens), ("stream",)),
    Metric("overlong_samples", "counter", "Samples that the over-long policy cut, split or dropped.",
           of_streams(lambda row: row.overlong), ("stream",)),
    Metric("lost_tokens", "counter", "Tokens that the over-long policy cut off or dropped.",
           of_streams(lambda row: row.lost_tokens), ("stream",)),
    Metric("stream_last_seen_timestamp_seconds", "gauge", "When a producer of the stream was last heard, since 1970.",
           last_seen, ("stream",)),
    Metric("stream_weight", "gauge", "Weight of the stream among those of its feed; 0 where it was taken out.",
           of_streams(lambda row: row.weight), ("stream",)),
    Metric("stream_producers", "gauge", "Producers that offer the stream.",
           of_streams(lambda row: row.producers), ("stream",)),
    Metric("stream_granted_tokens", "gauge", "Tokens of the stream that may wait for the merge: its credits.",
           of_streams(lambda row: row.credits.granted_tokens), ("stream",)),
    Metric("stream_used_tokens", "gauge", "Tokens of the stream that have come and wait for the merge.",
           of_streams(lambda row: row.credits.used_tokens), ("stream",)),
    Metric("stream_lag_samples", "gauge", "Samples of the stream that may be sent and have not come.",
           of_streams(lambda row: row.lag.samples), ("stream",)),
    Metric("rejected_samples", "counter", "Samples that could not be used and were dropped, by reason.",
           rejected, ("stream", "reason")),
    # What was formed
    Metric("steps", "counter", "Steps formed.", of_feeds(lambda feed: feed.totals.steps), ("feed",)),
    Metric("packs", "counter", "Packs formed, empty ones too.", of_feeds(lambda feed: feed.totals.packs), ("feed",)),
    Metric("packed_samples", "counter", "Samples in the packs formed.",
           of_feeds(lambda feed: feed.totals.samples), ("feed",)),
    Metric("packed_tokens", "counter", "Real tokens in the packs formed.",
           of_feeds(lambda feed: feed.totals.tokens), ("feed",)),
    Metric("tail_dropped_samples", "counter", "Samples that tail: drop left out, once an iteration.",
           of_feeds(lambda feed: feed.totals.dropped_samples), ("feed",)),
    Metric("waste_tokens", "counter", "Tokens of the packs delivered that are nobody's, by cause.",
           waste, ("feed", "cause")),
    Metric("delivered_tokens", "counter", "Tokens of the packs delivered, real and wasted.",
           of_feeds(lambda feed: feed.delivered_tokens), ("feed",)),
    Metric("untrained_tokens", "counter", "Tokens that came and are in no step that is trained, by what took them.",
           lost, ("feed", "policy")),
    Metric("form_seconds", "counter", "Time spent packing.", at(lambda status: status.form_seconds)),
    Metric("utilization_ratio", "gauge", "Real tokens over packs * budget, since the start.",
           of_feeds(lambda feed: feed.figures.utilization), ("feed",)),
    Metric("waste_ratio", "gauge", "1 - utilization.", of_feeds(lambda feed: feed.figures.waste_ratio), ("feed",)),
    Metric("packing_efficiency_ratio", "gauge", "Packs that the tokens alone would need, over packs formed.",
           of_feeds(lambda feed: feed.figures.packing_efficiency), ("feed",)),
    Metric("bin_balance_ratio", "gauge", "1 - deviation of the packs' fill over its mean; may be negative.",
           of_feeds(lambda feed: feed.figures.bin_balance), ("feed",)),
    Metric("padded_utilization_ratio", "gauge", "Tokens of aligned samples over packs * budget.",
           of_feeds(lambda feed: feed.padded_figures.utilization), ("feed",)),
    Metric("padded_packing_efficiency_ratio", "gauge", "Packs that aligned samples alone would need, over packs.",
           of_feeds(lambda feed: feed.padded_figures.packing_efficiency), ("feed",)),
    Metric("padded_bin_balance_ratio", "gauge", "Balance of the packs' fill with aligned samples.",
           of_feeds(lambda feed: feed.padded_figures.bin_balance), ("feed",)),
    Metric("pack_fill_ratio", "histogram", "Real tokens of the packs formed over the budget; 0: empty packs.",
           histograms(lambda each: each.pack_fill_ratio), ("feed",)),
    Metric("pack_samples", "histogram", "Samples of the packs formed.",
           histograms(lambda each: each.pack_samples), ("feed",)),
    Metric("cost_max_over_mean_ratio", "gauge", "Dearest pack over the mean of its micro-batch, mean over all dealt.",
           of_feeds(lambda feed: feed.figures.cost_max_over_mean), ("feed",)),
    Metric("step_cost_max_over_mean_ratio", "gauge", "Dearest rank of a step over the mean, mean over all dealt.",
           of_feeds(lambda feed: feed.figures.step_cost_max_over_mean), ("feed",)),
    Metric("rank_tokens", "gauge", "Real tokens of a rank's step before and after balancing, mean over steps.",
           rank_tokens, ("feed", "when", "figure")),
    Metric("split_packs", "counter", "Packs of batches more than were formed, split for the trainers' mesh.",
           of_feeds(lambda feed: feed.dealt.split_packs), ("feed",)),
    Metric("added_empty_packs", "counter", "Empty packs that batches needed for the trainers' mesh.",
           of_feeds(lambda feed: feed.dealt.empty_packs), ("feed",)),
    Metric("dynamic_batching_tokens", "counter", "Tokens of padded micro-batches: real (valid), of batches as wide as "
           "their longest sample (original), computed (actual), and the difference (removed_padding).",
           padding, ("feed", "kind")),
    Metric("removed_padding_ratio", "gauge", "Tokens not computed, of batches as wide as their longest sample.",
           of_feeds(removed_ratio), ("feed",)),
    # What is held
    Metric("window_samples", "gauge", "Samples merged and not in a step yet.",
           of_feeds(lambda feed: feed.window.samples), ("feed",)),
    Metric("window_tokens", "gauge", "Tokens of samples merged and not in a step yet.",
           of_feeds(lambda feed: feed.window.tokens), ("feed",)),
    Metric("window_oldest_steps", "gauge", "Steps that the oldest sample in the window has waited.",
           of_feeds(lambda feed: feed.window.oldest_steps), ("feed",)),
    Metric("wait_p99_steps", "gauge", "Steps that 99 of 100 samples waited in the window at most.",
           of_feeds(lambda feed: feed.waits.p99_steps), ("feed",)),
    Metric("longest_wait_steps", "gauge", "Most steps that a sample has waited in the window.",
           of_feeds(lambda feed: feed.waits.longest_steps), ("feed",)),
    Metric("wait_bound_steps", "gauge", "Steps that no sample waits beyond, as the packer promises.",
           of_feeds(lambda feed: feed.waits.bound_steps), ("feed",)),
    Metric("outliers_waiting", "gauge", "Samples in the window that balance: joint keeps for others as long.",
           of_feeds(lambda feed: feed.waits.outliers), ("feed",)),
    Metric("arena_live_tokens", "gauge", "Tokens held in the arena.", at(lambda status: status.memory.live_tokens)),
    Metric("arena_capacity_bytes", "gauge", "Size of the arena.", at(lambda status: status.memory.arena_bytes)),
    Metric("arena_token_bytes", "gauge", "Size of a token.", at(lambda status: status.memory.token_bytes)),
    Metric("arena_moved_tokens", "counter", "Tokens copied within the arena to make room.",
           at(lambda status: status.memory.moved_tokens)),
    # What is on the disk
    Metric("log_bytes", "gauge", "Size of the log's files.", of_log(lambda log: log.bytes)),
    Metric("log_limit_bytes", "gauge", "Most that they may take: retain.bytes.", of_log(lambda log: log.limit_bytes)),
    Metric("log_disk_free_bytes", "gauge", "Space left on the log's disk.", of_log(lambda log: log.free_bytes)),
    Metric("log_records", "counter", "Records appended over the life of the log.", of_log(lambda log: log.records)),
    Metric("log_unsafe_records", "gauge", "Records that are not as safe yet as durability asks.",
           of_log(lambda log: log.unsafe_records)),
    Metric("log_stalled", "gauge", "1 while the log takes no more: the disk or retain.bytes is full.",
           of_log(lambda log: log.stalled != "")),
    Metric("log_syncs", "counter", "Syncs of the log.", of_log(lambda log: log.syncs)),
    Metric("log_sync_seconds", "counter", "Time spent in them.", of_log(lambda log: log.sync_seconds)),
    # Who is there, and what went out
    Metric("sent_tokens", "counter", "Tokens sent to trainers, padding too.", at(lambda status: status.sent_tokens)),
    Metric("queued_bytes", "gauge", "Bytes of steps sent to ranks that have not confirmed them.",
           of_feeds(lambda feed: feed.queued_bytes), ("feed",)),
    Metric("queued_limit_bytes", "gauge", "Most bytes that may be sent to ranks and not confirmed.",
           of_feeds(lambda feed: feed.queued_limit_bytes), ("feed",)),
    Metric("resent_bytes", "counter", "Bytes of steps sent again to ranks, because they were lost.",
           of_feeds(lambda feed: feed.resent_bytes), ("feed",)),
    Metric("bad_messages", "counter",
           "Messages damaged, refused, of another run, or not sent; peers without a key; cut connections.",
           bad_messages, ("reason",)),
    Metric("producers_connected", "gauge", "Producers connected.", at(lambda status: status.producers)),
    Metric("vanished_producers", "counter", "Producers gone without a goodbye: silent, or started again.",
           at(lambda status: status.vanished_producers)),
    Metric("readers_connected", "gauge", "Ranks attached.",
           of_feeds(lambda feed: len(feed.readers)), ("feed",)),
    Metric("readers_expected", "gauge", "Ranks of the trainers' mesh that read.",
           of_feeds(lambda feed: feed.num_ranks), ("feed",)),
    Metric("round", "gauge", "Iteration over the feed that is served, from 0.",
           of_feeds(lambda feed: feed.round), ("feed",)),
    Metric("ended", "gauge", "1 once all ranks have returned the last step of this iteration.",
           of_feeds(ended), ("feed",)),
    Metric("held_tokens", "gauge", "Tokens merged and not yet returned by all ranks.",
           of_feeds(lambda feed: feed.held_tokens),
           ("feed",)),
    Metric("held_limit_tokens", "gauge", "Most tokens that may be held.",
           of_feeds(lambda feed: feed.held_limit_tokens), ("feed",)),
    Metric("reader_returned_steps", "gauge", "Steps of this iteration that a rank has returned.",
           of_readers(lambda row: row.done_upto), ("feed", *RANKS)),
    Metric("committed_step", "gauge", "Step at which the last checkpoint begins that is known to be durable.",
           of_feeds(lambda feed: feed.committed), ("feed",)),
    Metric("steps_left", "gauge", "Steps left of the pass, estimated: the estimate, and bounds that it should be in.",
           steps_left, ("feed", "bound")),
    Metric("reader_starved_seconds", "counter", "Time that a rank has waited for steps, by cause; of the cause stream, "
           "by the stream whose samples were missing.", starved, ("feed", *RANKS, "cause", "stream")),
    Metric("next_wait_seconds", "histogram", "How long all ranks have waited for each step.",
           histograms(lambda each: each.next_wait_seconds), ("feed",)),
    Metric("reader_trainer_seconds", "counter", "Time that a rank's trainer had a step and did not ask for the next.",
           of_readers(trainer_seconds), ("feed", *RANKS)),
    Metric("reader_step_seconds", "gauge", "Time from one step of a rank to the next, mean of the last ones.",
           of_readers(lambda row: row.step_s), ("feed", *RANKS)),
    Metric("reader_silent_seconds", "gauge", "Time since a rank was heard.",
           of_readers(lambda row: row.silent_s), ("feed", *RANKS)),
    Metric("reader_starved_ratio", "gauge", "Share of a rank's time spent waiting for data.",
           client_figure("starved_fraction"), ("feed", *RANKS)),
    Metric("reader_next_p99_seconds", "gauge", "99th percentile of a rank's wait for a step.",
           client_figure("next_p99_ms", 1e-3), ("feed", *RANKS)),
)  # fmt: skip


def exposition(status: BrokerStatus) -> bytes:
    """Return every series of a broker and of its process in Prometheus' text format, ``CONTENT_TYPE``.

    The client library is not used for the broker's series: for 8000 of them, those of 512 ranks, it takes 0.1 s, most
    of it for labels.
    """
    lines = []
    for metric in METRICS:
        name = f"streampack_{metric.name}{_ENDS[metric.kind]}"
        lines += [f"# HELP {name} {metric.text}", f"# TYPE {name} {metric.kind}"]
        for labels, value in metric.rows(status):
            if isinstance(value, Histogram):
                lines += _histogram(name, metric, labels, value)
            else:
                lines.append(f"{name}{_labels(metric.labels, labels)} {value!r}")
    return "\n".join([*lines, ""]).encode() + generate_latest(_process)


CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
_ENDS = {"counter": "_total", "gauge": "", "histogram": ""}
_process = CollectorRegistry()
ProcessCollector(registry=_process)


def _histogram(name: str, metric: Metric, labels: Labels, histogram: Histogram) -> Iterator[str]:
    """Yield the number of values up to each bound, their sum and their number."""
    names, upto = (*metric.labels, "le"), 0
    for bound, count in zip((*histogram.bounds, "+Inf"), histogram.counts, strict=True):
        upto += count
        yield f"{name}_bucket{_labels(names, (*labels, str(bound)))} {upto}"
    yield f"{name}_sum{_labels(metric.labels, labels)} {histogram.sum!r}"
    yield f"{name}_count{_labels(metric.labels, labels)} {upto}"


@lru_cache(maxsize=1 << 16)
def _labels(names: tuple[str, ...], values: tuple[str, ...]) -> str:
    if not names:
        return ""
    pairs = (f'{name}="{value.translate(_ESCAPES)}"' for name, value in zip(names, values, strict=True))
    return f"{{{','.join(pairs)}}}"


_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def text() -> str:
    """All of them, for a person: a table in Markdown."""
    rows = [
        f"| `streampack_{each.name}{_ENDS[each.kind]}` | {each.kind} | {', '.join(each.labels)} | {each.text} |"
        for each in METRICS
    ]
    return "\n".join([_HEAD, *rows, ""])


_HEAD = """# Metrics

What the broker has under `/metrics`, all of it: producers and trainers need no scraping, they send their figures to the
broker. A histogram has `_bucket`, `_sum` and `_count`. Beside these are `process_*` of the Prometheus client.

| metric | kind | labels | what it is |
|---|---|---|---|"""

if __name__ == "__main__":
    sys.stdout.write(text())
