"""The log: bytes of its files written out by hand, each of them damaged in turn, and power cuts at every sync."""

import contextlib
import errno
import os
import random
import re
import resource
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st
from streampack_services.descriptors import open_file
from streampack_services.log import log_writer, reserve
from streampack_services.log.log import Log
from streampack_services.log.segments import START, copy_records, mark_begin, recover, segment_path

from streampack.errors import InternalError, LogDamaged, UserError

Durability = Literal["os", "process"]
RECORD = 2
SMALL = START + 150
"""Bytes of a segment: a few records each."""
SHARED = Path("/dev/shm")


@pytest.fixture(autouse=True)
def nothing_is_synced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Power stays on while the tests run: thousands of syncs would take minutes."""
    for name in ("fdatasync", "fsync"):
        monkeypatch.setattr(log_writer, name, lambda fd: None)


@pytest.fixture
def folder() -> Iterator[Path]:
    """In memory where there is such a place: it is written a hundred thousand times."""
    with tempfile.TemporaryDirectory(dir=SHARED if SHARED.is_dir() else None) as made:
        yield Path(made)


def open_log(folder: Path, durability: Durability = "process", segment_bytes: int = SMALL) -> Log:
    return Log.open(folder, durability=durability, segment_bytes=segment_bytes, on_safe=lambda: None)


@contextlib.contextmanager
def opened(folder: Path, durability: Durability = "process", segment_bytes: int = SMALL) -> Iterator[Log]:
    with contextlib.closing(open_log(folder, durability, segment_bytes)) as log:
        yield log


def write(log: Log, bodies: list[bytes]) -> None:
    """Each in two parts, one of them an array, and wait until all are safe."""
    for body in bodies:
        log.append(RECORD, [body[:3], np.frombuffer(body[3:], np.uint8)])
    log.flush()
    wait_until_safe(log)


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 200
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.0005)


def wait_until_safe(log: Log) -> None:
    wait_until(lambda: log.safe_upto == log.next_lsn)


def wait_for_files(folder: Path, count: int) -> None:
    wait_until(lambda: len(list(folder.glob("*.log"))) == count)


def bodies_of(log: Log) -> list[bytes]:
    entries = list(log.entries())
    assert [entry.lsn for entry in entries] == list(range(log.first_lsn, log.next_lsn))
    return [bytes(entry.body) for entry in entries]


def some_bodies(count: int, seed: int = 0) -> list[bytes]:
    rng = random.Random(seed)
    return [rng.randbytes(rng.randrange(40)) for _ in range(count)]


def files_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.glob("*.log"))}


def head(first_lsn: int, synced: int, sealed: int) -> bytes:
    plain = b"spacklog" + struct.pack("<IIQQ", 1, sealed, first_lsn, synced)
    return (plain + struct.pack("<I", crc32c(plain))).ljust(4096, b"\0")


def record(lsn: int, kind: int, body: bytes) -> bytes:
    after = struct.pack("<QB", lsn, kind) + body
    length = struct.pack("<I", len(body))
    return length + struct.pack("<I", crc32c(length + after)) + after


# The format


def test_the_bytes_of_a_segment_are_those_of_the_format(tmp_path: Path) -> None:
    with opened(tmp_path, segment_bytes=8292) as log:
        log.append(7, [b"abc", np.array([1, 2], "<u2")])
        log.append(255, [])
    page = bytes(4096 - 36)
    first = bytes.fromhex(
        "737061636b6c6f67 01000000 00000000 0000000000000000 0020000000000000 06b3564d"  # synced up to 8192
    )
    second = bytes.fromhex(
        "737061636b6c6f67 01000000 00000000 0000000000000000 2920000000000000 62af514b"  # synced up to 8192 + 41
    )
    records = bytes.fromhex(
        "07000000 f8250e23 0000000000000000 07 616263 0100 0200"  # 7 bytes of kind 7, number 0
        "00000000 fd2018e5 0100000000000000 ff"
    )
    assert files_of(tmp_path) == {
        tmp_path / "00000000000000000000.log": first + page + second + page + records + bytes(8292 - 8192 - 41)
    }


def test_segments_follow_each_other_sealed(tmp_path: Path) -> None:
    bodies = [b"a" * 40, b"b" * 40, b"c" * 40, b"d" * 40]
    with opened(tmp_path) as log:
        write(log, bodies)
    one = b"".join(record(lsn, RECORD, bodies[lsn]) for lsn in (0, 1))
    two = b"".join(record(lsn, RECORD, bodies[lsn]) for lsn in (2, 3))
    found = list(files_of(tmp_path).items())
    assert [path.name for path, _ in found] == ["00000000000000000000.log", "00000000000000000002.log"]
    assert found[0][1] == head(0, START + 114, 1) + head(0, START + 114, 0) + one + bytes(36)
    assert found[1][1] == head(2, START, 0) + head(2, START + 114, 0) + two + bytes(36)


def test_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    with opened(tmp_path / "a" / "log") as log:
        write(log, [b"x"])
        assert (tmp_path / "a" / "log").stat().st_mode & 0o777 == 0o700
        assert {path.stat().st_mode & 0o777 for path in (tmp_path / "a" / "log").iterdir()} == {0o600}


# Append and read


@pytest.mark.parametrize("durability", ["os", "process"])
def test_appended_records_are_read_back_before_and_after_they_are_written(
    tmp_path: Path, durability: Durability
) -> None:
    bodies = some_bodies(100)
    with opened(tmp_path, durability) as log:
        for number, body in enumerate(bodies):
            assert log.append(RECORD, [body]) == number
        assert bodies_of(log) == bodies  # from memory
        log.flush()
        assert bodies_of(log) == bodies  # from either
        wait_until_safe(log)
        assert bodies_of(log) == bodies
        assert [bytes(log.read(lsn).body) for lsn in reversed(range(100))] == bodies[::-1]
        assert [entry.lsn for entry in log.entries(10, 20)] == list(range(10, 20))
    with opened(tmp_path, durability) as log:
        assert (log.first_lsn, log.next_lsn, log.safe_upto) == (0, 100, 100)
        assert bodies_of(log) == bodies
        write(log, [b"more"])
        assert bodies_of(log) == [*bodies, b"more"]


def test_a_reader_beside_the_writing_thread_sees_every_record(tmp_path: Path) -> None:
    with opened(tmp_path, segment_bytes=1 << 16) as log:
        for number in range(3000):
            log.append(RECORD, [number.to_bytes(4, "little")])
            log.flush()
            if number % 50 == 0:
                assert bodies_of(log) == [each.to_bytes(4, "little") for each in range(number + 1)]


def test_a_record_longer_than_a_segment_has_one_of_its_own(tmp_path: Path) -> None:
    bodies = [b"a", os.urandom(5 << 20), b"b", os.urandom(90), b"c"]
    with opened(tmp_path) as log:
        write(log, bodies)

        def on_disk() -> int:
            return sum(path.stat().st_size for path in tmp_path.iterdir() if path.name != "lock")

        wait_until(lambda: log.num_bytes == on_disk())  # the thread may be at the next segment's space
    assert [int(path.stem) for path in files_of(tmp_path)] == [0, 1, 2]
    with opened(tmp_path) as log:
        assert bodies_of(log) == bodies


def test_a_record_of_more_buffers_than_a_system_call_takes_is_written(tmp_path: Path) -> None:
    parts = [bytes([number % 251]) for number in range(5000)]
    with opened(tmp_path, segment_bytes=1 << 20) as log:
        log.append(RECORD, parts)
        log.append(RECORD, parts[:1024])
        log.flush()
        wait_until_safe(log)
        assert bodies_of(log) == [b"".join(parts), b"".join(parts[:1024])]


def test_a_record_that_is_not_there_is_our_bug(tmp_path: Path) -> None:
    with opened(tmp_path) as log:
        write(log, [b"x"])
        with pytest.raises(InternalError, match="got a request for record 1, expected a record from 0 to 0"):
            log.read(1)


def test_groups_are_synced_at_most_every_20_ms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[float] = []
    monkeypatch.setattr(log_writer, "fdatasync", lambda fd: synced.append(time.monotonic()))
    with opened(tmp_path, "os", segment_bytes=1 << 20) as log:
        write(log, [b"first"])
        synced.clear()
        begin = time.monotonic()
        for _ in range(100):
            log.append(RECORD, [b"x"])
            log.flush()
            time.sleep(0.001)
        wait_until_safe(log)
        assert 1 <= len(synced) <= (time.monotonic() - begin) / 0.02 + 1


def test_a_megabyte_does_not_wait_for_its_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_writer, "GROUP_SECONDS", 3600.0)
    with opened(tmp_path, "os", segment_bytes=1 << 23) as log:
        write(log, [b"the first goes at once"])
        log.append(RECORD, [b"x"])
        log.flush()
        log.append(RECORD, [bytes(1 << 20)])
        log.flush()
        wait_until_safe(log)


def test_on_safe_is_called_when_safe_upto_has_moved(tmp_path: Path) -> None:
    moved = threading.Event()
    log = Log.open(tmp_path, durability="os", on_safe=moved.set)
    with contextlib.closing(log):
        assert not moved.is_set()
        log.append(RECORD, [b"x"])
        log.flush()
        assert moved.wait(30)
        assert log.safe_upto == 1


def test_a_second_broker_is_told_who_has_the_log(tmp_path: Path) -> None:
    with opened(tmp_path), pytest.raises(UserError, match=rf"is in use by \S+:{os.getpid()} \(host:pid\)"):
        open_log(tmp_path)
    open_log(tmp_path).close()


def test_a_folder_that_cannot_be_made_is_the_users_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot be opened: Not a directory\. Choose a folder that you can write to"):
        open_log(tmp_path / "file" / "log")


# Cutting


def test_cut_removes_whole_segments_below_but_never_the_one_being_written(tmp_path: Path) -> None:
    bodies = [bytes([number]) * 40 for number in range(11)]  # two in a segment
    with opened(tmp_path) as log:
        write(log, bodies)
        assert (log.cut(0), log.cut(1), log.first_lsn) == (0, 0, 0)
        assert (log.cut(5), log.first_lsn) == (2, 4)
        assert bodies_of(log) == bodies[4:]
        with pytest.raises(InternalError, match="got a request for record 3, expected a record from 4 to 10"):
            log.read(3)
        assert (log.cut(1000), log.first_lsn) == (3, 10)
        wait_for_files(tmp_path, 1)
        wait_until(lambda: log.num_bytes == 2 * SMALL)  # and the next, preallocated
    assert [int(path.stem) for path in files_of(tmp_path)] == [10]
    with opened(tmp_path) as log:
        assert (log.first_lsn, log.next_lsn) == (10, 11)
        write(log, [b"more"])
        assert bodies_of(log) == [bodies[10], b"more"]


# Damage


class Damaged:
    """A log of a few segments as a crash left it, to be damaged over and over; ``synced`` of its records were safe."""

    def __init__(self, folder: Path, durability: Durability, *, closed: bool) -> None:
        self.folder, self.durability = folder, durability
        self.bodies = [os.urandom(length) for length in (10, 30, 0, 39, 20, 33, 5, 35, 8, 1, 17)]
        with opened(folder, durability) as log:
            write(log, self.bodies[:8])
            for body in self.bodies[8:]:
                log.append(RECORD, [body])
            log.flush()
            if not closed:
                self.files, self.synced = self._before_the_last_sync(log)
        if closed:
            self.files, self.synced = files_of(folder), len(self.bodies)
        self.ends = self._ends()

    def _before_the_last_sync(self, log: Log) -> tuple[dict[Path, bytes], int]:
        wait_until_safe(log)
        files = files_of(self.folder)
        if self.durability == "process":
            return files, int([*files][-1].stem)
        last = [*files][-1]  # heads as they were when 8 were safe
        synced = START + sum(17 + len(body) for body in self.bodies[int(last.stem) : 8])
        files[last] = head(int(last.stem), synced, 0) * 2 + files[last][START:]
        return files, 8

    def _ends(self) -> list[tuple[Path, int, int]]:
        """(file, first byte, byte behind) of every record."""
        found: list[tuple[Path, int, int]] = []
        begins = [int(path.stem) for path in self.files]
        for lsn, body in enumerate(self.bodies):
            path = segment_path(self.folder, max(begin for begin in begins if begin <= lsn))
            at = found[-1][2] if found and found[-1][0] == path else START
            found.append((path, at, at + 17 + len(body)))
        return found

    def put(self, path: Path, data: bytes) -> None:
        for each in set(self.folder.glob("*.log")) - set(self.files):
            each.unlink()
        for each, whole in self.files.items():
            wanted = data if each == path else whole
            fd = os.open(each, os.O_RDWR | os.O_CREAT)  # in place: a file system may flush what was truncated
            os.pwrite(fd, wanted, 0)
            os.ftruncate(fd, len(wanted))
            os.close(fd)

    def bad_record(self, path: Path, at: int) -> int:
        """The first record in ``path`` that has byte ``at`` or lies behind it; or how many there are."""
        for lsn, (each, _, end) in enumerate(self.ends):
            if each == path and at < end and at >= START:
                return lsn
        return len(self.bodies)

    def check(self, lsn: int, wholly: bool) -> None:
        """With record ``lsn`` bad: all before it, if it was not synced; else a refusal that names its place."""
        recovered = self._wholly if wholly else self._recovered
        if lsn >= self.synced:
            assert recovered() == self.bodies[:lsn]
            return
        path, begin, _ = self.ends[lsn]
        with pytest.raises(LogDamaged, match=rf"^{path}: byte {begin}: got"):
            recovered()

    def _recovered(self) -> list[bytes]:
        found = []
        for segment in recover(self.folder):
            data = segment.path.read_bytes()
            found += [data[at + 17 : segment.offset(segment.first_lsn + n + 1)] for n, at in enumerate(segment.offsets)]
        return found

    def _wholly(self) -> list[bytes]:
        with opened(self.folder, self.durability) as log:
            found = bodies_of(log)
            log.append(RECORD, [b"goes on"])
        with opened(self.folder, self.durability) as log:
            assert bodies_of(log) == [*found, b"goes on"]
        return found


DAMAGED = pytest.mark.parametrize(
    ("durability", "closed"), [("os", True), ("os", False), ("process", True), ("process", False)]
)


@DAMAGED
def test_any_flipped_bit_gives_a_prefix_with_all_that_was_synced_or_a_refusal(
    folder: Path, durability: Durability, closed: bool
) -> None:
    damaged = Damaged(folder, durability, closed=closed)
    assert len(damaged.files) >= 3
    rng = random.Random(closed)
    for path, whole in damaged.files.items():
        for at in range(len(whole)):
            is_padding = at % 4096 >= 48 and at < START
            if is_padding and not (closed and durability == "process"):  # nobody reads it, whatever the log
                continue
            for bit in range(8) if rng.random() < 0.02 else [rng.randrange(8)]:
                flipped = bytearray(whole)
                flipped[at] ^= 1 << bit
                damaged.put(path, bytes(flipped))
                damaged.check(damaged.bad_record(path, at), wholly=not is_padding and rng.random() < 0.2)


@DAMAGED
def test_a_file_cut_short_anywhere_gives_a_prefix_with_all_that_was_synced_or_a_refusal(
    folder: Path, durability: Durability, closed: bool
) -> None:
    damaged = Damaged(folder, durability, closed=closed)
    for path, whole in damaged.files.items():
        for length in range(len(whole)):
            if length < START and length % 64 and not (closed and durability == "process"):  # the same in all
                continue
            damaged.put(path, whole[:length])
            if length < START:
                with pytest.raises(LogDamaged, match=rf"^{path}: byte {length}: got the end of the file"):
                    recover(folder)
            else:
                damaged.check(damaged.bad_record(path, length), wholly=length % 16 == 0)


def test_whole_records_behind_a_torn_one_never_come_back(tmp_path: Path) -> None:
    damaged = Damaged(tmp_path, "os", closed=False)
    path, begin, end = damaged.ends[8]
    torn = bytearray(damaged.files[path])
    torn[begin:end] = bytes(end - begin)  # its sector never reached the disk, those of the next two records did
    damaged.put(path, bytes(torn))
    with opened(tmp_path, "os") as log:
        assert bodies_of(log) == damaged.bodies[:8]
        write(log, [b"z" * len(damaged.bodies[8])])  # up to where the next one lay
    with opened(tmp_path, "os") as log:
        assert bodies_of(log) == [*damaged.bodies[:8], b"z" * len(damaged.bodies[8])]


def test_a_tail_that_is_cut_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    damaged = Damaged(tmp_path, "os", closed=False)
    path, begin, _ = damaged.ends[9]
    damaged.put(path, damaged.files[path][:begin] + b"\xff" + damaged.files[path][begin + 1 :])
    open_log(tmp_path).close()
    assert re.search(rf"{path}: truncated the log at byte {begin}; dropped \d+ bytes that were not synced", caplog.text)


@DAMAGED
def test_a_segment_that_is_missing_is_named(tmp_path: Path, durability: Durability, closed: bool) -> None:
    damaged = Damaged(tmp_path, durability, closed=closed)
    first, *others = damaged.files
    for path in others:
        damaged.put(path, b"")
        path.unlink()
        with pytest.raises(
            LogDamaged, match=rf"^{path}: byte 0: got no such file, expected the next segment of the log"
        ):
            open_log(tmp_path, durability)
    damaged.put(first, b"")
    begin = int(others[0].stem)
    first.unlink()
    expected = f"the first segment of the log, with records 0 to {begin - 1}, which no broker has deleted"
    with pytest.raises(LogDamaged, match=rf"^{first}: byte 0: got no such file, expected {expected}"):
        open_log(tmp_path, durability)
    for path in others:
        path.unlink()
    with pytest.raises(LogDamaged, match=rf"^{first}: byte 0: got no such file, expected the segments of a log"):
        open_log(tmp_path, durability)


def test_a_log_without_its_first_segments_is_read_only_if_a_broker_deleted_them(tmp_path: Path) -> None:
    """With a mark, or, as streampack 0.1.0 left it, if the ledger has their records."""
    bodies = [bytes([number]) * 40 for number in range(11)]  # two in a segment
    with opened(tmp_path) as log:
        write(log, bodies)
        log.cut(5)
        wait_for_files(tmp_path, 4)
    mark = tmp_path / f"{4:020d}.cut"
    assert list(tmp_path.glob("*.cut")) == [mark]
    with opened(tmp_path) as log:
        assert bodies_of(log) == bodies[4:]
    segment_path(tmp_path, 4).unlink()
    with pytest.raises(LogDamaged, match="with records 4 to 5, which no broker has deleted"):
        open_log(tmp_path)
    mark.unlink()
    for upto in (0, 5):
        with pytest.raises(
            LogDamaged,
            match=rf"streampack 0.1.0 has deleted them, make an empty file .*{6:020d}\.cut\. With it, you accept the "
            "loss of all records before record 6",
        ):
            Log.open(
                tmp_path, durability="process", segment_bytes=SMALL, indexed_upto=partial(int, upto),
                on_safe=lambda: None,
            )  # fmt: skip
    log = Log.open(
        tmp_path, durability="process", segment_bytes=SMALL, indexed_upto=lambda: 6, on_safe=lambda: None
    )  # fmt: skip
    log.close()
    with opened(tmp_path) as log:  # it has a mark now
        assert bodies_of(log) == bodies[6:]


def test_a_segment_that_never_got_its_name_is_no_part_of_the_log(tmp_path: Path) -> None:
    damaged = Damaged(tmp_path, "os", closed=True)
    for left in (b"", bytes(SMALL), (head(11, START, 0) * 2).ljust(SMALL, b"\0"), os.urandom(SMALL)):
        (tmp_path / "next.tmp").write_bytes(left)
        damaged.put(tmp_path, b"")
        damaged.check(11, wholly=True)


def test_another_version_or_another_place_is_refused(tmp_path: Path) -> None:
    damaged = Damaged(tmp_path, "os", closed=True)
    path, whole = next(iter(damaged.files.items()))
    plain = b"spacklog" + struct.pack("<IIQQ", 2, 0, 0, START)
    other = (plain + struct.pack("<I", crc32c(plain))).ljust(4096, b"\0")
    damaged.put(path, other * 2 + whole[START:])
    with pytest.raises(LogDamaged, match=rf"^{path}: byte 8: got format version 2, expected version 1"):
        open_log(tmp_path)
    damaged.put(path, head(5, START, 0) * 2 + whole[START:])
    with pytest.raises(
        LogDamaged, match=rf"^{path}: byte 16: got a segment with first record 5, expected first record 0"
    ):
        open_log(tmp_path)
    damaged.put(path, os.urandom(len(whole)))
    with pytest.raises(LogDamaged, match=rf"^{path}: byte 0: got two damaged segment heads"):
        open_log(tmp_path)
    assert {each: each.read_bytes() for each in damaged.files if each != path} == {
        each: data for each, data in damaged.files.items() if each != path
    }


def test_a_record_that_changes_under_an_open_log_is_refused_when_it_is_read(tmp_path: Path) -> None:
    with opened(tmp_path, "os") as log:
        write(log, [b"x" * 40] * 3)
        path = segment_path(tmp_path, 0)
        whole = bytearray(path.read_bytes())
        whole[START + 57 + 20] ^= 1
        path.write_bytes(whole)
        assert bytes(log.read(0).body) == b"x" * 40
        for read in (lambda: log.read(1), lambda: list(log.entries())):
            with pytest.raises(LogDamaged, match=rf"^{path}: byte {START + 57}: got bytes that are not record 1"):
                read()
        path.unlink()
        with pytest.raises(LogDamaged, match=rf"^{path}: byte 0: got no such file"):
            log.read(0)


# Full disks and quotas, and a process without descriptors


@pytest.fixture
def dead(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when a log ends the process."""
    ended = threading.Event()
    monkeypatch.setattr(log_writer, "end_process", lambda _: ended.set())
    monkeypatch.setattr(log_writer, "RETRY_SECONDS", 0.02)
    return ended


