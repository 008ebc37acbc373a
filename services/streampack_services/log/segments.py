"""The log's files: what their bytes mean, and what is left of them after a crash.

A log is a folder of segments, each named by the number (lsn) of its first record, ``%020d.log``; they follow each
other without a gap. A segment is preallocated with zeros. It begins with its head, twice, each alone in a page of
4096 bytes; records follow from byte 8192 on, one after another, up to the first zeros. All numbers little-endian:

    head    8 bytes "spacklog"  u32 version (1)  u32 sealed  u64 lsn of the first record  u64 synced
            u32 crc32c of the head before it
    record  u32 bytes of body  u32 crc32c  u64 lsn  u8 kind  body
            the crc32c is that of the record without its crc: of a length that was damaged, too

``synced`` is a promise: all bytes of this file below it had been fsynced before this head was written. Each sync is
followed by writing the older one of the two heads anew; so one of them is whole whenever power goes, and a flipped bit
in one takes nothing away: the other promises less, but the records that both speak of are there. ``sealed`` is 1 once
the next segment has its name. A file gets its name when it is preallocated, its heads are synced, and all records of
the segments before it are: so in all segments but the last everything was synced.

What ``recover`` finds bad and does about it:

- in the last segment, at or after ``synced``: the tail of a write that power or a kill cut off. Sectors reach the disk
  in any order, so whole records may lie behind the bad one: nobody was told that they are safe. All bytes from the
  first bad one on are overwritten with zeros, or they might come back as records when the log has grown up to them;
- anything else: a record that was synced, both heads, a segment that is missing. LogDamaged, naming file and offset.

Zeros where a record could be are the end (the crc32c of zeros is not zero). Files are read in pieces, never mapped: a
file that is cut short under a map kills the reader (SIGBUS).
"""

from __future__ import annotations

import logging
import os
import re
import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from streampack.errors import LogDamaged
from streampack.wire.checksums import crc32c

MAGIC = b"spacklog"
VERSION = 1
PAGE = 4096
START = 2 * PAGE
"""Where records begin."""
MAX_BODY = 1 << 30
_HEAD = struct.Struct("<8sIIQQ")
_CRC = struct.Struct("<I")
RECORD = struct.Struct("<IIQB")
_PIECE = 1 << 20
_NAME = re.compile(r"(\d{20})\.log")
log = logging.getLogger("streampack.log")


@dataclass(slots=True)
class Segment:
    """A file of the log; ``offsets`` are the bytes at which its records begin, ``end`` where the next one will."""

    path: Path
    first_lsn: int
    capacity: int
    offsets: array[int] = field(default_factory=lambda: array("q"))
    end: int = START
    synced: int = START
    sealed: bool = False
    head: int = 0
    """Which of the two heads counts: 0 or 1."""

    @property
    def next_lsn(self) -> int:
        return self.first_lsn + len(self.offsets)

    def offset(self, lsn: int) -> int:
        """The byte at which record ``lsn`` begins, or will, if it is the next."""
        return self.offsets[lsn - self.first_lsn] if lsn < self.next_lsn else self.end


def segment_path(folder: Path, first_lsn: int) -> Path:
    return folder / f"{first_lsn:020d}.log"


def encode_head(first_lsn: int, synced: int, sealed: bool) -> bytes:
    """One head, without the rest of its page."""
    head = _HEAD.pack(MAGIC, VERSION, sealed, first_lsn, synced)
    return head + _CRC.pack(crc32c(head))


def write_head(fd: int, segment: Segment, synced: int, *, sealed: bool = False) -> None:
    """Replace the older head; ``synced`` bytes must have been synced before."""
    segment.head = 1 - segment.head
    write_at(fd, [encode_head(segment.first_lsn, synced, sealed)], segment.head * PAGE)
    segment.synced, segment.sealed = synced, sealed


