"""Reads the bytes that a reference names, from a file, through fsspec or from a ``data:`` URL, and checks them."""

from __future__ import annotations

import importlib
from functools import lru_cache
from pathlib import Path
from typing import Any

from awscrt.checksums import crc32c

from streampack.core.media.references import Reference, inline_bytes
from streampack.errors import ConfigError

LARGEST = 256 << 20
"""Bytes that an item may have, by default."""


class WrongBytes(ValueError):
    """The bytes are not those that the reference describes: fewer of them, or others."""


class TooLarge(ValueError):
    """The item has more bytes than are allowed."""


def read_bytes(reference: Reference, largest: int = LARGEST) -> bytes:
    """Return the bytes of a reference.

    Args:
        reference: Where the bytes are.
        largest: Bytes that it may have.

    Raises:
        TooLarge: It has more bytes.
        OSError: They cannot be read.
        WrongBytes: They have another size or checksum than the reference says, or the ``data:`` URL is not valid.
        ConfigError: fsspec, or a package that it needs for the URL, is not installed.
    """
    begin, size = reference.offset, reference.size
    if size is not None and size > largest:
        raise TooLarge(f"got an item of {size} bytes, expected at most {largest}. Raise `largest` of `Media`")
    end = begin + (largest + 1 if size is None else size)
    data: bytes
    if reference.is_inline:
        try:
            data = inline_bytes(reference)
        except ValueError as error:
            raise WrongBytes(str(error)) from None
        data = data[begin:end] if begin or size else data
    elif "://" in reference.uri:
        files, path = _filesystem(reference.uri)
        data = files.cat_file(path, start=begin, end=end)
    else:
        with Path(reference.uri).open("rb") as file:
            file.seek(begin)
            data = file.read(end - begin)
    if size is None and len(data) > largest:
        raise TooLarge(f"got an item of more than {largest} bytes. Raise `largest` of `Media`")
    if size is not None and len(data) != size:
        raise WrongBytes(f"got {len(data)} bytes, expected {size}")
    if reference.crc32c is not None and (found := crc32c(data)) != reference.crc32c:
        raise WrongBytes(f"got the checksum {found:08x}, expected {reference.crc32c:08x}")
    return data


def _filesystem(uri: str) -> tuple[Any, str]:
    """Return the fsspec file system for a URL, and the path in it."""
    protocol = uri.partition("://")[0]
    files = _files(protocol)
    return files, files._strip_protocol(uri)


@lru_cache(maxsize=16)
def _files(protocol: str) -> Any:
    """Return the fsspec file system of a protocol. Raises ConfigError."""
    try:
        return importlib.import_module("fsspec").filesystem(protocol)
    except (ImportError, ValueError) as error:
        text = " ".join(str(error).split())
        raise ConfigError(
            f"media: got a URL with {protocol}://, which cannot be opened ({text}). Run `pip install "
            f"'streampack[remote]'`, or what fsspec needs for this protocol"
        ) from None
