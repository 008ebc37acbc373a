"""The broker's metrics for Prometheus, read from its snapshot.

Names follow https://prometheus.io/docs/practices/naming: one prefix, base units, ``_total`` for
counters, few labels whose sum means something. Tokens, samples, packs and steps are things that
are counted and have no unit. Ratios are of 1. A custom collector makes the families when it is
scraped, so nothing is updated, locked or kept twice.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from streampack_services.status import Snapshot

Rows = Iterable[tuple[tuple[str, ...], float]]
"""(label values, value) of each series."""
RANKS = ("dp_rank", "cp_rank", "tp_rank", "pp_rank", "host")


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: its name without prefix and ``_total``, and where the snapshot has its series."""

    name: str
    kind: Literal["counter", "gauge"]
    text: str
    rows: Callable[[Snapshot], Rows]
    labels: tuple[str, ...] = ()


def _at(*path: str) -> Callable[[Snapshot], Rows]:
    def rows(snapshot: Snapshot) -> Rows:
        value: object = snapshot
        for key in path:
            assert isinstance(value, dict)
            value = value[key]
        assert isinstance(value, (bool, int, float))
        return [((), float(value))]

    return rows


def _by(path: str) -> Callable[[Snapshot], Rows]:
    return lambda snapshot: [((key,), float(value)) for key, value in snapshot[path].items()]


def _of_feeds(*path: str) -> Callable[[Snapshot], Rows]:
    """A figure of every feed."""
    each = _at(*path)
    return lambda snapshot: [((name,), value) for name, feed in snapshot["feeds"].items() for _, value in each(feed)]


def _of_log(key: str) -> Callable[[Snapshot], Rows]:
    """A figure of the log, where there is one; of words whether there are any."""

    def rows(snapshot: Snapshot) -> Rows:
        figures = snapshot["log"]
        if figures is not None:
            yield (), float(bool(figures[key]) if isinstance(figures[key], str) else figures[key])

    return rows


def _waste(snapshot: Snapshot) -> Rows:
    return [
        ((name, cause), float(tokens))
        for name, feed in snapshot["feeds"].items()
        for cause, tokens in feed["waste_tokens"].items()
    ]


def _padding(snapshot: Snapshot) -> Rows:
    """Tokens of padded micro-batches, of the feeds that have such."""
    for name, feed in snapshot["feeds"].items():
        for key, tokens in (feed["dynamic_batching"] or {}).items():
            if key.endswith("_tokens"):
                yield (name, key.removesuffix("_tokens")), float(tokens)


def _removed_ratio(snapshot: Snapshot) -> Rows:
    for name, feed in snapshot["feeds"].items():
        if feed["dynamic_batching"] is not None:
            yield (name,), feed["dynamic_batching"]["removed_padding_ratio"]


def _lost(snapshot: Snapshot) -> Rows:
    return [
        ((name, policy), float(tokens))
        for name, feed in snapshot["feeds"].items()
        for policy, tokens in feed["lost_tokens"].items()
    ]


def _rank_tokens(snapshot: Snapshot) -> Rows:
    return [
        ((name, when, figure), tokens)
        for name, feed in snapshot["feeds"].items()
        for when, figures in feed["rank_tokens"].items()
        for figure, tokens in figures.items()
    ]


def _of_waits(key: str) -> Callable[[Snapshot], Rows]:
    """A figure of how long samples wait, of the feeds whose packers have it."""

    def rows(snapshot: Snapshot) -> Rows:
        for name, feed in snapshot["feeds"].items():
            if (found := feed["waits"][key]) is not None:
                yield (name,), float(found)

    return rows


def _of_streams(*path: str) -> Callable[[Snapshot], Rows]:
    """A figure of every stream."""
    each = _at(*path)
    return lambda snapshot: [((row["stream"],), value) for row in snapshot["streams"] for _, value in each(row)]


def _last_seen(snapshot: Snapshot) -> Rows:
    for row in snapshot["streams"]:
        if row["last_seen_s"] is not None:
            yield (row["stream"],), snapshot["taken_at"] - row["last_seen_s"]


def _committed(snapshot: Snapshot) -> Rows:
    for name, feed in snapshot["feeds"].items():
        if feed["committed"] is not None:
            yield (name,), float(feed["committed"])


def _steps_left(snapshot: Snapshot) -> Rows:
    for name, feed in snapshot["feeds"].items():
        for which, steps in (feed["steps_left"] or {}).items():
            yield (name, which), float(steps)


def _rejected(snapshot: Snapshot) -> Rows:
    return [
        ((row["stream"], reason), float(count))
        for row in snapshot["streams"]
        for reason, count in row["rejected"].items()
    ]


