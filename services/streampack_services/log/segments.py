"""The log's files: their format, and their recovery after a crash.

A log is a folder of segments, each named by the number (lsn) of its first record, ``%020d.log``, without gaps between
them. A segment is preallocated with zeros. It begins with two heads, each in a page of 4096 bytes. Records follow from
byte 8192 on, one after another, up to the first zeros. All numbers are little-endian:

    head    8 bytes "spacklog"  u32 version (1)  u32 sealed  u64 lsn of the first record  u64 synced
            u32 crc32c of the head before it
    record  u32 bytes of body  u32 crc32c  u64 lsn  u8 kind  body
            the crc32c covers the record without its crc, so also its length

``synced`` says that all bytes of the file below this number had been synced before the head was written. After each
sync the older one of the two heads is overwritten. So one head is whole even if power fails during the write. If a head
is damaged, the other one has a smaller ``synced``, but no record is lost. ``sealed`` is 1 once the next segment has its
name. A file gets its name when its heads and all records of earlier segments are synced. So all segments but the last
are synced completely.

``recover`` handles two kinds of damage:

- Bad bytes in the last segment at or after ``synced`` are the rest of a write that a power cut or kill interrupted.
  Sectors reach the disk in any order, so whole records may follow, but no one was told that they are safe. All bytes
  from the first bad one on are overwritten with zeros, since they could be taken for records later.
- All other damage raises LogDamaged with file and offset: a bad record that was synced, two bad heads, or a missing
  segment.

The empty file ``%020d.cut`` says that records below this number may have been deleted. ``mark_begin`` writes it when a
log begins, and moves it before a segment is deleted. So ``check_begin`` finds out if the first segments are missing.

Zeros in place of a record are the end of the log (the crc32c of zeros is not zero). Files are read in pieces and not
mapped, because a reader of a map is killed (SIGBUS) if the file is truncated.
"""

from __future__ import annotations

import logging
import os
import re
import struct
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from streampack.errors import LogDamaged
from streampack.wire.checksums import crc32c
from streampack_services.descriptors import open_file

MAGIC = b"spacklog"
VERSION = 1
PAGE = 4096
START = 2 * PAGE
"""Byte at which records begin."""
MAX_BODY = 1 << 30
"""Bytes of the longest body of a record."""
_HEAD = struct.Struct("<8sIIQQ")
_CRC = struct.Struct("<I")
RECORD = struct.Struct("<IIQB")
_PIECE = 1 << 20
_NAME = re.compile(r"(\d{20})\.log")
_MARK = re.compile(r"(\d{20})\.cut")
Mark = tuple[int, Path]
"""The number of the first record that must be there, and the file that says so."""
log = logging.getLogger("streampack.log")


@dataclass(slots=True)
class Segment:
    """A file of the log.

    ``capacity``: bytes of the file. ``offsets``: bytes at which its records begin. ``end``: byte where the next record
    will begin. ``synced``: all bytes below it are synced.
    """

    path: Path
    first_lsn: int
    capacity: int
    offsets: array[int] = field(default_factory=lambda: array("q"))
    end: int = START
    synced: int = START
    sealed: bool = False
    head: int = 0
    """Index of the head that was written last: 0 or 1."""

    @property
    def next_lsn(self) -> int:
        """Number of the record after the last one in this segment."""
        return self.first_lsn + len(self.offsets)

    def offset(self, lsn: int) -> int:
        """Return the byte at which record ``lsn`` begins; for the next record, the end of the last one."""
        return self.offsets[lsn - self.first_lsn] if lsn < self.next_lsn else self.end


def segment_path(folder: Path, first_lsn: int) -> Path:
    """Return the path of the segment whose first record has number ``first_lsn``."""
    return folder / f"{first_lsn:020d}.log"


def encode_head(first_lsn: int, synced: int, sealed: bool) -> bytes:
    """Return the bytes of a head, without the rest of its page."""
    head = _HEAD.pack(MAGIC, VERSION, sealed, first_lsn, synced)
    return head + _CRC.pack(crc32c(head))


def write_head(fd: int, segment: Segment, synced: int, *, sealed: bool = False) -> None:
    """Overwrite the older head; the first ``synced`` bytes of the file must be synced already."""
    segment.head = 1 - segment.head
    write_at(fd, [encode_head(segment.first_lsn, synced, sealed)], segment.head * PAGE)
    segment.synced, segment.sealed = synced, sealed


