"""What the command line asks a broker over HTTP: its status, its health, and changes of a run.

Knows addresses, answers and the token that a broker may want (STREAMPACK_HTTP_TOKEN, or the file that
STREAMPACK_HTTP_TOKEN_FILE names); what an answer looks like to a person is for others.
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from streampack.config.config_files import read_broker
from streampack.config.daemon_settings import BrokerConfig
from streampack.errors import PeerError, Rejected, StreampackError, Unreachable, UserError
from streampack.transport.rendezvous import read_rendezvous
from streampack.version import __version__
from streampack_services.broker.status import BrokerStatus
from streampack_services.http.http_guard import find_token, parse_address

DEFAULT_ENDPOINT = "http://127.0.0.1:7400"
_FROM = "set STREAMPACK_HTTP_TOKEN, or STREAMPACK_HTTP_TOKEN_FILE to a file that holds it"
_NO_TOKEN = f"got a broker that wants a token, expected none: {_FROM}"
_OTHER_TOKEN = f"got a broker that wants another token, expected the environment's to be its own: {_FROM}"
Tree = dict[str, Any]


def _base(endpoint: str | None, timeout_s: float) -> str:
    return _named(endpoint, None, timeout_s) or DEFAULT_ENDPOINT


def _named(endpoint: str | None, config: BrokerConfig | None, timeout_s: float) -> str | None:
    """The HTTP address that the user names: ``endpoint``, that of a broker.yaml, STREAMPACK_HTTP, or the rendezvous
    file that STREAMPACK_ENDPOINT names. None where none of them is there.
    """
    trainers = os.environ.get("STREAMPACK_ENDPOINT", "")
    found = endpoint or (None if config is None else _of_config(config)) or os.environ.get("STREAMPACK_HTTP")
    found = found or (trainers if trainers.startswith("file://") else None)
    if found is None:
        return None
    if found.startswith("file://"):
        found = read_rendezvous(Path(found.removeprefix("file://")), "http", timeout_s)
    if "://" not in found:
        found = f"http://{found}"
    if not found.startswith(("http://", "https://")):
        raise UserError(f"got endpoint {found!r}, expected the broker's HTTP address such as {DEFAULT_ENDPOINT}")
    return found.rstrip("/")


def _of_config(config: BrokerConfig) -> str:
    """Where a broker of this configuration serves HTTP, for this machine. Raises UserError where only a running broker
    knows it.
    """
    if config.rendezvous is not None:
        return f"file://{config.rendezvous}"
    host, port = parse_address(config.listen.http)
    if not port:
        raise UserError(
            f"listen.http: got port 0 in {config.listen.http}, which only the broker's log tells: pass --endpoint, or "
            f"set rendezvous in broker.yaml"
        )
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Found(NamedTuple):
    """A running broker: its address, its status, and whether the user ``named`` it."""

    base: str
    snapshot: Tree
    named: bool

    @property
    def run(self) -> str:
        return str(self.snapshot["run"])


def find_broker(endpoint: str | None, config: Path | None, timeout_s: float) -> Found:
    """The broker whose run a command is to change.

    Raises UserError if STREAMPACK_ENDPOINT names a broker whose HTTP address is not known, Rejected if the broker does
    not serve the run of ``config``, Unreachable if nobody answers.
    """
    settings = None if config is None else read_broker(config)
    base = _named(endpoint, settings, timeout_s)
    if base is None and (trainers := os.environ.get("STREAMPACK_ENDPOINT")):
        raise UserError(
            f"STREAMPACK_ENDPOINT is {trainers}, which does not say where its broker serves HTTP: pass --endpoint "
            f"http://HOST:7400 or -c broker.yaml, or set STREAMPACK_HTTP"
        )
    found = Found(base or DEFAULT_ENDPOINT, fetch_status(base or DEFAULT_ENDPOINT, timeout_s), base is not None)
    if settings is not None and found.run != settings.run:
        raise Rejected(
            "run",
            f"{found.base} serves run {found.run!r}, but {config} is of run {settings.run!r}: start its broker, or "
            f"pass --endpoint",
        )
    return found


def _fetch(base: str, path: str, timeout_s: float, body: bytes | None = None) -> tuple[int, str]:
    """(HTTP status, text); a ``body`` is posted. Raises Unreachable, or Rejected without the token that is wanted.
    Proxies of the environment are not used: a broker is near.
    """
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(base + path, body, {} if body is None else {"Content-Type": "application/json"})
    if token := find_token():
        request.add_unredirected_header("Authorization", f"Bearer {token}")  # nobody can send it on to another host
    try:
        with opener.open(request, timeout=timeout_s) as answer:
            return int(answer.status), answer.read().decode("utf-8", "replace")
    except urllib.error.HTTPError as error:
        if error.code == 401:
            raise Rejected("token", f"{base}: {_NO_TOKEN if token is None else _OTHER_TOKEN}") from None
        return error.code, error.read().decode("utf-8", "replace")
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        what = getattr(reason, "strerror", None) or str(reason)
        raise Unreachable(
            f"{base}: got no answer ({what.lower()}), expected a broker: is 'streampack broker' running, "
            f"with listen.http there?"
        ) from None


def fetch_status(endpoint: str | None, timeout_s: float) -> Tree:
    """The broker's snapshot. Raises Unreachable, or PeerError if something else answers there."""
    base = _base(endpoint, timeout_s)
    code, text = _fetch(base, "/status", timeout_s)
    try:
        found = json.loads(text)
        if code == 200 and isinstance(found, dict) and "run" in found:
            return found
    except ValueError:
        pass
    raise PeerError(f"{base}/status: got an answer {code} that is no broker's, expected one: check the address")