def failing_once(call: Callable[..., Any], error: int) -> Callable[..., Any]:
    """``call``, whose first try fails."""
    errors = [OSError(error, os.strerror(error))]

    def call_again(*arguments: Any, **named: Any) -> Any:
        if errors:
            raise errors.pop()
        return call(*arguments, **named)

    return call_again


def test_a_segment_that_a_full_disk_does_not_delete_is_deleted_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dead: threading.Event
) -> None:
    bodies = [bytes([number]) * 40 for number in range(11)]  # two in a segment
    with opened(tmp_path) as log:
        write(log, bodies)
        monkeypatch.setattr(Path, "unlink", failing_once(Path.unlink, errno.ENOSPC))
        log.cut(5)
        wait_until(lambda: not segment_path(tmp_path, 2).exists())
    with opened(tmp_path) as log:
        assert bodies_of(log) == bodies[4:]
    assert not dead.is_set()


def test_records_do_not_wait_for_a_segment_that_cannot_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dead: threading.Event
) -> None:
    monkeypatch.setattr(log_writer, "RETRY_SECONDS", 3600.0)
    tried = threading.Event()

    def refused(path: Path, missing_ok: bool = False) -> None:
        tried.set()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    log = open_log(tmp_path)
    write(log, [bytes(40)] * 5)
    with monkeypatch.context() as full:
        full.setattr(Path, "unlink", refused)
        log.cut(2)
        assert tried.wait(30)
        log.append(RECORD, [b"x"])
        log.flush()
        end = time.monotonic() + 2
        while log.safe_upto < log.next_lsn and time.monotonic() < end:
            time.sleep(0.001)
        assert log.safe_upto == log.next_lsn
    log.close()
    assert not dead.is_set()


