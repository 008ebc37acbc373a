"""The broker as a process, with its HTTP server, its rendezvous file, and signals.

On SIGTERM, SIGINT or SIGHUP the broker drains: it admits no more samples, delivers the steps that are formed, and exits
with 0.
A second signal ends it at once.
"""

from __future__ import annotations

import contextlib
import logging
import re
import resource
import signal
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from streampack.config.daemon_settings import BrokerConfig
from streampack.core.feed.feed import Feed
from streampack.errors import UserError
from streampack.kernels import background
from streampack.transport import ipc_files
from streampack_services import own_runs
from streampack_services.amounts import counted
from streampack_services.broker.memory_plan import keep_freed_memory
from streampack_services.broker.service import BrokerService, Leadership
from streampack_services.daemons import rendezvous
from streampack_services.daemons.signals import ending_signals, on_ending_signals
from streampack_services.daemons.standby import become_active
from streampack_services.daemons.systemd import Systemd
from streampack_services.descriptors import hold_back
from streampack_services.http import http_limits
from streampack_services.http.http_guard import find_token, is_loopback, parse_address
from streampack_services.http.server import HttpServer
from streampack_services.logs import Ring
from streampack_services.standby.following import standby_settings

log = logging.getLogger("streampack.broker")
LOAD_S = 2.0
"""Seconds for which the broker waits for its kernels before it serves; until they are there, it is slower."""
LEAST_FILES = 64
"""Least limit of open files. A broker needs about 40, and some for connections."""
_LOOPBACK = re.compile(r"tcp://(127\.[0-9.]+|localhost|\[::1\]):")


def serve(
    config: BrokerConfig, *, exit_when_finished: bool = False, ring: Ring | None = None, standby: bool = False
) -> None:
    """Run a broker until it is drained; serve its status, and the log events in ``ring``, over HTTP.

    A broker with a standby first copies the log of the active broker, if there is one. It does so again if another
    broker has taken over from it.

    Args:
        config: The broker's configuration.
        exit_when_finished: Also end once every step is delivered and all ranks have left.
        ring: The log events to serve.
        standby: True if this broker does not begin a run, but waits for an active broker.

    Raises:
        UserError: No broker can start, e.g. because an address is in use.
        ConfigError: No broker can start with these settings.
    """
    keep_freed_memory()
    _allow_connections()
    if standby:
        standby_settings(config)
    while config.standby is not None:
        lead = become_active(config, waits=standby)
        if lead is None:
            return
        over = _serve(config, exit_when_finished, ring, lead)
        if not over:
            return
        log.warning("this broker is not active any more: %s", over)
        standby = True
    _serve(config, exit_when_finished, ring, None)


def _serve(config: BrokerConfig, exit_when_finished: bool, ring: Ring | None, lead: Leadership | None) -> str:
    """Run a broker until it is drained; return the reason if it ended because another broker is active."""
    service = BrokerService(config, exit_when_finished=exit_when_finished, lead=lead)
    service.on_snapshot = Systemd().tell_of_broker
    with _drained_by_signals(service), _closing(service):
        anybody = config.listen.control == "any"
        token = find_token(config.listen.token_file)
        http = HttpServer(
            config.listen.http, lambda: service.snapshot, service.ask, anybody, ring, token, service.rank_page
        )
        http.start()
        try:
            where = service.endpoints
            log.info(
                "started run %s; producers connect to %s, trainers connect to %s",
                config.run,
                where["producers"],
                where["trainers"],
            )
            log.info("serving status, metrics and probes at %s", http.url)
            for line in exposed(where, config.listen.http, config.listen.keys is not None, token is not None):
                log.warning("%s", line)
            background.start()
            service.warm_up()
            background.compiler.wait(LOAD_S)  # before the rendezvous file names the addresses
            with _rendezvous(service, http.url), own_runs.noted(config.run, http.url, config.state_dir):
                service.run()
            if service.over:
                return service.over
            log.info("stopped after %s", _steps_text(service.core.feeds.values()))
        finally:
            http.close()
    return ""


