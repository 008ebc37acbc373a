"""The broker and the producers as processes: they start, say what they wait for, and end as they are told."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import resource
import signal
import socket
import time
import urllib.error
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console
from streampack_services.daemons.producer import RESTARTS_A_MINUTE
from streampack_services.daemons.progress import Overall, figures, line, summary, table
from streampack_services.daemons.signals import ending_signals

import streampack as sp
from streampack.errors import PeerError
from streampack.producer.loop import StreamProgress
from tests.integration.commands.endless_run import ENDLESS, RULES, producer_config
from tests.integration.running import (
    PATIENCE_S,
    Daemon,
    RunningBroker,
    folder,
    running,
    running_broker,
    streampack,
    the_error,
    until,
    write,
    write_jsonl,
)

FOR_EVER = {"drain_timeout_s": 10 * PATIENCE_S}
"""What ends nevertheless did not wait until it was over."""


def readiness(broker: RunningBroker) -> int:
    try:
        broker.get("/readyz")
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    return 200


def children(daemon: Daemon) -> list[psutil.Process]:
    """A producer's processes, once all have begun to send."""
    found: list[psutil.Process] = psutil.Process(daemon.process.pid).children(recursive=True)
    return [child for child in found if "resource_tracker" not in " ".join(child.cmdline())]


