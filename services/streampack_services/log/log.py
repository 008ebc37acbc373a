"""The broker's durable record: numbered records of bytes, appended, safe a little later, read again after a crash.

It knows bytes, never what they mean; ``segments`` says how they lie in files. One thread (the broker's) appends, reads
and cuts, and never waits for the disk: what it appends stays in memory, where it can be read, until the thread of
``log_writer`` has written it. What is *safe* is told by ``safe_upto``: only of that may others hear.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

from streampack.errors import InternalError, UserError
from streampack_services.log.log_writer import Pending, Writer
from streampack_services.log.segments import (
    MAX_BODY,
    RECORD,
    START,
    Segment,
    damaged,
    read_segment,
    recover,
    segment_files,
    segment_path,
    walk,
)


@dataclass(frozen=True, slots=True)
class LogEntry:
    """A record as it is read back; ``body`` may share memory with its neighbors: copy what is kept."""

    lsn: int
    kind: int
    body: memoryview


class Log:
    """One run's log in ``folder``; made by ``open``."""

    def __init__(self, folder: Path, lock: int, segments: list[Segment], writer: Writer, segment_bytes: int) -> None:
        self._folder = folder
        self._lock = lock
        self._segments = segments
        self._writer = writer
        self._segment_bytes = segment_bytes
        self._appended: list[Pending] = []
        self._appended_bytes = 0
        self._closed = False
        self.next_lsn = segments[-1].next_lsn if segments else 0
        """The number that the next record gets."""

    @classmethod
    def open(
        cls,
        folder: Path,
        *,
        durability: Literal["os", "process"],
        segment_bytes: int = 64 << 20,
        on_safe: Callable[[], None],
    ) -> Log:
        """The log in ``folder``, which is made where it is missing; what it holds is safe from the start.

        ``on_safe`` is called from another thread whenever ``safe_upto`` has moved, and must not raise. Raises UserError
        where the folder cannot be used or another process has it, LogDamaged (``segments.recover``).
        """
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = _take(folder / "lock")
            try:
                segments = recover(folder)
                writer = Writer(folder, segments, durability == "os", segment_bytes, on_safe)
            except BaseException:
                os.close(lock)
                raise
        except OSError as error:
            raise UserError(
                f"log {folder}: cannot be opened: {error.strerror or error}: choose a folder that can be written"
            ) from None
        return cls(folder, lock, segments, writer, segment_bytes)

    @property
    def first_lsn(self) -> int:
        """Of the oldest record kept."""
        return self._segments[0].first_lsn if self._segments else self.next_lsn

    @property
    def safe_upto(self) -> int:
        """Every record below survives: a power cut (``os``: synced), or the end of this process (``process``)."""
        return self._writer.safe_upto

    @property
    def stalled(self) -> str:
        """Why records wait: the disk is full; it is tried again every second. Empty while all is well."""
        why = self._writer.full
        waiting = len(self._writer.unwritten)
        num_bytes = self._appended_bytes - self._writer.written_bytes
        return f"{why.lower()}: {waiting} records, {num_bytes / 1e6:.1f} MB wait" if why and waiting else ""

    @property
    def num_bytes(self) -> int:
        """That the files take on the disk, preallocated ones too."""
        return self._writer.num_bytes

    @property
    def free_bytes(self) -> int:
        """Of the disk that it is on, some seconds ago."""
        return self._writer.free_bytes

    @property
    def syncs(self) -> int:
        return self._writer.syncs

    @property
    def sync_seconds(self) -> float:
        return self._writer.sync_seconds

    def append(self, kind: int, parts: Sequence[Any]) -> int:
        """Take a record of ``kind`` (u8), its body in ``parts``: contiguous buffers that nobody changes any more.

        Returns its number. Never waits and never fails for the disk's sake; ``flush`` hands it over.
        """
        views, size = _views(parts)
        last = self._segments[-1] if self._segments else None
        if last is None or (len(last.offsets) > 0 and last.end + size > last.capacity):
            last = self._add_segment(size)
        return self._put(last, kind, views, size)

    def flush(self) -> None:
        """Hand over what was appended; once a turn of the broker's loop."""
        if self._appended:
            self._writer.hand_over(self._appended)
            self._appended = []

    def entries(self, start: int = 0, stop: int | None = None) -> Iterator[LogEntry]:
        """Records from ``start``, or the oldest that is kept, to below ``stop``, or what is next now.

        Raises LogDamaged where a record is not what it was when the log was opened.
        """
        lsn, stop = max(start, self.first_lsn), self.next_lsn if stop is None else min(stop, self.next_lsn)
        while lsn < stop:
            written = self._writer.written_upto
            if lsn >= written:
                if (pending := self._writer.unwritten.get(lsn)) is not None:  # else it has been written meanwhile
                    yield LogEntry(lsn, pending.head[-1], memoryview(b"".join(pending.views)))
                    lsn += 1
                continue
            segment = self._segment(lsn)
            upto = min(stop, segment.next_lsn, written)
            at, end = segment.offset(lsn), segment.offset(upto)
            with _reading(segment) as fd:
                for _, kind, body in walk(fd, at, end, lsn):
                    yield LogEntry(lsn, kind, body)
                    lsn += 1
            if lsn < upto:
                what = f"bytes that are not record {lsn}"
                raise damaged(segment.path, segment.offset(lsn), what, "it, as it was written or read before")

    def read(self, lsn: int) -> LogEntry:
        """Record ``lsn``. Raises LogDamaged as ``entries`` does, InternalError for one that is not there."""
        self._segment(lsn)
        return next(self.entries(lsn, lsn + 1))

    def cut(self, below_lsn: int) -> int:
        """Forget whole segments whose records are all below; returns how many.

        Their files go as soon as the next segment's first record is safe, oldest first.
        """
        count = 0
        while count + 1 < len(self._segments) and self._segments[count].next_lsn <= below_lsn:
            count += 1
        if count:
            self._writer.unlink(self._segments[:count])
            del self._segments[:count]
        return count

    def close(self) -> None:
        """Write and sync what waits, as far as there is space, and let others open the log."""
        if not self._closed:
            self._closed = True
            self.flush()
            self._writer.close()
            os.close(self._lock)

    def _add_segment(self, num_bytes: int) -> Segment:
        capacity = max(self._segment_bytes, START + num_bytes)
        segment = Segment(segment_path(self._folder, self.next_lsn), self.next_lsn, capacity)
        self._segments.append(segment)
        return segment

    def _put(self, segment: Segment, kind: int, views: list[memoryview], size: int) -> int:
        lsn = self.next_lsn
        head = bytearray(RECORD.pack(size - RECORD.size, 0, lsn, kind))  # its crc is the other thread's work
        self._writer.unwritten[lsn] = pending = Pending(segment, lsn, head, views, size)
        self._appended.append(pending)
        self._appended_bytes += size
        segment.offsets.append(segment.end)
        segment.end += size
        self.next_lsn = lsn + 1
        return lsn

    def _segment(self, lsn: int) -> Segment:
        if not self.first_lsn <= lsn < self.next_lsn:
            raise InternalError(f"got record {lsn} to read, expected one of {self.first_lsn} to {self.next_lsn - 1}")
        return self._segments[bisect_right(self._segments, lsn, key=lambda segment: segment.first_lsn) - 1]


