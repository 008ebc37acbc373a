"""The log's other thread: it writes what was handed over, syncs groups of it, and says up to where all is safe.

A group is what has gathered when it is due: with ``sync`` at most one every 20 ms, or sooner once 1 MB waits; the first
after an idle time goes at once. Without it each hand-over is written as it comes, and only whole segments are synced.

A full disk (or quota) is waited out: what could not be written stays in memory, in order, and is tried again every
second; a write names its place, so to repeat it is harmless. The next segment is preallocated ahead of its need, so
that a full disk is a warning before it is a stall. Any other error, and any error of a sync, ends the process: after
one the kernel may have dropped the pages and call the next sync a success (PostgreSQL's fsyncgate, 2018). Whoever is
started next reads what is really there.
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

from streampack_services.log.segments import PAGE, START, Segment, encode_head, seal_record, write_at, write_head

GROUP_SECONDS = 0.02
GROUP_BYTES = 1 << 20
RETRY_SECONDS = 1.0
LOOK_SECONDS = 5.0
"""Between two looks at how much space is left."""
MAX_BUFFERS = 1000
"""Of one system call: the kernel takes 1024."""
EX_IOERR = 74
fdatasync = os.fdatasync
fsync = os.fsync
"""Of the folder: fdatasync may leave a name out."""
end_process = os._exit
log = logging.getLogger("streampack.log")


class SyncFailed(OSError):
    """Nobody knows what is on the disk. It has no errno: a sync is not repeated for lack of space either."""


@dataclass(slots=True, eq=False)
class Pending:
    """A record in memory, on its way to ``segment``; ``size`` bytes with its head."""

    segment: Segment
    lsn: int
    head: bytearray
    views: list[memoryview]
    size: int


class Writer:
    """Writes behind ``segments``, the last of which it goes on with. Raises OSError where that cannot be done."""

    def __init__(
        self, folder: Path, segments: list[Segment], sync: bool, segment_bytes: int, on_safe: Callable[[], None]
    ) -> None:
        self._folder, self._sync, self._segment_bytes, self._on_safe = folder, sync, segment_bytes, on_safe
        self._folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._segment = segments[-1] if segments else None
        self._fd, self._end = -1, START
        self._spare, self._spare_bytes = -1, 0
        self._group: deque[Pending] = deque()
        self._ready = threading.Condition()
        self._queue: list[Pending] = []
        self._queued_bytes = 0
        self._doomed: deque[Segment] = deque()
        self._closing = self._sleeping = False
        self._due = self._retry = self._look_at = 0.0
        self._short = False
        self.unwritten: dict[int, Pending] = {}
        """By lsn, for readers; the appending thread adds."""
        self.written_upto = self.safe_upto = segments[-1].next_lsn if segments else 0
        self.written_bytes = 0
        self.full = ""
        """What the system calls the lack of space that stops writing."""
        self.num_bytes = sum(segment.capacity for segment in segments)
        self.free_bytes = 0
        self.syncs, self.sync_seconds = 0, 0.0
        if self._segment is not None:
            self._go_on(self._segment)
        self._look()
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def hand_over(self, records: list[Pending]) -> None:
        """Records to write, in order behind all before."""
        with self._ready:
            self._queue += records
            self._queued_bytes += sum(record.size for record in records)
            if self._sleeping or self._queued_bytes >= GROUP_BYTES:
                self._ready.notify()

    def unlink(self, segments: list[Segment]) -> None:
        """Remove files, in order, each once a record behind it is safe: that may be all that is known of it."""
        with self._ready:
            self._doomed += segments
            self._ready.notify()

    def close(self) -> None:
        """Write and sync what waits, as far as there is space now."""
        with self._ready:
            self._closing = True
            self._ready.notify()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._turn():
                pass
            self._finish()
        except BaseException as error:
            log.critical("log %s: %s: the process ends", self._folder, error, exc_info=not isinstance(error, OSError))
            end_process(EX_IOERR)

    def _turn(self) -> bool:
        """One group; True when it was the last."""
        closing = self._wait()
        self._look()
        while self._can_unlink():  # first: it may be the space that is lacking
            self._unlink()
        full = self._try(self._write)
        full = self._try(self._make_safe) or full
        if full and not self.full:
            log.warning("log %s: %s: records wait in memory", self._folder, full)
        elif self.full and not full:
            log.info("log %s: there is space again, all that waited is written", self._folder)
        self.full = full
        if not closing:
            self._reserve()
        return closing

    def _wait(self) -> bool:
        """Until a group is due, a segment is to be removed or preallocated, or the log closes: True."""
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
        """Seconds for which there is nothing to do, if nothing comes."""
        now = time.monotonic()
        if self._can_unlink():
            return 0
        if self.full:
            return self._retry - now
        if self._queue:
            return 0 if self._queued_bytes >= GROUP_BYTES else self._due - now
        return self._look_at - now if self._reserved else min(self._retry, self._look_at) - now

    def _look(self) -> None:
        """How much space there is, now and then: others use the disk, too."""
        if time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + LOOK_SECONDS
            space = os.statvfs(self._folder)
            self.free_bytes = space.f_bavail * space.f_frsize

    def _try(self, act: Callable[[], object]) -> str:
        """Why there was no space for it, or nothing. Any other error is raised."""
        try:
            act()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self._retry = time.monotonic() + RETRY_SECONDS
            return os.strerror(error.errno)
        return ""

    def _write(self) -> None:
        """The group; what there was no space for is still in it then."""
        while self._group:
            segment = self._group[0].segment
            if segment is not self._segment:
                self._begin(segment)
            batch: list[Pending] = []
            num_buffers = 0
            for record in self._group:
                num_buffers += 1 + len(record.views)
                if record.segment is not segment or (batch and num_buffers > MAX_BUFFERS):
                    break
                batch.append(record)
            self._write_batch(batch)

    def _write_batch(self, batch: list[Pending]) -> None:
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
        self.written_upto = batch[-1].lsn + 1  # before they leave memory: a reader looks in one place or the other
        for record in batch:
            self._group.popleft()
            del self.unwritten[record.lsn]

    def _make_safe(self) -> None:
        if self._sync and self._segment is not None and self._end > self._segment.synced:
            self._sync_written()
        if self.written_upto > self.safe_upto:
            self.safe_upto = self.written_upto
            self._on_safe()

    def _begin(self, segment: Segment) -> None:
        """Go on in a new file. It gets its name once all before it is synced: where it is, nothing before it lacks."""
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

    def _go_on(self, segment: Segment) -> None:
        """Make what was recovered safe: a process that was killed may have left it unsynced, and its name."""
        self._fd, self._end = os.open(segment.path, os.O_RDWR | os.O_CLOEXEC), segment.end
        self._timed(fsync, self._folder_fd)
        self._sync_written()

    def _sync_written(self) -> None:
        """Sync what is written of the segment and note that in its head, which the next sync takes to the disk."""
        if self._segment is not None:
            self._timed(fdatasync, self._fd)
            write_head(self._fd, self._segment, self._end)

    def _timed(self, sync: Callable[[int], None], fd: int) -> None:
        begin = time.monotonic()
        try:
            sync(fd)
        except OSError as error:
            raise SyncFailed(f"cannot be synced: {error.strerror}") from error
        self.syncs += 1
        self.sync_seconds += time.monotonic() - begin

    @property
    def _reserved(self) -> bool:
        return self._spare_bytes >= self._segment_bytes

    def _reserve(self) -> None:
        """Preallocate the next segment, if it is not there."""
        if self._reserved or time.monotonic() < self._retry:
            return
        lacks = self._try(lambda: self._allocate(self._segment_bytes))
        if lacks and not self._short:
            text = "log %s: %s for the next segment of %.1f MB: records will wait once this one is full"
            log.warning(text, self._folder, lacks, self._segment_bytes / 1e6)
        self._short = bool(lacks)

    def _allocate(self, capacity: int) -> int:
        """The file that will be the next segment, of so many zeros."""
        if self._spare < 0:
            flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            self._spare = os.open(self._folder / "next.tmp", flags, 0o600)
        more = capacity - self._spare_bytes
        if more > 0:
            space = os.statvfs(self._folder)
            if space.f_bavail * space.f_frsize < more:  # else others would see the disk full for a moment, each time
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
        return bool(self._doomed) and self._doomed[0].next_lsn < self.safe_upto

    def _unlink(self) -> None:
        """One file; the folder is synced before the next goes, or a power cut might leave a gap."""
        segment = self._doomed.popleft()
        segment.path.unlink(missing_ok=True)
        self._timed(fsync, self._folder_fd)
        self.num_bytes -= segment.capacity

    def _finish(self) -> None:
        if self._group:
            log.error("log %s: closed with %d records for which there was no space", self._folder, len(self._group))
        if self._fd >= 0:
            self._try(self._sync_written)
            self._timed(fdatasync, self._fd)
            os.close(self._fd)
        if self._spare >= 0:
            os.close(self._spare)
            (self._folder / "next.tmp").unlink()
        os.close(self._folder_fd)