def read_status(endpoint: str | None, timeout_s: float) -> BrokerStatus:
    """Return the broker's status. Raises Unreachable, or PeerError for an answer that this command cannot read."""
    return understand(fetch_status(endpoint, timeout_s))


def understand(tree: Tree) -> BrokerStatus:
    """Return the status that the JSON of ``/status`` holds.

    Raises PeerError if a field is missing or has another type: the broker is of another version or build.
    """
    try:
        return msgspec.convert(tree, BrokerStatus)
    except msgspec.ValidationError as error:
        got = f"got a broker of streampack {tree.get('version')}, whose status this command cannot read ({error})"
        if tree.get("version") == __version__:
            expected = "expected one of the same build: use the command of the broker's installation, or --json"
        else:
            expected = f"expected {__version__}: use the command of the broker's version, or --json"
        raise PeerError(f"{got}, {expected}") from None


def fetch_events(endpoint: str | None, since: int, timeout_s: float) -> list[Tree]:
    """What has happened after event number ``since``, as far as the broker keeps it. Raises Unreachable."""
    code, text = _fetch(_base(endpoint, timeout_s), f"/events?since={since}", timeout_s)
    found = json.loads(text) if code == 200 else []
    return found if isinstance(found, list) else []


def fetch_history(endpoint: str | None, since_s: float, timeout_s: float) -> dict[str, list[tuple[float, float]]]:
    """Return by feed (uptime in seconds, tokens formed) about every second after that uptime.

    Empty where the broker has no history that this command can read. Raises Unreachable.
    """
    code, text = _fetch(_base(endpoint, timeout_s), f"/history?since={since_s}", timeout_s)
    if code != 200:
        return {}
    try:
        found = json.loads(text)
        time, tokens = (found["columns"].index(name) for name in ("second", "tokens"))
        return {name: [(row[time], row[tokens]) for row in rows] for name, rows in found["feeds"].items()}
    except (LookupError, TypeError, ValueError):
        return {}


def fetch_health(endpoint: str | None, path: str, timeout_s: float) -> tuple[bool, str]:
    """(good, what was said). Whatever keeps it from being asked is no good health."""
    try:
        code, text = _fetch(_base(endpoint, timeout_s), path, timeout_s)
    except StreampackError as error:
        return False, f"streampack: {error}"
    return code == 200, text.strip() or f"got an answer {code}"


def ask_change(base: str, path: str, body: Tree, timeout_s: float) -> Tree:
    """What the broker at ``base`` says to a change that is asked for: ``feed`` and ``step``, from which it holds.

    Raises UserError for what cannot be, Rejected where it is refused, Unreachable if no answer comes in time.
    """
    code, text = _fetch(base, path, timeout_s, json.dumps(body).encode())
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if code == 200 and isinstance(found, dict) and "step" in found:
        return found
    if not isinstance(found, dict) or "error" not in found:
        raise PeerError(f"{base}{path}: got an answer {code} that is no broker's, expected one: check the address")
    if code in (503, 504):
        raise Unreachable(f"{base}: {found['error']}")
    raise UserError(found["error"]) if code == 400 else Rejected("refused", found["error"])
