"""The alerts and the Grafana dashboard in deploy/: promtool accepts them, each metric exists, each alert is tested.

No test runs Grafana. These tests check the fields that Grafana needs in the dashboard's JSON; ``test_prometheus`` asks
a real Prometheus every expression.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from streampack_services.http.metrics import METRICS

from docs.generate.dashboard import text
from tests.integration.programs import program

DEPLOY = Path(__file__).parents[3] / "deploy"
RULES = yaml.safe_load((DEPLOY / "prometheus/alerts.yaml").read_text())["groups"]
ALERTS: dict[str, Any] = {rule["alert"]: rule for group in RULES for rule in group["rules"]}
FILE = DEPLOY / "grafana/dashboards/streampack.json"
DASHBOARD: dict[str, Any] = json.loads(FILE.read_text())
ROWS: list[Any] = [panel for panel in DASHBOARD["panels"] if panel["type"] == "row"]
PANELS: list[Any] = [panel for panel in DASHBOARD["panels"] if panel["type"] not in ("row", "text")]
PANELS += [panel for row in ROWS for panel in row["panels"]]
"""All of them: Grafana has the panels of a collapsed row in the row."""
GRID = 24
"""Columns of Grafana's grid."""
OTHERS = {"ALERTS", "up", "process_cpu_seconds_total", "process_resident_memory_bytes", "process_open_fds",
          "process_max_fds", "process_start_time_seconds"}  # fmt: skip
"""Metrics that are Prometheus' own, and its client's."""


def promtool(*arguments: str | Path) -> str:
    said = subprocess.run([program("promtool"), *map(str, arguments)], capture_output=True, text=True, timeout=60)
    assert said.returncode == 0, said.stdout + said.stderr
    return said.stdout


def names_in(expression: str) -> set[str]:
    """Metrics that an expression is of."""
    return set(re.findall(r"\b(?:streampack|process)_\w+|\bup\b|\bALERTS\b", expression))


def known() -> set[str]:
    counted = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_count", "_sum")}
    return OTHERS | {f"streampack_{each.name}{end}" for each in METRICS for end in counted[each.kind]}


def test_promtool_finds_nothing_wrong_with_the_rules_and_the_configuration() -> None:
    assert f"{len(ALERTS)} rules found" in promtool("check", "rules", DEPLOY / "prometheus/alerts.yaml")
    promtool("check", "config", DEPLOY / "prometheus/prometheus.yaml")


def test_every_alert_fires_clears_and_leaves_the_neighbors_case_alone() -> None:
    tests = DEPLOY / "prometheus/alerts_test.yaml"
    promtool("test", "rules", tests, DEPLOY / "prometheus/alerts_days_test.yaml")
    cases = [case for test in yaml.safe_load(tests.read_text())["tests"] for case in test["alert_rule_test"]]
    fires = {case["alertname"] for case in cases if case["exp_alerts"]}
    quiet = {case["alertname"] for case in cases if not case["exp_alerts"]}
    assert fires == quiet == set(ALERTS)


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_says_what_to_do_and_has_its_section_in_the_runbook(name: str) -> None:
    rule = ALERTS[name]
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert rule["for"]
    assert set(rule["annotations"]) == {"summary", "description", "committed", "runbook"}
    assert rule["annotations"]["runbook"].startswith(f"RUNBOOK.md, {name}: ")
    assert f"\n## {name}\n" in (DEPLOY / "RUNBOOK.md").read_text()


def test_alerts_and_panels_are_of_metrics_that_the_broker_has() -> None:
    texts = [rule["expr"] for rule in ALERTS.values()]
    texts += [annotation for rule in ALERTS.values() for annotation in rule["annotations"].values()]
    texts += [target["expr"] for panel in PANELS for target in panel["targets"]]
    found = [names_in(text) for text in texts]
    assert all(names for names, text in zip(found, texts, strict=True) if "rate(" in text)
    assert set().union(*found) - known() == set()


