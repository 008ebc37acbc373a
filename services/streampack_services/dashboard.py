"""The Grafana dashboard, made from what ``dashboard_panels`` says.

    python -m streampack_services.dashboard > deploy/grafana/dashboards/streampack.json

The file that is checked in is what this prints, byte for byte (tested). This module knows Grafana's JSON and nothing
of the metrics: a panel's place follows from its row and its width, its number and its letters from their order. The
data source is a variable, so the file works with any Prometheus and has no ``__inputs``: it can be provisioned, given
to Grafana's sidecar in a ConfigMap, or imported by hand. Its ``uid`` is fixed, so that links to it stay.
"""

from __future__ import annotations

import itertools
import json
import string
import sys
from collections.abc import Iterator
from typing import Any

from streampack_services.dashboard_panels import ROWS, Panel, Row

UID = "streampack"
GRID = 24
"""Columns of Grafana's grid."""
HEIGHTS = {"stat": 4, "timeseries": 8, "table": 10}
Json = dict[str, Any]
DATA_SOURCE: Json = {"type": "prometheus", "uid": "${datasource}"}
SHORT = {
    "{broker": '{instance=~"$instance"',
    "{feed": '{instance=~"$instance",feed=~"$feed"',
    "[~]": "[$__rate_interval]",
    "(RANK)": "(instance, feed, dp_rank, cp_rank, tp_rank, pp_rank, host)",
}
"""What stands for what in the panels' expressions."""


def dashboard() -> Json:
    """The whole dashboard, as Grafana reads it."""
    return {
        "uid": UID,
        "title": "streampack",
        "description": "A run's broker: what comes in, how full packs are, what ranks wait for.",
        "tags": ["streampack"],
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "schemaVersion": 39,
        "time": {"from": "now-1h", "to": "now"},
        "timepicker": {},
        "timezone": "browser",
        "templating": {"list": _variables()},
        "annotations": {"list": [_alerts_as_annotations()]},
        "links": [],
        "panels": list(_panels()),
    }


def text() -> str:
    """The file's text."""
    return json.dumps(dashboard(), indent=2) + "\n"


def expression(short: str) -> str:
    """A panel's expression as Grafana takes it, with its variables."""
    for written, meant in SHORT.items():
        short = short.replace(written, meant)
    return short


def _variables() -> list[Json]:
    info = "streampack_run_info"
    return [
        {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
        _variable("run", "Run", f"label_values({info}, run)"),
        _variable("instance", "Broker", f'label_values({info}{{run=~"$run"}}, instance)', many=True),
        _variable("feed", "Feed", f'label_values({info}{{run=~"$run"}}, feed)', many=True),
    ]


def _variable(name: str, label: str, query: str, many: bool = False) -> Json:
    """Asked for again whenever the time range changes: a run may have moved to another host within it."""
    every = {"includeAll": True, "multi": True, "current": {"text": ["All"], "value": ["$__all"]}} if many else {}
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": DATA_SOURCE,
        "query": {"query": query, "refId": f"variable-{name}"},
        "refresh": 2,
        "sort": 1,
        **every,
    }


def _alerts_as_annotations() -> Json:
    return {
        "name": "Alerts",
        "enable": True,
        "datasource": DATA_SOURCE,
        "expr": 'ALERTS{alertstate="firing",run=~"$run"}',
        "titleFormat": "{{alertname}}",
        "textFormat": "{{feed}} {{stream}} {{cause}}",
        "iconColor": "red",
        "step": "30s",
    }


def _panels() -> Iterator[Json]:
    """Rows from top to bottom, each panel right of the last one where it still fits, else below."""
    numbers, y = itertools.count(1), 0
    for row in ROWS:
        yield _heading(row, next(numbers), y)
        x, y, height = 0, y + 1, 0
        for panel in row.panels:
            if x + panel.width > GRID:
                x, y, height = 0, y + height, 0
            place = {"x": x, "y": y, "w": panel.width, "h": HEIGHTS[panel.kind]}
            yield _panel(panel, next(numbers)) | {"gridPos": place}
            x, height = x + panel.width, max(height, HEIGHTS[panel.kind])
        y += height


