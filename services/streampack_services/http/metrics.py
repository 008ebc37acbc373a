"""The broker's metrics for Prometheus, read from its snapshot.

Names follow https://prometheus.io/docs/practices/naming: one prefix, base units, ``_total`` for counters, few labels.
Counts of tokens, samples, packs and steps have no unit. Ratios are fractions, not percent. Each scrape reads the last
snapshot, so there is no second copy of a counter.

To add a metric, add a field to ``broker.status``, fill it in ``Reporter.take``, and add a row to ``METRICS`` below.
``deploy/prometheus/METRICS.md`` lists all metrics; ``python -m streampack_services.http.metrics`` prints it.
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
    bad_messages,
    bound_packs,
    build_info,
    client_figure,
    data_wait,
    dynamic_batching,
    ended,
    histograms,
    last_seen,
    longest_waits,
    media_dropped,
    media_held,
    node_waits,
    of_broker,
    of_feeds,
    of_late,
    of_log,
    of_media,
    of_nodes,
    of_readers,
    of_relays,
    of_standby,
    of_streams,
    padding,
    rank_tokens,
    refused_values,
    rejected,
    removed_ratio,
    run_info,
    sample_warnings,
    starved,
    steps_left,
    trainer_seconds,
    untrained,
)


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: name without prefix and ``_total``, help text, and a function that reads its series from a status."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    text: str
    rows: Callable[[BrokerStatus], Iterable[tuple[Labels, float | Histogram]]]
    labels: tuple[str, ...] = ()


_FEW_RANKS = "Not with more than 1,024 ranks."
_MANY_RANKS = "Only with more than 1,024 ranks, of the 64 worst hosts."

METRICS: tuple[Metric, ...] = (
    Metric("build_info", "gauge", "Always 1; the labels are the versions of streampack and Python.", build_info,
           ("version", "python")),
    Metric("run_info", "gauge", "Always 1; the labels are the run, its feed and the digest of its rules.", run_info,
           ("run", "feed", "rules")),
    Metric("ready", "gauge", "1 while the broker serves, 0 while it starts or drains.",
           of_broker(lambda status: status.ready)),
    # Received samples
    Metric("received_samples", "counter", "Samples received from producers.",
           of_streams(lambda row: row.samples), ("stream",)),
    Metric("received_tokens", "counter", "Tokens received from producers and kept.",
           of_streams(lambda row: row.tokens), ("stream",)),
    Metric("overlong_samples", "counter", "Samples that the over-long policy truncated, split or dropped.",
           of_streams(lambda row: row.overlong), ("stream",)),
    Metric("lost_tokens", "counter", "Tokens that the over-long policy truncated or dropped.",
           of_streams(lambda row: row.lost_tokens), ("stream",)),
    Metric("stream_last_seen_timestamp_seconds", "gauge",
           "Time at which the broker last heard from a producer of the stream.",
           last_seen, ("stream",)),
    Metric("stream_weight", "gauge", "Weight of a stream among the streams of its feed; 0 after its removal.",
           of_streams(lambda row: row.weight), ("stream",)),
    Metric("stream_producers", "gauge", "Producers that offer the stream.",
           of_streams(lambda row: row.producers), ("stream",)),
    Metric("stream_granted_tokens", "gauge", "Credit of the stream: limit of tokens that wait for the merge.",
           of_streams(lambda row: row.credits.granted_tokens), ("stream",)),
    Metric("stream_used_tokens", "gauge", "Tokens of the stream that wait for the merge.",
           of_streams(lambda row: row.credits.used_tokens), ("stream",)),
    Metric("stream_lag_samples", "gauge", "Samples that producers have credit for but have not sent.",
           of_streams(lambda row: row.lag.samples), ("stream",)),
    Metric("late_samples", "gauge", "Samples that wait for values of late fields.", of_late(lambda late: late.samples),
           ("stream",)),
    Metric("late_oldest_seconds", "gauge", "Seconds that the oldest of these samples has waited.",
           of_late(lambda late: late.oldest_s), ("stream",)),
    Metric("late_refused_samples", "counter", "Samples whose values came too late or were refused, by reason.",
           refused_values, ("stream", "reason")),
    Metric("rejected_samples", "counter", "Samples that could not be used and were dropped, by reason.",
           rejected, ("stream", "reason")),
    Metric("sample_warnings", "counter", "Delivered samples that may not mean what you intend, by warning.",
           sample_warnings, ("stream", "warning")),
    # Formed steps and packs
    Metric("steps", "counter", "Steps formed.", of_feeds(lambda feed: feed.totals.steps), ("feed",)),
    Metric("packs", "counter",
           "Packs formed, empty packs included.", of_feeds(lambda feed: feed.totals.packs), ("feed",)),
    Metric("packed_samples", "counter", "Samples in the packs formed.",
           of_feeds(lambda feed: feed.totals.samples), ("feed",)),
    Metric("packed_tokens", "counter", "Real tokens in the packs formed.",
           of_feeds(lambda feed: feed.totals.tokens), ("feed",)),
    Metric("shared_tokens", "counter",
           "Tokens that samples share with samples before them in a pack; packed_tokens counts them once.",
           of_feeds(lambda feed: feed.totals.shared_tokens), ("feed",)),
    Metric("shared_ratio", "gauge", "Shared tokens / tokens of the samples in the packs formed, since the start.",
           of_feeds(lambda feed: feed.totals.shared_ratio), ("feed",)),
    Metric("media_items", "counter", "Media items in the packs formed. Only of feeds with media.",
           of_media(lambda media: media.items), ("feed",)),
    Metric("media_patches", "counter", "Patches of these media items.", of_media(lambda media: media.patches),
           ("feed",)),
    Metric("media_bound_packs", "counter",
           "Packs formed, by the axis that is fullest compared with its limit: tokens, patches or items. Only of feeds "
           "with media.", bound_packs, ("feed", "axis")),
    Metric("tail_dropped_samples", "counter", "Samples left out at the end of each iteration by `tail: drop`.",
           of_feeds(lambda feed: feed.totals.dropped_samples), ("feed",)),
    Metric("waste_tokens", "counter", "Padding in the packs delivered, in tokens, by cause.",
           padding, ("feed", "cause")),
    Metric("delivered_tokens", "counter", "Tokens of the packs delivered, padding included.",
           of_feeds(lambda feed: feed.delivered_tokens), ("feed",)),
    Metric("untrained_tokens", "counter", "Received tokens that no rank trains on, by the policy that excluded them.",
           untrained, ("feed", "policy")),
    Metric("form_seconds", "counter",
           "Time spent in FORM, which packs samples.", of_broker(lambda status: status.form_seconds)),
    Metric("utilization_ratio", "gauge", "Utilization: real tokens / (packs * budget), since the start.",
           of_feeds(lambda feed: feed.figures.utilization), ("feed",)),
    Metric("waste_ratio", "gauge",
           "Padding ratio: 1 - utilization.", of_feeds(lambda feed: feed.figures.waste_ratio), ("feed",)),
    Metric("packing_efficiency_ratio", "gauge", "Packing efficiency: fewest packs for the tokens / packs formed.",
           of_feeds(lambda feed: feed.figures.packing_efficiency), ("feed",)),
    Metric("bin_balance_ratio", "gauge", "Bin balance: 1 - standard deviation / mean of tokens per pack; may be < 0.",
           of_feeds(lambda feed: feed.figures.bin_balance), ("feed",)),
    Metric("padded_utilization_ratio", "gauge", "Utilization, with each sample padded to align.sample.",
           of_feeds(lambda feed: feed.padded_figures.utilization), ("feed",)),
    Metric("padded_packing_efficiency_ratio", "gauge", "Packing efficiency, with each sample padded to align.sample.",
           of_feeds(lambda feed: feed.padded_figures.packing_efficiency), ("feed",)),
    Metric("padded_bin_balance_ratio", "gauge", "Bin balance, with each sample padded to align.sample.",
           of_feeds(lambda feed: feed.padded_figures.bin_balance), ("feed",)),
    Metric("pack_fill_ratio", "histogram", "Real tokens / budget of each pack formed; 0 is an empty pack.",
           histograms(lambda each: each.pack_fill_ratio), ("feed",)),
    Metric("pack_samples", "histogram", "Samples of each pack formed.",
           histograms(lambda each: each.pack_samples), ("feed",)),
    Metric("cost_max_over_mean_ratio", "gauge",
           "Load imbalance: max / mean cost over the packs of a micro-batch, mean over micro-batches; 1.0 is perfect.",
           of_feeds(lambda feed: feed.figures.cost_max_over_mean), ("feed",)),
    Metric("step_cost_max_over_mean_ratio", "gauge",
           "Load imbalance: max / mean cost over the ranks of a step, mean over steps; 1.0 is perfect.",
           of_feeds(lambda feed: feed.figures.step_cost_max_over_mean), ("feed",)),
    Metric("rank_tokens", "gauge", "Real tokens per rank in a step, before and after balancing, mean over steps.",
           rank_tokens, ("feed", "when", "figure")),
    Metric("split_packs", "counter", "Packs added by splitting packs, because the trainers' mesh needed more packs.",
           of_feeds(lambda feed: feed.dealt.split_packs), ("feed",)),
    Metric("added_empty_packs", "counter", "Empty packs added because the trainers' mesh needed more packs.",
           of_feeds(lambda feed: feed.dealt.empty_packs), ("feed",)),
    Metric("dynamic_batching_tokens", "counter",
           "Tokens of padded micro-batches: without padding (valid), padded to the longest sample of the batch "
           "(original), as computed (actual), original - actual (removed_padding).",
           dynamic_batching, ("feed", "kind")),
    Metric("removed_padding_ratio", "gauge", "Share of the original tokens that dynamic batching removes.",
           of_feeds(removed_ratio), ("feed",)),
    # Samples held
    Metric("window_samples", "gauge", "Samples in the window: merged but not in a step yet.",
           of_feeds(lambda feed: feed.window.samples), ("feed",)),
    Metric("window_tokens", "gauge", "Tokens of the samples in the window.",
           of_feeds(lambda feed: feed.window.tokens), ("feed",)),
    Metric("window_oldest_steps", "gauge", "Wait of the oldest sample in the window, in steps.",
           of_feeds(lambda feed: feed.window.oldest_steps), ("feed",)),
    Metric("wait_p99_steps", "gauge", "99th percentile of a sample's wait in the window, in steps.",
           of_feeds(lambda feed: feed.waits.p99_steps), ("feed",)),
    Metric("longest_wait_steps", "gauge", "Longest wait of a sample in the window so far, in steps.",
           of_feeds(lambda feed: feed.waits.longest_steps), ("feed",)),
    Metric("wait_bound_steps", "gauge", "Longest wait in the window that the packer allows for a sample, in steps.",
           of_feeds(lambda feed: feed.waits.bound_steps), ("feed",)),
    Metric("outliers_waiting", "gauge",
           "Samples in the window that wait for samples of similar cost (`balance: joint`).",
           of_feeds(lambda feed: feed.waits.outliers), ("feed",)),
    Metric("arena_live_tokens", "gauge",
           "Tokens held in the arena.", of_broker(lambda status: status.memory.live_tokens)),
    Metric("arena_capacity_bytes", "gauge", "Size of the arena.", of_broker(lambda status: status.memory.arena_bytes)),
    Metric("arena_token_bytes", "gauge",
           "Bytes per token, including the values of its fields.", of_broker(lambda status: status.memory.token_bytes)),
    Metric("arena_moved_tokens", "counter", "Tokens copied within the arena to make room.",
           of_broker(lambda status: status.memory.moved_tokens)),
    Metric("arena_media_bytes", "gauge",
           "Bytes of the media of the samples held, outside the arena. Only with media.", media_held),
    # Log
    Metric("log_bytes", "gauge", "Size of the log's files.", of_log(lambda log: log.bytes)),
    Metric("log_limit_bytes", "gauge",
           "Most bytes of the log's files: retain.bytes.", of_log(lambda log: log.limit_bytes)),
    Metric("log_disk_free_bytes", "gauge", "Free bytes of the log's disk.", of_log(lambda log: log.free_bytes)),
    Metric("log_records", "counter", "Records appended since the log began.", of_log(lambda log: log.records)),
    Metric("log_unsafe_records", "gauge", "Records that are not yet stored as the durability setting requires.",
           of_log(lambda log: log.unsafe_records)),
    Metric("log_stalled", "gauge", "1 while the log accepts no records: the disk or retain.bytes is full.",
           of_log(lambda log: log.stalled != "")),
    Metric("log_warning", "gauge",
           "1 while the log's disk has no space for the next segment, or old segments cannot be deleted.",
           of_log(lambda log: log.warning != "")),
    Metric("log_syncs", "counter", "Syncs of the log to disk.", of_log(lambda log: log.syncs)),
    Metric("log_sync_seconds", "counter", "Time spent in syncs of the log.", of_log(lambda log: log.sync_seconds)),
    Metric("standby_member", "gauge", "1 if a standby has every safe record, so that it may take over.",
           of_standby(lambda standby: standby.is_member)),
    Metric("standby_lag_records", "gauge", "Records that the standby does not have on its disk yet.",
           of_standby(lambda standby: standby.lag_records)),
    Metric("standby_stalled", "gauge", "1 while no new steps are served, because the standby does not have them.",
           of_standby(lambda standby: standby.stalled != "")),
    # Peers, data wait and progress
    Metric("sent_tokens", "counter",
           "Tokens sent to trainers, padding included.", of_broker(lambda status: status.sent_tokens)),
    Metric("queued_bytes", "gauge", "Bytes sent to ranks and not yet confirmed.",
           of_feeds(lambda feed: feed.queued_bytes), ("feed",)),
    Metric("queued_limit_bytes", "gauge", "Limit of bytes sent to ranks and not yet confirmed.",
           of_feeds(lambda feed: feed.queued_limit_bytes), ("feed",)),
    Metric("resent_bytes", "counter", "Bytes sent to ranks again after they were lost.",
           of_feeds(lambda feed: feed.resent_bytes), ("feed",)),
    Metric("bad_messages", "counter",
           "Messages that cannot be decoded (damaged), belong to another run (foreign) or were not sent (unsent). "
           "Also peers rejected or without an allowed key (strangers), and connections cut.",
           bad_messages, ("reason",)),
    Metric("producers_connected", "gauge", "Producers connected.", of_broker(lambda status: status.producers)),
    Metric("vanished_producers", "counter", "Producers that disconnected without notice: silent or restarted.",
           of_broker(lambda status: status.vanished_producers)),
    Metric("readers_connected", "gauge", "Ranks attached.",
           of_feeds(lambda feed: feed.ranks.attached), ("feed",)),
    Metric("readers_expected", "gauge", "Ranks of the trainers' mesh that read the feed.",
           of_feeds(lambda feed: feed.num_ranks), ("feed",)),
    Metric("round", "gauge", "Number of the current iteration over the feed, from 0.",
           of_feeds(lambda feed: feed.round), ("feed",)),
    Metric("ended", "gauge", "1 after all ranks have returned the last step of this iteration, else 0.",
           of_feeds(ended), ("feed",)),
    Metric("held_tokens", "gauge", "Tokens merged but not yet returned by all ranks.",
           of_feeds(lambda feed: feed.held_tokens),
           ("feed",)),
    Metric("held_limit_tokens", "gauge", "Limit of tokens that the feed holds.",
           of_feeds(lambda feed: feed.held_limit_tokens), ("feed",)),
    Metric("reader_returned_steps", "gauge", f"Steps of this iteration that the rank has returned. {_FEW_RANKS}",
           of_readers(lambda row: row.done_upto), ("feed", *RANKS)),
    Metric("committed_step", "gauge", "Step at which a resume from the last durable checkpoint begins.",
           of_feeds(lambda feed: feed.committed), ("feed",)),
    Metric("steps_left", "gauge",
           "Steps left in this iteration: the estimate, and its bounds at two standard deviations.",
           steps_left, ("feed", "bound")),
    Metric("reader_starved_seconds", "counter",
           "Data wait of a rank, by cause. For the cause stream, the label stream names the stream whose samples were "
           f"missing. {_FEW_RANKS}", data_wait, ("feed", *RANKS, "cause", "stream")),
    Metric("next_wait_seconds", "histogram", "Data wait of each rank for each step.",
           histograms(lambda each: each.next_wait_seconds), ("feed",)),
    Metric("reader_trainer_seconds", "counter", f"Time from a step's delivery to the rank's next request. {_FEW_RANKS}",
           of_readers(trainer_seconds), ("feed", *RANKS)),
    Metric("reader_step_seconds", "gauge", f"Time between two steps of the rank, mean of the last steps. {_FEW_RANKS}",
           of_readers(lambda row: row.step_s), ("feed", *RANKS)),
    Metric("reader_silent_seconds", "gauge", f"Time since the broker last heard from the rank. {_FEW_RANKS}",
           of_readers(lambda row: row.silent_s), ("feed", *RANKS)),
    Metric("reader_starved_ratio", "gauge", f"Data wait of the rank as a share of its time. {_FEW_RANKS}",
           client_figure("starved_fraction"), ("feed", *RANKS)),
    Metric("reader_media_dropped", "counter", f"Media items that the rank could not have. {_FEW_RANKS}",
           of_readers(media_dropped), ("feed", *RANKS)),
    Metric("reader_next_p99_seconds", "gauge", f"99th percentile of the rank's data wait for a step. {_FEW_RANKS}",
           client_figure("next_p99_ms", 1e-3), ("feed", *RANKS)),
    # Ranks in sum and by node
    Metric("starved_seconds", "counter", "Data wait of all ranks since this broker began, by cause.",
           starved, ("feed", "cause")),
    Metric("longest_data_wait_ratio", "gauge",
           "Longest data wait of a rank over the last 3 to 5 minutes as a share of its time, by cause.",
           longest_waits, ("feed", "cause")),
    Metric("longest_silence_seconds", "gauge", "Longest time since the broker last heard from an attached rank.",
           of_feeds(lambda feed: feed.ranks.longest_silence_s), ("feed",)),
    Metric("node_missing_ranks", "gauge", f"Ranks last attached from the host that are not attached. {_MANY_RANKS}",
           of_nodes(lambda node: node.ranks - node.attached), ("feed", "host")),
    Metric("node_data_wait_ratio", "gauge",
           f"Longest data wait of a rank of the host as a share of its time, with its main cause. {_MANY_RANKS}",
           node_waits, ("feed", "host", "cause")),
    Metric("node_returned_steps", "gauge",
           f"Fewest steps of this iteration that a rank of the host has returned. {_MANY_RANKS}",
           of_nodes(lambda node: node.done_upto), ("feed", "host")),
    Metric("node_step_seconds", "gauge", f"Longest time between two steps of a rank of the host. {_MANY_RANKS}",
           of_nodes(lambda node: node.step_s), ("feed", "host")),
    Metric("node_silent_seconds", "gauge",
           f"Longest time since the broker last heard from a rank of the host. {_MANY_RANKS}",
           of_nodes(lambda node: node.silent_s), ("feed", "host")),
    Metric("node_queued_bytes", "gauge", f"Bytes sent to the host's ranks and not yet confirmed. {_MANY_RANKS}",
           of_nodes(lambda node: node.queued_bytes), ("feed", "host")),
    # Relays
    Metric("relay_up", "gauge",
           "1 while the relay of a host is connected. 0 after it has gone without a goodbye, until it is back or 1 h "
           "has passed. At most 64 relays, lost ones first.",
           of_relays(lambda relay: not relay.lost), ("host",)),
    Metric("relay_ranks", "gauge", "Ranks that read through the relay of a host. At most 64 relays.",
           of_relays(lambda relay: relay.ranks), ("host",)),
    Metric("relay_queued_bytes", "gauge", "Bytes sent to the relay of a host and not yet confirmed. At most 64 relays.",
           of_relays(lambda relay: relay.queued_bytes), ("host",)),
)  # fmt: skip


def exposition(status: BrokerStatus) -> bytes:
    """Return every series of a broker and of its process in Prometheus' text format, ``CONTENT_TYPE``.

    The broker's series do not go through the Prometheus client, which takes 0.1 s for the 8000 series of 512 ranks.
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
    """Yield the lines of one histogram: the number of values up to each bound, their sum and their number."""
    names, upto = (*metric.labels, "le"), 0
    for bound, count in zip((*histogram.bounds, "+Inf"), histogram.counts, strict=True):
        upto += count
        yield f"{name}_bucket{_labels(names, (*labels, str(bound)))} {upto}"
    yield f"{name}_sum{_labels(metric.labels, labels)} {histogram.sum!r}"
    yield f"{name}_count{_labels(metric.labels, labels)} {upto}"


