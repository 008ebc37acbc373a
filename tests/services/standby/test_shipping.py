"""The standby's port: peers that send junk are cut, in one log line."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path

import pytest
from streampack_services.log.log import Log
from streampack_services.standby.open_arbiter import open_arbiter
from streampack_services.standby.shipping import Shipping

from streampack.config.service_settings import StandbySettings
from streampack.core.standby.arbiter_entries import Entry
from streampack.transport.sockets import Poller
from streampack.transport.unread import MAX_DAMAGED
from tests.integration.running import PATIENCE_S
from tests.integration.transport.raw_peer import RawPeer, frame


def test_peers_that_send_junk_are_cut_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = StandbySettings(arbiter=str(tmp_path / "arbiter"), listen="tcp://127.0.0.1:*", name="a")
    entry = Entry(number=1, epoch=1, active="a", process="a-1", log_id="log", members=("a",))
    log = Log.open(tmp_path / "state", durability="process", on_safe=lambda: None)
    with contextlib.closing(log):
        shipping = Shipping(settings, 1, entry, log, open_arbiter(settings.arbiter), b"", lambda: None)
        with contextlib.closing(shipping):
            ended, poller = threading.Event(), Poller([shipping.router])

            def turn() -> None:
                while not ended.is_set():
                    poller.wait(0.01)
                    shipping.turn(None)

            thread = threading.Thread(target=turn)
            thread.start()
            try:
                for _ in range(3):
                    peer = RawPeer(shipping.router.endpoint, timeout_s=PATIENCE_S)
                    peer.send(frame(b"junk") * MAX_DAMAGED)
                    with contextlib.closing(peer.socket):
                        assert peer.is_closed()
                time.sleep(0.1)
            finally:
                ended.set()
                thread.join()
    lines = [record.getMessage() for record in caplog.records if "cut the connection" in record.getMessage()]
    assert len(lines) == 1, lines
    assert lines[0].endswith(f"{MAX_DAMAGED} of the peer's messages could not be decoded")
