"""References to media: where the bytes of an image are, so that they need not pass through the broker."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

MAX_REFERENCE_BYTES = 1 << 14


class Reference(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Where the bytes of a media item are. The trainer's client fetches, checks and decodes them.

    Example:
        >>> Reference("s3://data/images-00.tar", offset=1536, size=81_920, crc32c=0x1E3D5F70).uri
        's3://data/images-00.tar'
    """

    uri: Annotated[str, Meta(min_length=1, max_length=8192)]
    """A path, or a URL that fsspec can open."""
    offset: Annotated[int, Meta(ge=0, lt=2**62)] = 0
    """First byte of the item in the file."""
    size: Annotated[int, Meta(ge=1, lt=2**40)] | None = None
    """Bytes of the item; None stands for all bytes up to the end of the file."""
    crc32c: Annotated[int, Meta(ge=0, lt=2**32)] | None = None
    """CRC32C of these bytes; None if they are not checked."""

    def encode(self) -> bytes:
        """Return the reference as JSON."""
        return msgspec.json.encode(self)


def reference_of(given: Any) -> Reference:
    """Return a reference that a program gives: a ``Reference``, a dict with its attributes, or its uri alone.

    Raises ValueError for anything else.
    """
    if isinstance(given, Reference):
        return msgspec.convert(msgspec.to_builtins(given), Reference)  # the constructor does not check
    try:
        return msgspec.convert({"uri": given} if isinstance(given, str) else given, Reference)
    except msgspec.ValidationError as error:
        raise ValueError(f"got a reference that is not valid: {error}") from None


def decode_reference(data: bytes) -> Reference:
    """Return the reference that ``encode`` has made. Raises ValueError for other bytes."""
    try:
        return msgspec.json.decode(data, type=Reference)
    except msgspec.MsgspecError as error:
        raise ValueError(f"got a reference that is not valid: {error}") from None