def _steps_text(feeds: Collection[Feed]) -> str:
    """Return the formed steps of each feed, and how many of them some rank has not confirmed."""
    parts = []
    for feed in feeds:
        steps, name = feed.readers.steps, f" of feed {feed.name}" if len(feeds) > 1 else ""
        left = steps.formed_upto - steps.released_upto
        parts.append(
            counted(steps.formed_upto, "step") + name + f" (the last {left} not confirmed by every rank)" * (left > 0)
        )
    return ", ".join(parts)


def exposed(endpoints: Mapping[str, str], http: str, keys: bool, token: bool) -> list[str]:
    """Return a warning for each address that others could misuse, with the setting that prevents it."""
    warnings = []
    reached = [side for side, url in endpoints.items() if url.startswith("tcp://") and not _LOOPBACK.match(url)]
    if reached and not keys:
        warnings.append(
            f"anyone who can connect to the addresses for {' and '.join(reached)} can send or read samples; set "
            f"listen.keys ('streampack keys new'), or let only trusted hosts connect"
        )
    if not token and not is_loopback(parse_address(http)[0].replace("localhost", "127.0.0.1")):
        warnings.append(
            f"anyone who can connect to {http} can read the run's status; set listen.token_file ('streampack keys "
            f"token'), or let only trusted hosts connect"
        )
    replaceable = [url for url in endpoints.values() if ipc_files.can_be_replaced(url)]
    if replaceable:
        warnings.append(
            f"other users can write to the folder of {replaceable[0]} and replace the socket; chmod 700 the folder"
        )
    return warnings


def _allow_connections() -> None:
    """Raise the limit of open files, because every connection needs one, and divide it among the addresses.

    Raises UserError if the system's maximum is too low.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < LEAST_FILES:
        raise UserError(
            f"got at most {most} open files, expected at least {LEAST_FILES}, and one more for each rank and producer. "
            f"Raise the limit, e.g. with 'ulimit -n 4096'"
        )
    http_limits.MOST_CONNECTIONS = max(min(http_limits.MOST_CONNECTIONS, hold_back() // 4), 1)


@contextlib.contextmanager
def _closing(service: BrokerService) -> Iterator[None]:
    """Close the service at the end of the block, even if the block fails before ``run``."""
    try:
        yield
    finally:
        service.close()


@contextlib.contextmanager
def _drained_by_signals(service: BrokerService) -> Iterator[None]:
    """Drain the service on a signal that ends it; a second one ends its loop at once, and a third ends the process."""
    caught: list[int] = []

    def on_signal(number: int) -> None:
        caught.append(number)
        service.drain()
        if len(caught) > 1:
            for ending in ending_signals():
                signal.signal(ending, signal.SIG_DFL)

    with on_ending_signals(on_signal):
        yield


@contextlib.contextmanager
def _rendezvous(service: BrokerService, http: str) -> Iterator[None]:
    """Write the rendezvous file; at the end of the block, remove the file unless another broker has replaced it."""
    if service.config.rendezvous is None:
        yield
        return
    path = Path(service.config.rendezvous)

    def write() -> None:
        """Write the file. Raises UserError."""
        try:
            rendezvous.write(path, service.config.run, service.all_endpoints, http, service.core.epoch)
        except OSError as error:
            raise UserError(f"rendezvous: {path} cannot be written: {error.strerror}. Choose another path.") from None

    def write_again() -> None:
        """Write the file with the standby's addresses; go on without them if that fails."""
        try:
            write()
        except UserError as error:
            log.warning("%s", error)

    write()
    service.on_endpoints = write_again
    log.info("wrote the rendezvous file %s; producers and trainers can connect", path.absolute())
    near = [side for side, url in service.endpoints.items() if _LOOPBACK.match(url)]
    if near:
        log.warning(
            "the rendezvous file's addresses for %s are on loopback, so other hosts cannot connect; set listen",
            " and ".join(near),
        )
    try:
        yield
    finally:
        rendezvous.remove(path, service.core.epoch)
