"""The broker's HTTP side: probes, status and metrics agree with what really went through."""

from __future__ import annotations

import json
import math
import re
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families
from streampack_services.broker.service import BrokerService
from streampack_services.broker.status import BrokerStatus, FeedStatus, StepCounts, StreamStatus
from streampack_services.http import metrics
from streampack_services.http.metrics import METRICS
from streampack_services.http.server import HttpServer

import streampack as sp
from streampack.config.daemon_settings import BrokerConfig
from streampack.config.service_settings import Listen
from streampack.config.stream_settings import StreamSettings
from streampack.core.stats.data_wait import CAUSES, WAIT_BOUNDS_S, Starvation
from tests.blank import blank
from tests.integration.programs import program
from tests.integration.running import PATIENCE_S, RunningBroker, running, running_broker, until, write, write_jsonl
from tests.integration.simulated_ranks import SimulatedRanks

BUDGET, PACKS = 256, 4
MODEL, PEAK = sp.ModelFlops(token=10**9, pair=10**6), 1000.0
LENGTHS = [1 + (7 * i) % 300 for i in range(200)]
FEED, HOST = ("train",), socket.gethostname()
RANK = ("0", "0", "train", HOST, "0", "0")
CUT = [min(length, BUDGET) for length in LENGTHS]
LOST = {"truncated": 0, "dropped": 0, "policy_lag": 0, "tail": 0, "skipped": 0}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningBroker]:
    """A broker that has taken 200 samples and two bad ones, and served all steps to one rank, still attached."""
    path = tmp_path_factory.mktemp("data")
    rows: list[dict[str, Any]] = [{"tokens": list(range(length))} for length in LENGTHS]
    write_jsonl(path / "a.jsonl", [*rows, {"tokens": []}, {"tokens": "no"}])
    settings = {
        "run": "served",
        "rules": {"budget": BUDGET, "window": {"samples": 32}, "step": {"packs": PACKS},
                  "align": {"sample": 8, "pack": 8}, "overlong": "truncate", "poison": "drop"},
        "streams": {"web": {"partitions": 1}},
    }  # fmt: skip
    with running_broker(settings) as broker:
        source = {"source": "jsonl", "shards": str(path / "a.jsonl")}
        config = write(path / "p.yaml", {"broker": f"file://{broker.rendezvous}", "streams": {"web": source}})
        with (
            running("producer", "produce", "-c", config),
            sp.connect(f"file://{broker.rendezvous}", format="numpy", model=MODEL, peak_tflops=PEAK) as loader,
        ):
            broker.num_steps = sum(1 for _ in loader.steps())
            waits = broker.num_steps + 1  # the last for the end: what the rank has to say is all there then
            until(lambda: sum(broker.feed()["histograms"]["next_wait_seconds"]["counts"]) == waits)
            until(lambda: broker.feed()["steps"]["returned"] == broker.feed()["steps"]["end"])
            until(lambda: ("reader_starved_ratio", RANK) in values(broker))  # it is not known a minute later
            broker.data_wait = values(broker)["reader_starved_ratio", RANK]
            broker.mfu, broker.stats = values(broker)["mfu_ratio", FEED], loader.stats()
            with pytest.raises(sp.errors.StreampackError, match="expected one of: 'train'"):
                sp.connect(f"file://{broker.rendezvous}", feed="valid")
            until(lambda: broker.status()["messages"]["refused"] == 1)
            yield broker


def values(broker: RunningBroker) -> dict[tuple[str, tuple[str, ...]], float]:
    """Every series of the broker's own: (name, label values in the order of their names)."""
    return {
        (
            sample.name.removeprefix("streampack_"),
            tuple(sample.labels[name] for name in sorted(sample.labels)),
        ): sample.value
        for family in text_string_to_metric_families(broker.get("/metrics"))
        for sample in family.samples
        if sample.name.startswith("streampack_")
    }


