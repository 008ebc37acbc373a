"""A broker that has a standby, until it is active: it copies the log of the active broker, or asks to be active itself.

While it is not active it serves probes and its state over HTTP. Signals end it.
"""

from __future__ import annotations

import contextlib
import logging
import os

from streampack.config.daemon_settings import BrokerConfig
from streampack.kernels import background
from streampack.transport.keys import find_key
from streampack_services.broker.memory_plan import check_machine, plan
from streampack_services.broker.service import Leadership, warm_up
from streampack_services.daemons.signals import on_ending_signals
from streampack_services.daemons.systemd import Systemd
from streampack_services.http.http_guard import find_token
from streampack_services.http.server import AppServer, standby_app
from streampack_services.standby.following import Following, standby_settings
from streampack_services.standby.open_arbiter import open_arbiter

log = logging.getLogger("streampack.standby")


def become_active(config: BrokerConfig, *, waits: bool) -> Leadership | None:
    """Follow the active broker until this one is active; return the entry, or None if a signal ended it.

    Args:
        config: The broker's configuration, with ``standby``.
        waits: True if this broker does not begin a run.

    Raises:
        UserError: The arbiter, the log or an address cannot be used.
        ConfigError: The broker could not become active with these settings.
    """
    settings = standby_settings(config)
    check_machine(config)
    needs = plan(config)  # errors must show now, and not when the active broker is lost
    arbiter = open_arbiter(settings.arbiter)
    following = Following(config, arbiter, waits=waits, key=find_key(None))
    caught: list[int] = []

    def on_signal(number: int) -> None:
        caught.append(number)
        following.stop()

    systemd, app = Systemd(), standby_app(config.run, lambda: following.status)
    http = AppServer(config.listen.http, app, find_token(config.listen.token_file))
    with on_ending_signals(on_signal), contextlib.closing(http):
        http.start()
        background.start()
        warm_up(needs)
        log.info(
            "host %s of run %s asks the arbiter %s which broker is active (pid %d)", settings.host, config.run,
            arbiter.where, os.getpid(),
        )  # fmt: skip
        entry = following.run(
            on_turn=lambda: systemd.tell(ready=waits, status=f"standby: {following.follower.waits_for}")
        )
    if entry is None or caught:
        log.info("stopped before this broker was active")
        return None
    log.info("this broker is active, with entry %d of the arbiter", entry.number)
    return Leadership(entry, arbiter)
