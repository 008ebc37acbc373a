"""The command line: its help, its exit codes, and what status, health and check show."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace
from streampack_services.broker.service import BrokerService
from streampack_services.check import check
from streampack_services.cli import main
from streampack_services.watch import status_report

import streampack as sp
from streampack.config.daemon_settings import BrokerConfig
from streampack.config.service_settings import Listen
from streampack.config.typed_yaml import convert
from streampack.errors import ConfigError, InternalError, StreampackError, Unreachable
from tests.integration.running import (
    PATIENCE_S,
    RunningBroker,
    in_process,
    running_broker,
    streampack,
    the_error,
    write,
    write_jsonl,
)

COMMANDS = (
    "broker", "produce", "run", "status", "health", "check", "demo", "plan", "report", "why", "replay", "ledger", "set",
    "skip", "export",
)  # fmt: skip
BROKER = {
    "run": "shown",
    "rules": {"budget": 4096, "window": {"samples": 256}, "step": {"packs": 16}},
    "planned_mesh": {"dp": 4, "cp": 2},
    "streams": {"web": {"weight": 0.7}, "code": {"weight": 0.3, "repeat": True, "partitions": 2}},
    "limits": {"sample_tokens": 8192, "chunk": "64KiB"},
    "memory": "64MiB",
}

EVERYWHERE = {"producers": "tcp://0.0.0.0:*", "trainers": "tcp://0.0.0.0:*", "http": "127.0.0.1:0"}


@pytest.fixture(scope="module")
def broker() -> Iterator[RunningBroker]:
    with running_broker(BROKER) as found:
        yield found


def test_help_names_every_command_and_the_exit_codes() -> None:
    text = in_process("--help").stdout
    assert all(f"\n  {name}" in text for name in COMMANDS)
    assert "75 try again" in text
    assert "..." not in text.split("Commands:")[1], "no summary is cut"


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_each_command_has_an_example(command: str) -> None:
    result = in_process(command, "--help")
    assert result.returncode == 0
    assert f"Example:\n      streampack {command}" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_the_version_is_the_librarys() -> None:
    assert streampack("--version").stdout == f"streampack {sp.__version__}\n"


@pytest.mark.parametrize("arguments", [(), ("nonsense",), ("broker",), ("broker", "-c"), ("health", "--timeout", "x")])
def test_misuse_ends_with_2_and_no_traceback(arguments: tuple[str, ...]) -> None:
    result = in_process(*arguments)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert not arguments or result.stderr.splitlines()[-1].startswith("Error: ")


def test_status_is_a_page_for_a_person_or_json(broker: RunningBroker) -> None:
    shown = streampack("status", broker.http)
    assert shown.returncode == 0, shown.stderr
    waits = "Waiting for samples: the next sample has not come"
    for text in ("shown  serving  up", "feed train  serving", waits, "web", "0.7", "0 ranks"):
        assert text in shown.stdout
    found = json.loads(streampack("status", f"file://{broker.rendezvous}", "--json").stdout)
    assert found["run"] == "shown"
    assert [row["stream"] for row in found["streams"]] == ["web", "code"]


def test_names_are_shown_as_they_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = convert({"run": "sft[/x]", "memory": "64MiB", "streams": {"[a]:smile:": {}}}, BrokerConfig)
    config = replace(config, listen=Listen(producers="tcp://127.0.0.1:*", trainers="tcp://127.0.0.1:*"))
    service = BrokerService(config)
    try:
        status_report.show_status(service.snapshot)
    finally:
        service.close()
    shown = capsys.readouterr().out
    assert "sft[/x]  starting" in shown
    assert "[a]:smile:" in shown
    path = write(tmp_path / "b[a].yaml", {"run": "sft[/x]", "streams": {"web[a]": {}}, "listen": {"http": "[::1]:0"}})
    shown = in_process("check", path).stdout
    assert all(
        text in shown for text in ("sft[/x]", "  web[a]", "[::1]:0", "good: streampack broker can use b[a].yaml")
    )


def test_health_says_ready_and_ends_with_0(broker: RunningBroker) -> None:
    result = streampack("health", broker.http)
    assert (result.returncode, result.stdout) == (0, "ready\n")
    assert streampack("health", "--live", broker.http).stdout == "alive\n"


def test_an_address_without_a_broker_is_said_to_have_none(broker: RunningBroker) -> None:
    line = the_error(streampack("status", broker.http + "/nowhere"), 1)
    assert "got HTTP status 404 from a program that is not a broker" in line
    assert "expected the broker's HTTP address" in the_error(in_process("status", "tcp://127.0.0.1:1"), 2)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 90\r\n\r\n" + b'{"run": "sft", "epoch": ', "cut off after 24 bytes"),
        (b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00NULL", "Pass the address in listen.http"),
    ],
    ids=["an answer that is cut off", "an address of producers"],
)
def test_an_answer_that_no_status_is_in_is_one_line(answer: bytes, error: str) -> None:
    """Each was called a bug of streampack, with a traceback."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            for _ in range(3):
                connection, _ = server.accept()
                with connection:
                    connection.recv(4096)
                    connection.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        for command in (["status"], ["top", "--once"], ["health"]):
            result = in_process(*command, address)
            lines = (result.stdout + result.stderr).splitlines()
            assert result.returncode in (1, 75)
            assert len(lines) == 1
            assert error in lines[0]


