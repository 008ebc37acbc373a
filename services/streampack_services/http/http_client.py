"""The HTTP client of the command line: find a broker, fetch its status and health, ask for changes.

It sends the token of the environment (STREAMPACK_HTTP_TOKEN, or the file that STREAMPACK_HTTP_TOKEN_FILE names).
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from streampack.config.config_files import read_broker
from streampack.config.daemon_settings import BrokerConfig
from streampack.errors import PeerError, Rejected, StreampackError, Unreachable, UserError
from streampack.transport.rendezvous import RENDEZVOUS, read_rendezvous
from streampack.version import __version__
from streampack_services import own_runs
from streampack_services.broker.ranks.rank_status import RankPage
from streampack_services.broker.status import BrokerStatus
from streampack_services.http.http_guard import find_token, parse_address

DEFAULT_ENDPOINT = "http://127.0.0.1:7400"
_SET_TOKEN = "Set STREAMPACK_HTTP_TOKEN to the token, or STREAMPACK_HTTP_TOKEN_FILE to the path of the token file"
_NO_TOKEN = f"the broker requires a token, but the environment has no token. {_SET_TOKEN}"
_OTHER_TOKEN = f"the broker rejects the token in the environment. {_SET_TOKEN}"
Tree = dict[str, Any]


def address(endpoint: str | None, config: Path | None, timeout_s: float) -> str | None:
    """Return the address of the broker that the arguments of a command name; None if they name none.

    Args:
        endpoint: HTTP address, or None.
        config: Path of a broker.yaml, or None.
        timeout_s: Seconds to wait for the broker of ``config``, whose run must be the one in the file.

    Raises:
        UserError: The arguments name two brokers, or the address in ``config`` is not known.
        ConfigError: The file is wrong.
        Rejected: The broker does not serve the run of ``config``.
    """
    if config is None:
        return endpoint
    if endpoint is not None:
        raise UserError(f"Got both an address, {endpoint}, and --config {config}. Pass one of the two.")
    settings = read_broker(config)
    base = _of_config(settings)
    with contextlib.suppress(Unreachable, PeerError):  # the command itself says so
        _check_run(base, str(fetch_status(base, timeout_s)["run"]), config, settings)
    return base


def _check_run(base: str, run: str, config: Path, settings: BrokerConfig) -> None:
    """Raise Rejected if the broker at ``base`` does not serve the run of ``config``."""
    if run != settings.run:
        raise Rejected(
            "run",
            f"{base} serves run {run!r}, but {config} configures run {settings.run!r}. Start the broker of {config}, "
            f"or pass --endpoint",
        )


def _base(endpoint: str | None, timeout_s: float) -> str:
    """Return the HTTP address of the broker: the one that the user names, else the user's only one on this host.

    If there is none, return ``DEFAULT_ENDPOINT``. Raises UserError if there are several.
    """
    return _named(endpoint, None, timeout_s) or own_runs.only_address() or DEFAULT_ENDPOINT


def _named(endpoint: str | None, config: BrokerConfig | None, timeout_s: float) -> str | None:
    """Return the HTTP address that the user names, or None.

    It is the first of: ``endpoint``, the address in a broker.yaml, STREAMPACK_HTTP, the rendezvous file in
    STREAMPACK_ENDPOINT.
    """
    trainers = os.environ.get("STREAMPACK_ENDPOINT", "")
    base = endpoint or (None if config is None else _of_config(config)) or os.environ.get("STREAMPACK_HTTP")
    base = base or (trainers if trainers.startswith("file://") else None)
    if base is None:
        return None
    if base.startswith("file://"):
        base = read_rendezvous(Path(base.removeprefix("file://")), "http", timeout_s)
    if "://" not in base:
        base = f"http://{base}"
    if not base.startswith(("http://", "https://")):
        raise UserError(f"got endpoint {base!r}, expected the broker's HTTP address. Pass one, e.g. {DEFAULT_ENDPOINT}")
    return base.rstrip("/")


def _of_config(config: BrokerConfig) -> str:
    """Return the address at which this machine reaches the HTTP server of a broker with this configuration.

    Raises:
        UserError: The port is 0, so only the running broker knows it.
    """
    if config.rendezvous is not None:
        return f"file://{config.rendezvous}"
    if (own := own_runs.only_address(config.run, config.state_dir)) is not None:
        return own
    if config.state_dir is not None and (file := Path(config.state_dir) / RENDEZVOUS).exists():
        return f"file://{file}"
    host, port = parse_address(config.listen.http)
    if not port:
        raise UserError(
            f"listen.http is {config.listen.http}, and run {config.run!r} has no broker of yours on this host. "
            f"Pass the address that its log shows, or set rendezvous in broker.yaml"
        )
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Found(NamedTuple):
    """A running broker: its HTTP address, the JSON of its status, and True if the user ``named`` its address."""

    base: str
    snapshot: Tree
    named: bool

    @property
    def run(self) -> str:
        """Name of the broker's run."""
        return str(self.snapshot["run"])


