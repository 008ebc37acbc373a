"""The log's writing thread: it writes and syncs records in groups, and reports up to which record all are safe.

A group holds the records that wait when it is due. With ``sync``, a group is due every 20 ms, or sooner once 1 MiB
waits; the first group after an idle time is due at once. Without ``sync``, records are written as they come, and only
whole segments are synced.

If the disk (or quota) is full, records stay in memory in their order, and writing is tried again every second. A write
names its place in the file, so repeating it does no harm. The next segment is preallocated early, so that a full disk
causes a warning before records must wait. ``reserve`` holds more space back, which is needed to delete old segments.

Any other error, and any error of a sync, ends the process. After a failed sync the kernel may have dropped the pages
and report success for the next one (PostgreSQL's fsyncgate, 2018). The next process reads what is really on the disk.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from streampack_services.descriptors import open_file
from streampack_services.log.reserve import Reserve
from streampack_services.log.segments import (
    PAGE,
    START,
    Segment,
    encode_head,
    latest_mark,
    mark_begin,
    seal_record,
    write_at,
    write_head,
)

GROUP_SECONDS = 0.02
"""Least seconds between two groups with ``sync``."""
GROUP_BYTES = 1 << 20
"""Bytes of waiting records that make a group due at once."""
RETRY_SECONDS = 1.0
"""Seconds until writing is tried again on a full disk."""
LOOK_SECONDS = 5.0
"""Seconds between two looks at the free space."""
MAX_BUFFERS = 1000
"""Buffers in one system call; the kernel accepts 1024."""
EX_IOERR = 74
"""Exit code of the process after an error of the disk."""
fdatasync = os.fdatasync
fsync = os.fsync
"""Sync the folder by this function, because fdatasync may leave out a file's name."""
end_process = os._exit
log = logging.getLogger("streampack.log")


class SyncFailed(OSError):
    """A sync has failed, so the content of the disk is unknown. Without an errno, the sync is never tried again."""


@dataclass(slots=True, eq=False)
class Pending:
    """A record in memory that is to be written to ``segment``; ``size``: its bytes with the head."""

    segment: Segment
    lsn: int
    head: bytearray
    views: list[memoryview]
    size: int