def _heading(row: Row, number: int, y: int) -> Json:
    place = {"x": 0, "y": y, "w": GRID, "h": 1}
    return {"id": number, "type": "row", "title": row.title, "collapsed": False, "gridPos": place, "panels": []}


def _panel(panel: Panel, number: int) -> Json:
    kinds = {"stat": _stat, "timeseries": _timeseries, "table": _table}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": DATA_SOURCE,
        "targets": [_target(panel, *query) for query in zip(_letters(panel), panel.queries.items(), strict=True)],
        **kinds[panel.kind](panel),
    }


def _letters(panel: Panel) -> str:
    return string.ascii_uppercase[: len(panel.queries)]


def _target(panel: Panel, letter: str, query: tuple[str, str]) -> Json:
    legend, short = query
    now = {"format": "table", "instant": True, "range": False}
    return {
        "refId": letter,
        "datasource": DATA_SOURCE,
        "editorMode": "code",
        "expr": expression(short),
        "legendFormat": legend,
        **(now if panel.kind == "table" else {"range": True}),
    }


def _defaults(panel: Panel) -> Json:
    """What the field configurations of all panels share: unit, where the axis begins, limits."""
    colours = ("green", "orange", "red") if len(panel.limits) > 1 else ("green", "red")
    steps = zip(colours[::-1] if panel.falling else colours, (None, *panel.limits), strict=False)
    found: Json = {
        "unit": panel.unit,
        "thresholds": {"mode": "absolute", "steps": [{"color": colour, "value": limit} for colour, limit in steps]},
    }
    if panel.decimals is not None:
        found["decimals"] = panel.decimals
    if panel.least is not None:
        found["min"] = panel.least
    return found


def _stat(panel: Panel) -> Json:
    words = {str(value): {"text": word, "index": value} for value, word in enumerate(panel.words)}
    mappings = [{"type": "value", "options": words}] if words else []
    return {
        "fieldConfig": {"defaults": _defaults(panel) | {"mappings": mappings}, "overrides": []},
        "options": {
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "colorMode": "value" if panel.limits else "none",
            "graphMode": "none" if words else "area",
            "textMode": "auto",
            "justifyMode": "auto",
            "orientation": "auto",
        },
    }


def _timeseries(panel: Panel) -> Json:
    custom = {
        "drawStyle": "line",
        "lineWidth": 1,
        "fillOpacity": 30 if panel.stacked else 5,
        "showPoints": "never",
        "spanNulls": False,
        "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
        "thresholdsStyle": {"mode": "dashed" if panel.limits else "off"},
    }
    legend = {"showLegend": True, "displayMode": "table", "placement": "bottom", "calcs": ["lastNotNull", "max"]}
    return {
        "fieldConfig": {
            "defaults": _defaults(panel) | {"color": {"mode": "palette-classic"}, "custom": custom},
            "overrides": [],
        },
        "options": {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}},
    }


def _table(panel: Panel) -> Json:
    """A row for each set of labels; each query is a column, named by its legend; the first one sorts."""
    legends = list(panel.queries)
    names = {f"Value #{letter}": legend for letter, legend in zip(_letters(panel), legends, strict=True)}
    return {
        "fieldConfig": {
            "defaults": _defaults(panel),
            "overrides": [
                {"matcher": {"id": "byName", "options": legend}, "properties": [{"id": "unit", "value": unit}]}
                for legend, unit in zip(legends, panel.units, strict=True)
            ],
        },
        "options": {"showHeader": True, "sortBy": [{"displayName": legends[0], "desc": True}]},
        "transformations": [
            {"id": "merge", "options": {}},
            {"id": "organize", "options": {"excludeByName": {"Time": True}, "renameByName": names}},
        ],
    }


if __name__ == "__main__":
    sys.stdout.write(text())
