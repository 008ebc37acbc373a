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
    Path, typer.Argument(metavar="FOLDER", help="Folder of the broker's keys: listen.keys in broker.yaml.")
]
Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the key, in logs and errors.")]
keys = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@keys.callback()
def _keys() -> None:
    """Make, list and revoke the keys of producers and trainers.

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
    role: Annotated[str, typer.Option("--role", metavar="ROLE", help="producer (sends) or trainer (reads).")],
    stream: Annotated[
        list[str] | None,
        typer.Option("--stream", metavar="NAME", show_default=False,
                     help="The only stream that this producer may send. Repeat it for several."),
    ] = None,
    feed: Annotated[
        list[str] | None,
        typer.Option("--feed", metavar="NAME", show_default=False,
                     help="The only feed that this trainer may read. Repeat it for several."),
    ] = None,
    rank: Annotated[
        list[str] | None,
        typer.Option("--rank", metavar="AXIS=N", show_default=False,
                     help="The only rank of dp, cp, tp or pp that this trainer may have. Repeat it for several axes."),
    ] = None,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Make a key for a producer or trainer, and allow it to connect.

    Use it before you give a broker an address that other hosts can reach. The first
    key of a folder also makes the broker's own key. A running broker accepts the
    new key within a second. Copy NAME.key, and no other file of the folder, to the
    host that uses it. Name it there in STREAMPACK_KEY_FILE, or in key_file of
    producer.yaml or connect().

    \b
    Example:
        streampack keys new keys tokenizers --role producer --stream web --stream code
        streampack keys new keys rank-3 --role trainer --feed train --rank dp=3
    """
    from streampack_services.broker import authorization

    written = authorization.new_key(
        folder, name, role, {"streams": stream, "feeds": feed, "ranks": dict(map(_rank, rank or []))}
    )
    if as_json:
        print(json.dumps({"name": name, "written": list(map(str, written))}))
    else:
        print(f"wrote {', '.join(map(str, written))}")
        print(f"next: copy {folder / name}.key to the host of {name} and name it in STREAMPACK_KEY_FILE or key_file")
        print("keep this file secret: anyone who has it can connect")
        if len(written) > 2:
            print(f"next: name the folder in broker.yaml: listen: {{keys: {folder}}}")


def _rank(text: str) -> tuple[str, int]:
    """Return ``("dp", 3)`` for ``dp=3``. Raises UserError."""
    axis, _, number = text.partition("=")
    if not number.isascii() or not number.isdigit():
        raise UserError(f"--rank is {text!r}. Pass an axis and a number, such as dp=3.")
    return axis, int(number)


@keys.command(name="list", cls=Command)
def list_(folder: Folder, as_json: AsJson = False) -> None:
    """List the keys that may connect, and what each may do.

    Use it to see which streams, feeds and ranks each producer and trainer may use.

    \b
    Example:
        streampack keys list keys
    """
    from streampack_services.broker import authorization

    authorization.check_has_keys(folder)
    rows = [
        {"name": name, "role": entry.role, "streams": list(entry.streams), "feeds": list(entry.feeds),
         "ranks": entry.ranks, "key": entry.key}
        for name, entry in authorization.read_allowed(folder).items()
    ]  # fmt: skip
    if as_json:
        print(json.dumps({"keys": rows}))
        return
    from rich.console import Console

    Console().print(authorization.keys_table(rows))


@keys.command(cls=Command)
def revoke(folder: Folder, name: Name) -> None:
    """Revoke a key, so that it can no longer connect.

    Use it when a key file was lost or is no longer needed. A running broker
    disconnects all clients that use the key within a second.

    \b
    Example:
        streampack keys revoke keys rank-3
    """
    from streampack_services.broker import authorization

    authorization.revoke(folder, name)
    print(f"revoked {name}: the broker accepts no copy of its key file any more")


@keys.command(cls=Command)
def token(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write. Only you can read it.")],
) -> None:
    """Make a token that protects the broker's HTTP address.

    Use it when other hosts can reach that address. Name the file in
    listen.token_file of broker.yaml; in STREAMPACK_HTTP_TOKEN_FILE for status, top,
    health, set and skip; in authorization.credentials_file for Prometheus.

    \b
    Example:
        streampack keys token http.token
    """
    write_secret(file, secrets.token_urlsafe(32) + "\n")
    print(f"wrote {file}")
    print("next: name it in listen.token_file of broker.yaml, and in STREAMPACK_HTTP_TOKEN_FILE of each client")
