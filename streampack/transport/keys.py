"""Key files: who a process is, and to which broker.

::

    # tokenizers.key: mode 0600, on the machines that tokenize
    name: tokenizers
    secret: 2d1ae3...        32 bytes as hexadecimal digits
    broker: 7b0f9c...        the public key of the broker that it is for, which nobody else can answer for

``streampack keys new`` makes them; the broker's own, ``broker.key``, is such a file too. Whoever has that one may do
everything. Which rights another key has is written beside the broker (``allowed.yaml``), never in the key.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec
from msgspec import Struct

from streampack.errors import UserError
from streampack.transport import curve
from streampack.transport.secret_files import read_secret

KEY_FILE = "STREAMPACK_KEY_FILE"
"""Of the environment: the key file of whoever names none."""
HEX = re.compile(r"[0-9a-f]{64}", re.ASCII)
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9._-]{0,99}", re.ASCII)


class Key(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A name, its secret key, and the public key of the broker that it is for."""

    name: str
    secret: str
    broker: str

    def __repr__(self) -> str:
        return f"Key({self.name!r})"  # a secret is in no log and no traceback

    @property
    def public(self) -> str:
        """What others know it by."""
        return curve.public_of(self.secret)

    def text(self) -> str:
        """The file."""
        return f"name: {self.name}\nsecret: {self.secret}\nbroker: {self.broker}\n"


def load_key(path: str | Path) -> Key:
    """The key of a file that nobody else can read. Raises UserError, which never shows what is in it."""
    text = read_secret(path)
    try:
        key = msgspec.yaml.decode(text, type=Key)
    except (msgspec.DecodeError, ValueError):
        key = None
    if key is None or not NAME.fullmatch(key.name) or not HEX.fullmatch(key.secret) or not HEX.fullmatch(key.broker):
        raise UserError(f"{path}: got no key file (name, secret, broker), expected one of 'streampack keys new'")
    return key


def find_key(path: str | Path | None) -> Key | None:
    """The key of ``path``, by default of the file that STREAMPACK_KEY_FILE names; None where that is none, or ``path``
    is empty. Raises UserError.
    """
    found = os.environ.get(KEY_FILE) if path is None else path
    return load_key(found) if found else None