class Writer:
    """The writing thread of a log; it continues the last of ``segments``, or begins with record ``first_lsn``.

    Raises OSError if it cannot write.
    """

    def __init__(
        self, folder: Path, segments: list[Segment], sync: bool, segment_bytes: int, first_lsn: int,
        on_safe: Callable[[], None], reserve_bytes: int = 0,
    ) -> None:  # fmt: skip
        self._folder, self._sync, self._segment_bytes, self._on_safe = folder, sync, segment_bytes, on_safe
        self._folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._segment = segments[-1] if segments else None
        self._mark = mark_begin(folder, segments[0].first_lsn, latest_mark(folder)) if segments else None
        self._fd, self._end = -1, START
        self._spare, self._spare_bytes = -1, 0
        self._group: deque[Pending] = deque()
        self._ready = threading.Condition()
        self._queue: list[Pending] = []
        self._queued_bytes = 0
        self._doomed: deque[Segment] = deque()
        self._closing = self._sleeping = False
        self._due = self._retry = self._look_at = 0.0
        self.reserve = Reserve(folder, reserve_bytes)
        self.short = ""
        """The system's error text while there is no space for the next segment; else empty."""
        self.unwritten: dict[int, Pending] = {}
        """Records that are not written yet, by lsn, for readers; the appending thread adds them."""
        self.written_upto = self.safe_upto = segments[-1].next_lsn if segments else first_lsn
        self.written_bytes = 0
        self.full = ""
        """The system's error text while a lack of space stops writing; else empty."""
        self.num_bytes = sum(segment.capacity for segment in segments)
        self.free_bytes = 0
        self.syncs, self.sync_seconds = 0, 0.0
        if self._segment is not None:
            self._continue(self._segment)
        self._update_free_bytes()
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def hand_over(self, records: list[Pending]) -> None:
        """Queue records to be written after all earlier ones."""
        with self._ready:
            self._queue += records
            self._queued_bytes += sum(record.size for record in records)
            if self._sleeping or self._queued_bytes >= GROUP_BYTES:
                self._ready.notify()

    def unlink(self, segments: list[Segment]) -> None:
        """Remove the files of ``segments`` in order, each once a record after it is safe."""
        with self._ready:
            self._doomed += segments
            self._ready.notify()

    def close(self) -> None:
        """Write and sync all waiting records, as far as there is space now, and end the thread."""
        with self._ready:
            self._closing = True
            self._ready.notify()
        self._thread.join()

    def _run(self) -> None:
        """The thread's body: write groups until the log closes; end the process after an error of the disk."""
        try:
            while not self._turn():
                pass
            self._finish()
        except BaseException as error:
            text = "cannot write the log in %s: %s; the process ends"
            log.critical(text, self._folder, error, exc_info=not isinstance(error, OSError))
            end_process(EX_IOERR)

    def _turn(self) -> bool:
        """Wait for a group, write it and make it safe; return True after the last group."""
        closing = self._wait()
        self._update_free_bytes()
        while self._can_unlink() and not self._try(self._unlink):  # first, because it frees space
            pass
        full = self._try(self._write)
        full = self._try(self._make_safe) or full
        if full and not self.full:
            log.warning(
                "cannot write the log in %s: %s; records wait in memory until there is space", self._folder, full
            )
        elif self.full and not full:
            log.info("the log in %s has space again; all waiting records are written", self._folder)
        self.full = full
        if not closing:
            self._reserve()
        return closing

    def _wait(self) -> bool:
        """Wait until a group is due or a segment needs work; return True at once if the log closes."""
        with self._ready:
            while not self._closing and (left := self._idle_s()) > 0:
                self._sleeping = not self._queue
                self._ready.wait(left)
            self._sleeping = False
            self._group += self._queue
            self._queue, self._queued_bytes = [], 0
            if self._group and self._sync:
                self._due = time.monotonic() + GROUP_SECONDS
            return self._closing

    def _idle_s(self) -> float:
        """Return the seconds until the next work, if no new records come; 0 or less if there is work now."""
        now = time.monotonic()
        if self.full or (self._can_unlink() and self._retry <= now):
            return self._retry - now
        if self._queue:
            return 0 if self._queued_bytes >= GROUP_BYTES else self._due - now
        is_tried_again = self._can_unlink() or not self._reserved
        return min(self._retry, self._look_at) - now if is_tried_again else self._look_at - now

    def _update_free_bytes(self) -> None:
        """Update ``free_bytes`` every LOOK_SECONDS."""
        if time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + LOOK_SECONDS
            space = os.statvfs(self._folder)
            self.free_bytes = space.f_bavail * space.f_frsize
            if self._reserved:
                self.reserve.hold(self.free_bytes)

    def _try(self, act: Callable[[], object]) -> str:
        """Call ``act``; return the error's text if there was no space for it, else ``""``. Raise any other error."""
        try:
            act()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self._retry = time.monotonic() + RETRY_SECONDS
            return os.strerror(error.errno)
        return ""

    def _write(self) -> None:
        """Write the group; after an error, the group still holds the records that are not written."""
        while self._group:
            segment = self._group[0].segment
            if segment is not self._segment:
                self._begin(segment)
            if self._mark is None:  # after the segment's name is synced: a mark without a segment is damage
                self._move_mark(segment.first_lsn)
            batch: list[Pending] = []
            num_buffers = 0
            for record in self._group:
                num_buffers += 1 + len(record.views)
                if record.segment is not segment or (batch and num_buffers > MAX_BUFFERS):
                    break
                batch.append(record)
            self._write_batch(batch)

    def _write_batch(self, batch: list[Pending]) -> None:
        """Write records to the end of the current segment, and remove them from the group and from memory."""
        buffers: list[bytes | bytearray | memoryview] = []
        for record in batch:
            seal_record(record.head, record.views)
            buffers += [record.head, *record.views]
        if len(buffers) > MAX_BUFFERS:
            buffers = [b"".join(buffers)]
        write_at(self._fd, buffers, self._end)
        size = sum(record.size for record in batch)
        self._end += size
        self.written_bytes += size
        self.written_upto = (
            batch[-1].lsn + 1
        )  # set before they leave memory, so that a reader finds them in one place or the other
        for record in batch:
            self._group.popleft()
            del self.unwritten[record.lsn]

    def _make_safe(self) -> None:
        """Sync the written records if needed, move ``safe_upto``, and call ``on_safe``."""
        if self._sync and self._segment is not None and self._end > self._segment.synced:
            self._sync_written()
        if self.written_upto > self.safe_upto:
            self.safe_upto = self.written_upto
            self._on_safe()

    def _begin(self, segment: Segment) -> None:
        """Continue in a new file, which gets its name once all earlier records are synced: none can be missing."""
        fd = self._allocate(segment.capacity)
        before, before_fd, before_end = self._segment, self._fd, self._end
        self._sync_written()
        for at in (0, PAGE):
            write_at(fd, [encode_head(segment.first_lsn, START, False)], at)
        self._timed(fdatasync, fd)
        os.rename(self._folder / "next.tmp", segment.path)
        self._timed(fsync, self._folder_fd)
        self._segment, self._fd, self._end = segment, fd, START
        self._spare, self._spare_bytes = -1, 0
        if before is not None:
            try:
                write_head(before_fd, before, before_end, sealed=True)
            finally:
                os.close(before_fd)

    def _move_mark(self, lsn: int) -> None:
        """Note that records below ``lsn`` may be missing, and sync the folder."""
        self._mark = mark_begin(self._folder, lsn, self._mark)
        self._timed(fsync, self._folder_fd)

    def _continue(self, segment: Segment) -> None:
        """Continue in a recovered file; first sync its data and name, which a killed process may not have synced."""
        self._fd, self._end = os.open(segment.path, os.O_RDWR | os.O_CLOEXEC), segment.end
        self._timed(fsync, self._folder_fd)
        self._sync_written()

    def _sync_written(self) -> None:
        """Sync the written bytes of the segment, then note their end in its head; the next sync covers the head."""
        if self._segment is not None:
            self._timed(fdatasync, self._fd)
            write_head(self._fd, self._segment, self._end)

    def _timed(self, sync: Callable[[int], None], fd: int) -> None:
        """Sync a file by ``sync(fd)``; count the call and its time. Raises SyncFailed."""
        begin = time.monotonic()
        try:
            sync(fd)
        except OSError as error:
            raise SyncFailed(f"cannot be synced: {error.strerror}") from error
        self.syncs += 1
        self.sync_seconds += time.monotonic() - begin

    @property
    def _reserved(self) -> bool:
        """True if the next segment is preallocated."""
        return self._spare_bytes >= self._segment_bytes

    def _reserve(self) -> None:
        """Preallocate the next segment if it is not yet; log a warning if there is no space for it."""
        if self._reserved or time.monotonic() < self._retry:
            return
        with self.reserve.lock:
            if self.reserve.is_lent:
                self._retry = time.monotonic() + RETRY_SECONDS
                return
            lacks = self._try(lambda: self._allocate(self._segment_bytes))
        if lacks and not self.short:
            text = (
                "no space for the next log segment in %s: %s (%.1f MB); records wait when this segment is full. Make "
                "space, or commit a checkpoint, so that the broker deletes old segments"
            )
            log.warning(text, self._folder, lacks, self._segment_bytes / 1e6)
        self.short = lacks

    def _allocate(self, capacity: int) -> int:
        """Make or grow the file of the next segment to ``capacity`` zero bytes; return its descriptor."""
        if self._spare < 0:
            flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            self._spare = open_file(self._folder / "next.tmp", flags, 0o600)
        more = capacity - self._spare_bytes
        if more > 0:
            space = os.statvfs(self._folder)
            if space.f_bavail * space.f_frsize < more:  # an attempt would fill the disk for a moment
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            try:
                os.posix_fallocate(self._spare, 0, capacity)
            except OSError:
                os.ftruncate(self._spare, self._spare_bytes)
                raise
            self._spare_bytes = capacity
            self.num_bytes += more
        return self._spare

    def _can_unlink(self) -> bool:
        """Return whether a segment is to be removed and a record after it is safe."""
        return bool(self._doomed) and self._doomed[0].next_lsn < self.safe_upto

    def _unlink(self) -> None:
        """Remove one file, and sync the folder, so that a power cut leaves no gap between the other files."""
        segment = self._doomed[0]
        self._move_mark(segment.next_lsn)
        segment.path.unlink(missing_ok=True)
        self._doomed.popleft()  # after the unlink, which a full disk may refuse: it is then tried again
        self._timed(fsync, self._folder_fd)
        self.num_bytes -= segment.capacity

    def _finish(self) -> None:
        """Sync and close all files, and remove the preallocated one."""
        if self._group:
            text = "closed the log in %s; %d records are lost, because there was no space to write them"
            log.error(text, self._folder, len(self._group))
        if self._fd >= 0:
            self._try(self._sync_written)
            self._timed(fdatasync, self._fd)
            os.close(self._fd)
        if self._spare >= 0:
            os.close(self._spare)
            (self._folder / "next.tmp").unlink()
        self.reserve.give_up()
        os.close(self._folder_fd)
