"""A figure that is declared to be shown is in ``status``, ``top``, the page and the dashboard without a line there."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace
from streampack_services.broker.status import BrokerStatus, FeedStatus, StreamStatus
from streampack_services.figure import figures_of, places_in
from streampack_services.http.page import declared
from streampack_services.watch.status_report import show_status
from streampack_services.watch.top_view import PageOptions, page
from streampack_services.watch.view_model import Watch

from docs.generate import dashboard
from tests.services.full_status import full_status

SHOWN: tuple[tuple[str, type, str, str], ...] = (
    ("broker", BrokerStatus, "vanished_producers", "vanished producers"),
    ("feed", FeedStatus, "split_packs", "split packs"),
    ("stream", StreamStatus, "lost_tokens", "lost tokens"),
)


@pytest.fixture(autouse=True)
def _shown(monkeypatch: pytest.MonkeyPatch) -> None:
    for _, kind, name, _ in SHOWN:
        monkeypatch.setattr(places_in(kind)[name].figure, "shown", True)


def test_status_has_a_row_or_a_column(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    status = full_status()
    show_status(status)
    lines = capsys.readouterr().out.splitlines()
    rows = [" ".join(line.split()) for line in lines]
    assert f"vanished producers {status.vanished_producers}" in rows
    assert f"split packs {status.feeds['one'].dealt.split_packs}" in rows
    assert any(line.endswith("lost tokens") for line in lines)


def test_top_has_a_row_or_a_column() -> None:
    watch = Watch()
    status = full_status()
    watch.add(replace(status, streams=[replace(row, feed="one") for row in status.streams]))
    lines = [line.plain for line in page(watch.view(), PageOptions(), 300)]
    for label in ("vanished producers", "split packs"):
        assert any(line.startswith(label) for line in lines)
    assert any("lost tokens" in line for line in lines)


def test_the_page_knows_the_path_the_label_and_the_unit() -> None:
    lines = dict(line.removeprefix("export const ").split(" = ") for line in declared().splitlines())
    figures = json.loads(lines["FIGURES"].rstrip(";"))
    assert figures.keys() == {"broker", "feed", "stream"}
    assert sum(map(len, figures.values())) == sum(figure.shown for figure in figures_of(BrokerStatus))
    assert [["vanished_producers"], "vanished producers", "count"] in figures["broker"]
    assert [["dealt", "split_packs"], "split packs", "count"] in figures["feed"]
    assert [["lost_tokens"], "lost tokens", "tokens"] in figures["stream"]


def test_the_dashboard_has_a_panel_at_the_end_of_a_row() -> None:
    panels = {panel["title"]: panel for panel in json.loads(dashboard.text())["panels"]}
    assert panels["Lost tokens"]["fieldConfig"]["defaults"]["unit"] == "si:tok/s"
    expression = panels["Split packs"]["targets"][0]["expr"]
    assert expression == (
        'sum by (feed) (rate(streampack_split_packs_total{instance=~"$instance",feed=~"$feed"}[$__rate_interval]))'
    )
    assert "Vanished producers" not in panels, "a panel names this figure"