def test_a_tokenizer_may_be_a_module_of_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "near_tokens.py").write_text("def encode(text):\n    return [len(text)] * 3\n")
    shards = str(write_jsonl(tmp_path / "a.jsonl", [{"text": "x"}, {"text": "yy"}]))
    source = {"source": "jsonl", "shards": shards, "tokenizer": {"name": "near_tokens:encode"}}
    command = str(Path(sys.executable).with_name("streampack"))  # as installed: its own folder is first on the path
    with running_broker({"rules": {"budget": 256}, "streams": {"web": {"partitions": 1}}}) as broker:
        write(tmp_path / "p.yaml", {"broker": broker.producers, "streams": {"web": source}})
        subprocess.run([command, "check", "p.yaml"], cwd=tmp_path, capture_output=True, timeout=PATIENCE_S, check=True)
        with subprocess.Popen(
            [command, "produce", "-c", "p.yaml"], cwd=tmp_path, stderr=subprocess.PIPE, text=True
        ) as it:
            with sp.connect(broker.trainers) as loader:
                assert sum(pack.num_samples for pack in loader) == 2
            assert it.wait(30) == 0
            assert it.stderr is not None
            assert "all delivered: 2 samples, 6 tokens" in it.stderr.read()


def test_a_rendezvous_file_that_only_this_host_can_use_is_warned_of(broker: RunningBroker) -> None:
    said = "addresses for producers and trainers are on loopback, so other hosts cannot connect; set listen"
    broker.wait_for(said)
    with running_broker({**BROKER, "listen": EVERYWHERE}) as other:
        other.wait_for("rendezvous file")
        assert "other hosts" not in other.said


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ConfigError("a: got\n1"), 2, "streampack: a: got 1\n"),
        (Unreachable("nobody"), 75, "streampack: nobody\n"),
        (StreampackError("no"), 1, "streampack: no\n"),
        (KeyboardInterrupt(), 130, ""),
        (RuntimeError("oh"), 1, "Please report the bug"),
        (InternalError("oh"), 1, "Please report the bug"),
    ],
)
def test_errors_become_exit_codes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, code: int, said: str
) -> None:
    def fail(file: Path) -> None:
        raise error

    monkeypatch.setattr(check, "check", fail)
    monkeypatch.setattr(sys, "argv", ["streampack", "check", "x"])
    assert main.main() == code
    shown = capsys.readouterr().err
    assert said in shown
    assert ("Traceback" in shown) == isinstance(error, (RuntimeError, InternalError))


@pytest.mark.parametrize("module", ["numpy", "typer"])
def test_ctrl_c_is_quiet_while_the_command_is_imported(module: str) -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    entry, function = project["scripts"]["streampack"].split(":")
    code = (
        "import os, signal, sys\n"
        "class CtrlC:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == {module!r}: os.kill(os.getpid(), signal.SIGINT)\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "sys.meta_path.insert(0, CtrlC())\n"
        f"from {entry} import {function}\n"
        f"sys.exit({function}())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_the_daemons_and_the_command_load_no_torch() -> None:
    code = (
        "import sys; import streampack_services.daemons.broker, streampack_services.daemons.producer; "
        "import streampack_services.cli.main, streampack_services.watch.status_report; "
        "import streampack_services.http.http_client; assert 'torch' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
