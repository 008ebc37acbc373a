"""The broker's log keeper: an error of the ledger, also one that nobody expected, is logged and tried again later."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from pathlib import Path

import pytest
from streampack_services.broker import log_keeper
from streampack_services.broker.log_keeper import Keeper

from streampack.config.daemon_settings import BrokerConfig
from streampack.config.stream_settings import StreamSettings
from streampack.errors import UserError


@pytest.mark.parametrize("kind", [ZeroDivisionError, sqlite3.OperationalError, UserError])
def test_an_error_of_the_ledger_is_one_line_and_tried_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: type[Exception]
) -> None:
    text = "It is broken." if kind is UserError else "it is broken"
    calls = 0

    def broken(_: Path) -> int:
        nonlocal calls
        calls += 1
        raise kind(text)

    monkeypatch.setattr(log_keeper, "update_ledger", broken)
    config = BrokerConfig(streams={"web": StreamSettings(partitions=2)}, state_dir=str(tmp_path / "state"))
    with contextlib.closing(Keeper(config, lambda: None)) as keeper:
        keeper.trim(5)
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            list(keeper.take_events(0, "", ""))
            time.sleep(0.01)
        warning = keeper.status().warning
    assert calls == (2 if kind is UserError else 1)  # again with the reserve
    [record] = caplog.records
    expected = f"cannot update the ledger: {text.rstrip('.')}."
    assert record.getMessage() == f"did not delete old log segments: {expected} The broker tries again in 30 s"
    assert bool(record.exc_info) == (kind is ZeroDivisionError)
    assert warning == f"Old log segments are not deleted: {expected}"