def write_at(fd: int, buffers: Sequence[bytes | bytearray | memoryview], at: int) -> None:
    """Write all ``buffers`` from byte ``at`` on. Raises OSError; the call may then be repeated."""
    done = os.pwritev(fd, buffers, at)
    for buffer in buffers:
        while done < len(buffer):
            done += os.pwrite(fd, memoryview(buffer)[done:], at + done)
        at += len(buffer)
        done -= len(buffer)


def seal_record(head: bytearray, views: list[memoryview]) -> None:
    """Put the crc32c into the ``head`` of a record, its first 17 bytes; ``views`` are its body."""
    crc = crc32c(memoryview(head)[8:], crc32c(memoryview(head)[:4]))
    for view in views:
        crc = crc32c(view, crc)
    _CRC.pack_into(head, 4, crc)


def walk(fd: int, at: int, end: int, lsn: int) -> Iterator[tuple[int, int, memoryview]]:
    """Yield (offset, kind, body) of the records in bytes ``at`` to ``end``, from number ``lsn`` on; stop at a bad one.

    A body shares memory with up to 1 MiB around it, so copy it to store it.
    """
    piece, base = b"", at
    while at + RECORD.size <= end:
        if at + RECORD.size > base + len(piece):
            piece, base = os.pread(fd, min(_PIECE, end - at), at), at
            if len(piece) < RECORD.size:
                return
        length, crc, number, kind = RECORD.unpack_from(piece, at - base)
        size = RECORD.size + length
        if number != lsn or at + size > end:  # do not read a damaged length
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
    """Return the error for damage at byte ``at`` of a segment, to be raised by the caller."""
    return LogDamaged(
        f"{path}: byte {at}: got {got}, expected {expected}. Restore the log's folder from a copy, or start with an "
        f"empty folder from a checkpoint."
    )


