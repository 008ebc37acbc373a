"""The rendezvous file: where a broker says where it is, on a file system that others share.

One JSON object, replaced whole: the run's name, the addresses ``producers``, ``trainers`` and ``http``, the broker's
``epoch``, and the ``attempt`` of 'streampack run' that started it. A file outlives its broker: whoever must know that
it is not an earlier run's looks at the attempt, and asks the broker. A run that is over says so in the same place
(``failed``), if the file is still its own.
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
    """Where producers and clients find a broker. Raises OSError."""
    host = socket.gethostname()
    found = {side: url.replace("0.0.0.0", host).replace("[::]", host) for side, url in endpoints.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    attempt = os.environ.get("STREAMPACK_ATTEMPT", "")  # of 'streampack run': its other hosts look for it
    _replace(path, {"run": run, **found, "http": http, "epoch": epoch, "attempt": attempt})


def remove(path: Path, epoch: int) -> None:
    """Take the file of the broker of this epoch away; another broker's is left alone."""
    found = read(path)
    if found is not None and found["epoch"] == epoch:
        with contextlib.suppress(OSError):
            path.unlink()


def leave_word(path: Path, found: dict[str, Any], why: str) -> None:
    """Tell the other hosts that it is over, where they look, if that is still the file that was ``found``."""
    now = read(path)
    if found and (now is None or now["epoch"] == found["epoch"]):
        with contextlib.suppress(OSError):
            _replace(path, {"epoch": found["epoch"], "failed": why})


def _replace(path: Path, tree: dict[str, Any]) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(json.dumps(tree))
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def read(path: Path) -> dict[str, Any] | None:
    """What the file says; None where it says nothing."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and "epoch" in found else None


def not_believed(found: dict[str, Any], expected_attempt: str, key: Key | None) -> str:
    """Why this is not this attempt's broker; empty if it is."""
    if "failed" in found:
        return "it is of a run that has ended"
    if found.get("attempt", "") != expected_attempt:
        return f"it is of another attempt, {found.get('attempt')!r}, expected {expected_attempt!r}"
    try:
        return "" if answers(found["producers"], found["epoch"], key) else "its broker does not answer"
    except Rejected as error:
        return error.detail


def answers(endpoint: str, epoch: int, key: Key | None = None, timeout_s: float = 2.0) -> bool:
    """Whether the broker of this epoch answers at its producers' address. Raises Rejected if it does not let us in."""
    dealer = Dealer(endpoint, 1 << 20, key=key)
    try:
        poller = Poller([dealer])
        deadline = time.monotonic() + timeout_s
        asked = 0.0
        while (now := time.monotonic()) < deadline:
            if now - asked > 0.2:  # nothing is queued before the connection is made
                asked = now
                dealer.send(wire.encode(Envelope(run=0, epoch=0, fence=0, message=ProducerPing(producer="run"))))
            poller.wait(0.1)
            dealer.check()
            while (frames := dealer.receive()) is not None:
                with contextlib.suppress(WireError):
                    return wire.decode(frames).epoch == epoch
        return False
    finally:
        dealer.close()
