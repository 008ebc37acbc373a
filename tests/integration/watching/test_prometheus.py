"""The exercise of docs/how-to/observe.md, typed as it stands, with a real Prometheus.

Its alert fires and clears, and every expression of the dashboard and of the alerts has an answer.

In place of the page's are ports and folders, and times: scraped twice a second, an alert of a minute after seconds.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.programs import program
from tests.integration.running import PATIENCE_S, folder, until

ROOT = Path(__file__).parents[3]
WALK = (ROOT / "docs/how-to/observe.md").read_text().partition("\n## An exercise\n")[2].partition("\n## ")[0]
DASHBOARD: dict[str, Any] = json.loads((ROOT / "deploy/grafana/dashboards/streampack.json").read_text())
BLOCKS: list[str] = re.findall(r"^```bash\n(.*?)^```", WALK, re.M | re.S)
PORTS = ("7400", "7401", "7402", "9090")
SHOWN = {"$__rate_interval": "1m", "$instance": ".+", "$feed": ".+", "$run": ".+"}
"""What Grafana would put in place of its variables."""


class Walk:
    """A shell that is told the page's blocks one by one, as its reader would."""

    def __init__(self, path: Path) -> None:
        self.path, self.ports = path, dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
        for name in ("examples/watch", "deploy/prometheus"):
            shutil.copytree(ROOT / name, path / name)
        for file in (path / "examples/watch").iterdir():
            file.write_text(self._here(file.read_text()))
        self._hasten()
        environ = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
        self.out = path / "out"
        with self.out.open("w") as out:
            self.shell = subprocess.Popen(
                ["bash", "-u"], stdin=subprocess.PIPE, stdout=out, stderr=out, text=True, cwd=ROOT, env=environ
            )

    def _here(self, text: str) -> str:
        """Ports and folders of this test; files of the checkout are read where they are."""
        for port, free in self.ports.items():
            text = text.replace(port, str(free))
        text = text.replace("/tmp/streampack-watch", str(self.path))
        return re.sub(r"(?<![\w/])(examples/watch|deploy/prometheus)/", rf"{self.path}/\1/", text)

    def _hasten(self) -> None:
        config = self.path / "deploy/prometheus/prometheus.yaml"
        tree = yaml.safe_load(self._here(config.read_text()))
        tree["global"] = dict.fromkeys(tree["global"], "500ms")
        config.write_text(yaml.safe_dump(tree))
        rules = self.path / "deploy/prometheus/alerts.yaml"
        tree = yaml.safe_load(rules.read_text())
        (silent,) = [rule for group in tree["groups"] for rule in group["rules"] if rule["alert"] == "StreamSilent"]
        assert "> 60" in silent["expr"]
        silent |= {"expr": silent["expr"].replace("> 60", "> 3"), "for": "1s"}
        rules.write_text(yaml.safe_dump(tree))

    def type(self, block: str) -> None:
        assert self.shell.stdin is not None
        self.shell.stdin.write(self._here(block))
        self.shell.stdin.flush()

    def healths(self) -> set[str]:
        """How evaluating the alerts went: ``ok``, ``err``, ``unknown`` where it has not been done yet."""
        return {rule["health"] for group in self.api("rules")["groups"] for rule in group["rules"]}

    def close(self) -> None:
        """End what the blocks have started, by the shell that knows it, and wait until it is gone."""
        assert self.shell.stdin is not None
        self.type("kill -9 $(jobs -p) 2>/dev/null; wait\n")
        self.shell.stdin.close()
        self.shell.wait(PATIENCE_S)

    @property
    def said(self) -> str:
        return self.out.read_text()

    def api(self, path: str) -> Any:
        """What Prometheus' API answers; None while it starts."""
        try:
            url = f"http://127.0.0.1:{self.ports['9090']}/api/v1/{path}"
            with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            with error:
                if error.code != 503:
                    pytest.fail(f"{path}: {error.read().decode()}")
        except urllib.error.URLError:
            pass
        return None

    def asked(self, expression: str) -> list[Any]:
        """The series that an expression has now."""
        found = self.api(f"query?{urllib.parse.urlencode({'query': expression})}")
        return found["result"] if found else []

    def silent(self) -> set[str]:
        """The streams that an alert calls silent."""
        alerts = self.asked('ALERTS{alertname="StreamSilent",alertstate="firing"}')
        return {alert["metric"]["stream"] for alert in alerts}


def free_ports(count: int) -> list[int]:
    """Below those that the kernel gives to others in the meantime."""
    found: list[int] = []
    for port in itertools.count(20_000 + os.getpid() % 10_000):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(port)
        if len(found) == count:
            break
    return found


def without_figures(text: str) -> set[str]:
    """The lines of it."""
    return {re.sub(r"\d[\d. ms]*", "N", line.strip()) for line in text.splitlines()}


@pytest.fixture(scope="module")
def walk() -> Iterator[Walk]:
    """The broker, both producers, two ranks and Prometheus, as the first block starts them; a checkpoint later."""
    for name in ("prometheus", "promtool", "curl"):
        program(name)
    with folder() as path:
        found = Walk(path)
        try:
            found.type(BLOCKS[0])
            reading = "rate(streampack_reader_returned_steps[1m]) > 0"
            until(lambda: bool(found.asked(f"streampack_committed_step and on (feed) {reading}")))
            yield found
        finally:
            found.close()


def expressions_of(panels: Iterable[Any]) -> list[str]:
    """Return the values of these panels, as Prometheus gets them."""
    expressions = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    for variable, value in SHOWN.items():
        expressions = [expression.replace(variable, value) for expression in expressions]
    return expressions


def test_every_expression_of_the_dashboard_and_of_the_alerts_has_an_answer(walk: Walk) -> None:
    assert [each for each in expressions_of(DASHBOARD["panels"]) if not walk.asked(each)] == []
    for row in DASHBOARD["panels"]:
        for expression in expressions_of(row.get("panels", ())):
            assert walk.asked(expression) == [], (
                "this run has no late fields, media, groups of ranks, relays and standby, and Prometheus accepts the "
                "expression"
            )
    until(lambda: "unknown" not in walk.healths())
    assert walk.healths() == {"ok"}
    until(lambda: not walk.silent())


def test_a_killed_producer_is_an_alert_until_another_one_comes(walk: Walk) -> None:
    _, look, woken, again, end = BLOCKS
    kill, ask = woken.splitlines(keepends=True)
    walk.type(look)
    walk.type(kill)
    until(lambda: "code" in walk.silent())
    walk.type(ask)
    until(lambda: '"state": "firing"' in walk.said)
    (shown,) = re.findall(r'^```\n("annotations".*?)^```', WALK, re.M | re.S)
    assert without_figures(shown) - without_figures(walk.said) == set()
    walk.type(again)
    until(lambda: not walk.silent())
    walk.type(end)
    until(lambda: "broker: draining" in (walk.path / "broker.log").read_text())
    assert 'streampack_stream_producers{stream="code"} 1.0' in walk.said
    assert '{cause="stream"} =>' in walk.said
    assert not re.search("no such job|not found|No such file", walk.said)
