"""The broker's log: append numbered records, read them again, and cut old ones.

One thread (the broker's) appends, reads and cuts, and never waits for the disk. Appended records stay in memory, where
they can be read, until the thread of ``log_writer`` has written them. Records below ``safe_upto`` are safe; the broker
may tell others only about safe records. ``segments`` defines the files.
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
from streampack_services.descriptors import open_file
from streampack_services.log.log_writer import Pending, Writer
from streampack_services.log.segments import (
    MAX_BODY,
    RECORD,
    START,
    Segment,
    check_begin,
    damaged,
    delete_log,
    read_segment,
    recover,
    segment_files,
    segment_path,
    walk,
)


@dataclass(frozen=True, slots=True)
class LogEntry:
    """A record that was read; ``body`` may share memory with other records, so copy it to store it."""

    lsn: int
    kind: int
    body: memoryview


class Log:
    """One run's log in ``folder``, open for writing; ``open`` makes it."""

    def __init__(
        self, folder: Path, lock: int, segments: list[Segment], writer: Writer, segment_bytes: int, first_lsn: int
    ) -> None:  # fmt: skip
        self._folder = folder
        self._lock = lock
        self._segments = segments
        self.writer = writer
        """The writing thread, with its figures."""
        self._segment_bytes = segment_bytes
        self._appended: list[Pending] = []
        self._appended_bytes = 0
        self._closed = False
        self.next_lsn = segments[-1].next_lsn if segments else first_lsn
        """Number of the next record."""

    @classmethod
    def open(
        cls,
        folder: Path,
        *,
        durability: Literal["os", "process"],
        segment_bytes: int = 64 << 20,
        first_lsn: int = 0,
        reserve_bytes: int = 0,
        discards: bool = False,
        indexed_upto: Callable[[], int] = lambda: 0,
        on_safe: Callable[[], None],
    ) -> Log:
        """Open and recover the log in ``folder``, which is made if it is missing; all its records are then safe.

        ``discards``: delete the log that is there. A log without records begins with record ``first_lsn``.
        ``reserve_bytes`` of the disk are held back (``lend``). ``indexed_upto`` is called for a log of streampack
        0.1.0, as ``segments.check_begin`` does. ``on_safe`` is called from another thread whenever ``safe_upto`` has
        grown, and must not raise. Raises UserError if the folder cannot be used or another process writes there,
        LogDamaged as ``segments.recover`` and ``check_begin`` do.
        """
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = _lock(folder / "lock")
            try:
                if discards:
                    delete_log(folder)
                segments = recover(folder)
                check_begin(folder, segments, indexed_upto)
                writer = Writer(folder, segments, durability == "os", segment_bytes, first_lsn, on_safe, reserve_bytes)
            except BaseException:
                os.close(lock)
                raise
        except OSError as error:
            raise UserError(
                f"The log in {folder} cannot be opened: {error.strerror or error}. Choose a folder that you can write "
                f"to."
            ) from None
        return cls(folder, lock, segments, writer, segment_bytes, first_lsn)

    @property
    def first_lsn(self) -> int:
        """Number of the oldest record in the log."""
        return self._segments[0].first_lsn if self._segments else self.next_lsn

    @property
    def safe_upto(self) -> int:
        """Number up to which all records survive a power cut (``os``) or the end of this process (``process``)."""
        return self.writer.safe_upto

    @property
    def stalled(self) -> str:
        """The reason why records wait in memory, such as a full disk, and how many; empty if none wait."""
        why = self.writer.full
        waiting = len(self.writer.unwritten)
        num_bytes = self._appended_bytes - self.writer.written_bytes
        return f"{why.lower()}: {waiting} records, {num_bytes / 1e6:.1f} MB wait" if why and waiting else ""

    @property
    def short(self) -> str:
        """The reason why there is no space for the next segment, such as a full disk; empty if there is space."""
        return (self.writer.short or self.writer.full).lower()

    @property
    def num_bytes(self) -> int:
        """Bytes of the files on the disk, with preallocated ones."""
        return self.writer.num_bytes

    def append(self, kind: int, parts: Sequence[Any]) -> int:
        """Append a record in memory and return its number; ``flush`` hands it to the writing thread.

        ``kind``: 0 to 255. ``parts``: contiguous buffers that form the body and must not change any more. Never waits
        for the disk and never fails because of it.
        """
        views, size = _views(parts)
        last = self._segments[-1] if self._segments else None
        if last is None or (len(last.offsets) > 0 and last.end + size > last.capacity):
            last = self._add_segment(size)
        return self._put(last, kind, views, size)

    def flush(self) -> None:
        """Hand all appended records to the writing thread; the broker's loop calls this once per turn."""
        if self._appended:
            self.writer.hand_over(self._appended)
            self._appended = []

    def entries(self, start: int = 0, stop: int | None = None) -> Iterator[LogEntry]:
        """Yield the records from ``start`` (or the oldest one) up to ``stop`` (or the newest one), without ``stop``.

        Raises LogDamaged if a record was damaged after the log was opened.
        """
        lsn, stop = max(start, self.first_lsn), self.next_lsn if stop is None else min(stop, self.next_lsn)
        while lsn < stop:
            written = self.writer.written_upto
            if lsn >= written:
                if (pending := self.writer.unwritten.get(lsn)) is not None:  # else the writer has just written it
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
                problem = f"bytes that are not record {lsn}"
                raise damaged(segment.path, segment.offset(lsn), problem, f"record {lsn}, which was written there")

    def read(self, lsn: int) -> LogEntry:
        """Return record ``lsn``. Raises LogDamaged as ``entries`` does, InternalError if there is no such record."""
        self._segment(lsn)
        return next(self.entries(lsn, lsn + 1))

    def cut(self, below_lsn: int) -> int:
        """Delete whole segments whose records are all below ``below_lsn``; return their number.

        A file is removed once the first record of the next segment is safe, oldest first.
        """
        count = 0
        while count + 1 < len(self._segments) and self._segments[count].next_lsn <= below_lsn:
            count += 1
        if count:
            self.writer.unlink(self._segments[:count])
            del self._segments[:count]
        return count

    def lend(self) -> contextlib.AbstractContextManager[None]:
        """Free the space that is held back, for another file of this disk that the block writes."""
        return self.writer.reserve.lend()

    def squeeze(self) -> None:
        """Write the waiting records in the space that is held back, in files that are only as large as they are."""
        for segment in self._segments:
            if segment.first_lsn >= self.writer.written_upto and not segment.path.exists():
                segment.capacity = segment.end
        self.writer.reserve.give_up()

    def close(self) -> None:
        """Write and sync all waiting records, as far as there is space, and unlock the log."""
        if not self._closed:
            self._closed = True
            self.flush()
            self.writer.close()
            os.close(self._lock)

    def _add_segment(self, num_bytes: int) -> Segment:
        """Add a segment, at least large enough for a record of ``num_bytes``; the writer makes its file."""
        capacity = max(self._segment_bytes, START + num_bytes)
        segment = Segment(segment_path(self._folder, self.next_lsn), self.next_lsn, capacity)
        self._segments.append(segment)
        return segment

    def _put(self, segment: Segment, kind: int, views: list[memoryview], size: int) -> int:
        """Put a record of ``size`` bytes at the end of ``segment``; return its number."""
        lsn = self.next_lsn
        head = bytearray(RECORD.pack(size - RECORD.size, 0, lsn, kind))  # the writing thread adds the crc
        self.writer.unwritten[lsn] = pending = Pending(segment, lsn, head, views, size)
        self._appended.append(pending)
        self._appended_bytes += size
        segment.offsets.append(segment.end)
        segment.end += size
        self.next_lsn = lsn + 1
        return lsn

    def _segment(self, lsn: int) -> Segment:
        """Return the segment of record ``lsn``. Raises InternalError if the log has no such record."""
        if not self.first_lsn <= lsn < self.next_lsn:
            raise InternalError(
                f"got a request for record {lsn}, expected a record from {self.first_lsn} to {self.next_lsn - 1}"
            )
        return self._segments[bisect_right(self._segments, lsn, key=lambda segment: segment.first_lsn) - 1]