def test_a_log_begins_and_deletes_segments_although_connections_take_every_descriptor(
    tmp_path: Path, dead: threading.Event
) -> None:
    bodies = [bytes([number]) * 40 for number in range(11)]  # two in a segment
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with opened(tmp_path) as log:
        os.close(lowest := os.open("/dev/null", os.O_RDONLY))
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
        try:
            for body in bodies:
                log.append(RECORD, [body])
            log.flush()
            wait_until(lambda: log.safe_upto == 11 or dead.is_set())
            log.cut(5)
            wait_until(lambda: not segment_path(tmp_path, 2).exists() or dead.is_set())
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert not dead.is_set()
    with opened(tmp_path) as log:
        assert bodies_of(log) == bodies[4:]


def test_while_the_reserve_is_lent_the_writer_rests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = 0
    turn = log_writer.Writer._turn

    def counted(writer: log_writer.Writer) -> bool:
        nonlocal turns
        turns += 1
        return turn(writer)

    def lacks_space(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(log_writer.Writer, "_turn", counted)
    monkeypatch.setattr(log_writer, "RETRY_SECONDS", 0.1)
    monkeypatch.setattr(os, "posix_fallocate", lacks_space)
    with opened(tmp_path) as log:
        wait_until(lambda: bool(log.short))
        with log.lend():
            time.sleep(0.15)
            turns = 0
            time.sleep(0.5)
            assert 1 <= turns <= 10


def test_a_quota_without_room_for_the_reserve_does_not_stop_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dead: threading.Event
) -> None:
    monkeypatch.setattr(log_writer, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(reserve, "open_file", failing_once(open_file, errno.EDQUOT))
    log = Log.open(tmp_path, durability="process", segment_bytes=SMALL, reserve_bytes=4096, on_safe=lambda: None)
    with contextlib.closing(log):
        wait_until(lambda: (tmp_path / "reserve.tmp").exists() or dead.is_set())
        assert not dead.is_set()
        write(log, [b"x"])


def test_a_log_without_a_reserve_frees_the_one_that_a_killed_process_left(tmp_path: Path) -> None:
    """As of a broker that was killed on the host that becomes the standby."""
    (tmp_path / "reserve.tmp").write_bytes(bytes(4096))
    with opened(tmp_path):
        assert not (tmp_path / "reserve.tmp").exists()


def test_a_mark_that_finds_no_space_is_made_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dead: threading.Event
) -> None:
    monkeypatch.setattr(log_writer, "mark_begin", failing_once(mark_begin, errno.ENOSPC))
    with opened(tmp_path) as log:
        log.append(RECORD, [b"x"])
        log.flush()
        wait_until(lambda: log.safe_upto == 1 or dead.is_set())
        assert not dead.is_set()
    assert (tmp_path / f"{0:020d}.cut").exists()


