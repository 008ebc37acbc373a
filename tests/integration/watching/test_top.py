"""``streampack top``: a real broker's figures on terminals of many sizes, and in JSON; and ``health`` beside it."""

from __future__ import annotations

import contextlib
import copy
import fcntl
import json
import os
import re
import signal
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from streampack_services.http.http_client import fetch_events, parse_status
from streampack_services.http.server import HttpServer
from streampack_services.watch import status_report, top
from streampack_services.watch.top import StatusPoller, _Screen
from streampack_services.watch.top_ranks import Measure, rank_lines
from streampack_services.watch.top_view import PageOptions, page
from streampack_services.watch.view_model import HISTORY_S, BrokerView, Watch, rates_of

import streampack as sp
from streampack.core.stats.data_wait import CAUSES
from streampack.errors import PeerError
from streampack.sources import SourceSettings, open_source
from tests.integration.running import (
    PATIENCE_S,
    STREAMPACK,
    RunningBroker,
    folder,
    in_process,
    producing_here,
    running_broker,
    the_error,
    until,
    write_jsonl,
)

Tree = dict[str, Any]
STEPS = 20


@pytest.fixture(scope="module")
def served() -> Iterator[RunningBroker]:
    """Two ranks have read 20 steps of a stream that goes on, and are there."""
    settings = {
        "run": "sft-8b", "rules": {"budget": 256, "window": {"samples": 64}, "step": {"packs": 4}},
        "streams": {"web": {"partitions": 2, "repeat": True}},
    }  # fmt: skip
    with folder() as path, running_broker(settings | {"state_dir": str(path / "log")}) as broker:
        rows = [{"tokens": [1] * (1 + 31 * i % 97)} for i in range(300)]
        source = open_source(SourceSettings("jsonl", str(write_jsonl(path / "a.jsonl", rows))))
        with (
            producing_here(broker.producers, {"web": source}),
            sp.connect(broker.trainers, mesh={"dp": 2, "dp_rank": 0}, format="numpy") as one,
            sp.connect(broker.trainers, mesh={"dp": 2, "dp_rank": 1}, format="numpy") as other,
        ):
            threads = [threading.Thread(target=read, args=(each,)) for each in (one, other)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(PATIENCE_S)
            until(lambda: [row["trainer_s"] > 0 for row in broker.feed()["readers"]] == [True, True])
            yield broker


def read(loader: Any) -> None:
    steps = loader.steps()
    for _ in range(STEPS):
        next(steps)


@pytest.fixture(scope="module")
def snapshot(served: RunningBroker) -> Tree:
    return served.status()


# What is shown


def test_top_shows_a_broker_once_where_nobody_looks(served: RunningBroker) -> None:
    result = in_process("top", served.http)
    assert result.returncode == 0, result.stderr
    for text in ("sft-8b", "feed train", "utilization", "1 stream", "web", "2 ranks", "dp=0", "dp=1", "1 producer",
                 "attempt 1 of feed 'train' begins"):  # fmt: skip
        assert text in result.stdout
    assert "\x1b" not in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_top_for_machines_agrees_with_the_status(served: RunningBroker) -> None:
    view = json.loads(in_process("top", served.http, "--once", "--json").stdout)
    status = served.status()
    (feed,) = view["feeds"]
    assert (view["run"], feed["name"], feed["packs"]) == (
        "sft-8b",
        "train",
        status["feeds"]["train"]["totals"]["packs"],
    )
    assert [rank["name"] for rank in feed["ranks"]] == ["dp=0", "dp=1"]
    assert view["log"].keys() == status["log"].keys()
    assert all(rank["waits"] is not None and 0 <= rank["waits"] <= 1 for rank in feed["ranks"]), served.said
    assert sum(feed["waste"].values()) == pytest.approx(1 - feed["utilization"])
    assert [event["text"] for event in view["events"]] == [event["text"] for event in fetch_events(served.http, 0, 5)]


def test_status_fits_a_screen_however_many_ranks_there_are(
    served: RunningBroker, snapshot: Tree, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = " ".join(in_process("status", served.http).stdout.split())  # a line with many causes is wrapped
    for text in ("data wait", "of all ranks' time", "buffered", "dp=0", "dp=1"):
        assert text in shown
    status_report.show_status(parse_status(many(snapshot, 512)))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 50
    assert max(map(len, lines)) <= 80
    assert any(line.split()[:4] == ["dp=0", "cp=3", "100.0%", "peers"] for line in lines)


def test_a_stall_and_how_long_it_lasts_are_in_the_status_and_at_the_top(
    snapshot: Tree, capsys: pytest.CaptureFixture[str]
) -> None:
    stalled = copy.deepcopy(snapshot) | {"state": "waiting", "stalled_s": 75.0}
    stalled["feeds"]["train"] |= {"state": "waiting", "stalled_s": 75.0}
    status_report.show_status(parse_status(stalled))
    run, feed = (line for line in capsys.readouterr().out.splitlines() if "waiting for 1m15s" in line)
    assert stalled["run"] in run
    assert "feed train" in feed
    view = view_of(stalled, events=[])
    first = page(view, PageOptions(), 100)[0]
    assert "waiting for 1m15s" in first.plain
    assert "bold yellow" in {str(span.style) for span in first.spans}


def many(snapshot: Tree, ranks: int) -> Tree:
    """The same broker with as many ranks, of which number 3 waits for peers all the time, and a longer name."""
    found = copy.deepcopy(snapshot)
    feed = found["feeds"]["train"]
    row = feed["readers"][0]
    feed["readers"] = [
        row | {"dp_rank": n // 4, "cp_rank": n % 4, "where": f"node{n // 8}:{n}", "cost": [1.0 + (n == 5)],
               "data_wait": 1.0 if n == 3 else 0.0, "cause": "peers" if n == 3 else "", "stream": None}
        for n in range(ranks)
    ]  # fmt: skip
    return found


def test_one_node_is_shown_on_request(served: RunningBroker) -> None:
    host = served.feed()["ranks"]["nodes"][0]["host"]
    for command in ("status", "top"):
        result = in_process(command, served.http, "--node", host[:3], *(["--once"] if command == "top" else []))
        assert result.returncode == 0, result.stderr
        assert "dp=0" in result.stdout
        assert "dp=1" in result.stdout
        assert "no rank is on a host" in the_error(in_process(command, served.http, "--node", "no such host"), 2)
    pages = json.loads(in_process("status", served.http, "--node", host, "--json").stdout)
    assert pages["train"]["node"]["host"] == host
    assert [row["dp_rank"] for row in pages["train"]["readers"]] == [0, 1]


def view_of(*snapshots: Tree, events: list[Tree] | None = None) -> BrokerView:
    watch = Watch()
    for each in snapshots:
        watch.add(parse_status(each), events or [])
    return watch.view()


EVENT = {"seq": 1, "time": 1.8e9, "level": "error", "text": "producer n:1:\n\x1b[2Jthe 数据 file is gone " * 9}


@settings(max_examples=25)
@given(
    ranks=st.sampled_from([0, 1, 4, 16, 17, 512, 1025]), width=st.integers(20, 250), height=st.integers(1, 70),
    measure=st.sampled_from(["waits", "cost"]), keys=st.booleans(), trouble=st.sampled_from(["", "no answer " * 20]),
)  # fmt: skip
def test_a_page_fits_every_terminal(
    snapshot: Tree, ranks: int, width: int, height: int, measure: Measure, keys: bool, trouble: str
) -> None:
    view = view_of(many(snapshot, ranks), events=[EVENT])
    lines = page(view, PageOptions(measure=measure, keys=keys, trouble=trouble), width, height)
    assert len(lines) == height
    assert max(line.cell_len for line in lines) <= width
    assert all(line.plain.isprintable() for line in lines)
    assert lines[0].plain.startswith("sft-8b")


def test_three_streams_four_ranks_and_an_event_fit_a_terminal_of_24_lines(snapshot: Tree) -> None:
    row = snapshot["streams"][0] | {"last_seen_s": 1.0, "ended_partitions": 0}
    streams = [row | {"stream": name} for name in ("web", "code", "books")]
    view = view_of(many(snapshot, 4) | {"streams": streams}, events=[EVENT | {"seq": n} for n in range(1, 4)])
    shown = page(view, PageOptions(keys=True), 80, 24)
    begins = [line.plain.split()[0] for line in shown if line.plain]
    for first in ("web", "code", "books", "dp=0", "events", "q"):
        assert first in begins
    assert sum(first.startswith("dp=") for first in begins) == 4
    assert begins[-2].count(":") == 2, "the event with its time"


def test_top_shows_the_silent_streams_where_there_are_more_than_lines(snapshot: Tree) -> None:
    row = snapshot["streams"][0] | {"last_seen_s": 1.0, "ended_partitions": 0}
    rows = [row | {"stream": f"s{n}"} for n in range(1000)]
    rows[900] |= {"last_seen_s": 60.0}
    rows[950] |= {"last_seen_s": None}
    shown = "\n".join(line.plain for line in page(view_of(snapshot | {"streams": rows}), PageOptions(), 160, 40))
    assert "1,000 streams" in shown
    assert all(name in shown for name in ("s900 ", "s950 ", "s0 "))


@pytest.mark.parametrize("ranks", [17, 64, 100, 512])
def test_a_map_has_a_cell_for_each_rank_and_marks_the_one_that_waits(snapshot: Tree, ranks: int) -> None:
    (feed,) = view_of(many(snapshot, ranks)).feeds
    lines = [line for line in rank_lines(feed, "waits", 150, None)[1:] if line.plain.startswith("dp=")]
    cells = "".join(line.plain[len("dp=000 cp=0") :] for line in lines if "·" in line.plain).replace(" ", "")
    assert len(cells) == 2 * ranks
    assert [n for n in range(ranks) if cells[2 * n] == "█"] == [3]


# What is so lately


def later(snapshot: Tree, seconds: float, **ranks: Tree) -> Tree:
    """The same so much later; ``ranks``: what is new of rank ``r0``, ``r1``."""
    found = copy.deepcopy(snapshot)
    for key in ("uptime_s", "taken_at"):
        found[key] += seconds
    for name, news in ranks.items():
        found["feeds"]["train"]["readers"][int(name[1:])] |= news
    return found


def test_waits_are_those_that_the_broker_has_of_the_last_minute_beside_the_total(snapshot: Tree) -> None:
    """All from one status: so ``status``, ``top --once`` and the page show the same."""
    found = many(snapshot, 3)
    row = {"data_wait": 0.4, "cause": "stream", "stream": "web", "starved_s": dict.fromkeys(CAUSES, 1.0)}
    found["feeds"]["train"]["readers"][0] |= row
    recent = dict.fromkeys(CAUSES, 0.0) | {"stream": 0.15, "network": 0.02}
    found["feeds"]["train"]["ranks"] |= {
        "recent_waits": recent, "recent_streams": {"web": 0.15}, "recent_s": 45.0, "trainer_s": 90.0,
        "starved_s": dict.fromkeys(CAUSES, 0.0) | {"peers": 10.0},
    }  # fmt: skip
    (feed,) = view_of(found).feeds
    assert (feed.ranks[0].waits, feed.ranks[0].cause) == (0.4, "stream web")
    assert feed.waits_text() == "17.0% in the last 45 s, 10.0% since the start: stream web 15.0%, network 2.00%"


def test_the_slow_rank_is_named_and_not_the_ranks_that_wait_for_it(snapshot: Tree) -> None:
    found = many(snapshot, 3)
    feed = found["feeds"]["train"]
    slow = {"dp_rank": 0, "cp_rank": 1, "tp_rank": 0, "pp_rank": 0}
    feed["ranks"]["slow"] = slow | {
        "name": "dp=0 cp=1",
        "host": "node0",
        "count": 1,
        "step_s": 1.0,
        "others_step_s": 0.1,
    }
    feed["readers"][0] |= {"data_wait": 0.9, "cause": "peers"}
    feed["readers"][1] |= {"data_wait": 0.01, "cause": "network", "work_s": 1.0}
    (view,) = view_of(found).feeds
    assert view.waited_for is not None
    assert view.waited_for.name == "dp=0 cp=1"
    table = {line.plain.split()[1]: line.plain for line in rank_lines(view, "waits", 120, None)[2:]}
    assert "slow: 1.0 s a step" in table["cp=1"]
    assert "peers" in table["cp=0"]
    assert view_of(many(snapshot, 3)).feeds[0].waited_for is None


def test_a_long_headline_is_whole_at_the_top(snapshot: Tree) -> None:
    found = copy.deepcopy(snapshot)
    text = "Waiting for samples for 25 s: the next sample has not come from stream 'code' " * 3
    found["feeds"]["train"]["headline"] = {"kind": "waiting", "cause": "stream", "text": text.strip()}
    lines = [line.plain for line in page(view_of(found), PageOptions(), 80)]
    assert text.strip() in " ".join(line.strip() for line in lines[2:6])


def test_another_broker_begins_anew(snapshot: Tree) -> None:
    watch = Watch()
    watch.add(parse_status(snapshot), [EVENT, EVENT | {"seq": 2}])
    assert watch.last_seq(snapshot["epoch"]) == 2
    again = snapshot | {"epoch": snapshot["epoch"] + 1, "uptime_s": 0.5}
    assert watch.last_seq(again["epoch"]) == 0
    watch.add(parse_status(again), [EVENT])
    assert [event["seq"] for event in watch.view().events] == [1]
    assert watch.view().streams[0].tokens_per_s is None


@given(rate=st.floats(0, 1e9), seconds=st.integers(2, 400), columns=st.integers(1, 200), every=st.floats(0.5, 5))
def test_a_steady_flow_is_a_level_line_as_far_back_as_it_is_known(
    rate: float, seconds: int, columns: int, every: float
) -> None:
    points = [(every * n, rate * every * n) for n in range(seconds)]
    rates = rates_of(points, columns)
    assert len(rates) == columns
    known = [each for each in rates if each is not None]
    assert known == pytest.approx([rate] * len(known))
    assert rates[len(rates) - len(known) :] == known, "unknown is what is long ago"
    assert abs(len(known) - columns * min(points[-1][0] / HISTORY_S, 1)) <= 1 + columns * every / HISTORY_S


# A terminal


class Terminal:
    """A terminal of 80 by 24 without colors that a command runs on; what it wrote."""

    def __init__(self, *arguments: str) -> None:
        self._ours, theirs = os.openpty()
        self.resize(24, 80)
        words = [*STREAMPACK, *arguments]
        env = {**os.environ, "TERM": "xterm-256color", "NO_COLOR": "1", "COLUMNS": "80", "LINES": "24"}
        self.process = subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, env=env)
        os.close(theirs)
        self.said = self.written = ""

    def resize(self, lines: int, columns: int) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def wait_for(self, text: str) -> None:
        """Until it is written from now on."""
        self.said, deadline = "", time.monotonic() + PATIENCE_S
        while text not in self.said:
            assert time.monotonic() < deadline, self.said[-5000:]
            self._read()

    def _read(self) -> bool:
        found = os.read(self._ours, 1 << 16).decode(errors="replace")
        self.said += found
        self.written += found
        return bool(found)

    def echoes(self) -> bool:
        """Is what is typed shown, as before?"""
        return bool(termios.tcgetattr(self._ours)[3] & termios.ECHO)

    def press(self, key: str) -> None:
        os.write(self._ours, key.encode())

    def end(self) -> int:
        """Its exit code; who does not read what it writes holds it up."""
        with contextlib.suppress(OSError):
            while self._read():
                pass
        return self.process.wait(PATIENCE_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._ours)


def test_on_a_terminal_top_follows_its_size_its_keys_and_a_broker_that_goes_and_comes(snapshot: Tree) -> None:
    snapshot = many(snapshot, 20)
    server = HttpServer("127.0.0.1:0", lambda: parse_status(snapshot))
    server.start()
    address = server.url.removeprefix("http://")
    terminal = Terminal("top", server.url, "--interval", "0.1")
    try:
        terminal.wait_for("ranks by cost")
        terminal.press("c")
        terminal.wait_for("ranks by data wait")
        terminal.resize(50, 150)
        terminal.process.send_signal(signal.SIGWINCH)  # the kernel sends it to who has the terminal as its own
        terminal.wait_for("share of all ranks' time")
        server.close()
        terminal.wait_for("got no answer")
        server = HttpServer(address, lambda: parse_status(later(snapshot, 1) | {"run": "again"}))
        server.start()
        terminal.wait_for("again")
        terminal.process.terminate()
        assert terminal.end() == 128 + signal.SIGTERM
        assert "\x1b[?1049l" in terminal.said, "it leaves the terminal as it was"
        assert terminal.echoes()
        assert set(re.findall(r"\x1b\[([0-9;]*)m", terminal.written)) <= {"", "0", "1", "2", "1;2"}, "NO_COLOR"
    finally:
        server.close()
        terminal.close()


def test_q_ends_it_and_a_table_of_ranks_has_no_key_of_its_own(snapshot: Tree) -> None:
    view = view_of(snapshot)
    screen = _Screen(Console(), StatusPoller(None, 1.0, 1.0))
    assert screen._press(b"fc\t")
    assert not screen._press(b"fq")
    assert page(view, PageOptions(keys=True), 80, 24)[-1].plain == "q quit"
    assert page(view_of(many(snapshot, 17)), PageOptions(keys=True), 80, 24)[-1].plain == "q quit  c ranks by cost"


def test_a_loop_that_stands_still_and_a_broker_of_another_version_are_said(
    snapshot: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(top, "STUCK_AFTER_S", 0.0)
    said = [snapshot]
    with saying(lambda: said[-1]) as url:
        poller = StatusPoller(url, 1.0, PATIENCE_S)
        poller.fetch()
        poller.fetch()
        assert "the broker's main loop has been stuck for 0 s" in poller.trouble
        assert "has been stuck" in page(poller.fetch(), PageOptions(trouble=poller.trouble), 80, 24)[2].plain
        said.append(later(snapshot, 1))
        poller.fetch()
        assert not poller.trouble
        said.append(later(snapshot, 2) | {"version": "9.9", "memory": {}})
        with pytest.raises(
            PeerError, match=r"cannot read the status of a broker with version 9\.9 .* the broker's version"
        ):
            poller.fetch()
        assert "cannot read the status of a broker with version 9.9" in the_error(in_process("status", url), 1)


@pytest.mark.parametrize("key", ["stalled_s", "epoch", "taken_at", "uptime_s", "feeds"])
@pytest.mark.parametrize("version", [sp.__version__, "0.0.1"])
def test_a_broker_that_says_less_is_said_in_one_line(snapshot: Tree, key: str, version: str) -> None:
    less = {name: value for name, value in snapshot.items() if name != key} | {"version": version}
    with saying(lambda: less) as url:
        for command in (("top", url, "--once"), ("status", url)):
            said = the_error(in_process(*command), 1)
            assert f"cannot read the status of a broker with version {version}" in said
            assert f"`{key}`" in said


@contextlib.contextmanager
def saying(status: Callable[[], Tree]) -> Iterator[str]:
    """An HTTP server whose ``/status`` is any JSON, as a broker of another version may send it; yields its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(status()).encode() if self.path == "/status" else b"[]"
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


# Health


def test_health_says_why_not_and_1(served: RunningBroker) -> None:
    assert in_process("health", served.http).stdout == "ready\n"
    found = json.loads(in_process("health", served.http, "--live", "--json").stdout)
    assert found == {"good": True, "asked": "live", "said": "alive"}
    nobody = in_process("health", "127.0.0.1:1")
    assert "got no answer (connection refused)" in the_error(nobody, 1)
    nowhere = in_process("health", "file:///nowhere.json", "--timeout", "0", "--json")
    assert nowhere.returncode == 1
    assert json.loads(nowhere.stdout)["good"] is False
