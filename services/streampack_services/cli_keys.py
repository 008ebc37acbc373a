"""The commands that make secrets: ``keys token``; added to those of ``cli``."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated

import typer

from streampack.secret_files import write_secret

keys = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@keys.callback()
def _keys() -> None:
    """Make the secrets that keep others out.

    \b
    Example:
        streampack keys token http.token
    """


@keys.command()
def token(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A new file, which nobody else can read.")],
) -> None:
    """Make a token for the broker's HTTP side.

    The broker takes it from listen.token_file; status, top, health, set and skip from the file that
    STREAMPACK_HTTP_TOKEN_FILE names; Prometheus from authorization.credentials_file.

    \b
    Example:
        streampack keys token http.token
    """
    write_secret(file, secrets.token_urlsafe(32) + "\n")
    print(f"wrote {file}: name it in listen.token_file, and in STREAMPACK_HTTP_TOKEN_FILE of those who ask")
