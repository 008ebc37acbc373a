"""Addresses that sockets listen on, or connect to: ``tcp://host:port`` and ``ipc://path``."""

from __future__ import annotations

from streampack.errors import UserError


def check_endpoint(endpoint: str, *, connects: bool = False) -> None:
    """Raise UserError for an endpoint that is not ``tcp://host:port`` or ``ipc://path`` of 100 bytes at most.

    A socket that binds may leave the host (``*``) or the port (``*``, 0) open; one that ``connects`` may not.
    """
    kind, _, rest = endpoint.partition("://")
    if kind == "tcp":
        host, _, port = rest.rpartition(":")
        known = port.isascii() and port.isdigit() and int(port) < 65536
        if host and host.isprintable() and " " not in host and (known or port == "*"):
            if connects and (host == "*" or not known or int(port) == 0):
                raise UserError(
                    f"got endpoint {endpoint!r} to connect to, expected a host and the port that the broker listens "
                    f"on. Take the address from its log or rendezvous file"
                )
            return
    elif kind == "ipc" and rest:
        if len(rest.encode()) <= 100:
            return
        raise UserError(
            f"got an ipc path of {len(rest.encode())} bytes, expected at most 100 bytes. Choose a shorter path"
        )
    raise UserError(f"got endpoint {endpoint!r}, expected tcp://host:port or ipc:///path/of/a/socket")