def _of_readers(value: Callable[[Snapshot], float | None]) -> Callable[[Snapshot], Rows]:
    """A figure of every rank of every feed, where it has one."""

    def rows(snapshot: Snapshot) -> Rows:
        for name, feed in snapshot["feeds"].items():
            for row in feed["readers"]:
                found = value(row)
                if found is not None:
                    yield (name, *(str(row[rank]) for rank in RANKS)), found

    return rows


def _starved(snapshot: Snapshot) -> Rows:
    """By cause, and of the cause ``stream`` by stream: each second of a wait is in one series."""
    for name, feed in snapshot["feeds"].items():
        for row in feed["readers"]:
            rank = (name, *(str(row[rank]) for rank in RANKS))
            of_streams = row["starved_streams"]
            for cause, seconds in row["starved_s"].items():
                unknown = round(max(seconds - sum(of_streams.values()), 0.0), 3) if cause == "stream" else seconds
                yield (*rank, cause, ""), unknown
            for stream, seconds in of_streams.items():
                yield (*rank, "stream", stream), seconds


def _stat(key: str, scale: float = 1.0) -> Callable[[Snapshot], Rows]:
    """A figure that the clients send with their pings."""
    return _of_readers(lambda row: row["stats"][key] * scale if key in row["stats"] else None)


def _build(snapshot: Snapshot) -> Rows:
    return [((snapshot["version"], platform.python_version()), 1.0)]


def _run(snapshot: Snapshot) -> Rows:
    return [((snapshot["run"], name, feed["rules"]["digest"]), 1.0) for name, feed in snapshot["feeds"].items()]