def find_broker(endpoint: str | None, config: Path | None, timeout_s: float) -> Found:
    """Find the broker whose run a command changes, and return its address and status.

    Args:
        endpoint: HTTP address, or None.
        config: Path of a broker.yaml, or None.
        timeout_s: Seconds to wait for an answer.

    Raises:
        UserError: STREAMPACK_ENDPOINT names a broker, but its HTTP address is unknown.
        Rejected: The broker does not serve the run of ``config``.
        Unreachable: The broker does not answer.
    """
    settings = None if config is None else read_broker(config)
    base = _named(endpoint, settings, timeout_s)
    if base is None and (trainers := os.environ.get("STREAMPACK_ENDPOINT")):
        raise UserError(
            f"STREAMPACK_ENDPOINT is {trainers}, which is not an HTTP address. Pass --endpoint http://HOST:7400 or "
            f"-c broker.yaml, or set STREAMPACK_HTTP"
        )
    where = base or _base(None, timeout_s)
    broker = Found(where, fetch_status(where, timeout_s), base is not None)
    if settings is not None and config is not None:
        _check_run(broker.base, broker.run, config, settings)
    return broker


def _fetch(base: str, path: str, timeout_s: float, body: bytes | None = None) -> tuple[int, str]:
    """Send a request (POST if there is a ``body``), and return (HTTP status, text). Proxies are not used.

    Raises:
        PeerError: The answer is not HTTP.
        Rejected: The broker requires a token that the environment does not have.
        Unreachable: There is no answer, or it was cut off.
    """
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(base + path, body, {} if body is None else {"Content-Type": "application/json"})
    if token := find_token():
        request.add_unredirected_header(
            "Authorization", f"Bearer {token}"
        )  # a redirect to another host must not get the token
    try:
        with opener.open(request, timeout=timeout_s) as answer:
            return int(answer.status), answer.read().decode("utf-8", "replace")
    except urllib.error.HTTPError as error:
        if error.code == 401:
            raise Rejected("token", f"{base}: {_NO_TOKEN if token is None else _OTHER_TOKEN}") from None
        return error.code, error.read().decode("utf-8", "replace")
    except http.client.IncompleteRead as error:
        raise Unreachable(
            f"{base}{path}: the answer was cut off after {len(error.partial):,} bytes. The broker may be stopping, or "
            f"a proxy ended the connection. Try again"
        ) from None
    except http.client.HTTPException:
        raise PeerError(
            f"{base}: got an answer that is not HTTP. Pass the address in listen.http, not that of producers or "
            f"trainers"
        ) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        problem = getattr(reason, "strerror", None) or str(reason)
        others = own_runs.listed(but=base)
        if others:
            advice = f"Other brokers of yours on this host: {others}"
        elif base == DEFAULT_ENDPOINT:
            advice = "Pass the broker's HTTP address, which its log shows, or -c with its broker.yaml"
        else:
            advice = "Check the address, and that the broker runs with this address in listen.http"
        raise Unreachable(f"{base}: got no answer ({problem.lower()}). {advice}") from None


def _parsed(text: str) -> Any:
    """Return the decoded JSON text; None if it is not valid."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def fetch_status(endpoint: str | None, timeout_s: float) -> Tree:
    """Return the JSON of the broker's status. Raise Unreachable, or PeerError if another program answers."""
    base = _base(endpoint, timeout_s)
    code, text = _fetch(base, "/status", timeout_s)
    status = _parsed(text)
    if code == 200 and isinstance(status, dict) and "run" in status:
        return status
    raise PeerError(f"{base}/status: got HTTP status {code} from a program that is not a broker. Check the address")


def read_status(endpoint: str | None, timeout_s: float) -> BrokerStatus:
    """Return the broker's status. Raise Unreachable, or PeerError if this version cannot read the answer."""
    return parse_status(fetch_status(endpoint, timeout_s))