def read_entries(folder: Path, start: int = 0) -> Iterator[LogEntry]:
    """Yield the records from ``start`` (or the oldest one) of a log, without a lock; another process may write it.

    Stop at the last record that is written. Yield nothing if the folder has no log. Raises LogDamaged as ``Log.open``
    does.
    """
    files = segment_files(folder) if folder.is_dir() else []
    skip = max(bisect_right(files, start, key=lambda file: file[0]) - 1, 0)
    nexts = [first_lsn for first_lsn, _ in files[skip + 1 :]]
    for (first_lsn, path), next_first_lsn in zip_longest(files[skip:], nexts):
        with contextlib.suppress(FileNotFoundError), _opened(path) as fd:  # the file may be cut meanwhile
            segment = read_segment(path, first_lsn, next_first_lsn)
            lsn = min(max(start, first_lsn), segment.next_lsn)
            for _, kind, body in walk(fd, segment.offset(lsn), segment.end, lsn):
                yield LogEntry(lsn, kind, body)
                lsn += 1


def _views(parts: Sequence[Any]) -> tuple[list[memoryview], int]:
    """Return the parts as views of bytes, without empty ones, and the bytes of a record with this body."""
    views = [view.cast("B") for part in parts if (view := memoryview(part)).nbytes]
    size = sum(view.nbytes for view in views)
    if size > MAX_BODY:
        raise InternalError(f"got a record of {size} bytes, expected at most {MAX_BODY} bytes")
    return views, RECORD.size + size


@contextlib.contextmanager
def _reading(segment: Segment) -> Iterator[int]:
    """Open a segment's file and yield its descriptor. Raises LogDamaged if the file is gone."""
    with contextlib.ExitStack() as stack:
        try:
            fd = stack.enter_context(_opened(segment.path))
        except FileNotFoundError:
            expected = "the segment file that existed when the log was opened"
            raise damaged(segment.path, 0, "no such file", expected) from None
        yield fd


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Open a file for reading; yield its descriptor and close it in the end."""
    fd = open_file(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _lock(path: Path) -> int:
    """Lock the log's folder by the file ``path``; return a descriptor, which holds the lock while it is open.

    The file names the process that has the lock. Raises UserError if another process has it.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(fd, 200, 0).decode(errors="replace").strip() or "another process"
        os.close(fd)
        raise UserError(
            f"The log in {path.parent} is in use by {holder} (host:pid). Stop that broker, or set another state_dir "
            f"for this run."
        ) from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{socket.gethostname()}:{os.getpid()}\n".encode(), 0)
    return fd
