"""The broker's metrics for Prometheus, read from its snapshot.

Names follow https://prometheus.io/docs/practices/naming: one prefix, base units, ``_total`` for counters, few labels.
Counts of tokens, samples, packs and steps have no unit. Ratios are fractions, not percent. Each scrape reads the last
snapshot, so there is no second copy of a counter.

Metrics are declared in ``broker.status``; ``streampack_services.figure`` says how to add one. This module
writes the series that the declarations describe. ``deploy/prometheus/METRICS.md`` lists all metrics;
``python -m streampack_services.http.metrics`` prints it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import chain
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, ProcessCollector, generate_latest

from streampack_services.broker.status import BrokerStatus, Histogram
from streampack_services.figure import Figure, figures_of, members
from streampack_services.standby.following import FollowingStatus

Lines = dict[str, list[str]]
"""Lines of each metric, by its whole name."""


def _collect(struct: Struct, labels: str, lines: Lines) -> None:
    """Add the series of a struct's figures to the lines of each metric.

    ``labels``: the struct's labels as Prometheus writes them, without the last brace; empty without labels.
    """
    for member in members(type(struct)):
        value, declared = member.read(struct), member.declared
        if value is None:
            continue
        if isinstance(declared, Figure):
            _add(declared.metric, labels, declared.labels, value, lines[declared.metric])
        elif isinstance(value, dict):
            for key, part in value.items():
                _collect(part, _with(labels, declared.labels, (key,)), lines)
        else:
            for part in value if isinstance(value, list) else [value]:
                own = tuple([str(getattr(part, label)) for label in declared.labels])
                _collect(part, _with(labels, declared.labels, own), lines)


def _add(metric: str, labels: str, names: tuple[str, ...], value: Any, lines: list[str]) -> None:
    """Add the series of a value: one for each key of a dict, pair of a list, or field of a struct.

    ``labels``: the labels so far, as in ``_collect``. ``names``: the names of the others.
    """
    if isinstance(value, _NUMBER):
        lines.append(f"{metric}{labels}}} {float(value)}" if labels else f"{metric} {float(value)}")
    elif isinstance(value, str):
        _add(metric, labels, names, value != "", lines)
    elif isinstance(value, Histogram):
        _add_histogram(metric, labels, value, lines)
    else:
        parts = asdict(value) if isinstance(value, Struct) else value
        for key, part in parts.items() if isinstance(parts, dict) else parts:
            keys = key if isinstance(key, tuple) else (key,)
            _add(metric, _with(labels, names[: len(keys)], keys), names[len(keys) :], part, lines)


_NUMBER = (float, int)
"""Not ``float | int``: that would be made anew for each of thousands of values."""


def _add_histogram(metric: str, labels: str, histogram: Histogram, lines: list[str]) -> None:
    """Add the lines of one histogram: the number of values up to each bound, their sum and their number."""
    upto, closed = 0, f"{labels}}}" if labels else ""
    for bound, count in zip((*histogram.bounds, "+Inf"), histogram.counts, strict=True):
        upto += count
        lines.append(f"{metric}_bucket{_with(labels, ('le',), (str(bound),))}}} {upto}")
    lines += [f"{metric}_sum{closed} {histogram.sum!r}", f"{metric}_count{closed} {upto}"]


def _with(labels: str, names: tuple[str, ...], values: tuple[str, ...]) -> str:
    """Return labels with additional labels."""
    pairs = _pairs(names, values)
    return f"{labels},{pairs}" if labels and pairs else f"{{{pairs}" if pairs else labels


@lru_cache(maxsize=1 << 14)
def _pairs(names: tuple[str, ...], values: tuple[str, ...]) -> str:
    """Return labels as Prometheus writes them, escaped: ``name="value",name="value"``."""
    return ",".join([f'{name}="{value.translate(_ESCAPES)}"' for name, value in zip(names, values, strict=True)])


_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
_ORDER = (
    "build_info", "run_info", "ready", "received_samples", "received_tokens", "overlong_samples", "lost_tokens",
    "stream_last_seen_timestamp_seconds", "stream_weight", "stream_producers", "stream_granted_tokens",
    "stream_used_tokens", "stream_lag_samples", "late_samples", "late_oldest_seconds", "late_refused_samples",
    "rejected_samples", "sample_warnings", "steps", "packs", "packed_samples", "packed_tokens", "shared_tokens",
    "shared_ratio", "media_items", "media_patches", "media_bound_packs", "tail_dropped_samples", "waste_tokens",
    "delivered_tokens", "untrained_tokens", "form_seconds", "utilization_ratio", "waste_ratio",
    "packing_efficiency_ratio", "bin_balance_ratio", "padded_utilization_ratio", "padded_packing_efficiency_ratio",
    "padded_bin_balance_ratio", "pack_fill_ratio", "pack_samples", "cost_max_over_mean_ratio",
    "step_cost_max_over_mean_ratio", "rank_tokens", "split_packs", "added_empty_packs", "dynamic_batching_tokens",
    "removed_padding_ratio", "window_samples", "window_tokens", "window_oldest_steps", "wait_p99_steps",
    "longest_wait_steps", "wait_bound_steps", "outliers_waiting", "arena_live_tokens", "arena_capacity_bytes",
    "arena_token_bytes", "arena_moved_tokens", "arena_media_bytes", "log_bytes", "log_limit_bytes",
    "log_disk_free_bytes", "log_records", "log_unsafe_records", "log_stalled", "log_warning", "log_syncs",
    "log_sync_seconds", "standby_member", "standby_lag_records", "standby_stalled", "sent_tokens", "queued_bytes",
    "queued_limit_bytes", "resent_bytes", "bad_messages", "producers_connected", "vanished_producers",
    "readers_connected", "readers_expected", "round", "ended", "held_tokens", "held_limit_tokens",
    "reader_returned_steps", "committed_step", "steps_left", "reader_starved_seconds", "next_wait_seconds",
    "reader_trainer_seconds", "reader_step_seconds", "reader_silent_seconds", "reader_starved_ratio",
    "reader_media_dropped", "reader_next_p99_seconds", "starved_seconds", "longest_data_wait_ratio",
    "longest_silence_seconds", "node_missing_ranks", "node_data_wait_ratio", "node_returned_steps", "node_step_seconds",
    "node_silent_seconds", "node_queued_bytes", "relay_up", "relay_ranks", "relay_queued_bytes",
)  # fmt: skip
"""The order of the metrics that brokers of version 0.1 have. New ones follow in the order of their declarations."""
_PLACES = {name: place for place, name in enumerate(_ORDER)}
METRICS = tuple(sorted(figures_of(BrokerStatus), key=lambda metric: _PLACES.get(metric.name, len(_PLACES))))
"""All metrics, in the order of ``/metrics``."""
STANDBY_METRICS = tuple(figures_of(FollowingStatus))
"""All metrics of a standby that is not active."""


def exposition(status: BrokerStatus) -> bytes:
    """Return every series of a broker and of its process in Prometheus' text format, ``CONTENT_TYPE``.

    The broker's series do not go through the Prometheus client, which takes 0.1 s for the 8000 series of 512 ranks.
    """
    return series(METRICS, status) + generate_latest(_process)


def series(metrics: Iterable[Figure], status: Struct) -> bytes:
    """Return every series of these metrics, whose values are in ``status``, in Prometheus' text format."""
    lines = {
        metric.metric: [f"# HELP {metric.metric} {metric.text}", f"# TYPE {metric.metric} {metric.kind}"]
        for metric in metrics
    }
    _collect(status, "", lines)
    return "\n".join([*chain.from_iterable(lines.values()), ""]).encode()


CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
_process = CollectorRegistry()
ProcessCollector(registry=_process)


def text() -> str:
    """Return METRICS.md: a table of all metrics, and one of a standby's."""
    return "\n".join([_HEAD, *_table(METRICS), _STANDBY_HEAD, *_table(STANDBY_METRICS), ""])


def _table(metrics: Iterable[Figure]) -> Iterator[str]:
    """Yield the lines of a table of metrics."""
    yield "| metric | kind | labels | description |"
    yield "|---|---|---|---|"
    for metric in metrics:
        yield f"| `{metric.metric}` | {metric.kind} | {', '.join(metric.labels)} | {metric.text} |"


_HEAD = """# Metrics

All metrics of the broker's `/metrics`. Scrape only the broker: producers and trainers send their figures to it. A
histogram has `_bucket`, `_sum` and `_count`. The Prometheus client adds `process_*`.

The broker shows at most 1,024 ranks of a feed one by one, in `streampack_reader_*`. For a feed with more ranks, these
series are replaced by `streampack_node_*`: the worst rank of each of the 64 worst hosts. So a scrape of 30,000 ranks
takes about 50 kB. The order of the hosts is in [observe.md](../../docs/how-to/observe.md#thousands-of-ranks).
"""
_STANDBY_HEAD = """
## A standby that is not active

It has only these metrics.
"""

if __name__ == "__main__":
    sys.stdout.write(text())