@dataclass
class Manager:
    """What systemd would hear of the processes that are started here."""

    socket: socket.socket
    heard: list[str] = field(default_factory=list)

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not any(text in each for each in self.heard):
            assert time.monotonic() < deadline, self.heard
            self.heard.append(self.socket.recv(4096).decode())


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Iterator[Manager]:
    with folder() as path, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as own:
        own.bind(str(path / "notify"))
        own.settimeout(PATIENCE_S)
        monkeypatch.setenv("NOTIFY_SOCKET", str(path / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", "1000")
        yield Manager(own)


# The broker


def test_sigterm_drains_the_broker_and_its_last_steps_are_read(tmp_path: Path) -> None:
    with (
        running_broker({**ENDLESS, "steps_ahead": 4}) as broker,
        sp.connect(broker.trainers, prefetch=1, format="numpy") as loader,
    ):
        with running("producer", "produce", "-c", producer_config(tmp_path, broker.producers)) as producer:
            steps = loader.steps()
            assert next(steps).index == 0
            until(lambda: broker.feed()["steps"]["formed"] == 4)
            broker.signal(signal.SIGTERM)
            assert producer.end() == 0
            assert "the broker is stopping: " in producer.said
        until(lambda: readiness(broker) == 503)
        assert broker.status()["state"] == "draining"
        assert [next(steps).index for _ in range(3)] == [1, 2, 3]
        with pytest.raises(PeerError, match="the broker is stopping"):
            next(steps)
        loader.close()
        assert broker.end() == 0
        assert not broker.rendezvous.exists()
        assert "stopped after 4 steps" in broker.said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=str)
def test_every_daemon_ends_by_a_signal_as_it_should(tmp_path: Path, number: signal.Signals) -> None:
    """A terminal that closes sends SIGHUP, which ended a broker without its drain, and a producer with an error."""
    with running_broker(ENDLESS | FOR_EVER) as broker:
        with running("producer", "produce", "-c", producer_config(tmp_path, broker.producers)) as producer:
            until(lambda: broker.feed()["steps"]["formed"] > 0)
            producer.signal(number)
            assert producer.end() == 0
        with (
            folder() as path,
            running("relay", "relay", "--broker", broker.trainers, "--listen", f"ipc://{path}/r") as relay,
        ):
            relay.wait_for("ranks connect to")
            relay.signal(number)
            assert relay.end() == 0
        broker.signal(number)
        assert broker.end() == 0
        assert "draining: serving the steps that are formed" in broker.said
        assert "stopped after" in broker.said


def test_a_daemon_under_nohup_goes_on_when_the_terminal_closes() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert ending_signals() == (signal.SIGTERM, signal.SIGINT)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert ending_signals() == (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def test_a_second_signal_ends_the_broker_at_once() -> None:
    with running_broker(ENDLESS | FOR_EVER) as broker, sp.connect(broker.trainers, format="numpy"):
        broker.signal(signal.SIGINT)
        until(lambda: readiness(broker) == 503)
        assert broker.process.poll() is None, "a rank is attached, and may want what is formed"
        broker.signal(signal.SIGTERM)
        assert broker.end() == 0


def test_a_broker_without_readers_drains_at_once_and_systemd_is_told(manager: Manager) -> None:
    with running_broker(ENDLESS | FOR_EVER) as broker:
        manager.wait_for("READY=1")
        broker.signal(signal.SIGTERM)
        assert broker.end() == 0
    manager.wait_for("STOPPING=1\nSTATUS=draining: train step 0, 0 tokens/s")
    ready, *others = manager.heard
    assert ready.startswith("READY=1\nSTATUS=serving: train step 0, 0 tokens/s; Waiting for samples: ")
    assert "WATCHDOG=1" in ready
    assert not any("READY=1" in other for other in others)


def test_a_broker_has_more_connections_than_its_shell_lets_it_open() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        broker = stack.enter_context(running_broker(ENDLESS))
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        host, port = broker.trainers.removeprefix("tcp://").rsplit(":", 1)
        for _ in range(300):
            stack.enter_context(socket.create_connection((host, int(port)), PATIENCE_S))
        until(lambda: psutil.Process(broker.process.pid).num_fds() > 300)


def test_the_broker_says_what_it_waits_for() -> None:
    with running_broker(ENDLESS, "--log-json") as broker:
        until(lambda: (broker.feed()["waiting_for"] or {}).get("reason") == "stream")
        what = "waiting for samples: the next sample has not come from stream 'web' partition 0 of 2"
        said = re.compile(rf"no step for (?:[5-9]|\d\d) s: {what}")  # 5, but where the machine is slow
        until(lambda: said.search(broker.said) is not None)
        assert "start one with 'streampack produce -c producer.yaml'" in broker.said
        lines = [json.loads(line) for line in broker.said.splitlines()]
        warned = [line for line in lines if line["level"] != "info"]
        assert len(warned) == 1, "of its addresses, which are on loopback, and of nothing else"
        assert "so other hosts cannot connect" in warned[0]["text"]


def test_a_broker_ends_by_itself_when_all_is_delivered(tmp_path: Path) -> None:
    settings = {"rules": RULES, "streams": {"web": {"partitions": 2}}}
    with running_broker(settings, "--exit-when-finished") as broker:
        config = producer_config(tmp_path, f"file://{broker.rendezvous}", processes=2)
        with running("producer", "produce", "-c", config) as producer:
            with sp.connect(f"file://{broker.rendezvous}", format="numpy") as loader:
                samples = sum(int(pack.num_samples) for pack in loader)
                assert producer.process.poll() is None, "it may be needed again while a rank is attached"
            assert producer.end() == 0
            assert "all delivered: " in producer.said
        assert samples == 600
        assert broker.end() == 0


# The producers


@contextmanager
def two_processes(path: Path) -> Iterator[tuple[RunningBroker, Daemon]]:
    """A broker and a producer of two processes, which are connected."""
    with running_broker(ENDLESS) as broker:
        config = producer_config(path, broker.producers, processes=2)
        with running("producer", "produce", "-c", config) as producer:
            until(lambda: broker.status()["producers"] == 2)
            yield broker, producer


def test_sigterm_ends_every_producer_process(tmp_path: Path, manager: Manager) -> None:
    with two_processes(tmp_path) as (broker, producer):
        mine = children(producer)
        assert len(mine) == 2
        manager.wait_for("STATUS=web ")
        producer.signal(signal.SIGTERM)
        assert producer.end() == 0
        assert "stopped: " in producer.said
        manager.wait_for("STOPPING=1\nSTATUS=stopping")
        until(lambda: broker.status()["producers"] == 0)
        assert not psutil.wait_procs(mine, PATIENCE_S)[1]


def test_ctrl_c_ends_every_producer_process_and_says_130(tmp_path: Path) -> None:
    with two_processes(tmp_path) as (_, producer):
        mine = children(producer)
        for pid in [producer.process.pid, *(child.pid for child in mine)]:  # as a terminal does
            os.kill(pid, signal.SIGINT)
        assert producer.end() == 130
        assert not psutil.wait_procs(mine, PATIENCE_S)[1]
        assert "Traceback" not in producer.said


def test_a_killed_producer_process_is_started_again_and_no_step_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = tmp_path / "released"
    monkeypatch.setenv("RELEASED", str(released))
    settings = {"rules": RULES, "streams": {"web": {"partitions": 6}}}
    slow = {"name": "tests.integration.commands.test_daemons:slowly"}
    for number in range(6):
        write_jsonl(tmp_path / f"{number}.jsonl", [{"text": "t" * (2 + 31 * i % 97)} for i in range(100)])
    source = {"source": "jsonl", "shards": str(tmp_path / "?.jsonl"), "tokenizer": slow}
    found = []
    for kills in (0, 1):
        released.unlink(missing_ok=True)
        with running_broker(settings) as broker, sp.connect(broker.trainers) as loader:
            tree = {"broker": broker.producers, "processes": 3, "streams": {"web": source}}
            with running("producer", "produce", "-c", write(tmp_path / "p.yaml", tree), "--log-json") as producer:
                until(lambda: broker.status()["producers"] == 3 and broker.status()["streams"][0]["samples"] > 30)
                if kills:
                    killed = children(producer)[1]
                    killed.kill()
                    until(lambda: broker.status()["vanished_producers"] == 1)
                released.touch()
                steps = list(loader.steps())
                loader.close()
                assert producer.end() == 0
                lines = [json.loads(each) for each in producer.said.splitlines()]
            ids = [tuple(each) for step in steps for pack in step for each in pack.sample_ids.tolist()]
            assert len(ids) == len(set(ids)) == 600
            found.append([step.digest for step in steps])
            assert lines[-1]["figures"]["restarts"] == kills
            warned = [each["text"] for each in lines if each["level"] == "warning"]
            assert len(warned) == kills
            if kills:
                assert f"(pid {killed.pid}) was killed, perhaps because memory was short; process " in warned[0]
                assert f"took over from producer {socket.gethostname()}:{killed.pid}" in broker.said
                assert "silent" not in broker.said
    assert found[0] == found[1]


def slowly(text: str) -> list[int]:
    """Ten seconds for what a process has to send, until the test has done what it does in the middle of it."""
    if not Path(os.environ["RELEASED"]).exists():
        time.sleep(0.05)
    return list(text.encode())


def restarted(producer: Daemon, times: int) -> bool:
    return producer.said.count("continues its work") >= times or producer.process.poll() is not None


def test_producer_processes_that_are_killed_again_and_again_are_given_up(tmp_path: Path) -> None:
    with two_processes(tmp_path) as (_, producer):
        for number in range(RESTARTS_A_MINUTE + 1):
            mine = children(producer)
            mine[-1].kill()
            until(partial(restarted, producer, number + 1))
        assert producer.end() == 1
        assert (
            f"killed, perhaps because memory was short, after {RESTARTS_A_MINUTE} restarts within a min"
            in producer.said
        )
        assert not psutil.wait_procs(mine, PATIENCE_S)[1]


def test_producer_processes_do_not_outlive_their_parent(tmp_path: Path) -> None:
    with two_processes(tmp_path) as (_, producer):
        mine = children(producer)
        producer.process.kill()
        assert not psutil.wait_procs(mine, PATIENCE_S)[1]


def test_a_failing_stream_ends_every_process_with_its_line(tmp_path: Path) -> None:
    with running_broker(ENDLESS) as broker:
        config = producer_config(tmp_path, broker.producers, processes=2)
        write_jsonl(tmp_path / "1.jsonl", [{"tokens": [1]}] * 20 + [{"tokens": [1] * 300}])
        assert "1.jsonl:line 21: got a sample of 300 tokens" in the_error(streampack("produce", "-c", config), 2)


def test_a_broker_that_is_gone_is_waited_for_and_its_successor_served(tmp_path: Path) -> None:
    with folder() as short:
        listen = {"producers": f"ipc://{short}/p", "trainers": f"ipc://{short}/t", "http": "127.0.0.1:0"}
        settings: dict[str, Any] = {"rules": RULES, "streams": {"web": {"partitions": 2}}, "listen": listen}
        config = producer_config(tmp_path, f"ipc://{short}/p")
        with running("producer", "produce", "-c", config) as producer:
            with running_broker({**settings, **ENDLESS}) as broker:
                until(lambda: broker.status()["producers"] == 1)
                broker.kill()
            with running_broker(settings) as broker:
                with sp.connect(broker.trainers, format="numpy") as loader:
                    assert sum(int(pack.num_samples) for pack in loader) == 600
                assert producer.end() == 0
            assert "all delivered" in producer.said


def overall() -> Overall:
    """Two processes after ten seconds of two finite streams, one of them with a share of rejected samples."""
    found = Overall({"web": 8, "code [x]": 2})
    found.update(100.0, [], ["", ""], 0)
    web = [
        StreamProgress(30, 400, {"json": 1}, {0: 30}, 1, opened_shards=3, opened_samples=34),
        StreamProgress(10, 100, {"json": 1, "dtype": 2}, {1: 10}, 1, opened_shards=1, opened_samples=6),
    ]
    code = StreamProgress(5, 1000, {}, {0: 7}, None, opened_shards=1, opened_samples=1)
    waits = "credit: the broker is full"
    found.update(110.0, [{"web": web[0], "code [x]": code}, {"web": web[1]}], [waits, ""], 2)
    return found


def test_progress_is_told_by_stream() -> None:
    said = line(overall())
    assert said == (
        "web 50% 40 samples 500 tokens 4 rejected (dtype 2, json 2) 50 tokens/s; code [x] 5 samples 1000 tokens "
        "100 tokens/s; 2 restarts; 1 of 2 wait for credit: the broker is full"
    )
    assert summary(overall()).startswith("45 samples, 1500 tokens, 4 rejected (dtype 2, json 2); web 50% 40 samples")
    assert json.loads(json.dumps(figures(overall())))["streams"]["web"] == {
        "samples": 40, "tokens": 500, "share": 0.5, "tokens_per_s": 50.0, "rejected": {"json": 2, "dtype": 2},
        "warnings": {},
    }  # fmt: skip


def test_a_line_names_16_streams_and_adds_up_the_others() -> None:
    found = Overall({f"s{number:04d}": 1 for number in range(600)})
    found.update(120.0, [{name: StreamProgress(samples=2, tokens=10) for name in found.num_shards}], [], 0)
    assert line(found).endswith(
        "; s0015 2 samples 10 tokens 0 tokens/s; 584 more streams 1168 samples 5840 tokens 0 tokens/s"
    )
    assert len(summary(found)) < 1000


def test_samples_without_their_declared_mask_are_counted() -> None:
    found = overall()
    web, again, code = (StreamProgress(warnings={"no_loss_mask": count}) for count in (7, 2, 1))
    found.update(120.0, [{"web": web, "code [x]": code}, {"web": again}], [], 0)
    assert summary(found).startswith("0 samples, 0 tokens, 10 samples with the warning no_loss_mask")
    assert figures(found)["streams"]["web"]["warnings"] == {"no_loss_mask": 9}


def test_each_wait_is_told_with_as_many_processes_as_have_it() -> None:
    found = overall()
    found.update(120.0, [], ["credit", "", "a lease", "credit"], 0)
    assert line(found).endswith("; 2 of 4 wait for credit; 1 of 4 wait for a lease")
    found.update(130.0, [], ["credit"], 0)
    assert line(found).endswith("; waits for credit")


@pytest.mark.parametrize("width", [72, 200])
def test_progress_on_a_terminal_fits_and_shows_names_as_they_are(width: int) -> None:
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    console.print(table(overall()))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert max(map(len, shown.splitlines())) <= width
    for text in ("web", "code [x]", "50%", "1.0k", "pass 4, repeats", "2 restarts"):
        assert text in shown


def test_the_share_is_of_the_samples_within_shards_too() -> None:
    found = Overall({"web": 1, "list": 1})
    web = StreamProgress(30, 90, {}, {0: 30}, 2, opened_shards=1, opened_samples=100)
    unknown = StreamProgress(10, 10, {}, {0: 10}, 1)
    assert found_at(found, {}) == (0.0, 0.0)
    assert found_at(found, {"web": web, "list": unknown}) == (0.15, None)
    assert "web 15% 30 samples" in line(found)
    assert "list 10 samples" in line(found)
    again = StreamProgress(170, 900, {}, {0: 200}, 2, opened_shards=1, opened_samples=100)
    found.update(2.0, [{"web": web}, {"web": again}], [], 1)
    assert found.share("web") == 1.0, "the process that was started again opened the shard again"


def found_at(found: Overall, part: dict[str, StreamProgress]) -> tuple[float | None, ...]:
    found.update(1.0, [part], [], 0)
    return found.share("web"), found.share("list")


def test_a_share_of_the_samples_is_known_for_every_partition(tmp_path: Path) -> None:
    settings = {"rules": RULES, "streams": {"web": {"partitions": 3, "passes": 2}}}
    with running_broker(settings) as broker, sp.connect(broker.trainers) as loader:
        config = producer_config(tmp_path, broker.producers, processes=2)
        with running("producer", "produce", "-c", config, "--log-json") as producer:
            assert sum(int(pack.num_samples) for pack in loader) == 1200
            loader.close()
            assert producer.end() == 0
            last = json.loads(producer.said.splitlines()[-1])
    assert last["text"].startswith("all delivered: ")
    assert last["figures"]["streams"]["web"]["share"] == 1.0


def test_nothing_is_logged_once_a_pack(tmp_path: Path) -> None:
    with running_broker(ENDLESS) as broker, sp.connect(broker.trainers, format="numpy") as loader:
        config = producer_config(tmp_path, broker.producers)
        with running("producer", "produce", "-c", config):
            steps = loader.steps()
            began = time.monotonic()
            for _ in range(300):
                next(steps)
        seconds = time.monotonic() - began
        assert len(broker.said.splitlines()) < 20 + seconds
