"""The Grafana dashboard, from the declared figures: ``python -m docs.generate.dashboard`` writes it.

``ROWS`` places the figures. A panel that names a figure takes its expression, unit, legend and description from the
declaration. A figure that is declared with ``shown=True`` and that no panel names has a panel without a line here. The
last panel is the runbook. A panel of an alert's figures has a link that opens it.

In expressions, ``{broker`` begins the labels of the chosen brokers, and ``{feed`` those of the chosen feeds. ``[~]`` is
the range that fits the time shown, ``(RANK)`` the labels of a rank.
"""

from __future__ import annotations

import itertools
import json
import re
import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from streampack_services.broker.status import BrokerStatus
from streampack_services.figure import UNITS, Figure, figures_of

DEPLOY = Path(__file__).parents[2] / "deploy"
FILE = DEPLOY / "grafana/dashboards/streampack.json"
GRID = 24
"""Columns of Grafana's grid."""
HEIGHTS = {"stat": 4, "timeseries": 8, "table": 10}
RUNBOOK = 1000
"""Id of the panel with the runbook, which the links of other panels open; it stays when panels come and go."""
Json = dict[str, Any]
SOURCE = {"datasource": {"type": "prometheus", "uid": "${datasource}"}}
SHORT = {
    "{broker": '{instance=~"$instance"',
    "{feed": '{instance=~"$instance",feed=~"$feed"',
    "[~]": "[$__rate_interval]",
    "(RANK)": "(instance, feed, dp_rank, cp_rank, tp_rank, pp_rank, host)",
}
RANK = "{{feed}} dp {{dp_rank}} cp {{cp_rank}} tp {{tp_rank}} pp {{pp_rank}} on {{host}}"
STREAM, FEED, BROKER = "{{stream}}", "{{feed}}", "{{instance}}"
PACKED = "sum by (feed) (rate(streampack_packed_tokens_total{feed}[~]))"
PADDED = "rate(streampack_waste_tokens_total{feed}[~])"
DELIVERED = "sum by (feed) (rate(streampack_delivered_tokens_total{feed}[~]))"
WAITED = "sum by (RANK) (rate(streampack_reader_starved_seconds_total{feed}[~]))"
RANKS = "sum by (feed) (streampack_readers_connected{feed})"
MANY = "for feeds with more than 1,024 ranks."


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel of figures and expressions.

    Attributes:
        title: Its title.
        queries: The name of a figure, or expressions by legend. In place of an expression, a figure's name stands for
            its series, and the legend for an addition to the figure's own.
        text: The description; by default the figure's help text.
        unit: Grafana's name of the unit; by default that of the first figure.
        kind: Grafana's type of the panel.
        least: The least value of the axis.
        decimals: Digits after the point.
        limits: Values at which green becomes orange and red, or with ``falling`` red becomes orange and green.
        falling: Low values are bad.
        stacked: The series are stacked.
        words: Words for the values 0, 1, ...
        units: Units of a table's columns.
        alert: Alert whose section of the runbook a link of the panel names.
    """

    title: str
    queries: str | Mapping[str, str]
    text: str = ""
    unit: str = ""
    kind: Literal["timeseries", "stat", "table"] = "timeseries"
    least: float | None = 0.0
    decimals: int | None = None
    limits: tuple[float, ...] = ()
    falling: bool = False
    stacked: bool = False
    words: tuple[str, ...] = ()
    units: tuple[str, ...] = ()
    alert: str = ""

    @property
    def named(self) -> dict[str, str]:
        """Expressions and names of figures, by legend."""
        return {"": self.queries} if isinstance(self.queries, str) else dict(self.queries)


@dataclass(frozen=True, slots=True)
class Row:
    """A heading with panels, each ``width`` columns wide.

    ``scope``: the label of the figures that have a panel here if no panel names them.
    """

    title: str
    width: int
    panels: list[Panel] = field(default_factory=list)
    scope: str | None = None
    collapsed: bool = False


def _quantiles(histogram: str, *quantiles: float) -> dict[str, str]:
    """Return expressions of a histogram's quantiles, by legend."""
    buckets = f"sum by (feed, le) (rate(streampack_{histogram}_bucket{{feed}}[~]))"
    return {f"{FEED}: {100 * q:g}%": f"histogram_quantile({q}, {buckets})" for q in quantiles}


