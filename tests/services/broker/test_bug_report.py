"""A bug that ends the broker is reported with the broker's last events."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
from streampack_services.broker.service import BrokerService

from streampack.config.daemon_settings import BrokerConfig
from streampack.config.service_settings import Listen
from streampack.config.stream_settings import StreamSettings
from streampack.core.feed.feed import Feed


def test_the_traceback_of_a_bug_ends_with_the_last_events(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> Any:
        raise ZeroDivisionError("a bug")

    listen = Listen(producers="tcp://127.0.0.1:*", trainers="tcp://127.0.0.1:*")
    service = BrokerService(BrokerConfig(streams={"web": StreamSettings()}, listen=listen, memory="64MiB"))
    monkeypatch.setattr(service, "warm_up", lambda: None)
    monkeypatch.setattr(Feed, "tick", failing)
    with pytest.raises(ZeroDivisionError) as caught:
        service.run()
    lines = "".join(traceback.format_exception(caught.value)).splitlines()
    assert lines[-3:] == ["ZeroDivisionError: a bug", "the last 1 events, the oldest first:", "  Tick 0.0"]