def test_a_copy_that_ends_before_its_mark_is_a_log_without_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dead: threading.Event
) -> None:
    """A standby's copy may begin with any record."""
    with monkeypatch.context() as broken:
        broken.setattr(log_writer, "mark_begin", failing_once(mark_begin, errno.EIO))
        log = Log.open(tmp_path, durability="process", segment_bytes=SMALL, first_lsn=5, on_safe=lambda: None)
        log.append(RECORD, [b"lost"])
        log.flush()
        assert dead.wait(30)
        abandon(log)
    assert [path.name for path in tmp_path.glob("*.log")] == [f"{5:020d}.log"]
    with opened(tmp_path) as log:
        assert (log.first_lsn, log.next_lsn) == (5, 5)
        write(log, [b"x"])
    with opened(tmp_path) as log:
        assert bodies_of(log) == [b"x"]


# Power cuts


EVER = 1 << 60


class PowerCut(OSError):
    """At a sync that was never told how it ended."""


class Disk:
    """Stands for the disk under a log: it remembers what was synced, and fails the sync that it is told to.

    What it leaves then is each file as it was at its last sync, and any of the sectors of 512 bytes written since;
    and any of the names changed since the folder's.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.syncs_left = EVER
        self.synced: dict[int, bytes] = {}
        self.held: dict[int, int] = {}
        self.names: dict[str, int] = {}
        self.marks: list[str] = []
        self.dead = threading.Event()
        monkeypatch.setattr(log_writer, "fdatasync", self.fdatasync)
        monkeypatch.setattr(log_writer, "fsync", self.fsync)
        monkeypatch.setattr(log_writer, "end_process", lambda _: self.dead.set())

    def begin(self, folder: Path) -> None:
        """A disk that holds ``folder``, all synced."""
        self.release()
        for path in folder.glob("*.log"):
            self._see(os.open(path, os.O_RDONLY))
        self.names, self.marks = names_in(folder), marks_in(folder)

    def restart(self) -> None:
        """Syncs are heard again."""
        self.dead.clear()
        self.syncs_left = EVER

    def release(self) -> None:
        for fd in self.held.values():
            os.close(fd)
        self.synced, self.held = {}, {}

    def fdatasync(self, fd: int) -> None:
        self._count()
        self._see(os.dup(fd))
        self._count()

    def fsync(self, fd: int) -> None:
        self._count()
        folder = Path(f"/proc/self/fd/{fd}")
        self.names, self.marks = names_in(folder), marks_in(folder)
        self._count()

    def _count(self) -> None:
        """Before and after each sync."""
        if self.syncs_left <= 0:
            raise PowerCut
        self.syncs_left -= 1

    def _see(self, fd: int) -> None:
        number = os.fstat(fd).st_ino
        self.synced[number] = content(fd)
        if number in self.held:
            os.close(fd)
        else:
            self.held[number] = fd  # so that its number is not used again

    def leave(self, before: Path, after: Path, rng: random.Random) -> Path:
        """What a power cut leaves of ``before``, in ``after``."""
        after.mkdir()
        now = names_in(before)
        for mark in rng.choice([self.marks, marks_in(before)]):  # a mark gets another name: one or the other is there
            (after / mark).touch()
        for name, number in {**self.names, **now}.items():
            if (name in now) != (name in self.names) and rng.random() < 0.5:
                continue
            written, synced = content(self.held[number]), self.synced[number]
            synced = synced.ljust(len(written), b"\0")
            kept = rng.choice([0.0, 0.5, 0.9, 1.0])
            sectors = [
                (written if rng.random() < kept else synced)[at : at + 512] for at in range(0, len(written), 512)
            ]
            (after / name).write_bytes(b"".join(sectors))
        return after


def names_in(folder: Path) -> dict[str, int]:
    with os.scandir(folder) as found:
        return {each.name: each.inode() for each in found if each.name.endswith(".log")}


def marks_in(folder: Path) -> list[str]:
    return [path.name for path in folder.glob("*.cut")]


def content(fd: int) -> bytes:
    return os.pread(fd, os.fstat(fd).st_size, 0)


def abandon(log: Log) -> None:
    """Close what a process that is gone has closed."""
    writer: Any = log.writer
    writer._thread.join(30)
    for fd in (log._lock, writer._fd, writer._spare, writer._folder_fd):
        if fd >= 0:
            os.close(fd)


@settings(max_examples=60)
@given(
    durability=st.sampled_from(["os", "process"]),
    rounds=st.lists(st.tuples(st.integers(0, 40), st.sampled_from(["kill", "power"])), min_size=1, max_size=6),
    seed=st.integers(0, 2**32),
)
def test_neither_a_kill_nor_a_power_cut_takes_what_was_safe(
    durability: Durability, rounds: list[tuple[int, str]], seed: int
) -> None:
    rng = random.Random(seed)
    model: list[bytes] = []
    with pytest.MonkeyPatch.context() as monkeypatch, tempfile.TemporaryDirectory() as root:
        monkeypatch.setattr(log_writer, "GROUP_SECONDS", 0.0)
        disk = Disk(monkeypatch)
        folder = Path(root) / "0"
        folder.mkdir()
        disk.begin(folder)
        synced = 0
        for number, (syncs, crash) in enumerate([*rounds, (0, "power")]):
            log = open_log(folder, durability, segment_bytes=START + 1200)  # sectors of its own, and shared ones
            assert synced <= log.next_lsn <= len(model)
            del model[log.next_lsn :]
            check_against(model, log)
            at_open = log.next_lsn
            disk.syncs_left = syncs
            use(log, model, disk, rng)
            disk.syncs_left = 0
            for _ in range(2):  # the second needs another file, which is synced whatever the durability
                log.append(RECORD, [bytes(2000)])
            model += [bytes(entry.body) for entry in log.entries(len(model), log.next_lsn)]
            log.flush()
            assert disk.dead.wait(30)
            synced = log.safe_upto
            abandon(log)
            if crash == "power":
                if durability == "process":
                    synced = max([at_open, *(int(name[:20]) for name in disk.names)])
                folder = disk.leave(folder, Path(root) / str(number + 1), rng)
                disk.begin(folder)
            disk.restart()
        with opened(folder, durability) as log:
            assert synced <= log.next_lsn
            del model[log.next_lsn :]
            check_against(model, log)
        disk.release()


def use(log: Log, model: list[bytes], disk: Disk, rng: random.Random) -> None:
    """Append, flush, wait and cut until the disk fails, or a while."""
    for _ in range(rng.randrange(40)):
        log.append(RECORD, [rng.randbytes(rng.choice([0, 3, 100, 700, 1500]))])
        if rng.random() < 0.5:
            log.flush()
        while rng.random() < 0.3 and log.safe_upto < log.next_lsn and not disk.dead.is_set():
            time.sleep(0.0002)
        if rng.random() < 0.1:
            model += [bytes(entry.body) for entry in log.entries(len(model), log.next_lsn)]
            log.cut(rng.randrange(log.safe_upto + 1))


def check_against(model: list[bytes], log: Log) -> None:
    assert bodies_of(log) == model[log.first_lsn :]
    assert log.next_lsn == log.safe_upto == len(model)


def test_a_copy_of_any_first_records_is_a_log_and_going_on_with_it_leaves_the_first_as_it_is(folder: Path) -> None:
    """While its writer has it open; segments are links, or symbolic ones on another file system."""
    bodies = some_bodies(40)
    with opened(folder / "log") as log, tempfile.TemporaryDirectory() as elsewhere:
        write(log, bodies)
        before = files_of(folder / "log")
        assert len(before) > 5
        for upto in (1, 2, 7, 20, 39, 40, 1000):
            for copy in (folder / str(upto), Path(elsewhere) / str(upto)):
                copy.mkdir()
                copy_records(folder / "log", copy, upto)
                with opened(copy) as again:
                    assert bodies_of(again) == bodies[:upto]
                    write(again, [b"more"])
                    assert bodies_of(again) == [*bodies[:upto], b"more"]
        assert files_of(folder / "log") == before
        assert bodies_of(log) == bodies