METRICS: tuple[Metric, ...] = (
    Metric("build_info", "gauge", "1, with the broker's version and that of its Python.", _build,
           ("version", "python")),
    Metric("run_info", "gauge", "1, with the run, a feed of it and the digest of its rules.", _run,
           ("run", "feed", "rules")),
    Metric("ready", "gauge", "1 while the broker serves, 0 while it starts or drains.", _at("ready")),
    # What came in
    Metric("received_samples", "counter", "Samples taken from producers.", _of_streams("samples"), ("stream",)),
    Metric("received_tokens", "counter", "Tokens taken from producers and kept.", _of_streams("tokens"), ("stream",)),
    Metric("overlong_samples", "counter", "Samples that the over-long policy cut, split or dropped.",
           _of_streams("overlong"), ("stream",)),
    Metric("lost_tokens", "counter", "Tokens that the over-long policy cut off or dropped.",
           _of_streams("lost_tokens"), ("stream",)),
    Metric("stream_last_seen_timestamp_seconds", "gauge", "When a producer of the stream was last heard, since 1970.",
           _last_seen, ("stream",)),
    Metric("stream_weight", "gauge", "Weight of the stream among those of its feed; 0 where it was taken out.",
           _of_streams("weight"), ("stream",)),
    Metric("stream_producers", "gauge", "Producers that offer the stream.", _of_streams("producers"), ("stream",)),
    Metric("stream_granted_tokens", "gauge", "Tokens of the stream that may wait for the merge: its credits.",
           _of_streams("credits", "granted_tokens"), ("stream",)),
    Metric("stream_used_tokens", "gauge", "Tokens of the stream that have come and wait for the merge.",
           _of_streams("credits", "used_tokens"), ("stream",)),
    Metric("stream_lag_samples", "gauge", "Samples of the stream that may be sent and have not come.",
           _of_streams("lag", "samples"), ("stream",)),
    Metric("rejected_samples", "counter", "Samples that could not be used and were dropped, by reason.",
           _rejected, ("stream", "reason")),
    # What was formed
    Metric("steps", "counter", "Steps formed.", _of_feeds("totals", "steps"), ("feed",)),
    Metric("packs", "counter", "Packs formed, empty ones too.", _of_feeds("totals", "packs"), ("feed",)),
    Metric("packed_samples", "counter", "Samples in the packs formed.", _of_feeds("totals", "samples"), ("feed",)),
    Metric("packed_tokens", "counter", "Real tokens in the packs formed.", _of_feeds("totals", "tokens"), ("feed",)),
    Metric("tail_dropped_samples", "counter", "Samples of the last, partial step that policy tail: drop left out.",
           _of_feeds("totals", "dropped_samples"), ("feed",)),
    Metric("waste_tokens", "counter", "Tokens of the packs formed that are nobody's, by cause.",
           _waste, ("feed", "cause")),
    Metric("delivered_tokens", "counter", "Tokens of the packs formed, real and wasted.",
           _of_feeds("delivered_tokens"), ("feed",)),
    Metric("untrained_tokens", "counter", "Tokens that came and are in no step that is trained, by what took them.",
           _lost, ("feed", "policy")),
    Metric("form_seconds", "counter", "Time spent packing.", _at("form_seconds")),
    Metric("utilisation_ratio", "gauge", "Real tokens over packs * budget, since the start.",
           _of_feeds("figures", "utilisation"), ("feed",)),
    Metric("waste_ratio", "gauge", "1 - utilisation.", _of_feeds("figures", "waste_ratio"), ("feed",)),
    Metric("packing_efficiency_ratio", "gauge", "Packs that the tokens alone would need, over packs formed.",
           _of_feeds("figures", "packing_efficiency"), ("feed",)),
    Metric("bin_balance_ratio", "gauge", "1 - deviation of the packs' fill over its mean; may be negative.",
           _of_feeds("figures", "bin_balance"), ("feed",)),
    Metric("padded_utilisation_ratio", "gauge", "Tokens of aligned samples over packs * budget.",
           _of_feeds("padded_figures", "utilisation"), ("feed",)),
    Metric("padded_packing_efficiency_ratio", "gauge", "Packs that aligned samples alone would need, over packs.",
           _of_feeds("padded_figures", "packing_efficiency"), ("feed",)),
    Metric("padded_bin_balance_ratio", "gauge", "Balance of the packs' fill with aligned samples.",
           _of_feeds("padded_figures", "bin_balance"), ("feed",)),
    Metric("cost_max_over_mean_ratio", "gauge", "Dearest pack over the mean of its micro-batch, mean over all dealt.",
           _of_feeds("figures", "cost_max_over_mean"), ("feed",)),
    Metric("step_cost_max_over_mean_ratio", "gauge", "Dearest rank of a step over the mean, mean over all dealt.",
           _of_feeds("figures", "step_cost_max_over_mean"), ("feed",)),
    Metric("rank_tokens", "gauge", "Real tokens of a rank's step before and after balancing, mean over steps.",
           _rank_tokens, ("feed", "when", "figure")),
    Metric("split_packs", "counter", "Packs of batches more than were formed, split for the trainers' mesh.",
           _of_feeds("dealt", "split_packs"), ("feed",)),
    Metric("added_empty_packs", "counter", "Empty packs that batches needed for the trainers' mesh.",
           _of_feeds("dealt", "empty_packs"), ("feed",)),
    Metric("dynamic_batching_tokens", "counter", "Tokens of padded micro-batches: real (valid), of batches as wide as "
           "their longest sample (original), computed (actual), and the difference (removed_padding).",
           _padding, ("feed", "kind")),
    Metric("removed_padding_ratio", "gauge", "Tokens not computed, of batches as wide as their longest sample.",
           _removed_ratio, ("feed",)),
    # What is held
    Metric("window_samples", "gauge", "Samples merged and not in a step yet.",
           _of_feeds("window", "samples"), ("feed",)),
    Metric("window_tokens", "gauge", "Tokens of samples merged and not in a step yet.",
           _of_feeds("window", "tokens"), ("feed",)),
    Metric("window_oldest_steps", "gauge", "Steps that the oldest sample in the window has waited.",
           _of_feeds("window", "oldest_steps"), ("feed",)),
    Metric("wait_p99_steps", "gauge", "Steps that 99 of 100 samples waited in the window at most.",
           _of_waits("p99_steps"), ("feed",)),
    Metric("longest_wait_steps", "gauge", "Most steps that a sample has waited in the window.",
           _of_waits("longest_steps"), ("feed",)),
    Metric("wait_bound_steps", "gauge", "Steps that no sample waits beyond, as the packer promises.",
           _of_waits("bound_steps"), ("feed",)),
    Metric("outliers_waiting", "gauge", "Samples in the window that balance: joint keeps for others as long.",
           _of_waits("outliers"), ("feed",)),
    Metric("arena_live_tokens", "gauge", "Tokens held in the arena.", _at("memory", "live_tokens")),
    Metric("arena_capacity_bytes", "gauge", "Size of the arena.", _at("memory", "arena_bytes")),
    Metric("arena_token_bytes", "gauge", "Size of a token.", _at("memory", "token_bytes")),
    Metric("arena_moved_tokens", "counter", "Tokens copied within the arena to make room.",
           _at("memory", "moved_tokens")),
    # What is on the disk
    Metric("log_bytes", "gauge", "Size of the log's files.", _of_log("bytes")),
    Metric("log_limit_bytes", "gauge", "Most that they may take: retain.bytes.", _of_log("limit_bytes")),
    Metric("log_disk_free_bytes", "gauge", "Space left on the log's disk.", _of_log("free_bytes")),
    Metric("log_records", "counter", "Records appended over the life of the log.", _of_log("records")),
    Metric("log_unsafe_records", "gauge", "Records that are not as safe yet as durability asks.",
           _of_log("unsafe_records")),
    Metric("log_stalled", "gauge", "1 while the log takes no more: the disk or retain.bytes is full.",
           _of_log("stalled")),
    Metric("log_syncs", "counter", "Syncs of the log.", _of_log("syncs")),
    Metric("log_sync_seconds", "counter", "Time spent in them.", _of_log("sync_seconds")),
    # Who is there, and what went out
    Metric("sent_tokens", "counter", "Tokens sent to trainers, padding too.", _at("sent_tokens")),
    Metric("bad_messages", "counter", "Messages damaged, refused, of another run, or that could not be sent.",
           _by("messages"), ("reason",)),
    Metric("producers_connected", "gauge", "Producers connected.", _at("producers")),
    Metric("vanished_producers", "counter", "Producers gone without a goodbye: silent, or started again.",
           _at("vanished_producers")),
    Metric("readers_connected", "gauge", "Ranks attached.",
           lambda snapshot: [((name,), float(len(feed["readers"]))) for name, feed in snapshot["feeds"].items()],
           ("feed",)),
    Metric("readers_expected", "gauge", "Ranks of the trainers' mesh that read.", _of_feeds("num_ranks"), ("feed",)),
    Metric("round", "gauge", "Iteration over the feed that is served, from 0.", _of_feeds("round"), ("feed",)),
    Metric("held_tokens", "gauge", "Tokens merged and not yet returned by all ranks.", _of_feeds("held_tokens"),
           ("feed",)),
    Metric("held_limit_tokens", "gauge", "Most tokens that may be held.", _of_feeds("held_limit_tokens"), ("feed",)),
    Metric("reader_returned_steps", "gauge", "Steps of this iteration that a rank has returned.",
           _of_readers(lambda row: float(row["done_upto"])), ("feed", *RANKS)),
    Metric("committed_step", "gauge", "Step at which the last checkpoint begins that is known to be durable.",
           _committed, ("feed",)),
    Metric("steps_left", "gauge", "Steps left of the pass, estimated: the estimate, and bounds that it should be in.",
           _steps_left, ("feed", "bound")),
    Metric("reader_starved_seconds", "counter", "Time that a rank has waited for steps, by cause; of the cause stream, "
           "by the stream whose samples were missing.", _starved, ("feed", *RANKS, "cause", "stream")),
    Metric("reader_trainer_seconds", "counter", "Time that a rank's trainer had a step and did not ask for the next.",
           _of_readers(lambda row: float(row["trainer_s"])), ("feed", *RANKS)),
    Metric("reader_step_seconds", "gauge", "Time from one step of a rank to the next, mean of the last ones.",
           _of_readers(lambda row: row["step_s"]), ("feed", *RANKS)),
    Metric("reader_silent_seconds", "gauge", "Time since a rank was heard.",
           _of_readers(lambda row: float(row["silent_s"])), ("feed", *RANKS)),
    Metric("reader_starved_ratio", "gauge", "Share of a rank's time spent waiting for data.",
           _stat("starved_fraction"), ("feed", *RANKS)),
    Metric("reader_next_p99_seconds", "gauge", "99th percentile of a rank's wait for a step.",
           _stat("next_p99_ms", 1e-3), ("feed", *RANKS)),
)  # fmt: skip


class _SnapshotCollector(Collector):
    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self._snapshot = snapshot

    def describe(self) -> Iterable[Family]:
        return [_family(metric) for metric in METRICS]

    def collect(self) -> Iterator[Family]:
        snapshot = self._snapshot()
        for metric in METRICS:
            family = _family(metric)
            for labels, value in metric.rows(snapshot):
                family.add_metric(labels, value)
            yield family


def _family(metric: Metric) -> CounterMetricFamily | GaugeMetricFamily:
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    return kind(f"streampack_{metric.name}", metric.text, labels=metric.labels)


def registry(snapshot: Callable[[], Snapshot]) -> CollectorRegistry:
    """A registry of this process alone, whose every scrape reads ``snapshot()`` once."""
    own = CollectorRegistry()
    own.register(_SnapshotCollector(snapshot))
    ProcessCollector(registry=own)
    return own
