"""A relay that cannot serve says why in one line, and ranks without a relay say what to start."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from streampack_services.broker.authorization import new_key
from streampack_services.daemons.relay import RelayService

import streampack
from streampack.errors import Rejected, Unreachable, UserError
from streampack.wire import frames as wire
from tests.integration.relay.relayed import SETTINGS, Ranks, job
from tests.integration.running import PATIENCE_S, Daemon, folder, in_process, running, running_broker, the_error
from tests.integration.running import streampack as command

SOON_S = 10.0
ALONE = {"dp": 1}


def test_two_relays_cannot_have_one_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    with job(monkeypatch) as it, it.relaying():
        second = command("relay", "--broker", it.broker.trainers, "--listen", it.relay)
        said = the_error(second, 2)
        assert it.relay in said
        assert "another process uses" in said


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--listen", "tcp://127.0.0.1:7411"), "--listen: got 'tcp://127.0.0.1:7411', expected ipc:///path"),
        (("--broker", "http://127.0.0.1:7402"), "http://127.0.0.1:7402"),
        (("--memory", "little"), "--memory"),
        (("--key-file", "/no/such.key"), "/no/such.key"),
    ],
)
def test_a_wrong_option_of_a_relay_is_one_line(words: tuple[str, str], told: str, tmp_path: Path) -> None:
    given = {"--broker": "tcp://127.0.0.1:9", "--listen": f"ipc://{tmp_path}/relay"} | dict([words])
    said = the_error(command("relay", *[word for pair in given.items() for word in pair], timeout_s=SOON_S), 2)
    assert told in said


def test_a_relay_needs_a_folder_for_its_socket(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    words = ("--broker", "tcp://127.0.0.1:9", "--listen", f"ipc://{tmp_path}/file/relay")
    assert f"{tmp_path}/file" in the_error(command("relay", *words, timeout_s=SOON_S), 2)


def test_a_relay_without_a_broker_says_what_to_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STREAMPACK_ENDPOINT", raising=False)
    assert "Pass --broker tcp://host:port" in the_error(in_process("relay"), 2)


def test_ranks_of_another_version_than_the_relay_go_on_with_the_broker(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Here the broker has another version than the ranks, too, and rejects them."""
    ours = wire.VERSION
    with job(monkeypatch, produces=False) as it, it.relaying():
        monkeypatch.setattr(wire, "VERSION", ours + 1)
        began = time.monotonic()
        with pytest.raises(Rejected, match=f"{ours + 1}, but the broker .* uses version {ours}"):
            streampack.connect(it.broker.trainers, mesh=ALONE, format="numpy")
        assert time.monotonic() - began < SOON_S
    (line,) = [line for line in caplog.messages if "reads from the broker itself" in line]
    assert f"uses protocol version {ours + 1}, but the relay at {it.relay}" in line


