"""Encoding and decoding of log records and snapshots."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Any

import msgspec

from streampack.core.journal.log_records import ALL_RECORDS, Record
from streampack.core.model.snapshot import Snapshot
from streampack.errors import WireError
from streampack.wire.frames import MAX_META_BYTES

_record_encoder = msgspec.msgpack.Encoder()
_record_decoders = {kind.TYPE: msgspec.msgpack.Decoder(kind) for kind in ALL_RECORDS}
_snapshot_decoder = msgspec.msgpack.Decoder(Snapshot)
_SIZES = struct.Struct("<IH")


def encode_record(record: Record, payload: Sequence[Any] = ()) -> list[Any]:
    """Return a record of the log as buffers: sizes, the record as msgpack (meta), the frames of the payload.

    The sizes are u32 bytes of meta, u16 number of frames, u64 bytes of each frame; little-endian.
    """
    meta = _record_encoder.encode(record)
    sizes = b"".join(memoryview(frame).nbytes.to_bytes(8, "little") for frame in payload)
    return [_SIZES.pack(len(meta), len(payload)) + sizes, meta, *payload]


def decode_record(kind: int, body: Any) -> tuple[Record, tuple[memoryview, ...]]:
    """Return the record of type ``kind`` in ``body``, and its payload, which shares the body's memory.

    Raises WireError unless the body is a whole record of this version.
    """
    view = memoryview(body).cast("B")
    decoder = _record_decoders.get(kind)
    if decoder is None:
        raise WireError(f"got a record of type {kind}, expected one of {sorted(_record_decoders)}")
    try:
        meta_bytes, count = _SIZES.unpack_from(view)
        sizes = struct.unpack_from(f"<{count}Q", view, _SIZES.size)
        at = _SIZES.size + 8 * count
        record = decoder.decode(view[at : at + meta_bytes])
    except (struct.error, msgspec.DecodeError, RecursionError, ValueError) as error:
        raise WireError(f"got a record of type {kind} that cannot be decoded: {error}") from None
    at += meta_bytes
    frames = []
    for size in sizes:
        frames.append(view[at : at + size])
        at += size
    if at != len(view):
        raise WireError(f"got a record of {len(view)} bytes, expected {at}")
    return record, tuple(frames)


def encode_snapshot(snapshot: Any) -> bytes:
    """Return a snapshot as compressed bytes, for a trainer's checkpoint."""
    return zlib.compress(_record_encoder.encode(snapshot), 6)


def decode_snapshot(data: bytes) -> Snapshot:
    """Return the snapshot in ``data``, which ``encode_snapshot`` made. Raises WireError if it does not decode."""
    try:
        inflate = zlib.decompressobj()
        plain = inflate.decompress(data, MAX_META_BYTES)
        return _snapshot_decoder.decode(plain)
    except (zlib.error, msgspec.DecodeError, RecursionError, ValueError) as error:
        raise WireError(f"got a snapshot that cannot be decoded: {error}") from None
