"""Bundles: messages of several readers in one message between a relay and the broker.

A bundle saves a send and a receive for each message. It has two frames, little-endian::

    "SPB1"  u16 count
    count * (u16 bytes of the reader's name  u32 bytes of the message  name  message)

A message is its header and its meta, as in ``frames``, with their own checksums. Messages with payload are sent alone.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from streampack.core.protocol.message import Envelope
from streampack.errors import WireError
from streampack.wire import frames as wire

MAGIC = b"SPB1"
MOST_NAME_BYTES = 800
FULL_BYTES, FULL_MESSAGES = 256 << 10, 256
"""Size of a bundle to which no further message is added. A bundle with more messages is rejected unread."""
_HEAD = struct.Struct("<4sH")
_ITEM = struct.Struct("<HI")


def encode_bundles(items: Iterable[tuple[str, Envelope]]) -> Iterator[list[bytes]]:
    """Yield bundles of messages in their order; a new bundle begins after ``FULL_BYTES`` or ``FULL_MESSAGES``."""
    parts: list[bytes] = []
    size = count = 0
    for reader, envelope in items:
        item = _item(reader, envelope)
        parts += item
        size += sum(map(len, item))
        count += 1
        if size >= FULL_BYTES or count >= FULL_MESSAGES:
            yield [_HEAD.pack(MAGIC, count), b"".join(parts)]
            parts, size, count = [], 0, 0
    if count:
        yield [_HEAD.pack(MAGIC, count), b"".join(parts)]


def _item(reader: str, envelope: Envelope) -> list[bytes]:
    """Return the bytes of one message of a bundle."""
    header, meta = wire.encode(envelope)
    name = reader.encode()
    return [_ITEM.pack(len(name), len(header) + len(meta)), name, header, meta]


def is_bundle(frames: Sequence[Any]) -> bool:
    """Return whether the frames of a received message are a bundle."""
    return len(frames) == 2 and memoryview(frames[0]).nbytes == _HEAD.size and bytes(frames[0])[:4] == MAGIC


def num_messages(frames: Sequence[Any]) -> int:
    """Return the number of messages that the frames of a received message say they hold: 1 unless they are a bundle."""
    return int(_HEAD.unpack(bytes(frames[0]))[1]) if is_bundle(frames) else 1


def encode_bundle(items: Iterable[tuple[str, Envelope]]) -> list[bytes]:
    """Return the frames of a bundle of messages without payload, each with the name of its reader.

    >>> from streampack.core.protocol.message import Who
    >>> who = Envelope(run=1, epoch=2, fence=3, message=Who())
    >>> decode_bundle(encode_bundle([("rank 0", who)])) == [("rank 0", who)]
    True
    """
    encoded = [_item(reader, envelope) for reader, envelope in items]
    return [_HEAD.pack(MAGIC, len(encoded)), b"".join(part for item in encoded for part in item)]


def decode_bundle(frames: Sequence[Any]) -> list[tuple[str, Envelope]]:
    """Return (name of the reader, message) of each message of a bundle.

    Raises WireError unless the frames are a whole, undamaged bundle.
    """
    _, count = _HEAD.unpack(bytes(frames[0]))
    body, at = bytes(frames[1]), 0
    if count > FULL_MESSAGES:
        raise WireError(f"got a bundle of {count} messages, expected at most {FULL_MESSAGES}")
    messages = []
    for _ in range(count):
        if at + _ITEM.size > len(body):
            raise WireError(f"got a bundle of {len(body)} bytes, expected {count} messages")
        name_bytes, size = _ITEM.unpack_from(body, at)
        at += _ITEM.size
        name, message = body[at : at + name_bytes], body[at + name_bytes : at + name_bytes + size]
        at += name_bytes + size
        if at > len(body) or not 0 < name_bytes <= MOST_NAME_BYTES or b"\0" in name or not name.isascii():
            raise WireError("got a bundle with a message that is cut off, or with a reader's name that is not ASCII")
        messages.append((name.decode(), wire.decode([message[: wire.HEADER_BYTES], message[wire.HEADER_BYTES :]])))
    if at != len(body):
        raise WireError(f"got a bundle with {len(body) - at} bytes after its last message")
    return messages