def test_metrics_count_what_came_in(served: RunningBroker) -> None:
    found = values(served)
    assert found["received_samples_total", ("web",)] == len(LENGTHS) + 2
    assert found["received_tokens_total", ("web",)] == sum(CUT)
    assert found["overlong_samples_total", ("web",)] == sum(length > BUDGET for length in LENGTHS)
    assert found["lost_tokens_total", ("web",)] == sum(LENGTHS) - sum(CUT)
    assert found["rejected_samples_total", ("empty", "web")] == 1
    assert found["rejected_samples_total", ("dtype", "web")] == 1


def test_metrics_count_what_was_packed_and_waste_adds_up(served: RunningBroker) -> None:
    found = values(served)
    packs = found["packs_total", FEED]
    assert found["steps_total", FEED] == served.num_steps
    assert packs == PACKS * found["steps_total", FEED]
    assert found["packed_samples_total", FEED] == len(LENGTHS)
    assert found["packed_tokens_total", FEED] == sum(CUT)
    waste = {cause: found["waste_tokens_total", (cause, "train")] for cause in ("alignment", "pack_tail", "empty_pack")}
    assert waste["alignment"] == sum(-length % 8 for length in CUT)
    assert waste["empty_pack"] % BUDGET == 0
    assert sum(waste.values()) == packs * BUDGET - sum(CUT)
    assert all(found["waste_tokens_total", (cause, "train")] == 0 for cause in ("shape", "pipeline"))
    assert found["delivered_tokens_total", FEED] == packs * BUDGET
    lost = {policy: found["untrained_tokens_total", ("train", policy)] for policy in LOST}
    assert lost == LOST | {"truncated": sum(LENGTHS) - sum(CUT)}


def test_the_useful_mfu_is_that_of_real_tokens_over_the_time_of_the_ranks(served: RunningBroker) -> None:
    found, useful_s = values(served), MODEL.samples(np.array(CUT)) / (PEAK * 1e12)
    assert found["useful_seconds_total", FEED] == pytest.approx(useful_s, rel=0.1)
    assert served.stats["mfu"] == pytest.approx(served.stats["useful_tflops"] / PEAK)
    assert 0 < served.mfu < 1


@pytest.mark.parametrize(
    "more", [{"peak_tflops": 989}, *({"model": MODEL, "peak_tflops": peak} for peak in (0, math.inf))]
)
def test_a_peak_without_a_model_and_a_peak_of_nothing_are_refused(more: dict[str, Any]) -> None:
    with pytest.raises(sp.errors.UserError, match="expected a number above 0 and the model whose FLOPs count"):
        sp.connect("tcp://127.0.0.1:1", **more)


