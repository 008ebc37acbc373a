"""A standby that cannot follow, or must not: it says why in a line, and the active broker goes on."""

from __future__ import annotations

import http.client
import json
import signal
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from streampack_services.broker import authorization
from streampack_services.broker.authorization import new_key

from streampack.transport.keys import load_key
from tests.integration.running import Daemon, folder, in_process, the_error, until, write
from tests.integration.security.keyed import KeyPeer
from tests.soak.job import fixed_listen

SETTINGS: dict[str, Any] = {
    "run": "two-hosts", "memory": "32MiB", "streams": {"web": {"partitions": 2}}, "rules": {"budget": 256},
    "limits": {"sample_tokens": 4096, "chunk": "16KiB"},
}  # fmt: skip


class Pair:
    """Two brokers of one run, ``a`` and ``b``, on this machine."""

    def __init__(self, path: Path, **standby: Any) -> None:
        self.path, self._standby, self.daemons = path, standby, dict[str, Daemon]()

    def config(self, name: str, **more: Any) -> Path:
        listen = fixed_listen(self.path / name, over_tcp=False)
        ship = f"ipc://{self.path}/ship-{name}"
        standby = {
            "arbiter": str(self.path / "arbiter"), "listen": ship, "address": ship, "name": name, "takeover_s": 2,
        } | self._standby  # fmt: skip
        (self.path / name).mkdir(exist_ok=True)
        tree = SETTINGS | {"listen": listen, "state_dir": str(self.path / name / "state"), "standby": standby}
        return write(self.path / name / "broker.yaml", tree | more)

    def start(self, name: str, *arguments: str, config: Path | None = None) -> Daemon:
        config = config or self.config(name)
        self.daemons[name] = daemon = Daemon(self.path, name, "broker", "-c", config, *arguments)
        return daemon

    def start_both(self) -> tuple[Daemon, Daemon]:
        """The active broker ``a``, and its standby ``b``, which has the log."""
        first = self.start("a")
        second = self.start("b", "--standby")
        second.wait_for("standby: has every safe record of a")
        first.wait_for(" broker: ready\n")
        return first, second


@contextmanager
def pair(**standby: Any) -> Iterator[Pair]:
    with folder() as path:
        found = Pair(path, **standby)
        try:
            yield found
        finally:
            for daemon in found.daemons.values():
                daemon.kill()


def test_a_standby_joins_takes_over_and_the_other_one_follows() -> None:
    with pair() as found:
        first, second = found.start_both()
        first.kill()
        second.wait_for("this broker is active, with entry 3")
        second.wait_for(" broker: ready\n")
        found.start("a").wait_for("standby: has every safe record of b")
        entries = [json.loads(path.read_text()) for path in sorted((found.path / "arbiter").glob("0*.json"))]
        assert [(each["active"], each["members"]) for each in entries] == [
            ("a", ["a"]), ("a", ["a", "b"]), ("b", ["b"]), ("b", ["b", "a"]),
        ]  # fmt: skip
        assert [each["number"] for each in entries] == [1, 2, 3, 4]


def test_a_broker_that_is_stopped_hands_over_at_once() -> None:
    with pair(takeover_s=120) as found:
        first, second = found.start_both()
        first.signal(signal.SIGTERM)
        assert first.end() == 0
        assert "stopping: the standby takes over, and producers and trainers move to it" in first.said
        second.wait_for("this broker is active, with entry 3", timeout_s=60)


def test_a_broker_that_is_stopped_waits_for_a_standby_that_copies_its_log() -> None:
    """Without a wait, the standby would never be allowed to take over, and none would serve."""
    with pair(takeover_s=120) as found:
        first = found.start("a")
        first.wait_for(" broker: ready\n")
        second = found.start("b", "--standby")
        first.wait_for("the standby b follows this broker")
        second.signal(signal.SIGSTOP)
        first.signal(signal.SIGTERM)
        first.wait_for("stopping: ")
        second.signal(signal.SIGCONT)
        assert first.end() == 0
        second.wait_for("this broker is active, with entry 3", timeout_s=60)


def test_a_standby_with_other_rules_or_a_third_one_is_told_why() -> None:
    with pair() as found:
        first = found.start("a")
        other = found.start("b", "--standby", config=found.config("b", rules={"budget": 512}))
        other.wait_for("got a standby with another settings (rules, streams, seed or fields)")
        other.kill()
        found.start("b", "--standby").wait_for("standby: has every safe record of a")
        found.start("c", "--standby").wait_for("the standby b is connected already")
        assert first.process.poll() is None