def parse_status(content: Tree) -> BrokerStatus:
    """Return the status in the JSON of ``/status``.

    Raises:
        PeerError: A field is missing or has another type, since the broker is of another version or build.
    """
    try:
        if content.get("state") == "standby":
            raise UserError(
                f"got the address of a standby ({content['standby']['waits_for']}), expected that of the active broker"
            )
        return msgspec.convert(content, BrokerStatus)
    except msgspec.ValidationError as error:
        version = content.get("version")
        answered = f"streampack {__version__} cannot read the status of a broker with version {version} ({error})"
        part = "installation" if version == __version__ else "version"
        raise PeerError(f"{answered}. Use the streampack command of the broker's {part}, or pass --json") from None


def fetch_node(endpoint: str | None, feeds: Iterable[str], node: str, timeout_s: float) -> dict[str, Tree]:
    """Return the ranks of one node as JSON (``RankPage``), by feed; without the feeds that have no rank there.

    Args:
        endpoint: HTTP address, or None.
        feeds: Names of the feeds.
        node: The node's host, or a part of its name.
        timeout_s: Seconds to wait for an answer.

    Raises:
        UserError: No feed has a rank there.
        Unreachable: The broker does not answer.
    """
    base, pages = _base(endpoint, timeout_s), {}
    for feed in feeds:
        query = urllib.parse.urlencode({"feed": feed, "node": node})
        code, text = _fetch(base, f"/status?{query}", timeout_s)
        page = _parsed(text) if code == 200 else None
        if isinstance(page, dict) and "readers" in page:
            pages[feed] = page
    if not pages:
        raise UserError(f"got node {node!r}, but no rank is on a host with this name. 'streampack status' lists hosts")
    return pages


def of_node(status: BrokerStatus, pages: Mapping[str, Tree]) -> BrokerStatus:
    """Return a status whose ranks are only those of one node; ``pages``: what ``fetch_node`` returned."""
    feeds = {}
    for name, feed in status.feeds.items():
        page = msgspec.convert(pages[name], RankPage) if name in pages else None
        nodes = [page.node] if page is not None and page.node is not None else []
        ranks = msgspec.structs.replace(feed.ranks, left_out=0, num_nodes=len(nodes), nodes=nodes, nodes_left_out=0)
        feeds[name] = msgspec.structs.replace(feed, readers=page.readers if page is not None else [], ranks=ranks)
    return msgspec.structs.replace(status, feeds=feeds)


def fetch_events(endpoint: str | None, since: int, timeout_s: float) -> list[Tree]:
    """Return the events after number ``since`` that the broker still has, oldest first. Raise Unreachable."""
    code, text = _fetch(_base(endpoint, timeout_s), f"/events?since={since}", timeout_s)
    events = _parsed(text) if code == 200 else []
    return events if isinstance(events, list) else []


def fetch_history(endpoint: str | None, since_s: float, timeout_s: float) -> dict[str, list[tuple[float, float]]]:
    """Return (uptime in seconds, tokens formed so far) pairs after ``since_s`` of each feed, about one per second.

    Empty if this version cannot read the broker's history. Raise Unreachable.
    """
    code, text = _fetch(_base(endpoint, timeout_s), f"/history?since={since_s}", timeout_s)
    if code != 200:
        return {}
    try:
        history = json.loads(text)
        time, tokens = (history["columns"].index(name) for name in ("second", "tokens"))
        return {name: [(row[time], row[tokens]) for row in rows] for name, rows in history["feeds"].items()}
    except (LookupError, TypeError, ValueError):
        return {}


def fetch_health(endpoint: str | None, path: str, timeout_s: float) -> tuple[bool, str]:
    """Ask a probe, ``/livez`` or ``/readyz``; return (success, a description). Any error is a failure."""
    try:
        code, text = _fetch(_base(endpoint, timeout_s), path, timeout_s)
    except StreampackError as error:
        return False, f"streampack: {error}"
    return code == 200, text.strip() or f"got HTTP status {code}"


def ask_change(base: str, path: str, body: Tree, timeout_s: float) -> Tree:
    """Ask the broker at ``base`` for a change; return ``feed`` and the first ``step`` with the change.

    Raises:
        UserError: The change is not valid.
        Rejected: The broker rejects the change.
        Unreachable: There is no answer in time.
    """
    code, text = _fetch(base, path, timeout_s, json.dumps(body).encode())
    answer = _parsed(text)
    if code == 200 and isinstance(answer, dict) and "step" in answer:
        return answer
    if not isinstance(answer, dict) or "error" not in answer:
        raise PeerError(f"{base}{path}: got HTTP status {code} from a program that is not a broker. Check the address")
    if code in (503, 504):
        raise Unreachable(f"{base}: {answer['error']}")
    raise UserError(answer["error"]) if code == 400 else Rejected("refused", answer["error"])
