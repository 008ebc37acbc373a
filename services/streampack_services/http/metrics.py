"""The broker's metrics for Prometheus, read from its snapshot.

Names follow https://prometheus.io/docs/practices/naming: one prefix, base units, ``_total`` for counters, few labels.
Counts of tokens, samples, packs and steps have no unit. Ratios are fractions, not percent. Each scrape reads the last
snapshot, so there is no second copy of a counter.

Metrics are declared in ``broker.status``; ``streampack_services.figure`` says how to add one. This module finds the
declarations, and writes the series that they describe. ``deploy/prometheus/METRICS.md`` lists all metrics;
``python -m streampack_services.http.metrics`` prints it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from functools import cache, lru_cache
from types import UnionType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, ProcessCollector, generate_latest

from streampack_services.broker.status import BrokerStatus, Histogram
from streampack_services.figure import Computed, Declared, Figure, Series
from streampack_services.standby.following import FollowingStatus

Labels = tuple[str, ...]
Rows = list[tuple[Labels, float | Histogram]]
"""(label values, value) of each series."""


def figures_of(struct: type, *labels: str) -> Iterator[Figure]:
    """Yield the figures that are declared in a struct and in the structs in it, with all their labels.

    ``labels``: the names of the labels of each such struct.
    """
    for _, kind, declared in _members(struct):
        if isinstance(declared, Figure):
            yield Figure(declared.kind, declared.name, declared.text, *labels, *declared.labels)
        else:
            yield from figures_of(kind, *labels, *declared.labels)


@cache
def _members(struct: type) -> list[tuple[str, Any, Declared]]:
    """Return name, type and declaration of a struct's attributes; a single struct counts as a series without labels."""
    hints = get_type_hints(struct, include_extras=True)
    hints |= {name: each.hint for name, each in vars(struct).items() if isinstance(each, Computed)}
    members = []
    for name, hint in hints.items():
        parts = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        kinds = [kind for kind in (*get_args(parts[0]), parts[0]) if _is_struct(kind)]
        declared = next((each for each in parts[1:] if isinstance(each, Declared)), None)
        if declared is not None or (kinds and get_origin(parts[0]) in (None, UnionType)):
            members.append((name, kinds[0] if kinds else None, declared or Series()))
    return members


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _collect(struct: msgspec.Struct, labels: Labels, rows: dict[str, Rows]) -> None:
    """Add the series of a struct's figures to those of each metric; ``labels``: the values of the struct's labels."""
    for name, _, declared in _members(type(struct)):
        value = getattr(struct, name)
        if isinstance(declared, Figure):
            _add(labels, value, rows[declared.name])
        elif isinstance(value, dict):
            for key, part in value.items():
                _collect(part, (*labels, key), rows)
        elif value is not None:
            for part in value if isinstance(value, list) else [value]:
                _collect(part, (*labels, *(str(getattr(part, label)) for label in declared.labels)), rows)


def _add(labels: Labels, value: Any, rows: Rows) -> None:
    """Add the series of a value: one for each key of a dict, pair of a list, or field of a struct; none for None."""
    if isinstance(value, float | int):
        rows.append((labels, float(value)))
    elif isinstance(value, Histogram):
        rows.append((labels, value))
    elif isinstance(value, str):
        rows.append((labels, float(value != "")))
    elif value is not None:
        parts = msgspec.structs.asdict(value) if isinstance(value, msgspec.Struct) else value
        for key, part in parts.items() if isinstance(parts, dict) else parts:
            _add(labels + (key if isinstance(key, tuple) else (key,)), part, rows)


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


def series(metrics: Iterable[Figure], status: msgspec.Struct) -> bytes:
    """Return every series of these metrics, whose values are in ``status``, in Prometheus' text format."""
    lines = []
    rows: dict[str, Rows] = {metric.name: [] for metric in metrics}
    _collect(status, (), rows)
    for metric in metrics:
        name = f"streampack_{metric.name}{_ENDS[metric.kind]}"
        lines += [f"# HELP {name} {metric.text}", f"# TYPE {name} {metric.kind}"]
        for labels, value in rows[metric.name]:
            if isinstance(value, Histogram):
                lines += _histogram(name, metric, labels, value)
            else:
                lines.append(f"{name}{_labels(metric.labels, labels)} {value!r}")
    return "\n".join([*lines, ""]).encode()


CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
_ENDS = {"counter": "_total", "gauge": "", "histogram": ""}
_process = CollectorRegistry()
ProcessCollector(registry=_process)


def _histogram(name: str, metric: Figure, labels: Labels, histogram: Histogram) -> Iterator[str]:
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
    """Return METRICS.md: a table of all metrics, and one of a standby's."""
    return "\n".join([_HEAD, *_table(METRICS), _STANDBY_HEAD, *_table(STANDBY_METRICS), ""])


def _table(metrics: Iterable[Figure]) -> Iterator[str]:
    """Yield the lines of a table of metrics."""
    yield "| metric | kind | labels | description |"
    yield "|---|---|---|---|"
    for metric in metrics:
        name = f"streampack_{metric.name}{_ENDS[metric.kind]}"
        yield f"| `{name}` | {metric.kind} | {', '.join(metric.labels)} | {metric.text} |"


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