def recover(folder: Path) -> list[Segment]:
    """Read and check all segments of ``folder``; overwrite a bad unsynced tail of the last one with zeros.

    Raises LogDamaged for any other damage, and then changes nothing.
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
    """Return (first lsn, file) of each segment in ``folder``, in order."""
    return sorted((int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name)))


def check_begin(folder: Path, segments: Sequence[Segment], indexed_upto: Callable[[], int]) -> None:
    """Raise LogDamaged if the first segments are missing although no broker deleted them.

    ``indexed_upto``: called for a log without a mark, as streampack 0.1.0 left it; returns the number of the first
    record that the ledger lacks. A broker deletes no record that the ledger lacks.
    """
    mark = latest_mark(folder)
    if not segments and mark is not None:
        expected = "the segments of a log, because the folder has a mark of one"
        raise damaged(segment_path(folder, mark[0]), 0, "no such file", expected)
    if mark is None and len(segments) == 1 and not segments[0].offsets:
        return  # the process ended before it made the mark, and so before the first record
    first = segments[0].first_lsn if segments else 0
    if first <= (mark[0] if mark is not None else indexed_upto() if first else 0):
        return
    begin = mark[0] if mark is not None else 0
    expected = f"the first segment of the log, with records {begin} to {first - 1}, which no broker has deleted"
    if mark is None:
        expected += (
            f". If streampack 0.1.0 has deleted them, make an empty file {folder / f'{first:020d}.cut'}. With it, you "
            f"accept the loss of all records before record {first}"
        )
    raise damaged(segment_path(folder, begin), 0, "no such file", expected)


def mark_begin(folder: Path, lsn: int, mark: Mark | None) -> Mark:
    """Note that records below ``lsn`` may be missing, unless a later number is noted; the caller must sync the folder.

    ``mark``: the latest one. It gets the new name, since a full disk may have no room for another file, and connections
    may take every descriptor. Return the mark that is now the latest. Raises OSError.
    """
    if mark is not None and mark[0] >= lsn:
        return mark
    path = folder / f"{lsn:020d}.cut"
    if mark is None:
        os.close(open_file(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
    else:
        mark[1].rename(path)
    return lsn, path


def delete_log(folder: Path) -> None:
    """Delete the segments and the mark of a log that is of no use, so that a crash leaves a log. Raises OSError."""
    files = segment_files(folder)
    if files:
        mark_begin(folder, files[-1][0], latest_mark(folder))
    for _, path in files:
        path.unlink()
    if (mark := latest_mark(folder)) is not None:
        mark[1].unlink()


def latest_mark(folder: Path) -> Mark | None:
    """Return the latest mark in ``folder``; None without one."""
    matches = ((_MARK.fullmatch(path.name), path) for path in folder.iterdir())
    return max(((int(match[1]), path) for match, path in matches if match), default=None)


def read_segment(path: Path, first_lsn: int, next_first_lsn: int | None) -> Segment:
    """Read and check one segment, which another process may be writing; change nothing.

    ``next_first_lsn``: number of the next segment's first record; None for the last segment, whose bytes after the last
    good record count as not written yet. Raises FileNotFoundError, LogDamaged as ``recover`` does.
    """
    segment = _read(path, first_lsn)
    if segment.end < segment.synced:
        raise _lost(segment)
    if next_first_lsn not in (None, segment.next_lsn):
        raise _gap(segment, next_first_lsn)
    return segment


def copy_records(folder: Path, into: Path, upto: int) -> None:
    """Copy a log's records below number ``upto`` to folder ``into``; another process may be writing the log.

    Whole segments are linked and not copied. Raises FileNotFoundError if a segment is cut meanwhile, LogDamaged.
    """
    files = [(first_lsn, path) for first_lsn, path in segment_files(folder) if first_lsn < upto]
    mark_begin(into, files[0][0], None)
    for _, path in files[:-1]:
        try:
            os.link(path, into / path.name)
        except OSError:  # the folder is on another file system, or the file belongs to another user
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
    """Read a segment up to its last good record. Raises LogDamaged if no head is good."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        segment = Segment(path, first_lsn, os.fstat(fd).st_size)
        if segment.capacity < START:  # the newer head may be gone
            raise damaged(path, segment.capacity, "the end of the file", f"two heads, of {START} bytes")
        heads = [(*head, at) for at in (0, 1) if (head := _decode_head(os.pread(fd, PAGE, at * PAGE), first_lsn))]
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
    """Return (synced, sealed) of a head; None if it is damaged or of another segment."""
    head = page[: _HEAD.size + _CRC.size]
    _, _, sealed, _, synced = _HEAD.unpack_from(head)
    return (synced, bool(sealed)) if head == encode_head(first_lsn, synced, bool(sealed)) else None


def _no_head(path: Path, head: bytes, first_lsn: int) -> LogDamaged:
    """Return the error for a segment without a good head: another version, a wrong name, or damage."""
    magic, version, _, lsn, _ = _HEAD.unpack(head)
    if magic == MAGIC and version != VERSION:
        return damaged(path, 8, f"format version {version}", f"version {VERSION}, which this streampack writes")
    if magic == MAGIC and lsn != first_lsn:
        return damaged(path, 16, f"a segment with first record {lsn}", f"first record {first_lsn}, as in the file name")
    return damaged(path, 0, "two damaged segment heads", "at least one intact head")


def _gap(segment: Segment, first_lsn: int | None) -> LogDamaged:
    """Return the error for records that are missing between ``segment`` and the next file, or for a missing file."""
    if segment.end < segment.synced:
        return _lost(segment)
    path = segment_path(segment.path.parent, segment.next_lsn)
    if first_lsn is not None and not segment.sealed:  # the records may be missing here, or a whole file
        return damaged(segment.path, segment.end, f"no record {segment.next_lsn}", f"the record here or in {path.name}")
    return damaged(path, 0, "no such file", "the next segment of the log")


def _lost(segment: Segment) -> LogDamaged:
    """Return the error for a record that was synced and is bad."""
    problem = f"bytes that are not record {segment.next_lsn}"
    expected = f"the whole record, because all bytes below {segment.synced} were synced"
    return damaged(segment.path, segment.end, problem, expected)


def _cut_tail(segment: Segment) -> None:
    """Overwrite all bytes after the last good record with zeros; the caller must sync the file."""
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
        text = "%s: truncated the log at byte %d; dropped %d bytes that were not synced when the last writer ended"
        log.warning(text, segment.path, segment.end, cut)
