"""The commands that make secrets, and say who may come: ``keys new``, ``list``, ``revoke``, ``token``; added to those
of ``main``.
"""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Annotated

import typer

from streampack.errors import UserError
from streampack.transport.secret_files import write_secret

Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="Of the broker's keys: listen.keys of broker.yaml.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="What the key is called in logs and errors.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]
keys = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@keys.callback()
def _keys() -> None:
    r"""Make the secrets that keep others out.

    \b
    Example:
        streampack keys new keys tokenizers --role producer
        streampack keys new keys trainers --role trainer
        streampack keys list keys
        streampack keys token http.token
    """


@keys.command()
def new(
    folder: Folder,
    name: Name,
    role: Annotated[str, typer.Option("--role", metavar="ROLE", help="producer (sends) or trainer (reads).")],
    stream: Annotated[
        list[str] | None,
        typer.Option("--stream", metavar="NAME", show_default=False,
                     help="Of a producer: it may send this stream alone; may be given again."),
    ] = None,
    feed: Annotated[
        list[str] | None,
        typer.Option("--feed", metavar="NAME", show_default=False,
                     help="Of a trainer: it may read this feed alone; may be given again."),
    ] = None,
    rank: Annotated[
        list[str] | None,
        typer.Option("--rank", metavar="AXIS=N", show_default=False,
                     help="Of a trainer: it may be this rank of dp, cp, tp or pp alone; may be given again."),
    ] = None,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    r"""Make a key, and let it in.

    The first one of a folder makes the broker's too. A broker that runs with this folder lets the key in within a
    second. Take NAME.key, and nothing else of the folder, to where it is used: STREAMPACK_KEY_FILE, key_file of
    producer.yaml or of connect().

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
        print(f"take {folder / name}.key to who is to be {name}, as STREAMPACK_KEY_FILE or key_file: it is a secret")
        if len(written) > 2:
            print(f"and have the broker use the folder: listen: {{keys: {folder}}} in broker.yaml")


def _rank(text: str) -> tuple[str, int]:
    axis, _, number = text.partition("=")
    if not number.isascii() or not number.isdigit():
        raise UserError(f"--rank: got {text!r}, expected an axis and a number, such as dp=3")
    return axis, int(number)


@keys.command(name="list")
def list_(folder: Folder, as_json: AsJson = False) -> None:
    r"""Show who may come, and what each may do.

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


@keys.command()
def revoke(folder: Folder, name: Name) -> None:
    r"""Shut a key out.

    A broker that runs sends whoever came with it away within a second.

    \b
    Example:
        streampack keys revoke keys rank-3
    """
    from streampack_services.broker import authorization

    authorization.revoke(folder, name)
    print(f"{name} may not come any more; its key file, wherever it is, is worth nothing")


@keys.command()
def token(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A new file, which nobody else can read.")],
) -> None:
    r"""Make a token for the broker's HTTP side.

    The broker takes it from listen.token_file; status, top, health, set and skip from the file that
    STREAMPACK_HTTP_TOKEN_FILE names; Prometheus from authorization.credentials_file.

    \b
    Example:
        streampack keys token http.token
    """
    write_secret(file, secrets.token_urlsafe(32) + "\n")
    print(f"wrote {file}: name it in listen.token_file, and in STREAMPACK_HTTP_TOKEN_FILE of those who ask")
