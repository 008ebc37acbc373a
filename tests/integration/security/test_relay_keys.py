"""Keys of relays on real sockets: the relay's key reads for ranks, whose own keys take over without it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from streampack_services.broker.authorization import new_key
from streampack_services.broker.service import BrokerService
from streampack_services.daemons.relay import RelayService

import streampack as sp
from streampack.errors import Rejected
from streampack.transport.keys import load_key
from tests.integration.running import PATIENCE_S, folder, until, write_jsonl
from tests.integration.security.keyed import producing, serving, trained


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("relay-keys") / "keys"
    new_key(made, "tokenizers", "producer", {})
    new_key(made, "ranks", "trainer", {})
    new_key(made, "relays", "relay", {})
    new_key(made, "elsewhere", "relay", {"hosts": ["another-host"]})
    return made


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    rows = [{"tokens": list(range(1 + 7 * i % 90))} for i in range(300)]
    return str(write_jsonl(tmp_path_factory.mktemp("data") / "a.jsonl", rows))


@contextlib.contextmanager
def relaying(broker: BrokerService, keys: Path, name: str, patch: pytest.MonkeyPatch) -> Iterator[RelayService]:
    """A relay in a thread that shows the key of this name; ranks of this process find it."""
    with folder() as path:
        at = f"ipc://{path}/relay.sock"
        relay = RelayService(broker.endpoints["trainers"], at, key=load_key(keys / f"{name}.key"))
        thread = threading.Thread(target=relay.run)
        thread.start()
        patch.setenv("STREAMPACK_RELAY", at)
        try:
            yield relay
        finally:
            relay.stop()
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


def through_relay(broker: BrokerService) -> list[bool]:
    """For each rank: does it read through a relay?"""
    return [reader.receiver.is_relay for reader in list(broker.core.feeds["train"].readers.registry)]


def test_a_rank_reads_with_the_relays_key_then_with_its_own(
    keys: Path, data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAMPACK_RELAY", "off")
    tokenizers = load_key(keys / "tokenizers.key")
    with serving(keys) as broker, producing(broker, data, tokenizers):
        expected = trained(broker, keys / "ranks.key")
    found: list[tuple[str, bytes, bytes]] = []
    with (
        serving(keys) as broker,
        producing(broker, data, tokenizers),
        relaying(broker, keys, "relays", monkeypatch) as relay,
        sp.connect(broker.endpoints["trainers"], format="numpy", verify=True, key_file=keys / "ranks.key") as loader,
    ):
        for step in loader.steps():
            if len(found) == 2:
                assert through_relay(broker) == [True]
                relay.stop()
                until(lambda: through_relay(broker) == [False])
            packs = list(step)
            ids, labels = (
                b"".join(getattr(pack, name).tobytes() for pack in packs) for name in ("input_ids", "labels")
            )
            found.append((step.digest, ids, labels))
    assert found == expected


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("ranks", "got key 'ranks' of role trainer from a relay, expected a key of role relay"),
        ("elsewhere", "for key 'elsewhere', expected host another-host"),
    ],
)
def test_ranks_pass_by_a_relay_whose_key_does_not_do(
    keys: Path, data: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, key: str, why: str
) -> None:
    caplog.set_level("INFO", logger="streampack")
    with (
        serving(keys) as broker,
        producing(broker, data, load_key(keys / "tokenizers.key")),
        relaying(broker, keys, key, monkeypatch),
    ):
        assert len(trained(broker, keys / "ranks.key")) > 5
        assert not broker.core.feeds["train"].readers.receivers.relays
    told = [record.getMessage() for record in caplog.records if record.name == "streampack.relay"]
    assert any("which continues with the broker" in line and why in line for line in told), told


def test_a_rank_without_a_key_is_told_so_once_its_relay_is_gone(
    keys: Path, data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        serving(keys) as broker,
        producing(broker, data, load_key(keys / "tokenizers.key")),
        relaying(broker, keys, "relays", monkeypatch) as relay,
        sp.connect(broker.endpoints["trainers"], format="numpy", key_file="") as loader,
    ):
        steps = loader.steps()
        next(steps)
        relay.stop()
        with pytest.raises(Rejected, match="got no key, expected one, because the broker requires keys"):
            for _ in steps:
                pass
