"""The rendezvous file: a broker's addresses, on a file system that the other hosts share.

The file holds one JSON object and is replaced as a whole. Its keys are the ``run``'s name, the addresses ``producers``,
``trainers`` and ``http``, the broker's ``epoch``, and the ``attempt`` of 'streampack run' that started the broker. A
file may outlive its broker, so ``rejection`` compares the attempt and asks the broker. After a failure the file holds
only ``epoch`` and the reason, ``failed``.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from streampack.core.protocol.message import Envelope
from streampack.core.protocol.producer_messages import ProducerPing
from streampack.errors import Rejected, WireError
from streampack.transport.keys import Key
from streampack.transport.sockets import Dealer, Poller
from streampack.wire import frames as wire


def write(path: Path, run: str, endpoints: Mapping[str, str], http: str, epoch: int) -> None:
    """Write the file with a broker's addresses, with this host's name in place of a wildcard. Raises OSError."""
    host = socket.gethostname()
    addresses = {side: url.replace("0.0.0.0", host).replace("[::]", host) for side, url in endpoints.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    attempt = os.environ.get("STREAMPACK_ATTEMPT", "")  # set by 'streampack run', compared by its other hosts
    _replace(path, {"run": run, **addresses, "http": http, "epoch": epoch, "attempt": attempt})


def remove(path: Path, epoch: int) -> None:
    """Remove the file if the broker with this epoch wrote it."""
    content = read(path)
    if content is not None and content["epoch"] == epoch:
        with contextlib.suppress(OSError):
            path.unlink()


def write_failure(path: Path, content: dict[str, Any], why: str) -> None:
    """Replace the file's content by the reason ``why`` the run failed, for the other hosts.

    Do nothing if another broker has replaced the file since it had ``content``.
    """
    now = read(path)
    if content and (now is None or now["epoch"] == content["epoch"]):
        with contextlib.suppress(OSError):
            _replace(path, {"epoch": content["epoch"], "failed": why})


def _replace(path: Path, content: dict[str, Any]) -> None:
    """Replace the file atomically by a new one with the content ``content``. Raises OSError."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(json.dumps(content))
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def read(path: Path) -> dict[str, Any] | None:
    """Return the file's content; None if the file does not exist or is not a rendezvous file."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) and "epoch" in content else None


def rejection(content: dict[str, Any], expected_attempt: str, key: Key | None) -> str:
    """Return the reason why a file's ``content`` is not from this attempt's broker; empty if it is."""
    if "failed" in content:
        return "the file belongs to a run that has ended"
    if content.get("attempt", "") != expected_attempt:
        return f"the file belongs to attempt {content.get('attempt')!r}, expected attempt {expected_attempt!r}"
    try:
        return "" if answers(content["producers"], content["epoch"], key) else "its broker does not answer"
    except Rejected as error:
        return error.detail


def answers(endpoint: str, epoch: int, key: Key | None = None, timeout_s: float = 2.0) -> bool:
    """Return whether the broker with this epoch answers at its address for producers within ``timeout_s`` seconds.

    Raises Rejected if the broker does not accept the key.
    """
    dealer = Dealer(endpoint, 1 << 20, key=key)
    try:
        poller = Poller([dealer])
        deadline = time.monotonic() + timeout_s
        asked_at = 0.0
        while (now := time.monotonic()) < deadline:
            if now - asked_at > 0.2:  # a message is lost before the connection is made
                asked_at = now
                dealer.send(wire.encode(Envelope(run=0, epoch=0, fence=0, message=ProducerPing(producer="run"))))
            poller.wait(0.1)
            dealer.check()
            while (frames := dealer.receive()) is not None:
                with contextlib.suppress(WireError):
                    return wire.decode(frames).epoch == epoch
        return False
    finally:
        dealer.close()