def read_entries(folder: Path, start: int = 0) -> Iterator[LogEntry]:
    """Records from ``start``, or the oldest that is kept, of a log that another process may be writing: no lock.

    Ends where nothing more is written yet. Raises LogDamaged as ``Log.open`` does; a folder without a log has no
    records.
    """
    files = segment_files(folder) if folder.is_dir() else []
    skip = max(bisect_right(files, start, key=lambda file: file[0]) - 1, 0)
    nexts = [first_lsn for first_lsn, _ in files[skip + 1 :]]
    for (first_lsn, path), next_first_lsn in zip_longest(files[skip:], nexts):
        with contextlib.suppress(FileNotFoundError), _opened(path) as fd:  # cut meanwhile: the log begins later now
            segment = read_segment(path, first_lsn, next_first_lsn)
            lsn = min(max(start, first_lsn), segment.next_lsn)
            for _, kind, body in walk(fd, segment.offset(lsn), segment.end, lsn):
                yield LogEntry(lsn, kind, body)
                lsn += 1


def _views(parts: Sequence[Any]) -> tuple[list[memoryview], int]:
    """The parts as bytes, without the empty ones, and how many bytes a record of them has."""
    views = [view.cast("B") for part in parts if (view := memoryview(part)).nbytes]
    size = sum(view.nbytes for view in views)
    if size > MAX_BODY:
        raise InternalError(f"got a record of {size} bytes, expected at most {MAX_BODY}")
    return views, RECORD.size + size


@contextlib.contextmanager
def _reading(segment: Segment) -> Iterator[int]:
    with contextlib.ExitStack() as stack:
        try:
            fd = stack.enter_context(_opened(segment.path))
        except FileNotFoundError:
            expected = "the segment that was here when the log was opened"
            raise damaged(segment.path, 0, "no such file", expected) from None
        yield fd


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _take(path: Path) -> int:
    """The folder's lock, held while the descriptor is open; it says who has it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(fd, 200, 0).decode(errors="replace").strip() or "another process"
        os.close(fd)
        raise UserError(
            f"log {path.parent}: got a log that {holder} (host:pid) writes, expected a free one: stop that broker, or "
            f"give this run a folder of its own"
        ) from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{socket.gethostname()}:{os.getpid()}\n".encode(), 0)
    return fd