def test_the_dashboard_is_written_with_an_indent_of_two_so_that_a_change_shows_as_few_lines() -> None:
    assert FILE.read_text() == json.dumps(DASHBOARD, indent=2) + "\n"


def test_the_dashboard_is_what_the_declared_figures_and_its_rows_make() -> None:
    assert FILE.read_text() == text(), "write it anew: python -m docs.generate.dashboard"


def test_every_series_of_a_panel_is_of_the_brokers_and_feeds_that_the_reader_chose() -> None:
    chosen = r'\{instance=~"\$instance"(,feed=~"\$feed")?[,}]'
    for expression in [target["expr"] for panel in PANELS for target in panel["targets"]]:
        series = re.findall(r"\b(?:streampack|process)_\w+", expression)
        assert len(re.findall(rf"\b(?:streampack|process)_\w+{chosen}", expression)) == len(series), expression
        assert series or "ALERTS{" in expression, expression
        assert re.findall(r"\[([^\]]+)\]", expression) == ["$__rate_interval"] * expression.count("["), expression


def test_the_dashboard_can_be_provisioned_with_any_prometheus() -> None:
    board = DASHBOARD
    assert board["uid"] == "streampack"
    assert not {"id", "__inputs", "__requires"} & set(board)
    sources = re.findall(r'"uid": ("[^"]*")', json.dumps({**board, "uid": None}))
    assert set(sources) == {'"${datasource}"'}
    assert [each["name"] for each in board["templating"]["list"]] == ["datasource", "run", "instance", "feed"]
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(board)))
    assert used == {"datasource", "run", "instance", "feed", "__rate_interval", "__all"}
    (provider,) = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/streampack.yaml").read_text())["providers"]
    assert provider["type"] == "file"


def test_panels_lie_beside_and_below_each_other_and_never_over() -> None:
    for panels in (DASHBOARD["panels"], *(row["panels"] for row in ROWS)):
        places = [panel["gridPos"] for panel in panels]
        for a, b in itertools.combinations(places, 2):
            beside = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
            below = a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
            assert beside or below
        assert all(place["x"] + place["w"] <= GRID for place in places)
    ids = [panel["id"] for panel in (*DASHBOARD["panels"], *(each for row in ROWS for each in row["panels"]))]
    assert len(set(ids)) == len(ids)


def test_each_alert_has_a_panel_with_a_link_that_opens_the_runbook() -> None:
    (runbook,) = [panel for panel in DASHBOARD["panels"] if panel["type"] == "text"]
    assert runbook["options"] == {"mode": "markdown", "content": (DEPLOY / "RUNBOOK.md").read_text()}
    links = [link for panel in PANELS for link in panel.get("links", ())]
    assert {link["url"] for link in links} == {f"/d/{DASHBOARD['uid']}?viewPanel={runbook['id']}"}
    assert {link["title"] for link in links} == {f"Runbook: {name}" for name in ALERTS}


def test_panels_that_few_runs_need_are_in_a_collapsed_row() -> None:
    hidden = {row["title"]: row["panels"] for row in ROWS if row["collapsed"]}
    rare = {
        "Late fields": r"streampack_late_", "Media": r"streampack_(media|arena_media)_",
        "Groups of ranks": r"streampack_(cp_groups|saved_)", "Relays": r"streampack_relay_",
        "Standby": r"streampack_standby_",
    }  # fmt: skip
    assert list(hidden) == list(rare)
    shown = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
    for title, names in rare.items():
        expressions = [target["expr"] for panel in hidden[title] for target in panel["targets"]]
        assert all(re.search(names, expression) for expression in expressions)
        assert not any(re.search(names, expression) for expression in shown)


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_panel_has_a_unit_words_and_legends(panel: dict[str, Any]) -> None:
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["targets"]
    assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
    legends = [target["legendFormat"] for target in panel["targets"]]
    assert panel["type"] == "stat" or (all(legends) and len(set(legends)) == len(legends))