def write_at(fd: int, buffers: Sequence[bytes | bytearray | memoryview], at: int) -> None:
    """Write all of ``buffers`` from byte ``at`` on; they may be written again after an error. Raises OSError."""
    done = os.pwritev(fd, buffers, at)
    for buffer in buffers:
        while done < len(buffer):
            done += os.pwrite(fd, memoryview(buffer)[done:], at + done)
        at += len(buffer)
        done -= len(buffer)


def seal_record(head: bytearray, views: list[memoryview]) -> None:
    """Put the crc32c into a record's first 17 bytes; ``views`` are its body."""
    crc = crc32c(memoryview(head)[8:], crc32c(memoryview(head)[:4]))
    for view in views:
        crc = crc32c(view, crc)
    _CRC.pack_into(head, 4, crc)


def walk(fd: int, at: int, end: int, lsn: int) -> Iterator[tuple[int, int, memoryview]]:
    """(offset, kind, body) of the records in bytes ``at`` to ``end``, from number ``lsn`` on; up to one that is bad.

    A body shares memory with up to 1 MiB around it: whoever keeps it copies it.
    """
    piece, base = b"", at
    while at + RECORD.size <= end:
        if at + RECORD.size > base + len(piece):
            piece, base = os.pread(fd, min(_PIECE, end - at), at), at
            if len(piece) < RECORD.size:
                return
        length, crc, number, kind = RECORD.unpack_from(piece, at - base)
        size = RECORD.size + length
        if number != lsn or at + size > end:  # of a damaged length nothing is read
            return
        if at + size > base + len(piece):
            piece, base = os.pread(fd, min(max(_PIECE, size), end - at), at), at
            if len(piece) < size:
                return
        record = memoryview(piece)[at - base : at - base + size]
        if crc32c(record[8:], crc32c(record[:4])) != crc:
            return
        yield at, kind, record[RECORD.size :]
        at, lsn = at + size, lsn + 1


def damaged(path: Path, at: int, got: str, expected: str) -> LogDamaged:
    return LogDamaged(
        f"{path}: byte {at}: got {got}, expected {expected}: restore the log's folder from a copy, or start with an "
        f"empty one, from a checkpoint"
    )


def recover(folder: Path) -> list[Segment]:
    """All segments of ``folder``, each record checked, and the unsynced tail overwritten where it is bad.

    Raises LogDamaged for whatever else is not as it was written; then nothing has been changed.
    """
    segments: list[Segment] = []
    for first_lsn, path in segment_files(folder):
        if segments and segments[-1].next_lsn != first_lsn:
            raise _gap(segments[-1], first_lsn)
        segments.append(_read(path, first_lsn))
    if segments:
        last = segments[-1]
        if last.sealed:
            raise _gap(last, None)
        if last.end < last.synced:
            raise _lost(last)
        _cut_tail(last)
    return segments


def segment_files(folder: Path) -> list[tuple[int, Path]]:
    """(first lsn, file) of each segment, in their order."""
    return sorted((int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name)))


def read_segment(path: Path, first_lsn: int, next_first_lsn: int | None) -> Segment:
    """One segment while another process may write it: what follows its last good record, if it is the last, is not
    there yet. Raises FileNotFoundError, LogDamaged as ``recover`` does; changes nothing.
    """
    segment = _read(path, first_lsn)
    if segment.end < segment.synced:
        raise _lost(segment)
    if next_first_lsn not in (None, segment.next_lsn):
        raise _gap(segment, next_first_lsn)
    return segment