def _stat(title: str, legend: str, expression: str, text: str, unit: str = "none", **more: Any) -> Panel:
    return Panel(title, {legend: expression}, text, unit, "stat", **more)


ROWS = (
    Row("Overview", 3, [
        _stat("Broker", "ready", "max(streampack_ready{broker})",
              "Ready while the broker serves; not ready while it starts or drains.",
              limits=(1,), falling=True, words=("not ready", "serving"), alert="BrokerDown"),
        _stat("Alerts", "alerts", 'count(ALERTS{alertstate="firing",run=~"$run"}) or vector(0)',
              "Alerts of this run that fire now.", limits=(1, 2)),
        _stat("Tokens packed per second", "packed", f"sum({PACKED})", "Real tokens packed per second.", "si:tok/s"),
        _stat("Utilization", "real", f"1 - sum(sum by (feed) ({PADDED})) / sum({DELIVERED})",
              "Real tokens / tokens delivered, lately.", "percentunit", decimals=2, limits=(0.9, 0.95), falling=True),
        _stat("Longest data wait", "starved", f"max({WAITED}) or max(streampack_longest_data_wait_ratio{{feed}})",
              "Longest data wait of a rank, as a share of its time.", "percentunit", decimals=2, limits=(0.05, 0.1),
              alert="TrainerStarved"),
        _stat("Ranks", "ranks", f"sum({RANKS})",
              "Ranks attached. No step is served until every rank of the mesh is attached.", alert="RankMissing"),
        _stat("Last checkpoint", "step", "max(streampack_committed_step{feed})",
              "Step at which the last durable checkpoint begins."),
        _stat("Steps left", "steps", 'max(streampack_steps_left{feed,bound="estimate"})',
              "Estimate of the steps left of this iteration; empty if a stream repeats forever."),
    ]),
    Row("Flow by stream", 6, [
        Panel("Share trained, recent share and share now",
              {"trained": "trained_ratio", "recent": "recent_share_ratio", "now": "stream_share_ratio"},
              "Share of a stream in the tokens that were trained, and in the last 100 steps, beside the share that the "
              "weights give it now. The weight of a stream that has ended goes to the others."),
        Panel("Tokens trained", "trained_tokens"),
        Panel("Weights", "stream_weight"),
        Panel("Passes and ends", {"passes": "stream_passes", "ended": "stream_ended"},
              "Whole passes over the data that producers have sent, and 1 once all samples of a stream are merged."),
        Panel("Tokens received", "received_tokens"),
        Panel("Samples received", "received_samples"),
        Panel("Credits used", {STREAM: "sum by (stream) (streampack_stream_used_tokens{broker}) / "
                                       "sum by (stream) (streampack_stream_granted_tokens{broker} > 0)"},
              "Tokens that wait for the merge / tokens that may wait. The other streams wait for a stream near 0.",
              "percentunit"),
        Panel("Lag", {"": "stream_lag_tokens", "samples": "stream_lag_samples"},
              "Tokens and samples that producers have credit for but have not sent.", "short"),
        Panel("Time since last heard",
              {STREAM: "max by (stream) (time() - streampack_stream_last_seen_timestamp_seconds{broker})"},
              "Time since the broker heard a producer of the stream.", "s", limits=(60,), alert="StreamSilent"),
        Panel("Producers", {"": "stream_producers",
                            "vanished": "sum(increase(streampack_vanished_producers_total{broker}[~]))"},
              "Producers that offer the stream, and producers that left without a goodbye (vanished)."),
        Panel("Rejected", {f"{STREAM} {{{{reason}}}}":
                           "sum by (stream, reason) (rate(streampack_rejected_samples_total{broker}[~])) "
                           "or on (stream) 0 * sum by (stream) (streampack_stream_producers{broker})"},
              "Samples that could not be used and were dropped, by reason.", "si:smp/s", alert="RejectsHigh"),
        Panel("Tokens not trained", "untrained_tokens"),
    ], "stream"),
    Row("Late fields", 8, [
        Panel("Samples without late fields", "late_samples"),
        Panel("Longest wait for late fields", {STREAM: "max by (stream) (streampack_late_oldest_seconds{broker})"},
              "Time that the oldest of these samples has waited. After late_timeout_s, the default is used or the "
              "sample is dropped.", "s"),
        Panel("Dropped, because a value did not come",
              {STREAM: 'sum by (stream) (rate(streampack_rejected_samples_total{broker,reason="late_timeout"}[~])) '
                       "or on (stream) 0 * sum by (stream) (streampack_late_samples{broker})"},
              "Samples that were dropped per second, because a late field had no value and no default after "
              "late_timeout_s.", "si:smp/s"),
    ], collapsed=True),
    Row("Media", 8, [
        Panel("Patches packed per second", "media_patches",
              "Patches of media items in the packs formed, per second.", "none"),
        Panel("Packs by the axis that filled them", "media_bound_packs",
              "Packs formed per second, by the axis that is fullest compared with its limit. If patches or items fill "
              "most packs, tokens leave room."),
        Panel("Media held", "arena_media_bytes",
              "Bytes of the media of the samples that the broker holds, beside the arena. References count with their "
              "own bytes."),
    ], collapsed=True),
    Row("Groups of ranks", 8, [
        Panel("Groups by ranks", "cp_groups"),
        Panel("Exchange saved", "saved_exchange_ratio"),
        Panel("Padding saved", "saved_chunk_padding_ratio"),
    ], collapsed=True),
    Row("Padding and packing", 6, [
        Panel("Padding by cause",
              {"{{cause}}": f"sum by (cause) ({PADDED}) / on () group_left () sum({DELIVERED})"},
              "Padding as a share of delivered tokens, by cause.", "percentunit", limits=(0.05,), stacked=True,
              alert="WasteHigh"),
        Panel("Packed and delivered", {"packed": "packed_tokens", "delivered": "delivered_tokens"},
              "Real tokens packed, and tokens delivered with padding."),
        Panel("Utilization, efficiency, balance",
              {"utilization": "utilization_ratio", "efficiency": "packing_efficiency_ratio",
               "balance": "bin_balance_ratio"},
              "Since the broker began. Utilization: real tokens / (packs * budget). Efficiency: packs that the tokens "
              "need at least / packs formed. Balance: 1 - standard deviation / mean of the packs' tokens.", least=None),
        Panel("Fill of packs", _quantiles("pack_fill_ratio", 0.01, 0.1, 0.5),
              "Real tokens of a pack / budget: 1st, 10th and 50th percentile of the packs.", "percentunit", least=None),
        Panel("Samples in a pack",
              {f"{FEED}: mean": "sum by (feed) (rate(streampack_pack_samples_sum{feed}[~])) / "
                                "sum by (feed) (rate(streampack_pack_samples_count{feed}[~]))",
               **_quantiles("pack_samples", 0.9)},
              "Samples per pack: mean, and 90th percentile, about.", "none", decimals=1),
        Panel("Steps formed", "steps", "Steps formed per second."),
        Panel("Time spent in FORM", "form_seconds",
              "Share of one core that FORM uses. Near 1 the packer limits the throughput."),
        Panel("Over-long", "overlong_samples"),
    ], "feed"),
    Row("Data wait and ranks", 6, [
        Panel("Data wait by cause",
              {f"{FEED}: {{{{cause}}}}": "sum by (feed, cause) (rate(streampack_starved_seconds_total{feed}[~])) "
                                         f"/ on (feed) group_left () {RANKS}"},
              "Data wait by cause, as a share of a rank's time, mean over ranks.", "percentunit", limits=(0.1,),
              stacked=True, alert="TrainerStarved"),
        Panel("Data wait by stream",
              {f"{FEED}: {STREAM}": 'sum by (feed, stream) (rate(streampack_reader_starved_seconds_total{feed,'
                                    f'cause="stream"}}[~])) / on (feed) group_left () {RANKS}'},
              "Data wait for samples of a stream, as a share of a rank's time, mean over ranks.", "percentunit",
              stacked=True),
        Panel("Ten ranks with the longest data wait",
              {RANK: f"topk(10, {WAITED} or sum by (instance, feed, host) (streampack_node_data_wait_ratio{{feed}}))"},
              "Data wait as a share of a rank's time, for the ten ranks with the longest. Above 1,024 ranks: for "
              "hosts.", "percentunit", limits=(0.1,)),
        Panel("Load imbalance", {"micro-batch": "cost_max_over_mean_ratio", "step": "step_cost_max_over_mean_ratio"},
              "Max / mean cost over the ranks of a micro-batch, and of a step; 1.0 is perfect. Mean since the broker "
              "began.", least=1.0, decimals=3, limits=(1.1,), alert="CostImbalance"),
        Panel("Ten ranks with the slowest waits for a step",
              {RANK: "topk(10, streampack_reader_next_p99_seconds{feed})"},
              f"99th percentile of a rank's wait for a step, for the ten ranks with the longest. Empty {MANY}", "s"),
        Panel("Waits for a step", _quantiles("next_wait_seconds", 0.5, 0.99, 0.999),
              "Wait of all ranks for a step: 50th, 99th and 99.9th percentile.", "s"),
        Panel("Ranks attached", {"": "readers_connected", "mesh": "readers_expected"},
              "Ranks attached, and ranks of the mesh that read.", alert="RankMissing"),
        Panel("Steps returned",
              {f"{FEED}: {which} rank": f"{end} by (feed) (streampack_reader_returned_steps{{feed}}) or "
                                        f"{end} by (feed) (streampack_node_returned_steps{{feed}})"
               for which, end in (("first", "max"), ("last", "min"))},
              "Steps of this iteration returned by the first and by the last rank.", "none"),
        Panel("Slow ranks", "slow_ranks", limits=(1,), alert="RankSlow"),
        Panel("All ranks",
              {"waits": WAITED,
               "trains": "sum by (RANK) (rate(streampack_reader_trainer_seconds_total{feed}[~]))",
               "a step takes": "max by (RANK) (streampack_reader_work_seconds{feed})",
               "wait, p99": "max by (RANK) (streampack_reader_next_p99_seconds{feed})",
               "steps returned": "max by (RANK) (streampack_reader_returned_steps{feed})",
               "silent": "max by (RANK) (streampack_reader_silent_seconds{feed})"},
              f"Current figures of each rank, longest data wait first. Empty {MANY}", "none", "table",
              units=("percentunit", "percentunit", "s", "s", "none", "s")),
    ]),
    Row("Window and memory", 8, [
        Panel("Window", "window_tokens"),
        Panel("Age in the window", {"99 of 100": "wait_p99_steps", "longest ever": "longest_wait_steps",
                                    "oldest now": "window_oldest_steps"},
              "Steps that samples waited in the window."),
        Panel("Displacement", "displacement_steps"),
        Panel("Budget", "budget_tokens"),
        Panel("Packs in a step", "step_packs"),
        Panel("Mean length", "mean_sample_tokens"),
        Panel("Held", {"": "held_tokens", "limit": "held_limit_tokens"},
              "Tokens merged and not yet returned by all ranks, and the limit."),
        Panel("Arena", {"taken": "streampack_arena_live_tokens{broker} * streampack_arena_token_bytes{broker}",
                        "all": "streampack_arena_capacity_bytes{broker}"},
              "Memory for samples, used and total. Producers wait while it is full, which is normal if trainers are "
              "slower.", "bytes"),
    ]),
    Row("Log and disk", 8, [
        Panel("Log", "log_bytes", "Size of the log's files. The limit is retain.bytes."),
        Panel("Free disk space", "log_disk_free_bytes", alert="DiskLow"),
        Panel("Log stalled", "log_stalled", limits=(1,), alert="LogStalled"),
        Panel("Records appended", "log_records", "Records appended to the log per second."),
        Panel("Records not durable yet", "log_unsafe_records",
              "Records that are not yet as safe as durability asks. A step is sent once its record is safe."),
        Panel("Time syncing", "log_sync_seconds", "Share of time that the log's thread waits for the disk."),
    ]),
    Row("Relays", 8, [
        Panel("Relays connected", "relay_up", limits=(1,), falling=True, alert="RelayDown"),
        Panel("Ranks that read through relays", "relay_ranks"),
        Panel("Bytes on the way to relays", "relay_queued_bytes"),
    ], collapsed=True),
    Row("Standby", 8, [
        Panel("Standby may take over", "standby_member", limits=(1,), falling=True, alert="StandbyLost"),
        Panel("Records that the standby lacks", "standby_lag_records"),
        Panel("Steps that wait for the standby", "standby_stalled", limits=(1,), alert="StandbyLost"),
    ], collapsed=True),
    Row("Broker process", 8, [
        Panel("CPU", {BROKER: "rate(process_cpu_seconds_total{broker}[~])"}, "Cores that the broker uses.", "none",
              decimals=2),
        Panel("Memory", {BROKER: "process_resident_memory_bytes{broker}"}, "Resident memory of the broker.", "bytes"),
        Panel("Tokens sent", "sent_tokens"),
        Panel("Bad messages", "bad_messages", "Messages and connections that went wrong, per second, by reason. "
              "Foreign ones are of another run, strangers have no allowed key, and peers of unsent ones were gone."),
        Panel("Open files", {BROKER: "process_open_fds{broker}"}, "Files and sockets that the broker has open.",
              "none"),
        Panel("Uptime", {BROKER: "time() - process_start_time_seconds{broker}"},
              "Time since the broker began; it falls at a restart.", "s"),
    ], ""),
)  # fmt: skip


