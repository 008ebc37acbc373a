"""Messages to frames and back. Sizes and checksums are verified before a message is decoded.

Frame 0 is a fixed header of 56 bytes, little-endian::

    magic "SPK1"  u8 version  u8 type  u16 frames of payload
    u64 run       u64 broker epoch     u64 fence (session or attempt)
    u32 meta bytes  u32 crc32c of meta and payload  u64 payload bytes  u32 0  u32 crc32c of the header before it

Frame 1 is the message as a msgpack map of its field names; the frames after it are raw arrays, the payload. Lengths and
checksums are compared first. Then the map is decoded straight into its type, which bounds nesting and rejects wrong
types. Unknown names are ignored, so that a later version may add some. A checksum is needed since 78 % of single-bit
flips in a msgpack map decode to another valid value. It is CRC32C (Castagnoli; RFC 3720, appendix B.4), which
processors compute. Any msgpack library can read and write messages; nothing is ever pickled.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import msgspec

from streampack.core.model.fields import MAX_FIELDS
from streampack.core.protocol.message import SHARED_MESSAGES, Envelope, Message
from streampack.core.protocol.producer_messages import PRODUCER_MESSAGES
from streampack.core.protocol.relay_messages import RELAY_MESSAGES
from streampack.core.protocol.result_messages import RESULT_MESSAGES
from streampack.core.protocol.standby_messages import STANDBY_MESSAGES
from streampack.core.protocol.trainer_messages import TRAINER_MESSAGES
from streampack.errors import WireError
from streampack.wire.checksums import crc32c

MAGIC = b"SPK1"
VERSION = 1
"""Every version has the same header, and ``Reject`` as message 14, so that a peer of another version gets a reason."""
ALL_MESSAGES = (
    *SHARED_MESSAGES, *PRODUCER_MESSAGES, *TRAINER_MESSAGES, *RESULT_MESSAGES, *RELAY_MESSAGES, *STANDBY_MESSAGES,
)  # fmt: skip
MAX_PAYLOAD_FRAMES = 2 + MAX_FIELDS
MAX_META_BYTES = 64 << 20
MAX_PAYLOAD_BYTES = 1 << 30
MAX_FENCE = 1 << 62
"""Fences and epochs are below this, so that the next higher number fits the header."""

_HEADER = struct.Struct("<4sBBHQQQIIQI")
_CRC = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _CRC.size

_encoder = msgspec.msgpack.Encoder()
_decoders = {kind.TYPE: msgspec.msgpack.Decoder(kind) for kind in ALL_MESSAGES}


class OtherVersion(WireError):
    """A message of another protocol version, ``version``."""

    def __init__(self, version: int) -> None:
        super().__init__(
            f"got protocol version {version}, expected {VERSION}. Install the same version of streampack everywhere"
        )
        self.version = version


def checksum(frames: Sequence[Any]) -> int:
    """Return the CRC32C of the concatenated frames."""
    value = 0
    for frame in frames:
        value = crc32c(frame, value)
    return value


def encode(envelope: Envelope, version: int | None = None) -> list[Any]:
    """Return the frames of a message: header, meta, then the payload frames, which are not copied.

    ``version`` is the protocol version of the receiver, if it differs from this process's version. Raises WireError for
    more payload frames than tokens, edges and all fields that may be declared.
    """
    payload = envelope.payload
    if len(payload) > MAX_PAYLOAD_FRAMES:
        raise WireError(f"got {len(payload)} payload frames, expected at most {MAX_PAYLOAD_FRAMES}")
    meta, num_bytes = _encoder.encode(envelope.message), sum(memoryview(frame).nbytes for frame in payload)
    if envelope.payload_crc is None:
        crc = checksum([meta, *payload])
    else:
        from streampack.wire.crc_kernels import joined  # imports numba; payload_crc comes from there

        crc = joined(crc32c(meta), envelope.payload_crc, num_bytes)
    head = _HEADER.pack(
        MAGIC, VERSION if version is None else version, envelope.message.TYPE, len(payload), envelope.run,
        envelope.epoch, envelope.fence, len(meta), crc, num_bytes, 0,
    )  # fmt: skip
    return [head + _CRC.pack(crc32c(head)), meta, *payload]


def decode(frames: Sequence[Any]) -> Envelope:
    """Return the message in ``frames``; its payload is memoryviews that share the frames' memory.

    Raises WireError, with the reason, unless the frames are a whole, undamaged message of this version.
    """
    if not 2 <= len(frames) <= 2 + MAX_PAYLOAD_FRAMES:
        raise WireError(f"got {len(frames)} frames, expected 2 to {2 + MAX_PAYLOAD_FRAMES}")
    header = bytes(_flat(frames[0])[: HEADER_BYTES + 1])
    meta: bytes | memoryview = _flat(frames[1])
    payload = tuple(_flat(frame) for frame in frames[2:])
    if len(header) != HEADER_BYTES or header[:4] != MAGIC:
        raise WireError(
            f"got {len(_flat(frames[0]))} bytes that are not a header of streampack, expected a header of "
            f"{HEADER_BYTES} bytes"
        )
    if _CRC.unpack(header[_HEADER.size :])[0] != crc32c(header[: _HEADER.size]):
        raise WireError("got a damaged header (crc32c differs)")
    if header[4] != VERSION:
        raise OtherVersion(header[4])
    _, _, kind, num_frames, run, epoch, fence, meta_bytes, crc, payload_bytes, _ = _HEADER.unpack(
        header[: _HEADER.size]
    )
    sizes = (num_frames, meta_bytes, payload_bytes)
    received = (len(payload), len(meta), sum(len(frame) for frame in payload))
    if sizes != received:
        raise WireError(
            f"got (payload frames, metadata bytes, payload bytes) = {received}, expected {sizes} as in the header"
        )
    if meta_bytes > MAX_META_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
        raise WireError(
            f"got {meta_bytes} bytes of metadata and {payload_bytes} bytes of payload, expected at most "
            f"{MAX_META_BYTES} and {MAX_PAYLOAD_BYTES} bytes"
        )
    if max(epoch, fence) >= MAX_FENCE:
        raise WireError(f"got epoch {epoch} and fence {fence}, expected numbers below {MAX_FENCE}")
    if isinstance(frames[1], memoryview):  # in shared memory, to which the sender may still write
        meta = bytes(meta)
    if checksum([meta, *payload]) != crc:
        raise WireError("got a damaged message (crc32c differs)")
    return Envelope(run=run, epoch=epoch, fence=fence, message=_decode(kind, meta), payload=payload)


def _flat(frame: Any) -> memoryview:
    """Return the bytes of a frame; empty for an array without elements, which cannot be cast."""
    view = memoryview(frame)
    return view.cast("B") if view.nbytes else memoryview(b"")


def _decode(kind: int, meta: bytes | memoryview) -> Message:
    """Return the message of type ``kind`` in ``meta``. Raises WireError if it does not decode."""
    decoder = _decoders.get(kind)
    if decoder is None:
        raise WireError(f"got message type {kind}, expected one of {sorted(_decoders)}")
    try:
        return decoder.decode(meta)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise WireError(f"got a message of type {kind} that cannot be decoded: {error}") from None