def test_an_arbiter_that_is_gone_is_named_on_both_sides_and_nobody_takes_over() -> None:
    with pair() as found:
        first, second = found.start_both()
        (found.path / "arbiter").rename(found.path / "gone")
        first.kill()
        second.wait_for("cannot reach the arbiter")
        assert "this broker is active" not in second.said
        (found.path / "gone").rename(found.path / "arbiter")
        second.wait_for("this broker is active")


def test_an_active_broker_that_loses_standby_and_arbiter_ends_and_follows_later() -> None:
    with pair() as found:
        first, second = found.start_both()
        (found.path / "arbiter").rename(found.path / "gone")
        second.kill()
        first.wait_for("neither the standby nor the arbiter answers")


@pytest.mark.parametrize(
    ("more", "arguments", "text"),
    [
        ({"standby": None}, ["--standby"], "got --standby, but broker.yaml has no `standby` section"),
        ({"state_dir": None}, [], "state_dir: got none, expected a folder for the log, because `standby` is set"),
        ({"standby": {"arbiter": "/proc/nowhere"}}, [], "standby.arbiter: /proc/nowhere cannot be used"),
    ],
)
def test_settings_that_allow_no_standby_are_one_line(more: dict[str, Any], arguments: list[str], text: str) -> None:
    with pair() as found:
        result = in_process("broker", "-c", found.config("a", **more), *arguments)
        assert text in the_error(result, 2)


def test_with_keys_only_a_standby_copies_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    with pair() as found:
        keys = found.path / "keys"
        for name, role in (("b", "standby"), ("web", "producer")):
            new_key(keys, name, role, {})

        def config(name: str) -> Path:
            listen = fixed_listen(found.path / name, over_tcp=False) | {"keys": str(keys)}
            return found.config(name, listen=listen)

        (found.path / "a").mkdir()
        (found.path / "b").mkdir()
        found.start("a", config=config("a")).wait_for(" broker: ready\n")
        monkeypatch.setenv("STREAMPACK_KEY_FILE", str(keys / "web.key"))
        second = found.start("b", "--standby", config=config("b"))
        second.wait_for("got a key of role producer, expected a key of role standby")
        second.kill()
        monkeypatch.setenv("STREAMPACK_KEY_FILE", str(keys / "b.key"))
        found.start("b", "--standby", config=config("b")).wait_for("standby: has every safe record of a")


def test_a_standby_is_alive_but_not_ready_and_says_what_it_has() -> None:
    with pair() as found, socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        taken.close()
        found.start("a")
        found.start("b", "--standby", "--http", address).wait_for("standby: has every safe record of a")
        assert ask(address, "/livez") == (200, "alive\n")
        assert ask(address, "/readyz") == (503, "not ready: standby: has every safe record of a\n")
        status = json.loads(ask(address, "/status")[1])
        assert status["state"] == "standby"
        assert status["standby"]["is_member"]
        said = in_process("status", f"http://{address}").stdout
        assert "two-hosts  standby on b\n" in said
        assert "has every safe record of a" in said
        assert "expected that of the active broker" in the_error(in_process("top", "--once", f"http://{address}"), 2)
        assert "streampack_standby_member 1.0\n" in ask(address, "/metrics")[1]


def ask(address: str, path: str) -> tuple[int, str]:
    """The code and the text of an answer."""
    with closing(http.client.HTTPConnection(address, timeout=30)) as connection:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def test_a_revoked_standby_is_cut_from_the_log_within_two_seconds() -> None:
    """It got records until it was silent for ``takeover_s``."""
    with pair() as found:
        keys = found.path / "keys"
        for name in ("gone", "stays"):
            new_key(keys, name, "standby", {})
        listen = fixed_listen(found.path)
        port = int(listen["producers"].rpartition(":")[2])
        ship = {"listen": listen["producers"], "address": listen["producers"], "takeover_s": 60}
        standby = {"arbiter": str(found.path / "arbiter"), "name": "a"} | ship
        config = found.config("a", standby=standby)
        tree = json.loads(config.read_text())
        tree["listen"]["keys"] = str(keys)
        daemon = found.start("a", config=write(config, tree))
        daemon.wait_for(" broker: ready\n")
        gone, stays = (KeyPeer(load_key(keys / f"{name}.key"), listen["producers"]) for name in ("gone", "stays"))
        try:
            for peer in (gone, stays):
                peer.speak()
            assert connections_to(port) == 2
            authorization.revoke(keys, "gone")
            until(lambda: connections_to(port) == 1, 2.0)
        finally:
            gone.raw.close()
            stays.raw.close()


def connections_to(port: int) -> int:
    """Connections that a process of this machine has accepted at ``port``."""
    tables = [Path(f"/proc/net/{table}").read_text().splitlines()[1:] for table in ("tcp", "tcp6")]
    rows = [line.split() for lines in tables for line in lines]
    return sum(row[1].endswith(f":{port:04X}") and row[3] == "01" for row in rows)
