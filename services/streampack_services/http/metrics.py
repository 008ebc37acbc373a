"""The broker's metrics for Prometheus, read from its snapshot.

Names follow https://prometheus.io/docs/practices/naming: one prefix, base units, ``_total`` for
counters, few labels whose sum means something. Tokens, samples, packs and steps are things that
are counted and have no unit. Ratios are of 1. All is read from the snapshot when it is scraped, so
nothing is updated, locked or kept twice. ``deploy/prometheus/METRICS.md`` lists them:
``python -m streampack_services.http.metrics`` prints it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, ProcessCollector, generate_latest

from streampack_services.broker.reporter import Snapshot
from streampack_services.http.metric_rows import (
    RANKS,
    Rows,
    at,
    build,
    by,
    committed,
    ended,
    histograms,
    last_seen,
    lost,
    of_feeds,
    of_log,
    of_readers,
    of_streams,
    of_waits,
    padding,
    rank_tokens,
    rejected,
    removed_ratio,
    run,
    starved,
    stat,
    steps_left,
    trainer_seconds,
    waste,
)


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: its name without prefix and ``_total``, and where the snapshot has its series."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    text: str
    rows: Callable[[Snapshot], Rows]
    labels: tuple[str, ...] = ()


METRICS: tuple[Metric, ...] = (
    Metric("build_info", "gauge", "1, with the broker's version and that of its Python.", build,
           ("version", "python")),
    Metric("run_info", "gauge", "1, with the run, a feed of it and the digest of its rules.", run,
           ("run", "feed", "rules")),
    Metric("ready", "gauge", "1 while the broker serves, 0 while it starts or drains.", at("ready")),
    # What came in
    Metric("received_samples", "counter", "Samples taken from producers.", of_streams("samples"), ("stream",)),
    Metric("received_tokens", "counter", "Tokens taken from producers and kept.", of_streams("tokens"), ("stream",)),
    Metric("overlong_samples", "counter", "Samples that the over-long policy cut, split or dropped.",
           of_streams("overlong"), ("stream",)),
    Metric("lost_tokens", "counter", "Tokens that the over-long policy cut off or dropped.",
           of_streams("lost_tokens"), ("stream",)),
    Metric("stream_last_seen_timestamp_seconds", "gauge", "When a producer of the stream was last heard, since 1970.",
           last_seen, ("stream",)),
    Metric("stream_weight", "gauge", "Weight of the stream among those of its feed; 0 where it was taken out.",
           of_streams("weight"), ("stream",)),
    Metric("stream_producers", "gauge", "Producers that offer the stream.", of_streams("producers"), ("stream",)),
    Metric("stream_granted_tokens", "gauge", "Tokens of the stream that may wait for the merge: its credits.",
           of_streams("credits", "granted_tokens"), ("stream",)),
    Metric("stream_used_tokens", "gauge", "Tokens of the stream that have come and wait for the merge.",
           of_streams("credits", "used_tokens"), ("stream",)),
    Metric("stream_lag_samples", "gauge", "Samples of the stream that may be sent and have not come.",
           of_streams("lag", "samples"), ("stream",)),
    Metric("rejected_samples", "counter", "Samples that could not be used and were dropped, by reason.",
           rejected, ("stream", "reason")),
    # What was formed
    Metric("steps", "counter", "Steps formed.", of_feeds("totals", "steps"), ("feed",)),
    Metric("packs", "counter", "Packs formed, empty ones too.", of_feeds("totals", "packs"), ("feed",)),
    Metric("packed_samples", "counter", "Samples in the packs formed.", of_feeds("totals", "samples"), ("feed",)),
    Metric("packed_tokens", "counter", "Real tokens in the packs formed.", of_feeds("totals", "tokens"), ("feed",)),
    Metric("tail_dropped_samples", "counter", "Samples that tail: drop left out, once an iteration.",
           of_feeds("totals", "dropped_samples"), ("feed",)),
    Metric("waste_tokens", "counter", "Tokens of the packs delivered that are nobody's, by cause.",
           waste, ("feed", "cause")),
    Metric("delivered_tokens", "counter", "Tokens of the packs delivered, real and wasted.",
           of_feeds("delivered_tokens"), ("feed",)),
    Metric("untrained_tokens", "counter", "Tokens that came and are in no step that is trained, by what took them.",
           lost, ("feed", "policy")),
    Metric("form_seconds", "counter", "Time spent packing.", at("form_seconds")),
    Metric("utilisation_ratio", "gauge", "Real tokens over packs * budget, since the start.",
           of_feeds("figures", "utilisation"), ("feed",)),
    Metric("waste_ratio", "gauge", "1 - utilisation.", of_feeds("figures", "waste_ratio"), ("feed",)),
    Metric("packing_efficiency_ratio", "gauge", "Packs that the tokens alone would need, over packs formed.",
           of_feeds("figures", "packing_efficiency"), ("feed",)),
    Metric("bin_balance_ratio", "gauge", "1 - deviation of the packs' fill over its mean; may be negative.",
           of_feeds("figures", "bin_balance"), ("feed",)),
    Metric("padded_utilisation_ratio", "gauge", "Tokens of aligned samples over packs * budget.",
           of_feeds("padded_figures", "utilisation"), ("feed",)),
    Metric("padded_packing_efficiency_ratio", "gauge", "Packs that aligned samples alone would need, over packs.",
           of_feeds("padded_figures", "packing_efficiency"), ("feed",)),
    Metric("padded_bin_balance_ratio", "gauge", "Balance of the packs' fill with aligned samples.",
           of_feeds("padded_figures", "bin_balance"), ("feed",)),
    Metric("pack_fill_ratio", "histogram", "Real tokens of the packs formed over the budget; 0: empty packs.",
           histograms("pack_fill_ratio"), ("feed",)),
    Metric("pack_samples", "histogram", "Samples of the packs formed.", histograms("pack_samples"), ("feed",)),
    Metric("cost_max_over_mean_ratio", "gauge", "Dearest pack over the mean of its micro-batch, mean over all dealt.",
           of_feeds("figures", "cost_max_over_mean"), ("feed",)),
    Metric("step_cost_max_over_mean_ratio", "gauge", "Dearest rank of a step over the mean, mean over all dealt.",
           of_feeds("figures", "step_cost_max_over_mean"), ("feed",)),
    Metric("rank_tokens", "gauge", "Real tokens of a rank's step before and after balancing, mean over steps.",
           rank_tokens, ("feed", "when", "figure")),
    Metric("split_packs", "counter", "Packs of batches more than were formed, split for the trainers' mesh.",
           of_feeds("dealt", "split_packs"), ("feed",)),
    Metric("added_empty_packs", "counter", "Empty packs that batches needed for the trainers' mesh.",
           of_feeds("dealt", "empty_packs"), ("feed",)),
    Metric("dynamic_batching_tokens", "counter", "Tokens of padded micro-batches: real (valid), of batches as wide as "
           "their longest sample (original), computed (actual), and the difference (removed_padding).",
           padding, ("feed", "kind")),
    Metric("removed_padding_ratio", "gauge", "Tokens not computed, of batches as wide as their longest sample.",
           removed_ratio, ("feed",)),
    # What is held
    Metric("window_samples", "gauge", "Samples merged and not in a step yet.",
           of_feeds("window", "samples"), ("feed",)),
    Metric("window_tokens", "gauge", "Tokens of samples merged and not in a step yet.",
           of_feeds("window", "tokens"), ("feed",)),
    Metric("window_oldest_steps", "gauge", "Steps that the oldest sample in the window has waited.",
           of_feeds("window", "oldest_steps"), ("feed",)),
    Metric("wait_p99_steps", "gauge", "Steps that 99 of 100 samples waited in the window at most.",
           of_waits("p99_steps"), ("feed",)),
    Metric("longest_wait_steps", "gauge", "Most steps that a sample has waited in the window.",
           of_waits("longest_steps"), ("feed",)),
    Metric("wait_bound_steps", "gauge", "Steps that no sample waits beyond, as the packer promises.",
           of_waits("bound_steps"), ("feed",)),
    Metric("outliers_waiting", "gauge", "Samples in the window that balance: joint keeps for others as long.",
           of_waits("outliers"), ("feed",)),
    Metric("arena_live_tokens", "gauge", "Tokens held in the arena.", at("memory", "live_tokens")),
    Metric("arena_capacity_bytes", "gauge", "Size of the arena.", at("memory", "arena_bytes")),
    Metric("arena_token_bytes", "gauge", "Size of a token.", at("memory", "token_bytes")),
    Metric("arena_moved_tokens", "counter", "Tokens copied within the arena to make room.",
           at("memory", "moved_tokens")),
    # What is on the disk
    Metric("log_bytes", "gauge", "Size of the log's files.", of_log("bytes")),
    Metric("log_limit_bytes", "gauge", "Most that they may take: retain.bytes.", of_log("limit_bytes")),
    Metric("log_disk_free_bytes", "gauge", "Space left on the log's disk.", of_log("free_bytes")),
    Metric("log_records", "counter", "Records appended over the life of the log.", of_log("records")),
    Metric("log_unsafe_records", "gauge", "Records that are not as safe yet as durability asks.",
           of_log("unsafe_records")),
    Metric("log_stalled", "gauge", "1 while the log takes no more: the disk or retain.bytes is full.",
           of_log("stalled")),
    Metric("log_syncs", "counter", "Syncs of the log.", of_log("syncs")),
    Metric("log_sync_seconds", "counter", "Time spent in them.", of_log("sync_seconds")),
    # Who is there, and what went out
    Metric("sent_tokens", "counter", "Tokens sent to trainers, padding too.", at("sent_tokens")),
    Metric("queued_bytes", "gauge", "Bytes of steps sent to ranks that have not confirmed them.",
           of_feeds("queued_bytes"), ("feed",)),
    Metric("queued_limit_bytes", "gauge", "Most bytes that may be sent to ranks and not confirmed.",
           of_feeds("queued_limit_bytes"), ("feed",)),
    Metric("resent_bytes", "counter", "Bytes of steps sent again to ranks, because they were lost.",
           of_feeds("resent_bytes"), ("feed",)),
    Metric("bad_messages", "counter",
           "Messages damaged, refused, of another run, or not sent; peers without a key; cut connections.",
           by("messages"), ("reason",)),
    Metric("producers_connected", "gauge", "Producers connected.", at("producers")),
    Metric("vanished_producers", "counter", "Producers gone without a goodbye: silent, or started again.",
           at("vanished_producers")),
    Metric("readers_connected", "gauge", "Ranks attached.",
           lambda snapshot: [((name,), float(len(feed["readers"]))) for name, feed in snapshot["feeds"].items()],
           ("feed",)),
    Metric("readers_expected", "gauge", "Ranks of the trainers' mesh that read.", of_feeds("num_ranks"), ("feed",)),
    Metric("round", "gauge", "Iteration over the feed that is served, from 0.", of_feeds("round"), ("feed",)),
    Metric("ended", "gauge", "1 once all ranks have returned the last step of this iteration.", ended, ("feed",)),
    Metric("held_tokens", "gauge", "Tokens merged and not yet returned by all ranks.", of_feeds("held_tokens"),
           ("feed",)),
    Metric("held_limit_tokens", "gauge", "Most tokens that may be held.", of_feeds("held_limit_tokens"), ("feed",)),
    Metric("reader_returned_steps", "gauge", "Steps of this iteration that a rank has returned.",
           of_readers(lambda row: float(row["done_upto"])), ("feed", *RANKS)),
    Metric("committed_step", "gauge", "Step at which the last checkpoint begins that is known to be durable.",
           committed, ("feed",)),
    Metric("steps_left", "gauge", "Steps left of the pass, estimated: the estimate, and bounds that it should be in.",
           steps_left, ("feed", "bound")),
    Metric("reader_starved_seconds", "counter", "Time that a rank has waited for steps, by cause; of the cause stream, "
           "by the stream whose samples were missing.", starved, ("feed", *RANKS, "cause", "stream")),
    Metric("next_wait_seconds", "histogram", "How long all ranks have waited for each step.",
           histograms("next_wait_seconds"), ("feed",)),
    Metric("reader_trainer_seconds", "counter", "Time that a rank's trainer had a step and did not ask for the next.",
           of_readers(trainer_seconds), ("feed", *RANKS)),
    Metric("reader_step_seconds", "gauge", "Time from one step of a rank to the next, mean of the last ones.",
           of_readers(lambda row: row["step_s"]), ("feed", *RANKS)),
    Metric("reader_silent_seconds", "gauge", "Time since a rank was heard.",
           of_readers(lambda row: float(row["silent_s"])), ("feed", *RANKS)),
    Metric("reader_starved_ratio", "gauge", "Share of a rank's time spent waiting for data.",
           stat("starved_fraction"), ("feed", *RANKS)),
    Metric("reader_next_p99_seconds", "gauge", "99th percentile of a rank's wait for a step.",
           stat("next_p99_ms", 1e-3), ("feed", *RANKS)),
)  # fmt: skip


def exposition(snapshot: Snapshot) -> bytes:
    """Every series of a snapshot, and the process' own, as Prometheus reads them: ``CONTENT_TYPE``.

    Written out here: of 8000 series, those of 512 ranks, the client library takes 0.1 s, most of it for labels.
    """
    lines = []
    for metric in METRICS:
        name = f"streampack_{metric.name}{_ENDS[metric.kind]}"
        lines += [f"# HELP {name} {metric.text}", f"# TYPE {name} {metric.kind}"]
        if metric.kind == "histogram":
            lines += [line for labels, each in metric.rows(snapshot) for line in _histogram(name, metric, labels, each)]
        else:
            lines += [f"{name}{_labels(metric.labels, labels)} {value!r}" for labels, value in metric.rows(snapshot)]
    return "\n".join([*lines, ""]).encode() + generate_latest(_process)


CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
_ENDS = {"counter": "_total", "gauge": "", "histogram": ""}
_process = CollectorRegistry()
ProcessCollector(registry=_process)


def _histogram(name: str, metric: Metric, labels: tuple[str, ...], histogram: Snapshot) -> Iterator[str]:
    """Values up to each bound, and all of them; their sum and their number."""
    names, upto = (*metric.labels, "le"), 0
    for bound, count in zip((*histogram["bounds"], "+Inf"), histogram["counts"], strict=True):
        upto += count
        yield f"{name}_bucket{_labels(names, (*labels, str(bound)))} {upto}"
    yield f"{name}_sum{_labels(metric.labels, labels)} {histogram['sum']!r}"
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
