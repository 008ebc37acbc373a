"""References to media: where the bytes of an image are, so that they need not pass through the broker.

Bytes that are in no file of their own, such as those in a column of a table, travel in the reference. Its uri is then a
``data:`` URL in base64 (RFC 2397), a third larger than the bytes. Such references have no limit of their own: a
sample's media fit one chunk.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

MAX_URI = 8192
"""Most characters of a path or URL, except a ``data:`` URL."""
_DATA, _BASE64 = "data:", ";base64"


class Reference(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Where the bytes of a media item are. The trainer's client fetches, checks and decodes them.

    Example:
        >>> Reference("s3://data/images-00.tar", offset=1536, size=81_920, crc32c=0x1E3D5F70).uri
        's3://data/images-00.tar'
        >>> Reference("a.png").encode()
        b'{"uri":"a.png"}'
    """

    uri: Annotated[str, Meta(min_length=1)]
    """A path, a URL that fsspec can open, or a ``data:`` URL that holds the bytes in base64."""
    offset: Annotated[int, Meta(ge=0, lt=2**62)] = 0
    """First byte of the item in the file."""
    size: Annotated[int, Meta(ge=1, lt=2**40)] | None = None
    """Bytes of the item; None stands for all bytes up to the end of the file."""
    crc32c: Annotated[int, Meta(ge=0, lt=2**32)] | None = None
    """CRC32C of these bytes; None if they are not checked."""

    def __post_init__(self) -> None:
        if len(self.uri) > MAX_URI and not self.is_inline:
            raise ValueError(f"got a uri of {len(self.uri)} characters, expected at most {MAX_URI}")

    @property
    def is_inline(self) -> bool:
        """True if the uri holds the bytes themselves."""
        return self.uri.startswith(_DATA)

    @property
    def shown(self) -> str:
        """The uri for messages: without the query of a URL, which may hold a secret, and without inline bytes."""
        return self.uri.partition(",")[0] if self.is_inline else self.uri.partition("?")[0]

    def encode(self) -> bytes:
        """Return the reference as JSON."""
        return msgspec.json.encode(self)


def reference_of(value: Any) -> Reference:
    """Return a reference that a program gives.

    Args:
        value: A ``Reference``, a dict with its attributes, its uri alone, or the bytes of the item. Or a dict with the
            keys ``bytes`` and ``path``, as Hugging Face datasets store images: the bytes count, else the path.

    Raises:
        ValueError: It is anything else.
    """
    if isinstance(value, Mapping) and value and value.keys() <= {"bytes", "path"}:
        if value.get("bytes") is not None:
            return _inline(value["bytes"])
        value = {"uri": value.get("path")}
    if isinstance(value, bytes | bytearray | memoryview):
        return _inline(value)
    if isinstance(value, Reference):
        return msgspec.convert(msgspec.to_builtins(value), Reference)  # the constructor does not check
    try:
        return msgspec.convert({"uri": value} if isinstance(value, str) else value, Reference)
    except msgspec.ValidationError as error:
        raise ValueError(f"got a reference that is not valid: {error}") from None


def _inline(data: Any) -> Reference:
    """Return a reference that holds the bytes of an item. Raises ValueError if ``data`` has none, or is not bytes."""
    if not isinstance(data, bytes | bytearray | memoryview) or not len(data):
        raise ValueError(f"got a {type(data).__name__} without bytes, expected the bytes of an item")
    return Reference(f"{_DATA}{_BASE64},{base64.b64encode(data).decode()}")


def inline_bytes(reference: Reference) -> bytes:
    """Return the bytes that the uri of an inline reference holds. Raises ValueError for another URL."""
    head, comma, body = reference.uri.partition(",")
    if not comma or not head.endswith(_BASE64):
        raise ValueError(f"got the URL {head[:80]}, expected data:;base64, and the bytes of the item in base64")
    try:
        return base64.b64decode(body, validate=True)
    except ValueError as error:
        raise ValueError(
            f"got the URL {head[:80]} with wrong base64 ({error}), expected the bytes of the item"
        ) from None


def decode_reference(data: bytes) -> Reference:
    """Return the reference that ``encode`` has made. Raises ValueError for other bytes."""
    try:
        return msgspec.json.decode(data, type=Reference)
    except msgspec.MsgspecError as error:
        raise ValueError(f"got a reference that is not valid: {error}") from None
