"""Changes asked for over HTTP and on the command line: what comes to the broker, and what is said of it."""

from __future__ import annotations

import io
import json
import socket
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from streampack_services.broker.changes.asked_changes import Asked as AskedChange
from streampack_services.broker.status import BrokerStatus
from streampack_services.http import control, http_client
from streampack_services.http.server import HttpServer

from streampack.core.model.rule_changes import Restream, Reweigh, Skip
from streampack.core.model.rules import StreamRules
from streampack.core.protocol.effects import Answer
from tests.blank import blank
from tests.integration.running import RunningBroker, in_process, post, running_broker, the_error, write

Asked = tuple[str, AskedChange, int | None, str]


class Desk:
    """Takes what is asked, and answers as it is told."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.refusal = ""
        self.silent = False

    def ask(self, feed: str, ask: AskedChange, at_step: int | None, note: str) -> Future[Answer]:
        self.asked.append((feed, ask, at_step, note))
        future: Future[Answer] = Future()
        if not self.silent:
            future.set_result(Answer(0, feed or "train", at_step or 17, self.refusal))
        return future


def nothing() -> BrokerStatus:
    """Return the status of a broker without feeds."""
    return blank(BrokerStatus, run="sft")


@pytest.fixture
def desk() -> Desk:
    return Desk()


@pytest.fixture
def url(desk: Desk) -> Iterator[str]:
    server = HttpServer("127.0.0.1:0", nothing, desk.ask)
    server.start()
    yield server.url
    server.close()


@pytest.fixture(scope="module")
def broker() -> Iterator[RunningBroker]:
    with running_broker({"streams": {"web": {}, "code": {}}, "rules": {"budget": 256, "step": {"packs": 2}}}) as found:
        yield found


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("weights", {"weights": {"code": 0.3, "web": 0}},
         ("", Reweigh({"code": 0.3, "web": 0.0}), None, "")),
        ("weights", {"weights": {"a": 1}, "feed": "b", "at_step": 9, "note": "why"},
         ("b", Reweigh({"a": 1.0}), 9, "why")),
        ("skip", {"steps": "120-140"}, ("", Skip(120, 140), None, "")),
        ("skip", {"steps": "7", "feed": "b"}, ("b", Skip(7, 7), None, "")),
        ("streams", {"add": {"c": {"weight": 2, "repeat": True, "partitions": 3}}, "remove": ["a"], "at_step": 4},
         ("", Restream((StreamRules("c", 2.0, 3, None),), ("a",)), 4, "")),
    ],
)  # fmt: skip
def test_requests_reach_the_broker(desk: Desk, url: str, path: str, body: Any, expected: Asked) -> None:
    code, said = post(url, f"/control/{path}", body)
    assert (code, said) == (200, {"feed": expected[0] or "train", "step": expected[2] or 17})
    assert desk.asked == [expected]


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("weights", b"{", "truncated"),
        ("weights", {}, "missing required field `weights`"),
        ("weights", {"weights": {}}, "length >= 1"),
        ("weights", {"weights": {"a": -1}}, ">= 0"),
        ("weights", {"weights": {"a": "1"}}, "got `str`"),
        ("weights", {"weights": {"a": 1}, "at_step": -1}, ">= 0"),
        ("weights", {"weights": {"a": 1}, "fed": "b"}, "unknown field `fed`"),
        ("skip", {"steps": "12-"}, "got steps '12-', expected a range such as 120-140, or one step"),
        ("skip", {"steps": "9-7"}, "got steps 9 to 7, expected 0 <= first step <= last step"),
        ("skip", {"steps": "\u0661"}, "expected a range such as"),
        ("streams", {}, "got neither add nor remove, expected at least one"),
        ("streams", {"add": {"a": {"weigt": 1}}}, "unknown field `weigt`"),
        ("weights", b" " * (control.MAX_BODY_BYTES + 1), "got a request body of more than 65536 bytes"),
    ],
)
def test_requests_that_cannot_be_read_do_not_reach_the_broker(
    desk: Desk, url: str, path: str, body: Any, expected: str
) -> None:
    code, said = post(url, f"/control/{path}", body)
    assert code == 400
    assert expected in said["error"]
    assert not desk.asked


def test_a_refusal_is_passed_on_and_a_silence_is_said(desk: Desk, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.refusal = "got stream 'x', expected one of: web"
    assert post(url, "/control/skip", {"steps": "1"}) == (409, {"error": desk.refusal})
    desk.silent = True
    monkeypatch.setattr(control, "ANSWER_S", 0.1)
    code, said = post(url, "/control/skip", {"steps": "1"})
    assert code == 504
    assert "the broker did not answer within" in said["error"]


def test_pages_in_a_browser_change_nothing(desk: Desk, url: str) -> None:
    code, said = post(url, "/control/skip", {"steps": "1"}, Origin="http://127.0.0.1:7400")
    assert code == 403
    assert "web pages must not change a run" in said["error"]
    assert not desk.asked


@pytest.mark.parametrize("client", ["10.0.0.7", "no address"])
def test_a_request_through_a_proxy_is_not_of_this_machine(desk: Desk, url: str, client: str) -> None:
    code, said = post(url, "/control/skip", {"steps": "1"}, **{"X-Forwarded-For": client})
    assert code == 403
    assert said["error"].startswith(f"got a request from {client}. Send it from the broker's host")
    assert not desk.asked


@pytest.mark.parametrize("anybody", [False, True])
def test_other_hosts_change_a_run_only_where_that_is_wanted(desk: Desk, anybody: bool) -> None:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))  # sends nothing: which address would it be?
            here = probe.getsockname()[0]
    except OSError:
        pytest.skip("this machine has no address but its loopback")
    server = HttpServer("0.0.0.0:0", nothing, desk.ask, anybody)
    server.start()
    try:
        port = server.url.rsplit(":", 1)[1]
        assert post(f"http://127.0.0.1:{port}", "/control/skip", {"steps": "1"})[0] == 200
        code, said = post(f"http://{here}:{port}", "/control/skip", {"steps": "1"})
        assert code == (200 if anybody else 403)
        assert anybody or said["error"].startswith(f"got a request from {here}. Send it from the broker's host")
    finally:
        server.close()


def test_the_commands_say_from_which_step_it_holds(desk: Desk, url: str) -> None:
    shown = in_process("set", "weights", "code=0.3", "a=b=2", "--endpoint", url, "--feed", "train")
    assert shown.stdout == "run sft, feed train: code=0.3 a=b=2 from step 17 on\n", shown.stderr
    shown = in_process("set", "weights", "code=0", "--at-step", "30", "--note", "why", "--json", "-e", url)
    assert json.loads(shown.stdout) == {"run": "sft", "feed": "train", "step": 30}
    shown = in_process("skip", "--steps", "120-140", "-e", url)
    assert shown.stdout == "run sft, feed train: steps 120-140 are skipped\n"
    math = "math={weight: 0.2, passes: 2, pushed: true}"
    shown = in_process("set", "streams", "--add", math, "--add", "plain", "--remove", "old", "-e", url)
    assert shown.stdout == "run sft, feed train: +math +plain -old from step 17 on\n", shown.stderr
    shown = in_process("set", "streams", "--remove", "a", "--at-step", "30", "--feed", "b", "--json", "-e", url)
    assert json.loads(shown.stdout) == {"run": "sft", "feed": "b", "step": 30}
    assert desk.asked == [
        ("train", Reweigh({"code": 0.3, "a=b": 2.0}), None, ""),
        ("", Reweigh({"code": 0.0}), 30, "why"),
        ("", Skip(120, 140), None, ""),
        ("", Restream((StreamRules("math", 0.2, 4, 2, pushed=True), StreamRules("plain", 1.0, 4)), ("old",)), None,
         ""),
        ("b", Restream((), ("a",)), 30, ""),
    ]  # fmt: skip


def test_a_refused_command_prints_one_line(desk: Desk, url: str) -> None:
    assert "Got 'code'. Pass a stream and its weight" in the_error(in_process("set", "weights", "code"), 2)
    assert "expected a range such as" in the_error(in_process("skip", "--steps", "x", "-e", url), 2)
    desk.refusal = "got stream 'code', expected one of: web"
    assert desk.refusal in the_error(in_process("set", "weights", "code=1", "-e", url), 1)
    assert "got no answer" in the_error(in_process("skip", "--steps", "1", "-e", "http://127.0.0.1:9"), 75)


@pytest.mark.parametrize("how", ["-e", "-c", "STREAMPACK_HTTP", "STREAMPACK_ENDPOINT"])
def test_a_broker_may_be_named_in_four_ways(
    desk: Desk, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    found = tmp_path / "found.json"
    found.write_text(json.dumps({"http": url, "trainers": "tcp://x:1", "epoch": 1}))
    config = {"run": "sft", "streams": {"a": {}}}
    words: dict[str, list[str | Path]] = {
        "-e": ["-e", f"file://{found}"], "-c": ["-c", write(tmp_path / "b.yaml", config | {"rendezvous": str(found)})]
    }  # fmt: skip
    if how.startswith("STREAMPACK"):
        monkeypatch.setenv(how, url if how == "STREAMPACK_HTTP" else f"file://{found}")
    shown = in_process("skip", "--steps", "120-140", *words.get(how, []))
    assert shown.stdout == "run sft, feed train: steps 120-140 are skipped\n", shown.stderr
    written = write(tmp_path / "b.yaml", config | {"listen": {"http": url.removeprefix("http://")}})
    assert in_process("skip", "--steps", "7", "-c", written).returncode == 0


def test_a_run_that_was_not_named_is_not_changed_without_a_question(
    desk: Desk, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_client, "DEFAULT_ENDPOINT", url)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # no broker of this user is there
    said = the_error(in_process("set", "weights", "code=1"), 2)
    assert f"Neither an option nor the environment names a broker, and {url} serves run 'sft'. To change" in said
    other = write(tmp_path / "b.yaml", {"run": "other", "streams": {"a": {}}})
    monkeypatch.setenv("STREAMPACK_ENDPOINT", "tcp://node0:7402")
    assert "STREAMPACK_ENDPOINT is tcp://node0:7402" in the_error(in_process("set", "weights", "code=1"), 2)
    assert not desk.asked
    monkeypatch.delenv("STREAMPACK_ENDPOINT")
    monkeypatch.setattr(http_client, "_of_config", lambda _: url)
    said = the_error(in_process("set", "weights", "code=1", "-c", other), 1)
    assert "serves run 'sft', but" in said
    assert not desk.asked
    assert in_process("set", "weights", "code=1", "--yes").returncode == 0
    assert len(desk.asked) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["skip", "--steps", "200-999999999999999999"],
            "steps (200 to 999999999999999999) would be skipped permanently",
        ),
        (["set", "weights", "code=1", "--at-step", "999999999999"], "Step 999999999999 is 999999999999 steps ahead"),
    ],
)
def test_a_change_that_is_likely_a_slip_is_asked_about(desk: Desk, url: str, words: list[str], said: str) -> None:
    assert said in the_error(in_process(*words, "-e", url), 2)
    assert not desk.asked
    assert in_process(*words, "-e", url, "--yes").returncode == 0
    assert len(desk.asked) == 1


@pytest.mark.parametrize(("answer", "asked"), [("y\n", 1), ("n\n", 0), ("\n", 0)])
def test_a_user_at_a_terminal_is_asked(
    desk: Desk, url: str, monkeypatch: pytest.MonkeyPatch, answer: str, asked: int
) -> None:
    terminal = io.StringIO(answer)
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", terminal)
    in_process("skip", "--steps", "1-5000", "-e", url)
    assert len(desk.asked) == asked


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "Got neither --add nor --remove. Pass at least one of these options."),
        (["--add", "=1"], "Got '=1'. Pass a stream and its settings, such as math='{weight: 0.2}'."),
        (["--add", "math=0.2"], "Got 'math=0.2'. Pass a stream and its settings"),
        (["--add", "math={weight: "], "Pass a stream and its settings"),
        (["--add", "math={weigth: 0.2}"], "stream 'math': got the unknown key 'weigth', expected one of: "),
        (["--add", "math={weight: 0}"], "stream 'math': weight: got"),
    ],
)
def test_streams_that_cannot_be_read_are_not_asked_for(desk: Desk, url: str, words: list[str], expected: str) -> None:
    assert expected in the_error(in_process("set", "streams", *words, "-e", url), 2)
    assert not desk.asked


def test_a_running_broker_answers_from_its_own_thread(broker: RunningBroker) -> None:
    code, said = post(broker.http, "/control/weights", {"weights": {"wob": 1.0}})
    assert (code, said) == (409, {"error": "got stream 'wob', expected one of: web, code"})
    assert "got feed 'valid'" in the_error(in_process("skip", "--steps", "1", "--feed", "valid", "-e", broker.http), 1)