def copy_records(folder: Path, into: Path, upto: int) -> None:
    """Make in folder ``into`` a log of the records of ``folder`` below ``upto``, which another process may be writing.

    Whole segments are links, so that nothing is written to them and no time is lost; of the one in which the records
    end, those wanted are copied. Raises FileNotFoundError where a segment is cut meanwhile, LogDamaged.
    """
    files = [(first_lsn, path) for first_lsn, path in segment_files(folder) if first_lsn < upto]
    for _, path in files[:-1]:
        try:
            os.link(path, into / path.name)
        except OSError:  # on another file system, or of another user
            path.stat()
            (into / path.name).symlink_to(path.absolute())
    first_lsn, path = files[-1]
    segment = read_segment(path, first_lsn, None)
    head = encode_head(first_lsn, START, False).ljust(PAGE, b"\0")
    left = segment.offset(min(upto, segment.next_lsn)) - START
    with path.open("rb") as source, (into / path.name).open("wb") as target:
        target.write(head * 2)
        source.seek(START)
        while left > 0 and (piece := source.read(min(_PIECE, left))):
            left -= target.write(piece)


def _read(path: Path, first_lsn: int) -> Segment:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        segment = Segment(path, first_lsn, os.fstat(fd).st_size)
        if segment.capacity < START:  # it may be the newer head that is gone, and what it promised
            raise damaged(path, segment.capacity, "the end of the file", f"two heads, of {START} bytes")
        heads = [(*found, at) for at in (0, 1) if (found := _decode_head(os.pread(fd, PAGE, at * PAGE), first_lsn))]
        if not heads:
            raise _no_head(path, os.pread(fd, _HEAD.size, 0), first_lsn)
        segment.synced, segment.sealed, segment.head = max(heads)
        for at, _, body in walk(fd, START, segment.capacity, first_lsn):
            segment.offsets.append(at)
            segment.end = at + RECORD.size + len(body)
        return segment
    finally:
        os.close(fd)


def _decode_head(page: bytes, first_lsn: int) -> tuple[int, bool] | None:
    """(synced, sealed) of a good head."""
    head = page[: _HEAD.size + _CRC.size]
    _, _, sealed, _, synced = _HEAD.unpack_from(head)
    return (synced, bool(sealed)) if head == encode_head(first_lsn, synced, bool(sealed)) else None


def _no_head(path: Path, head: bytes, first_lsn: int) -> LogDamaged:
    magic, version, _, lsn, _ = _HEAD.unpack(head)
    if magic == MAGIC and version != VERSION:
        return damaged(path, 8, f"format version {version}", f"{VERSION}, that this streampack writes")
    if magic == MAGIC and lsn != first_lsn:
        return damaged(path, 16, f"a segment that begins with record {lsn}", f"{first_lsn}, as its name says")
    return damaged(path, 0, "neither of two heads whole", "a segment of a log")


def _gap(segment: Segment, first_lsn: int | None) -> LogDamaged:
    """What is missing between ``segment`` and the next file, or where one should be."""
    if segment.end < segment.synced:
        return _lost(segment)
    path = segment_path(segment.path.parent, segment.next_lsn)
    if first_lsn is not None and not segment.sealed:  # both may be: its tail, or a file behind it
        return damaged(segment.path, segment.end, f"no record {segment.next_lsn}", f"it here or in {path.name}")
    return damaged(path, 0, "no such file", "the segment that follows")


def _lost(segment: Segment) -> LogDamaged:
    what = f"bytes that are not record {segment.next_lsn}"
    return damaged(segment.path, segment.end, what, f"it: all bytes below {segment.synced} were synced")


def _cut_tail(segment: Segment) -> None:
    """Overwrite with zeros what is not zero behind the last good record; the caller syncs."""
    fd = os.open(segment.path, os.O_RDWR | os.O_CLOEXEC)
    try:
        zeros, cut = bytes(_PIECE), 0
        for at in range(segment.end, segment.capacity, _PIECE):
            piece = os.pread(fd, min(_PIECE, segment.capacity - at), at)
            if piece != zeros[: len(piece)]:
                write_at(fd, [zeros[: len(piece)]], at)
                cut = at + len(piece.rstrip(b"\0")) - segment.end
    finally:
        os.close(fd)
    if cut:
        text = "%s: byte %d: cut %d bytes that were being written, and not yet synced, when the last writer ended"
        log.warning(text, segment.path, segment.end, cut)