def test_a_relay_of_another_run_is_not_read(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with (
        job(monkeypatch) as it,
        running_broker(SETTINGS | {"run": "another"}) as other,
        running("relay", "relay", "--broker", other.trainers, "--listen", it.relay) as relay,
    ):
        relay.wait_for("ranks connect to")
        with Ranks(it.broker.trainers, ALONE, most=3) as ranks:
            ranks.allow(3)
            assert ranks.none_by_relay()
        assert other.feed()["readers"] == []
    (line,) = [line for line in caplog.messages if "Reading from the broker itself" in line]
    assert other.trainers in line
    assert "streampack relay --broker" in line


def test_a_relay_without_the_key_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STREAMPACK_KEY_FILE", raising=False)
    with folder() as path:
        for name, role in (("rank", "trainer"), ("gone", "trainer")):
            new_key(path / "keys", name, role, {})
        new_key(path / "others", "stranger", "trainer", {})
        settings = SETTINGS | {"listen": {
            "producers": "tcp://127.0.0.1:*", "trainers": "tcp://127.0.0.1:*", "http": "127.0.0.1:0",
            "keys": str(path / "keys"),
        }}  # fmt: skip
        with running_broker(settings) as broker:
            for key, told in (
                ([], "the broker requires keys"),
                (["--key-file", path / "others" / "stranger.key"], "got a broker whose key is not"),
            ):
                words = ["relay", "--broker", broker.trainers, "--listen", f"ipc://{path}/relay", *key]
                done = command(*words, timeout_s=60.0)
                assert done.returncode == 1, done.stderr
                (said,) = [line for line in done.stderr.splitlines() if line.startswith("streampack: ")]
                assert broker.trainers in said
                assert told in said


def test_ranks_leave_a_relay_whose_memory_is_less_than_a_step(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with job(monkeypatch) as it, it.relaying("--memory", "1KiB") as relay:
        with Ranks(it.broker.trainers, {"dp": 2}, most=5) as ranks:
            ranks.allow(5)
            assert ranks.none_by_relay()
        assert "Start the relay with more --memory" in relay.said
    told = [line for line in caplog.messages if "reads from the broker itself" in line]
    assert len(told) == 2
    assert all("Start the relay with more --memory" in line for line in told)


def test_a_rank_waits_for_the_relay_that_its_user_names(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with job(monkeypatch) as it:
        began = time.monotonic()
        with pytest.raises(Unreachable) as error:
            streampack.connect(it.broker.trainers, mesh=ALONE, format="numpy", stall_timeout_s=7.0)
        assert 6.5 < time.monotonic() - began < 7.0 + SOON_S
    start = f"streampack relay --broker {it.broker.trainers} --listen {it.relay}"
    assert start in str(error.value)
    told = [line for line in caplog.records if start in line.getMessage()]
    assert len(told) == 1
    assert told[0].levelno == logging.WARNING
    assert [line for line in caplog.messages if f"waiting for an answer of the relay at {it.relay}" in line]


def test_a_rank_reads_through_a_relay_that_comes_late(monkeypatch: pytest.MonkeyPatch) -> None:
    with job(monkeypatch) as it:
        started: list[Daemon] = []
        timer = threading.Timer(1.0, lambda: started.append(it.start_relay()))
        timer.start()
        try:
            with Ranks(it.broker.trainers, ALONE, most=3) as ranks:
                ranks.allow(3)
                assert ranks.all_by_relay()
        finally:
            timer.join()
            for relay in started:
                relay.kill()


def test_a_relay_of_another_version_than_the_broker_ends_and_says_both(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ours = wire.VERSION
    with job(monkeypatch, produces=False) as it:
        monkeypatch.setattr(wire, "VERSION", ours + 1)
        relay = RelayService(it.broker.trainers, it.relay)
        with ThreadPoolExecutor(1) as pool:
            ran = pool.submit(relay.run)
            with pytest.raises(Rejected, match=f"the broker .* uses version {ours}"):
                streampack.connect(it.broker.trainers, mesh=ALONE, format="numpy", timeout_s=PATIENCE_S)
            with pytest.raises(Rejected) as error:
                ran.result(PATIENCE_S)
    assert error.value.code == "version"
    assert it.broker.trainers in str(error.value)
    assert f"uses protocol version {ours + 1}" in str(error.value)
    assert f"uses version {ours}" in str(error.value)
    assert any("reads from the broker itself: the relay stops" in line for line in caplog.messages)


def test_relay_off_means_the_broker_and_a_wrong_address_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with job(monkeypatch) as it, it.relaying():
        monkeypatch.setenv("STREAMPACK_RELAY", "tcp://127.0.0.1:7411")
        with pytest.raises(UserError, match=r"STREAMPACK_RELAY: got 'tcp://127.0.0.1:7411', expected ipc:///path"):
            streampack.connect(it.broker.trainers, mesh=ALONE)
        monkeypatch.setenv("STREAMPACK_RELAY", "off")
        with Ranks(it.broker.trainers, ALONE, most=2) as ranks:
            ranks.allow(2)
            assert ranks.none_by_relay()


def test_a_relay_of_the_default_address_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with job(monkeypatch) as it, folder() as path:
        monkeypatch.delenv("STREAMPACK_RELAY")
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(path))
        with Ranks(it.broker.trainers, ALONE, most=2) as ranks:
            ranks.allow(2)
            assert ranks.none_by_relay()
        with running("relay", "relay", "--broker", it.broker.trainers) as relay:
            relay.wait_for("ranks connect to")
            with Ranks(it.broker.trainers, ALONE, most=4) as ranks:
                ranks.allow(4)
                assert ranks.all_by_relay()
