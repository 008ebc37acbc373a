"""Who may ask the broker's HTTP side: those who bring the token, and no page of another site."""

from __future__ import annotations

import asyncio
import base64
import http.client
import http.server
import json
import os
import socket
import stat
import threading
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from streampack_services.broker.status import BrokerStatus
from streampack_services.http import http_client
from streampack_services.http.http_guard import Guard, find_token
from streampack_services.http.server import HttpServer

from streampack.errors import Rejected, UserError
from tests.blank import blank
from tests.integration.running import PATIENCE_S, in_process

TOKEN = "a-token.of_40+characters/that~nobody-has=="
STATUS = blank(BrokerStatus, run="guarded", ready=True, state="serving", taken_at=1e12)


@pytest.fixture(scope="module")
def guarded() -> Iterator[str]:
    server = HttpServer("127.0.0.1:0", lambda: STATUS, token=TOKEN)
    server.start()
    yield server.url
    server.close()


@pytest.fixture(scope="module")
def open_one() -> Iterator[str]:
    server = HttpServer("127.0.0.1:0", lambda: STATUS)
    server.start()
    yield server.url
    server.close()


@pytest.fixture(autouse=True)
def _no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STREAMPACK_HTTP_TOKEN", raising=False)
    monkeypatch.delenv("STREAMPACK_HTTP_TOKEN_FILE", raising=False)


def ask(url: str, path: str, method: str = "GET", **headers: str) -> tuple[int, str, str]:
    """(status, challenges, text)."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=PATIENCE_S)
    try:
        connection.request(method, path, b"{}" if method == "POST" else None, headers)
        answer = connection.getresponse()
        return answer.status, answer.getheader("WWW-Authenticate", ""), answer.read().decode()
    finally:
        connection.close()


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


@pytest.mark.parametrize("path", ["/", "/status", "/metrics", "/nothing", "/livez/"])
def test_without_the_token_nothing_is_told(guarded: str, path: str) -> None:
    for headers in ({}, {"Authorization": "Bearer " + TOKEN[:-1]}, {"Authorization": basic("me", "guess")}):
        status, challenges, text = ask(guarded, path, **headers)
        assert status == 401
        assert challenges == 'Basic realm="streampack", Bearer realm="streampack"'
        assert "listen.token_file" in json.loads(text)["error"]
        assert "guarded" not in text


@pytest.mark.parametrize("authorization", ["Bearer " + TOKEN, "bearer " + TOKEN, basic("", TOKEN), basic("me", TOKEN)])
def test_with_it_programs_and_browsers_are_answered(guarded: str, authorization: str) -> None:
    assert json.loads(ask(guarded, "/status", Authorization=authorization)[2])["run"] == "guarded"
    assert ask(guarded, "/status", Authorization=authorization, Host="node0.cluster:7400")[0] == 200


def test_probes_bring_nothing(guarded: str, open_one: str) -> None:
    for url in (guarded, open_one):
        assert ask(url, "/livez", Host="10.0.0.7:7400")[::2] == (200, "alive\n")
        assert ask(url, "/readyz", Host="any.name")[::2] == (200, "ready\n")


@pytest.mark.parametrize("host", ["evil.example:7400", "127.0.0.1.evil.example", "10.0.0.7", "localhost.evil.example"])
def test_a_name_that_somebody_lets_point_here_is_refused(open_one: str, host: str) -> None:
    status, _, text = ask(open_one, "/status", Host=host)
    assert status == 421
    assert "Use a name of this machine such as localhost" in json.loads(text)["error"]


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:7400", "127.1.2.3", "[::1]:7400", "[::1]"])
def test_names_of_this_machine_are_answered(open_one: str, host: str) -> None:
    assert ask(open_one, "/status", Host=host)[0] == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", None])
def test_requests_that_a_page_may_post_to_another_site_are_refused(open_one: str, kind: str | None) -> None:
    status, _, text = ask(open_one, "/control/skip", "POST", **({"Content-Type": kind} if kind else {}))
    assert status == 415
    assert "expected application/json" in json.loads(text)["error"]


@given(
    st.binary(max_size=60), st.sampled_from(["", "Bearer ", "Basic ", "bearer", "Basic\t", "Digest "]), st.booleans()
)
def test_nothing_but_the_token_opens(data: bytes, kind: str, encoded: bool) -> None:
    value = base64.b64encode(data) if encoded else data
    reached: list[str] = []
    said: list[int] = []

    async def app(*_: Any) -> None:
        reached.append("app")

    async def send(message: MutableMapping[str, Any]) -> None:
        said.append(message.get("status", 0))

    headers = [(b"authorization", kind.encode() + value), (b"host", b"localhost")]
    scope = {"type": "http", "path": "/status", "method": "GET", "headers": headers}
    asyncio.run(Guard(app, TOKEN, on_loopback=True)(scope, None, send))  # type: ignore[arg-type]
    assert not reached
    assert said[0] == 401


@pytest.mark.parametrize(("path", "size"), [("/livez", 100_000), ("/status", 100_000), ("/status", 65_000)])
def test_a_request_has_64_kib_of_headers_at_most(open_one: str, path: str, size: int) -> None:
    """In one part: the server's own bound holds for what comes in several."""
    host, port = open_one.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as connection:
        head = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nX: {'a' * size}\r\nConnection: close\r\n\r\n"
        connection.sendall(head.encode())
        assert connection.recv(20).split()[1] in ((b"431", b"400") if size > 1 << 16 else (b"200",))


