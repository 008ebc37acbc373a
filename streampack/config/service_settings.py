"""Settings of the broker as a service: its addresses, its log, its limits and its standby."""

from __future__ import annotations

import socket
from typing import Annotated, Literal

from msgspec import Meta

from streampack.core.model.bounded import Name
from streampack.core.model.keys.key_groups import Keys
from streampack.core.model.keys.planning_keys import Positive


class Listen(Keys, frozen=True, kw_only=True):
    """Addresses at which the broker listens, and who may connect.

    Addresses of ``producers`` and ``trainers`` are ``tcp://host:port`` (``*`` for a free port) or ``ipc:///path``. The
    address ``http`` is ``host:port``. Without ``token_file``, the variable STREAMPACK_HTTP_TOKEN may hold the token.
    """

    producers: Annotated[
        str,
        Meta(
            description="Address for producers: `tcp://host:port` or `ipc:///path`. Use `tcp://0.0.0.0:7401` if "
            "producers run on other machines"
        ),
    ] = "tcp://127.0.0.1:7401"
    trainers: Annotated[
        str,
        Meta(
            description="Address for trainers: `tcp://host:port` or `ipc:///path`. Use `tcp://0.0.0.0:7402` if "
            "trainers run on other machines"
        ),
    ] = "tcp://127.0.0.1:7402"
    http: Annotated[
        str,
        Meta(
            description="Address (`host:port`) of the HTTP server for metrics, status, health checks and changes "
            "to the run"
        ),
    ] = "127.0.0.1:7400"
    control: Annotated[
        Literal["loopback", "any"],
        Meta(
            description="Clients that may change the run over HTTP: only clients on this machine (`loopback`), or "
            "every client that can connect (`any`)"
        ),
    ] = "loopback"
    keys: Annotated[
        str | None,
        Meta(
            description="Folder of keys made by `streampack keys new`. If this is set, producers and trainers need a "
            "key, and their traffic is encrypted. If not, the broker accepts anyone who can connect"
        ),
    ] = None
    token_file: Annotated[
        str | None,
        Meta(
            description="File with a token that every HTTP client must send. Default: the token in the environment "
            "variable `STREAMPACK_HTTP_TOKEN`. If neither is set, clients need no token"
        ),
    ] = None


class Retain(Keys, frozen=True, kw_only=True):
    """Limits of the log: number of committed checkpoints that it keeps, and bytes.

    A full log takes no more pushed samples until a checkpoint is committed; the broker logs a warning.
    """

    checkpoints: Annotated[
        Positive,
        Meta(
            description="Number of committed checkpoints from which trainers can resume. The log deletes data that "
            "only older checkpoints need"
        ),
    ] = 3
    bytes: Annotated[
        str | int,
        Meta(
            description="Maximum size of the log. When the log reaches this size, the broker accepts no more pushed "
            "samples until trainers commit a checkpoint"
        ),
    ] = "200GiB"


class Limits(Keys, frozen=True, kw_only=True):
    """Limits on samples, messages and the number of peers; the broker rejects what exceeds them."""

    sample_tokens: Annotated[
        Positive,
        Meta(
            description="Maximum number of tokens in a sample that a producer sends. The setting `overlong` "
            "determines the treatment of longer samples"
        ),
    ] = 262_144
    chunk: Annotated[
        str | int,
        Meta(
            description="Maximum bytes of samples in one message from a producer, such as `2MiB`. A message may also "
            "use at most a quarter of a partition's share of `memory`"
        ),
    ] = "2MiB"
    peers: Annotated[
        int,
        Meta(
            ge=1,
            le=2**18,
            description="Maximum number of producers that are connected at a time, and of trainer ranks in a feed. "
            "Each connection uses some memory",
        ),
    ] = 16_384
    keys: Annotated[
        int,
        Meta(
            ge=1,
            le=2**28,
            description="Maximum number of keys that the broker remembers for each pushed stream, until the writing "
            "job commits. Each key uses about 100 bytes of memory",
        ),
    ] = 1_048_576


class StandbySettings(Keys, frozen=True, kw_only=True):
    """A second broker on another host, which has a copy of the log and takes over if the first one is lost.

    Both hosts have the same broker.yaml, except for ``name``, ``address``, ``listen`` and ``state_dir``.
    """

    arbiter: Annotated[
        str,
        Meta(
            min_length=1,
            description="Place that decides which broker is active. It is a path on a file system that both hosts "
            "share, a URL such as `s3://bucket/my-run`, or a Lease, `kubernetes:///NAME`. Each run "
            "needs a place of its own",
        ),
    ]
    listen: Annotated[
        str,
        Meta(
            description="Address at which the active broker sends its log to the standby: `tcp://host:port` with a "
            "fixed port"
        ),
    ] = "tcp://0.0.0.0:7403"
    address: Annotated[
        str | None,
        Meta(
            description="Address at which the other host reaches `listen`; `{name}` stands for the name of this host. "
            "Default: `listen` with this host's name in place of `0.0.0.0`"
        ),
    ] = None
    name: Annotated[
        Name | None,
        Meta(
            description="Name of this host, which must differ from the other's. Default: the host name",
        ),
    ] = None
    on_loss: Annotated[
        Literal["stall", "go_on"],
        Meta(
            description="Behavior of the active broker when it loses the standby. `stall` serves no new steps until a "
            "standby has the log. `go_on` serves them without a copy"
        ),
    ] = "stall"
    takeover_s: Annotated[
        float,
        Meta(
            ge=1.0,
            le=600.0,
            description="Seconds without a message after which the standby takes over, and after which the active "
            "broker counts the standby as lost",
        ),
    ] = 5.0

    @property
    def host(self) -> str:
        """The name of this host."""
        return self.name or socket.gethostname()