@lru_cache(maxsize=1 << 16)
def _labels(names: tuple[str, ...], values: tuple[str, ...]) -> str:
    """Return labels as Prometheus writes them: ``{name="value"}``, escaped; empty without labels."""
    if not names:
        return ""
    pairs = (f'{name}="{value.translate(_ESCAPES)}"' for name, value in zip(names, values, strict=True))
    return f"{{{','.join(pairs)}}}"


_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def text() -> str:
    """Return METRICS.md: a table of all metrics."""
    rows = [
        f"| `streampack_{each.name}{_ENDS[each.kind]}` | {each.kind} | {', '.join(each.labels)} | {each.text} |"
        for each in METRICS
    ]
    return "\n".join([_HEAD, *rows, ""])


_HEAD = """# Metrics

All metrics of the broker's `/metrics`. Scrape only the broker: producers and trainers send their figures to it. A
histogram has `_bucket`, `_sum` and `_count`. The Prometheus client adds `process_*`.

The broker shows at most 1,024 ranks of a feed one by one, in `streampack_reader_*`. For a feed with more ranks, these
series are replaced by `streampack_node_*`: the worst rank of each of the 64 worst hosts. So a scrape of 30,000 ranks
takes about 50 kB. The order of the hosts is in [observe.md](../../docs/how-to/observe.md#thousands-of-ranks).

| metric | kind | labels | description |
|---|---|---|---|"""

if __name__ == "__main__":
    sys.stdout.write(text())