def test_the_commands_bring_the_token(guarded: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = in_process("status", guarded)
    assert refused.returncode == 1
    assert "the broker requires a token, but the environment has no token. Set STREAMPACK_HTTP_TOKEN" in refused.stderr
    assert in_process("health", guarded).returncode == 0
    (tmp_path / "old").write_text("x" + TOKEN + "\n")
    (tmp_path / "old").chmod(0o600)
    monkeypatch.setenv("STREAMPACK_HTTP_TOKEN_FILE", str(tmp_path / "old"))
    assert "rejects the token in the environment" in in_process("status", guarded).stderr
    monkeypatch.setenv("STREAMPACK_HTTP_TOKEN", TOKEN)
    assert http_client.fetch_status(guarded, PATIENCE_S)["run"] == "guarded"


def test_a_token_is_not_sent_on_to_another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str | None] = []

    class Redirecting(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            heard.append(self.headers["Authorization"])
            self.send_response(302 if len(heard) == 1 else 401)
            self.send_header("Location", f"http://localhost:{server.server_port}/elsewhere")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            return

    server = http.server.HTTPServer(("127.0.0.1", 0), Redirecting)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        monkeypatch.setenv("STREAMPACK_HTTP_TOKEN", TOKEN)
        with pytest.raises(Rejected, match="rejects the token in the environment"):
            http_client.fetch_status(f"http://127.0.0.1:{server.server_port}", PATIENCE_S)
        assert heard == ["Bearer " + TOKEN, None]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_token_is_made_for_its_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        made = in_process("keys", "token", tmp_path / "new" / "http.token")
    finally:
        os.umask(before)
    assert made.returncode == 0, made.stderr
    file = tmp_path / "new" / "http.token"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    token = find_token(str(file))
    assert token is not None
    assert len(token) == 43
    assert token not in made.stdout
    again = in_process("keys", "token", file)
    assert again.returncode == 2
    assert find_token(str(file)) == token


@pytest.mark.parametrize(
    ("text", "mode", "expected"),
    [
        (TOKEN, 0o644, "that other users can access (mode 0644), expected mode 0600"),
        (TOKEN, 0o620, "that other users can access (mode 0620)"),
        ("", 0o600, "is empty. Make a token with"),
        ("short", 0o600, "got a token of 5 characters, expected at least 16"),
        (TOKEN + "\nand more", 0o600, "all of them letters, digits or"),
    ],
)
def test_a_token_that_is_no_secret_is_refused(tmp_path: Path, text: str, mode: int, expected: str) -> None:
    file = tmp_path / "token"
    file.write_text(text)
    file.chmod(mode)
    with pytest.raises(UserError, match="token") as refused:
        find_token(str(file))
    assert expected in str(refused.value)


def test_a_secret_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read a secret: No such file or directory"):
        find_token(str(tmp_path / "none"))
    with pytest.raises(UserError, match="cannot read a secret: Is a directory"):
        find_token(str(tmp_path))
