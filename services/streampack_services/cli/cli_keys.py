"""The commands that make secrets and decide who may connect: ``keys new``, ``list``, ``revoke`` and ``token``."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Annotated

import typer

from streampack.errors import UserError
from streampack.transport.secret_files import write_secret
from streampack_services.cli.cli_options import AsJson, Command

Folder = Annotated[
    Path, typer.Argument(metavar="FOLDER", help="Folder of the broker's keys, as in listen.keys of broker.yaml.")
]
Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the key, which logs and errors show.")]
keys = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@keys.callback()
def _keys() -> None:
    """Make, list and revoke the keys of producers, trainers and relays.

    \b
    Example:
        streampack keys new keys tokenizers --role producer
        streampack keys new keys trainers --role trainer
        streampack keys list keys
        streampack keys token http.token
    """


@keys.command(cls=Command)
def new(
    folder: Folder,
    name: Name,
    role: Annotated[
        str,
        typer.Option("--role", metavar="ROLE", help="producer (sends samples), trainer (reads steps), relay (reads "
                     "steps for all ranks of a host) or standby (copies the log)."),
    ],
    stream: Annotated[
        list[str] | None,
        typer.Option("--stream", metavar="NAME",
                     help="Stream that this producer may send. Repeat the option for several streams. Default: all "
                     "streams."),
    ] = None,
    feed: Annotated[
        list[str] | None,
        typer.Option("--feed", metavar="NAME",
                     help="Feed that this trainer or relay may read. Repeat the option for several feeds. Default: all "
                     "feeds."),
    ] = None,
    rank: Annotated[
        list[str] | None,
        typer.Option("--rank", metavar="AXIS=N",
                     help="Rank that this trainer, or each rank of this relay, may have on an axis (dp, cp, tp or "
                     "pp). Repeat the option for several axes. Default: any rank."),
    ] = None,
    host: Annotated[
        list[str] | None,
        typer.Option("--host", metavar="NAME",
                     help="Host whose ranks this relay may read for, as the host names itself. Repeat the option for "
                     "several hosts. Default: any host."),
    ] = None,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Make a key that lets a producer, trainer or relay connect.

    Use this command before you give a broker an address that other hosts can reach.
    For a new folder, the command also makes the broker's own key. A running broker
    accepts the new key within a second. Copy only the file NAME.key to the host of
    its owner. On this host, set STREAMPACK_KEY_FILE, or key_file in
    producer.yaml or connect(), to the path of the file.

    \b
    Example:
        streampack keys new keys tokenizers --role producer --stream web
        streampack keys new keys relay-0 --role relay --host gpu0
    """
    from streampack_services.broker import authorization

    written = authorization.new_key(
        folder, name, role,
        {"streams": stream, "feeds": feed, "ranks": dict(map(_rank, rank or [])), "hosts": host},
    )  # fmt: skip
    if as_json:
        print(json.dumps({"name": name, "written": list(map(str, written))}))
    else:
        print(f"wrote {', '.join(map(str, written))}")
        print(
            f"next: copy {folder / name}.key to the host of {name}, and set STREAMPACK_KEY_FILE or key_file to its path"
        )
        print("keep this file secret: anyone who has the file can connect")
        if len(written) > 2:
            print(f"next: add the folder to broker.yaml: `listen: {{keys: {folder}}}`")


def _rank(text: str) -> tuple[str, int]:
    """Return ``("dp", 3)`` for ``dp=3``. Raises UserError."""
    axis, _, number = text.partition("=")
    if not number.isascii() or not number.isdigit():
        raise UserError(f"--rank is {text!r}. Pass an axis and a rank, such as dp=3.")
    return axis, int(number)


@keys.command(name="list", cls=Command)
def list_(folder: Folder, as_json: AsJson = False) -> None:
    """List the keys that may connect, and the rights of each key.

    Use this command to see which streams, feeds, ranks and hosts each
    producer, trainer and relay may use.

    \b
    Example:
        streampack keys list keys
    """
    from streampack_services.broker import authorization

    authorization.check_has_keys(folder)
    rows = [
        {"name": name, "role": entry.role, "streams": list(entry.streams), "feeds": list(entry.feeds),
         "ranks": entry.ranks, "hosts": list(entry.hosts), "key": entry.key}
        for name, entry in authorization.read_allowed(folder).items()
    ]  # fmt: skip
    if as_json:
        print(json.dumps({"keys": rows}))
        return
    from rich.console import Console

    Console().print(authorization.keys_table(rows))


@keys.command(cls=Command)
def revoke(folder: Folder, name: Name) -> None:
    """Revoke a key, so that its owner can no longer connect.

    Use this command when a key file was lost or is no longer needed. Within two
    seconds, a running broker disconnects all clients that use the key.

    \b
    Example:
        streampack keys revoke keys rank-3
    """
    from streampack_services.broker import authorization

    authorization.revoke(folder, name)
    print(f"revoked {name}: the broker no longer accepts this key")


@keys.command(cls=Command)
def token(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write, which only you can read.")],
) -> None:
    """Make a token that protects the broker's HTTP address.

    Use this command when other hosts can reach the HTTP address. Set
    listen.token_file in broker.yaml to the path of the file. For the commands
    status, top, health, set and skip, set STREAMPACK_HTTP_TOKEN_FILE to this path.
    For Prometheus, set authorization.credentials_file.

    \b
    Example:
        streampack keys token http.token
    """
    write_secret(file, secrets.token_urlsafe(32) + "\n")
    print(f"wrote {file}")
    print(f"next: set listen.token_file in broker.yaml, and STREAMPACK_HTTP_TOKEN_FILE of each client, to {file}")