@pytest.mark.parametrize("of", ["arguments", "environment"])
def test_a_loader_counts_the_flops_of_the_model_that_its_arguments_or_the_environment_name(
    of: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 128, "vocab_size": 512,
    }  # fmt: skip
    write(tmp_path / "config.json", config)
    more: dict[str, Any] = {"model": config, "peak_tflops": PEAK} if of == "arguments" else {}
    if of == "environment":
        monkeypatch.setenv("STREAMPACK_MODEL_CONFIG", str(tmp_path))
        monkeypatch.setenv("STREAMPACK_PEAK_TFLOPS", str(PEAK))
    with sp.local([{"tokens": list(range(60))}] * 8, budget=64, format="numpy", **more) as loader:
        assert len(list(loader.steps())) == 8
        stats = loader.stats()
    assert 0 < stats["mfu"] == pytest.approx(stats["useful_tflops"] / PEAK)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("STREAMPACK_PEAK_TFLOPS", "989 TFLOPs", "expected the TFLOPs of one device"),
        ("STREAMPACK_PEAK_TFLOPS", "989", "Or set STREAMPACK_MODEL_CONFIG"),
        ("STREAMPACK_MODEL_CONFIG", "/nowhere", "expected the config.json of a model or its folder"),
        ("STREAMPACK_MODEL_CONFIG", b"null", "STREAMPACK_MODEL_CONFIG=.*Expected `object`, got `null`"),
        ("STREAMPACK_MODEL_CONFIG", b'{"a": "\xff"}', "STREAMPACK_MODEL_CONFIG=.*'utf-8' codec"),
    ],
)
def test_variables_that_name_no_model_or_no_number_are_refused(
    name: str, value: str | bytes, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isinstance(value, bytes):
        (tmp_path / "config.json").write_bytes(value)
        value = str(tmp_path)
    monkeypatch.setenv(name, value)
    with pytest.raises(sp.errors.UserError, match=text):
        sp.connect("tcp://127.0.0.1:1", format="numpy")


def test_the_figures_are_those_of_the_packs_that_a_reader_got(served: RunningBroker) -> None:
    found = values(served)
    packs = found["packs_total", FEED]
    assert found["utilization_ratio", FEED] == pytest.approx(sum(CUT) / (packs * BUDGET))
    assert found["waste_ratio", FEED] == pytest.approx(1 - found["utilization_ratio", FEED])
    assert found["packing_efficiency_ratio", FEED] == pytest.approx(math.ceil(sum(CUT) / BUDGET) / packs)
    assert found["bin_balance_ratio", FEED] <= 1
    aligned = sum(CUT) + sum(-length % 8 for length in CUT)
    assert found["padded_utilization_ratio", FEED] == pytest.approx(aligned / (packs * BUDGET))
    assert found["padded_packing_efficiency_ratio", FEED] == pytest.approx(math.ceil(aligned / BUDGET) / packs)
    assert found["cost_max_over_mean_ratio", FEED] == pytest.approx(1.0), "one rank is its own mean"
    assert found["step_cost_max_over_mean_ratio", FEED] == pytest.approx(1.0)
    mean = sum(CUT) / found["steps_total", FEED]
    assert all(found["rank_tokens", ("train", "mean", when)] == pytest.approx(mean) for when in ("before", "after"))
    assert all(found["rank_tokens", ("train", "spread", when)] == 0 for when in ("before", "after"))


def test_metrics_show_who_is_there_and_what_is_held(served: RunningBroker) -> None:
    found = values(served)
    assert found["readers_connected", FEED] == found["readers_expected", FEED] == found["ended", FEED] == 1
    assert found["stream_weight", ("web",)] == 1
    assert found["producers_connected", ()] <= 1
    assert found["reader_returned_steps", RANK] == found["steps_total", FEED]
    assert 0 <= served.data_wait <= 1
    assert 0 <= found["reader_next_p99_seconds", RANK] < 60
    assert found["window_samples", FEED] == found["window_tokens", FEED] == found["arena_live_tokens", ()] == 0
    assert found["wait_p99_steps", FEED] <= found["longest_wait_steps", FEED] <= found["wait_bound_steps", FEED]
    assert found["held_tokens", FEED] == found["round", FEED] == 0 < found["held_limit_tokens", FEED]
    assert found["arena_capacity_bytes", ()] == 32 * 2**20
    assert found["sent_tokens_total", ()] == found["packs_total", FEED] * BUDGET
    assert found["ready", ()] == 1
    assert all(found["bad_messages_total", (reason,)] == 0 for reason in ("damaged", "foreign"))
    assert found["bad_messages_total", ("refused",)] == 1, "the client that wanted another feed"


def test_histograms_count_every_pack_and_every_wait_once(served: RunningBroker) -> None:
    found, feed = values(served), served.feed()
    packs, histograms = found["packs_total", FEED], feed["histograms"]
    for name, count in (("pack_fill_ratio", packs), ("pack_samples", packs)):
        assert found[f"{name}_count", FEED] == found[f"{name}_bucket", ("train", "+Inf")] == count
    assert found["pack_samples_sum", FEED] == len(LENGTHS)
    assert found["pack_fill_ratio_sum", FEED] * BUDGET == pytest.approx(sum(CUT))
    assert found["pack_fill_ratio_bucket", ("train", "0.0")] == feed["totals"]["empty_packs"]
    waits = [found["next_wait_seconds_bucket", ("train", str(bound))] for bound in WAIT_BOUNDS_S]
    assert waits == sorted(waits)
    assert found["next_wait_seconds_count", FEED] == sum(histograms["next_wait_seconds"]["counts"])


def test_a_rank_s_wait_is_in_one_series_of_each_cause_and_stream(served: RunningBroker) -> None:
    (row,) = served.feed()["readers"]
    starved = {
        (labels[0], labels[-2]): seconds
        for (name, labels), seconds in values(served).items()
        if name == "reader_starved_seconds_total"
    }
    assert {cause for cause, _ in starved} == set(CAUSES)
    assert sum(starved.values()) == pytest.approx(row["stats"]["wait_s"], abs=1e-2)
    assert all(cause == "stream" for cause, stream in starved if stream)
    assert row["host"] == HOST
    assert sum(row["cost"]) / len(row["cost"]) == pytest.approx(1.0, abs=1e-3), "its micro-batches are their own mean"


def test_metrics_keep_prometheus_rules(served: RunningBroker) -> None:
    text = served.get("/metrics")
    said = subprocess.run([program("promtool"), "check", "metrics"], input=text, capture_output=True, text=True)
    assert (said.returncode, said.stdout + said.stderr) == (0, "")
    assert "_created" not in text
    names = {(metric.name, metric.kind) for metric in METRICS}
    for family in text_string_to_metric_families(text):
        if family.name.startswith("streampack_"):
            assert family.documentation.endswith(".")
            assert (family.name.removeprefix("streampack_"), family.type) in names
    for metric in METRICS:
        assert f"# TYPE streampack_{metric.name}" in text
        assert not metric.name.endswith(("_total", "_count", "_sum"))


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_name_is_read_back_as_it_is(name: str) -> None:
    """Of the snapshot's streams and hosts, which users and clients choose."""
    streams = [blank(StreamStatus, stream=name, rejected={name: 1})]
    text = metrics.exposition(blank(BrokerStatus, streams=streams)).decode()
    (line,) = [line for line in text.split("\n") if line.startswith("streampack_rejected_samples_total{")]
    if not set(name) & set("\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"):  # what only this client's parser takes for line ends
        (family,) = text_string_to_metric_families(f"# TYPE streampack_rejected_samples_total gauge\n{line}\n")
        assert family.samples[0].labels == {"stream": name, "reason": name}


def test_when_a_stream_was_heard_and_whether_a_feed_has_ended_by_hand() -> None:
    """What the alerts go by: a stream that nobody ever sent has no time, one that is read has not ended."""
    streams = [blank(StreamStatus, stream=name, last_seen_s=age) for name, age in (("web", 40.0), ("code", None))]
    status = blank(BrokerStatus, taken_at=100.0, streams=streams)
    assert status.last_seen_at == [("web", 60.0)]
    for returned, end, ended in ((0, None, False), (4, 5, False), (5, 5, True)):
        steps = blank(StepCounts, returned=returned, end=end)
        assert blank(FeedStatus, steps=steps).has_ended is ended


def test_the_table_of_metrics_that_is_checked_in_is_that_of_all_of_them() -> None:
    assert (Path(__file__).parents[3] / "deploy/prometheus/METRICS.md").read_text() == metrics.text()
    assert len({metric.name for metric in METRICS}) == len(METRICS)


def test_status_agrees_with_metrics(served: RunningBroker) -> None:
    status = served.status()
    assert status["run"] == "served"
    assert status["state"] == "ended"
    feed = status["feeds"]["train"]
    assert feed["state"] == "ended"
    assert feed["waiting_for"] is None
    assert feed["totals"]["tokens"] == sum(CUT)
    assert feed["steps"]["formed"] == feed["steps"]["returned"] == feed["steps"]["end"]
    assert status["streams"][0]["rejected"] == {"dtype": 1, "empty": 1}
    assert feed["rules"]["budget"] == BUDGET
    until(lambda: served.status()["taken_at"] > status["taken_at"])


def test_ranks_are_listed_on_request(served: RunningBroker) -> None:
    page = json.loads(served.get("/status?ranks=0"))
    assert (page["feed"], page["node"], page["first"], page["attached"]) == ("train", None, 0, 1)
    assert [row["host"] for row in page["readers"]] == [HOST]
    assert json.loads(served.get("/status?ranks=1"))["readers"] == []
    node = json.loads(served.get(f"/status?feed=train&node={HOST}"))
    assert node["node"] == served.feed()["ranks"]["nodes"][0] | {"silent_s": node["node"]["silent_s"]}
    assert len(node["readers"]) == 1
    for path, code in (("node=elsewhere", 404), ("ranks=-1", 400), ("ranks=0&feed=none", 404), ("ranks=1e3", 400)):
        got, text = answer(f"{served.http}/status?{path}")
        assert got == code
        assert "expected" in json.loads(text)["error"]


def test_the_last_events_say_what_they_are_about(served: RunningBroker) -> None:
    events = json.loads(served.get("/events"))
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    assert {event["run"] for event in events} == {"served"}
    took = next(event for event in events if " took rank " in event["text"])
    assert (took["level"], took["feed"], took["rank"]) == ("info", "train", "dp=0")
    joined = next(event for event in events if " joined, offering web" in event["text"])
    assert joined["producer"].startswith(joined["host"] + ":")
    began = next(event for event in events if event["text"].startswith("attempt 1 "))
    assert (began["attempt"], began["step"]) == (1, 0)
    ended = next(event for event in events if " has ended " in event["text"])
    assert ended["step"] == served.num_steps
    assert next(event for event in events if "refused a client: " in event["text"])["level"] == "warning"
    assert json.loads(served.get(f"/events?since={events[-2]['seq']}"))[0] == events[-1]
    assert answer(served.http + "/events?since=-1")[0] == 400


def test_probes_and_the_page_are_answered(served: RunningBroker) -> None:
    assert served.get("/livez") == "alive\n"
    assert served.get("/readyz") == "ready\n"
    page = served.get("/")
    assert all(f'href="{path}"' in page for path in ("/status", "/metrics", "/history", "/readyz", "/livez"))
    assert answer(served.http + "/nothing")[0] == 404


def test_files_of_the_page_are_sent_once_and_let_it_ask_nobody_else(served: RunningBroker) -> None:
    page = served.get("/")
    paths = re.findall(r'(?:src|href)="(/web/[^"]+)"', page)
    assert {"/web/main.js", "/web/style.css", "/web/vendor/uPlot.iife.min.js"} <= set(paths)
    kinds = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml", "/": "text/html"}
    for path in ["/", *paths, "/web/heat.js"]:
        with urllib.request.urlopen(served.http + path, timeout=PATIENCE_S) as got:
            assert got.headers["content-security-policy"].startswith("default-src 'self'; ")
            assert got.headers["content-type"].startswith(kinds[path.rpartition(".")[2]])
            again = urllib.request.Request(served.http + path, headers={"if-none-match": got.headers["etag"]})
        assert answer(again) == (304, "")
    for path in ("/web/", "/web/../page.py", "/web/%2e%2e/page.py", "/web//etc/passwd", "/web/nothing.js"):
        assert answer(served.http + path)[0] == 404, path


def test_the_history_has_a_row_a_second_whose_last_agrees_with_the_status(served: RunningBroker) -> None:
    until(lambda: len(json.loads(served.get("/history"))["feeds"]["train"]) > 1)
    found, status = json.loads(served.get("/history")), served.status()
    rows = [dict(zip(found["columns"], row, strict=True)) for row in found["feeds"]["train"]]
    feed = status["feeds"]["train"]
    assert rows[-1]["tokens"] == feed["totals"]["tokens"]
    assert rows[-1]["delivered"] == feed["delivered_tokens"]
    assert {cause: rows[-1][f"waste_{cause}"] for cause in feed["waste_tokens"]} == feed["waste_tokens"]
    assert rows[-1]["returned"] == feed["steps"]["returned"]
    assert rows[-1]["ranks"] == 1
    assert found["began"] == pytest.approx(status["taken_at"] - status["uptime_s"], abs=0.5)
    since = rows[0]["second"]
    later = json.loads(served.get(f"/history?since={since}"))["feeds"]["train"]
    assert all(row[0] > since for row in later)
    assert len(later) >= len(rows) - 1
    assert list(json.loads(served.get("/history?feed=train"))["feeds"]) == ["train"]
    assert answer(served.http + "/history?since=now")[0] == 400
    assert answer(served.http + "/history?feed=nobody's")[0] == 404


def test_readiness_follows_the_state_and_liveness_the_loop() -> None:
    listen = Listen(producers="tcp://127.0.0.1:*", trainers="tcp://127.0.0.1:*")
    config = BrokerConfig(streams={"web": StreamSettings()}, listen=listen, memory="64MiB")
    service = BrokerService(config)
    server = HttpServer("127.0.0.1:0", lambda: service.snapshot)
    server.start()
    try:
        assert answer(server.url + "/readyz") == (503, "not ready: starting\n")
        assert answer(server.url + "/livez") == (200, "alive\n")
        service.snapshot = replace(service.snapshot, ready=True, state="serving")
        assert answer(server.url + "/readyz") == (200, "ready\n")
        service.snapshot = replace(service.snapshot, ready=False, state="draining")
        assert answer(server.url + "/readyz") == (503, "not ready: draining\n")
        assert answer(server.url + "/livez") == (200, "alive\n")
        service.snapshot = replace(service.snapshot, ready=True, taken_at=time.time() - 60)
        assert answer(server.url + "/livez")[0] == 503
    finally:
        server.close()
        service.close()


def test_figures_of_a_client_that_are_no_numbers_or_nobody_knows_are_left_out() -> None:
    simulated = SimulatedRanks(2)
    service = simulated.service
    stats = {"starved_fraction": math.nan, "next_p99_ms": math.inf, "steps": 3.0}
    said = Starvation(causes_s={"stream": 2.5, "made up": 1.0}, streams_s={"web": 2.5, "made up": 1.0}, trainer_s=0.5)
    server = HttpServer("127.0.0.1:0", lambda: service.snapshot)
    server.start()
    try:
        simulated.attach()
        simulated.report(0, stats, said)
        simulated.snapshot()
        code, text = answer(server.url + "/status")
        assert code == 200
        found, _ = json.loads(text)["feeds"]["train"]["readers"]
        assert found["stats"] == {"steps": 3.0}
        assert found["starved_s"] == {cause: 2.5 if cause == "stream" else 0.0 for cause in CAUSES}
        assert found["starved_streams"] == {"web": 2.5}, "a client that makes streams up makes no series"
        assert (found["trainer_s"], found["step_s"], found["cost"]) == (0.5, None, [])
        lines = [line for line in answer(server.url + "/metrics")[1].splitlines() if "trainer_seconds_total{" in line]
        assert len(lines) == 1, "counts of a rank that has said nothing yet are not 0: they may be of hours"
        assert 'dp_rank="0"' in lines[0]
    finally:
        server.close()
        simulated.close()


def answer(url: str | urllib.request.Request) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as got:
            return got.status, got.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
