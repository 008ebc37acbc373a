"""The address of a host's relay: by default a socket in a folder of the user, named for the broker's address."""

from __future__ import annotations

import hashlib
import os
import socket
import tempfile
from pathlib import Path

from streampack.errors import UserError

ENVIRONMENT = "STREAMPACK_RELAY"
"""Environment variable with the address of the relay, or ``off`` to read from the broker itself."""
OFF = "off"


def default_relay(broker: str) -> str:
    """Return the address at which a relay for the broker at ``broker`` listens if no other is given.

    Only processes of the same user find it. The broker's address, or the list of several, must be written in the same
    way everywhere.

    >>> default_relay("tcp://node0:7402").startswith("ipc:///")
    True
    """
    name = hashlib.blake2b(broker.encode(), digest_size=6).hexdigest()
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return f"ipc://{base}/streampack-{os.getuid()}/relay-{name}.sock"


def make_folder(relay: str) -> None:
    """Create the folder of a default address, for this user alone. Raises UserError if another user owns it."""
    folder = Path(relay.removeprefix("ipc://")).parent
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.name == f"streampack-{os.getuid()}" and folder.stat().st_uid != os.getuid():
            raise UserError(f"{folder}: got a folder of another user, expected one of this user. Pass --listen")
    except OSError as error:
        raise UserError(f"{folder}: cannot create the folder of the relay's socket: {error.strerror}") from None


def check_address(relay: str, name: str) -> None:
    """Raise UserError unless the address, which the option ``name`` gives, is one that a relay can have."""
    if not relay.startswith("ipc:///"):
        raise UserError(f"{name}: got {relay[:200]!r}, expected ipc:///path/of/a/socket")


def note_broker(relay: str, broker: str) -> None:
    """Write the address of a relay's broker to a file beside the relay's socket, for ``broker_of``."""
    path = Path(relay.removeprefix("ipc://"))
    path.with_name(f"{path.name}.broker").write_text(broker)


def broker_of(relay: str) -> str | None:
    """Return the address of a relay's broker, as the relay was started with; None if it is not known."""
    path = Path(relay.removeprefix("ipc://"))
    try:
        return path.with_name(f"{path.name}.broker").read_text()
    except (OSError, UnicodeDecodeError):
        return None


def is_served(relay: str) -> bool:
    """Return whether a process listens at the address of a relay."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(1.0)
        try:
            sock.connect(relay.removeprefix("ipc://"))
        except OSError:
            return False
    return True


def find_relay(broker: str) -> tuple[str | None, bool]:
    """Return the address of the relay for a reader on this host, and whether the user has named it.

    The address is that of ``STREAMPACK_RELAY``, or the default address if a relay listens there; else None. Raises
    UserError for an address that is not ``ipc://``.
    """
    named = os.environ.get(ENVIRONMENT, "")
    if named in (OFF, broker):
        return None, False
    if named:
        if not named.startswith("ipc:///"):
            raise UserError(f"{ENVIRONMENT}: got {named[:200]!r}, expected ipc:///path/of/a/socket, or {OFF!r}")
        return named, True
    relay = default_relay(broker)
    return (relay, False) if Path(relay.removeprefix("ipc://")).exists() and is_served(relay) else (None, False)
