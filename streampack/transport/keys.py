"""Key files: the identity of a process, for one broker.

::

    # tokenizers.key: mode 0600, on the machines that tokenize
    name: tokenizers
    secret: 2d1ae3...        32 bytes as hexadecimal digits
    broker: 7b0f9c...        the public key of the broker that the key is for

``streampack keys new`` makes key files. The broker's own, ``broker.key``, is a key file too, and gives all rights. The
rights of other keys are in a file of the broker (``allowed.yaml``), never in the key.
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
"""The environment variable that names the default key file."""
HEX = re.compile(r"[0-9a-f]{64}", re.ASCII)
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9._-]{0,99}", re.ASCII)


class Key(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A named secret key, and the public key of the broker for which it is made."""

    name: str
    secret: str
    broker: str

    def __repr__(self) -> str:
        return f"Key({self.name!r})"  # keeps the secret out of logs and tracebacks

    @property
    def public(self) -> str:
        """The public key of this secret key, 64 hexadecimal digits; other processes identify it by this."""
        return curve.public_of(self.secret)

    def text(self) -> str:
        """Return the contents of the key file."""
        return f"name: {self.name}\nsecret: {self.secret}\nbroker: {self.broker}\n"


def load_key(path: str | Path) -> Key:
    """Return the key in a key file. Raises UserError, which never shows the contents, for an invalid or unsafe file."""
    text = read_secret(path)
    try:
        key = msgspec.yaml.decode(text, type=Key)
    except (msgspec.DecodeError, ValueError):
        key = None
    if key is None or not NAME.fullmatch(key.name) or not HEX.fullmatch(key.secret) or not HEX.fullmatch(key.broker):
        raise UserError(
            f"{path}: got a file that is not a key file (name, secret, broker), expected a file that 'streampack keys "
            f"new' created"
        )
    return key


def find_key(path: str | Path | None) -> Key | None:
    """Return the key in the file ``path``, by default in the file that STREAMPACK_KEY_FILE names.

    None if neither names a file, or ``path`` is empty. Raises UserError as ``load_key`` does.
    """
    file = os.environ.get(KEY_FILE) if path is None else path
    return load_key(file) if file else None