def text() -> str:
    """Return the dashboard's file."""
    return json.dumps(_dashboard(), indent=2) + "\n"


def _dashboard() -> Json:
    info = "streampack_run_info"
    every = {"includeAll": True, "multi": True, "current": {"text": ["All"], "value": ["$__all"]}}
    return {
        "uid": "streampack",
        "title": "streampack",
        "description": "The broker of a run: streams, utilization, padding and data wait by cause, ranks, memory and "
        "log.",
        "tags": ["streampack"],
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "schemaVersion": 39,
        "time": {"from": "now-1h", "to": "now"},
        "timepicker": {},
        "timezone": "browser",
        "templating": {
            "list": [
                {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
                _variable("run", "Run", f"label_values({info}, run)"),
                _variable("instance", "Broker", f'label_values({info}{{run=~"$run"}}, instance)') | every,
                _variable("feed", "Feed", f'label_values({info}{{run=~"$run"}}, feed)') | every,
            ]
        },
        "annotations": {
            "list": [
                {"name": "Alerts", "enable": True, **SOURCE, "expr": 'ALERTS{alertstate="firing",run=~"$run"}',
                 "titleFormat": "{{alertname}}", "textFormat": "{{feed}} {{stream}} {{cause}}", "iconColor": "red",
                 "step": "30s"},
                {"name": "Stages", "enable": True, **SOURCE,
                 "expr": 'changes(streampack_stage_since_step{instance=~"$instance",feed=~"$feed"}[1m]) > 0',
                 "titleFormat": "a stage begins", "textFormat": "{{feed}}", "iconColor": "blue",
                 "step": "30s"},
            ]
        },
        "links": [],
        "panels": list(_panels({figure.name: figure for figure in figures_of(BrokerStatus)})),
    }  # fmt: skip


def _variable(name: str, label: str, query: str) -> Json:
    """Return a variable, which Grafana asks for again when the time range changes."""
    asked = {"query": query, "refId": f"variable-{name}"}
    return {"name": name, "label": label, "type": "query", **SOURCE, "query": asked, "refresh": 2, "sort": 1}


def _panels(figures: Mapping[str, Figure]) -> Iterator[Json]:
    """Yield the rows from top to bottom, and their panels from left to right; collapsed rows are numbered last."""
    rows = {row.title: [*row.panels, *_unplaced(row, figures)] for row in ROWS}
    counter = itertools.count(1)
    numbers = {row.title: [next(counter) for _ in (row, *rows[row.title])]
               for row in sorted(ROWS, key=lambda row: row.collapsed)}  # fmt: skip
    y = 0
    for row in ROWS:
        heading = {"id": numbers[row.title][0], "type": "row", "title": row.title, "collapsed": row.collapsed,
                   "gridPos": {"x": 0, "y": y, "w": GRID, "h": 1}}  # fmt: skip
        below, end = [], y + 1
        x, top = 0, end
        for number, panel in zip(numbers[row.title][1:], rows[row.title], strict=True):
            width, height = GRID if panel.kind == "table" else row.width, HEIGHTS[panel.kind]
            if x + width > GRID:
                x, top = 0, end
            place = {"gridPos": {"x": x, "y": top, "w": width, "h": height}}
            below.append(_panel(panel, number, figures) | place)
            x, end = x + width, max(end, top + height)
        yield heading | {"panels": below if row.collapsed else []}
        yield from [] if row.collapsed else below
        y = y + 1 if row.collapsed else end
    content = (DEPLOY / "RUNBOOK.md").read_text()
    yield {"id": RUNBOOK - 1, "type": "row", "title": "Runbook", "collapsed": False, "panels": [],
           "gridPos": {"x": 0, "y": y, "w": GRID, "h": 1}}  # fmt: skip
    yield {"id": RUNBOOK, "type": "text", "title": "Runbook", "gridPos": {"x": 0, "y": y + 1, "w": GRID, "h": 20},
           "options": {"mode": "markdown", "content": content}}  # fmt: skip


def _unplaced(row: Row, figures: Mapping[str, Figure]) -> Iterator[Panel]:
    """Yield a panel for each figure of the row's scope that is declared to be shown, and that no panel names."""
    placed = " ".join(name for row in ROWS for panel in row.panels for name in panel.named.values())
    for figure in figures.values():
        scope = next((label for label in ("stream", "feed") if label in figure.labels), "")
        if figure.shown and scope == row.scope and not re.search(rf"\b(streampack_)?{figure.name}(_total)?\b", placed):
            yield Panel(figure.label[:1].upper() + figure.label[1:], figure.name)


def _query(figure: Figure) -> tuple[str, str]:
    """Return the legend and the expression of a figure."""
    series = f"{figure.metric}{{{'feed' if 'feed' in figure.labels else 'broker'}}}"
    if figure.kind == "counter":
        series = f"rate({series}[~])"
    if figure.labels and (figure.kind == "counter" or figure.labels != ("feed",)):
        series = f"sum by ({', '.join(figure.labels)}) ({series})"
    return ": ".join(f"{{{{{label}}}}}" for label in figure.labels) or BROKER, series


def _panel(panel: Panel, number: int, figures: Mapping[str, Figure]) -> Json:
    """Return a panel without its place."""
    queries = []
    for legend, query in panel.named.items():
        if query in figures:
            own, query = _query(figures[query])
            legend = f"{own}: {legend}" if legend else own
        for short, whole in SHORT.items():
            query = query.replace(short, whole)
        queries.append((legend, query))
    first = figures.get(next(iter(panel.named.values())))
    unit = UNITS[first.unit] if first is not None else UNITS["count"]
    of_figure = unit.grafana_rate if first is not None and first.kind == "counter" else unit.grafana
    now = {"format": "table", "instant": True, "range": False} if panel.kind == "table" else {"range": True}
    letters = string.ascii_uppercase[: len(queries)]
    kinds = {"stat": _of_stat, "timeseries": _of_timeseries, "table": _of_table}
    return {
        "id": number, "type": panel.kind, "title": panel.title,
        "description": panel.text or (first.text if first is not None else ""), **SOURCE,
        "targets": [
            {"refId": letter, **SOURCE, "editorMode": "code", "expr": query, "legendFormat": legend, **now}
            for letter, (legend, query) in zip(letters, queries, strict=True)
        ],
        **_links(panel),
        **kinds[panel.kind](panel, _defaults(panel, panel.unit or of_figure)),
    }  # fmt: skip


def _links(panel: Panel) -> Json:
    """Return the link of a panel that opens the runbook."""
    link = {"title": f"Runbook: {panel.alert}", "url": f"/d/streampack?viewPanel={RUNBOOK}"}
    return {"links": [link]} if panel.alert else {}


def _defaults(panel: Panel, unit: str) -> Json:
    """Return the settings that all kinds of panels have: unit, limits, digits, and where the axis begins."""
    colors = ("green", "orange", "red") if len(panel.limits) > 1 else ("green", "red")
    steps = zip(colors[::-1] if panel.falling else colors, (None, *panel.limits), strict=False)
    limits = {"mode": "absolute", "steps": [{"color": color, "value": limit} for color, limit in steps]}
    more = {"decimals": panel.decimals, "min": panel.least}
    return {"unit": unit, "thresholds": limits} | {key: value for key, value in more.items() if value is not None}


def _of_stat(panel: Panel, defaults: Json) -> Json:
    words = {str(value): {"text": word, "index": value} for value, word in enumerate(panel.words)}
    mappings = [{"type": "value", "options": words}] if words else []
    options = {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "colorMode": "value" if panel.limits else "none", "graphMode": "none" if words else "area",
        "textMode": "auto", "justifyMode": "auto", "orientation": "auto",
    }  # fmt: skip
    return {"fieldConfig": {"defaults": defaults | {"mappings": mappings}, "overrides": []}, "options": options}


def _of_timeseries(panel: Panel, defaults: Json) -> Json:
    custom = {
        "drawStyle": "line", "lineWidth": 1, "fillOpacity": 30 if panel.stacked else 5, "showPoints": "never",
        "spanNulls": False, "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
        "thresholdsStyle": {"mode": "dashed" if panel.limits else "off"},
    }  # fmt: skip
    legend = {"showLegend": True, "displayMode": "table", "placement": "bottom", "calcs": ["lastNotNull", "max"]}
    shown = defaults | {"color": {"mode": "palette-classic"}, "custom": custom}
    options = {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}
    return {"fieldConfig": {"defaults": shown, "overrides": []}, "options": options}


def _of_table(panel: Panel, defaults: Json) -> Json:
    """Return the settings of a table: a row for each set of labels, a column for each query; the first one sorts."""
    legends = list(panel.named)
    names = {f"Value #{letter}": legend for letter, legend in zip(string.ascii_uppercase, legends, strict=False)}
    overrides = [
        {"matcher": {"id": "byName", "options": legend}, "properties": [{"id": "unit", "value": unit}]}
        for legend, unit in zip(legends, panel.units, strict=True)
    ]
    return {
        "fieldConfig": {"defaults": defaults, "overrides": overrides},
        "options": {"showHeader": True, "sortBy": [{"displayName": legends[0], "desc": True}]},
        "transformations": [
            {"id": "merge", "options": {}},
            {"id": "organize", "options": {"excludeByName": {"Time": True}, "renameByName": names}},
        ],
    }


if __name__ == "__main__":
    FILE.write_text(text())
