"""On Ray: Ray Data writes and Ray Train reads on two nodes, while daemons, tasks and actors are killed.

``RAY_KILLS=10 pytest ...`` also kills nodes, and trains with 4, 2 and 4 workers, as ``benchmarks/recovery/on_ray.py``
does.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
import warnings
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from streampack.errors import UserError

with warnings.catch_warnings():  # Ray's own, of what it imports
    warnings.simplefilter("ignore")
    from tests.integration.frameworks import ray_programs as programs

from streampack.integrations.ray import installed_version, placement
from tests.integration.running import PATIENCE_S, until

packs, ray = programs.packs, programs.ray
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(580)]
ROOT = Path(__file__).parents[3]
STEPS, ROWS = 8, 160
KILLS = int(os.environ.get("RAY_KILLS", "0"))


@pytest.fixture(scope="module")
def nodes() -> Iterator[programs.RayNodes]:
    with programs.cluster(workers=1) as found:
        yield found


@pytest.fixture(scope="module")
def service(nodes: programs.RayNodes, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("ray")
    broker, producers = programs.settings(folder, standby=True)
    return programs.start(broker, producers), folder


def test_kills_change_no_step_and_each_row_is_delivered_once(service: tuple[Any, Path], tmp_path: Path) -> None:
    run, folder = service
    calm = programs.calm(tmp_path, STEPS)
    writer = threading.Thread(target=programs.write, args=(range(ROWS), 4, True), daemon=True)
    writer.start()
    for kind in ("daemon", "write", "actor"):
        if kind == "write":
            programs.until_killed(("Write",), lambda: not writer.is_alive())
        else:
            os.kill(run.where(300)["actor_pid" if kind == "actor" else "pid"], signal.SIGKILL)
    programs.train(2, folder, STEPS, every=4)
    writer.join()
    assert programs.notes(folder) == {step: {digest} for step, digest in calm.items()}
    assert sorted(programs.delivered()) == programs.expected(range(ROWS))


@pytest.mark.skipif(not KILLS, reason="takes minutes; set RAY_KILLS=10")
def test_kills_of_nodes_too_change_no_step_for_4_2_and_4_workers() -> None:
    """In a process of its own, since Ray may end a program that loses a node."""
    words = ["-m", "benchmarks.recovery.on_ray", "--only", "kills", "--kills", str(KILLS), "--every", "4", "--standby"]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=60 * KILLS, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert sum(found["kills"].values()) >= KILLS
    assert (found["steps_that_differ"], found["rows_lost"], found["rows_twice"]) == ([], 0, 0)


def test_a_standby_runs_on_another_node_and_takes_over(service: tuple[Any, Path]) -> None:
    run, _ = service
    states = run.states()
    assert states["broker"]["node"] != states["standby"]["node"]
    before = run.where(PATIENCE_S)
    other = {"broker": "standby", "standby": "broker"}[before["part"]]
    until(lambda: "," in run.where(PATIENCE_S)["trainers"])  # the other one has joined
    ray.get(ray.get_actor(f"streampack/{programs.NAME}/{before['part']}", "streampack").stop.remote())
    after = run.where(PATIENCE_S)
    assert (after["part"], after["node"]) == (other, states[other]["node"])
    assert after["epoch"] > before["epoch"]


def test_ray_exports_the_metrics_of_the_broker(service: tuple[Any, Path]) -> None:
    """At an address of each node that Ray writes to its file for Prometheus."""
    node = next(node for node in ray.nodes() if node["NodeID"] == service[0].where(PATIENCE_S)["node"])
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    found = ""

    def is_there() -> bool:
        nonlocal found
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
            found = answer.read().decode()
        return "ray_streampack_steps_total{" in found

    until(is_there)
    assert f'service="{programs.NAME}"' in found
    assert packs.Service(programs.NAME).states()["broker"]["failures"] >= 0


@pytest.mark.skipif(not KILLS, reason="takes more than a minute; set RAY_KILLS=10")
def test_the_example_goes_on_with_more_workers(nodes: programs.RayNodes, tmp_path: Path) -> None:
    there = os.environ | {"RAY_ADDRESS": nodes.cluster.address, "RAY_ENABLE_AUTO_CONNECT": "1"}
    for words in (("2",), ("3", "4")):  # steps and workers
        command = [sys.executable, "examples/ray_train.py", str(tmp_path / "run"), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=there, cwd=ROOT)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"metrics={{'step': {int(words[0]) - 1}" in done.stdout


def test_the_same_settings_find_the_running_service_and_others_are_rejected(service: tuple[Any, Path]) -> None:
    run, folder = service
    broker, producers = programs.settings(folder, standby=True)
    before = run.where(PATIENCE_S)["pid"]
    assert programs.start(broker, producers).where(PATIENCE_S)["pid"] == before
    broker["rules"]["budget"] = 64
    with pytest.raises(UserError, match=r"rules.budget is 128 there and 64 here.*shutdown"):
        programs.start(broker, producers)


def test_wrong_requests_say_what_to_do(service: tuple[Any, Path]) -> None:
    broker, _ = programs.settings(service[1])
    with pytest.raises(UserError, match=r"got a request for CPU 99, expected at most what one node has.*CPU 2\b"):
        packs.start("huge", broker, broker_options={"num_cpus": 99})
    with pytest.raises(UserError, match=r"got no service 'none', expected one of: tried"):
        packs.connect("none", timeout_s=1)
    with pytest.raises(UserError, match=r"got stream 'web', expected one of: docs, text"):
        packs.Datasink(programs.NAME, stream="web", key="doc_id")
    with pytest.raises(UserError, match=r"got a stream that is not pushed.*pushed: true"):
        packs.Datasink(programs.NAME, stream="text", key="doc_id")
    sink = packs.Datasink(programs.NAME, stream="docs", key="id")
    with pytest.raises(UserError, match=r"rows without the column 'id'.*The rows have: doc_id, input_ids"):
        sink.write([programs.pa.Table.from_pylist([programs.row(1)])], None)


def test_a_datasink_needs_a_key() -> None:
    with pytest.raises(UserError, match=r"got key='', expected the column with the key of each row"):
        packs.Datasink("any", stream="docs")


def test_another_ray_is_rejected_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: "3.1.0")
    with pytest.raises(UserError, match=r"got Ray 3.1.0, expected Ray 2.*pip install"):
        installed_version.check_ray()

    def missing(_: str) -> str:
        raise metadata.PackageNotFoundError

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(UserError, match=r"got no package 'ray'.*streampack\[ray\]"):
        installed_version.check_ray()


def test_an_actor_prefers_a_node_that_has_its_resources() -> None:
    nodes = [
        {"NodeID": "a" * 56, "Alive": True, "Resources": {"CPU": 8.0}},
        {"NodeID": "b" * 56, "Alive": True, "Resources": {"CPU": 2.0, "disk": 1.0}},
        {"NodeID": "c" * 56, "Alive": False, "Resources": {"CPU": 99.0}},
    ]
    found = placement.placed({"num_cpus": 1}, "the broker", nodes)
    assert found["scheduling_strategy"].node_id == "a" * 56
    assert placement.placed({"resources": {"disk": 1}}, "it", nodes)["scheduling_strategy"].node_id == "b" * 56
    assert placement.placed({"label_selector": {"x": "y"}}, "it", nodes) == {"label_selector": {"x": "y"}}
    with pytest.raises(UserError, match=r"the broker: got a request for CPU 9.*2 nodes.*on a node is CPU 8"):
        placement.placed({"num_cpus": 9}, "the broker", nodes)


class Files:
    """A dataset that Ray Data reads from files."""

    def __init__(self, *names: str) -> None:
        self.names = list(names)

    def input_files(self) -> list[str]:
        return self.names


def test_files_of_a_dataset_become_a_source_in_a_fixed_order(tmp_path: Path) -> None:
    found = packs.source_of(Files("/d/b.jsonl.gz", "/d/a.jsonl.gz"), text_key="text")
    assert found == {"source": "jsonl", "shards": ["/d/a.jsonl.gz", "/d/b.jsonl.gz"], "text_key": "text"}
    assert json.loads(json.dumps(found)) == found
    for names, said in (((), "without files"), (("a.csv",), "end in .csv"), (("a.txt", "b.jsonl"), "one of .parquet")):
        with pytest.raises(UserError, match=said):
            packs.source_of(Files(*names))
