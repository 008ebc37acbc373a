"""The log on real disks, in real processes: full ones, failing ones, and writers that are killed."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Literal

import pytest
from streampack_services.log.log import Log

from tests.integration.faults.small_disks import mounts
from tests.integration.running import PATIENCE_S

PRELUDE = """
import errno, logging, os, sys, time
from pathlib import Path
from streampack_services.log import log_writer; from streampack_services import logs
from streampack_services.log.log import Log

from tests.integration.running import PATIENCE_S
logs.set_up()

def body(number, size):
    return number.to_bytes(8, "little") * (size // 8)

def wait_until(holds, timeout_s=60):
    end = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < end, (log.stalled, log.safe_upto, log.next_lsn)
        time.sleep(0.01)

def reopen(durability="os"):
    return Log.open(folder, durability=durability, segment_bytes=SEGMENT, on_safe=lambda: None)

def check(log, numbers, size):
    entries = list(log.entries())
    assert [entry.lsn for entry in entries] == list(range(len(numbers)))
    assert all(entry.body == body(number, size) for number, entry in zip(numbers, entries, strict=True))

SEGMENT = 1 << 18
folder = Path(sys.argv[1]) / "log"
log = reopen()
"""


def python(script: str, folder: Path, *before: str) -> subprocess.CompletedProcess[str]:
    code = PRELUDE + textwrap.dedent(script)
    command = [*before, sys.executable, "-c", code, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def on_a_small_disk(script: str, folder: Path) -> str:
    """Run ``script`` with ``folder`` a tmpfs of 2 MiB of its own; what it has logged."""
    if not mounts():
        pytest.skip("a tmpfs cannot be mounted here: neither as root nor by unshare -r")
    mount = ("sh", "-c", 'mount -t tmpfs -o size=2m none "$0" && exec "$@"', str(folder))
    done = python(script, folder, *mounts(), *mount)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_a_full_disk_is_waited_out_and_no_record_is_lost_or_moved(tmp_path: Path) -> None:
    said = on_a_small_disk(
        """
        SIZE = 40_000
        with open(folder / "filler", "wb") as filler:
            filler.write(bytes(1_200_000))
        for number in range(100):
            assert log.append(5, [body(number, SIZE)]) == number  # four megabytes
            log.flush()
            time.sleep(0.001)
        wait_until(lambda: log.stalled)
        safe = log.safe_upto
        assert 6 <= safe < 25, safe
        assert log.stalled.startswith("no space left on device: "), log.stalled
        assert f": {100 - safe} records, {(100 - safe) * (SIZE + 17) / 1e6:.1f} MB wait" in log.stalled, log.stalled
        check(log, range(100), SIZE)  # of the disk and of memory
        os.truncate(folder / "filler", 0)
        wait_until(lambda: log.safe_upto > safe)  # as far as the disk goes
        wait_until(lambda: log.stalled)
        safe = log.safe_upto
        assert 25 < safe < 50, safe
        assert log.cut(safe) > 3  # makes space of its own
        wait_until(lambda: log.safe_upto > safe)
        while log.safe_upto < 100:
            log.cut(log.safe_upto)
            time.sleep(0.01)
        assert log.stalled == ""
        first = log.first_lsn
        assert log.append(5, [b"after"]) == 100
        log.close()
        log = reopen()
        found = [entry.body for entry in log.entries()]
        assert found == [*(body(number, SIZE) for number in range(first, 100)), b"after"]
        log.close()
        """,
        tmp_path,
    )
    assert said.count("No space left on device; records wait in memory") == 1
    assert said.count("has space again; all waiting records are written") == 1


def test_a_disk_that_fills_up_is_said_before_records_wait(tmp_path: Path) -> None:
    said = on_a_small_disk(
        """
        log.append(5, [body(0, 800)])
        log.flush()
        wait_until(lambda: log.num_bytes == 2 * SEGMENT)  # one is written, one is reserved
        with open(folder / "filler", "wb", buffering=0) as filler:
            try:
                while True:
                    filler.write(bytes(4096))
            except OSError as error:
                assert error.errno == errno.ENOSPC
        for number in range(1, 500):
            log.append(5, [body(number, 800)])
            log.flush()
        wait_until(lambda: log.safe_upto == 500)  # in what was reserved
        assert log.stalled == ""
        check(log, range(500), 800)
        log.close()
        """,
        tmp_path,
    )
    assert "No space left on device (0.3 MB); records wait when this segment is full" in said
    assert "records wait in memory" not in said


def test_a_log_closes_on_a_full_disk_with_all_that_was_safe(tmp_path: Path) -> None:
    said = on_a_small_disk(
        """
        for number in range(100):
            log.append(5, [body(number, 40_000)])
        log.flush()
        wait_until(lambda: log.stalled)
        safe = log.safe_upto
        log.close()
        log = reopen()
        assert log.next_lsn == safe
        check(log, range(safe), 40_000)
        """,
        tmp_path,
    )
    assert re.search(r"; \d\d records are lost, because there was no space", said)


@pytest.mark.parametrize("code", ["EIO", "ENOSPC"])
def test_a_failed_sync_ends_the_process_and_is_never_tried_again(tmp_path: Path, code: str) -> None:
    done = python(
        f"""
        tried = 0
        def fail(fd):
            global tried
            tried += 1
            print("synced", tried, flush=True)
            raise OSError(errno.{code}, os.strerror(errno.{code}))
        log.append(5, [b"safe"])
        log.flush()
        wait_until(lambda: log.safe_upto == 1)
        log_writer.fdatasync = fail
        log.append(5, [b"lost?"])
        log.flush()
        time.sleep(60)
        """,
        tmp_path,
    )
    assert (done.returncode, done.stdout) == (74, "synced 1\n"), done.stderr
    assert re.search(
        r"CRITICAL log: cannot write the log in \S+: cannot be synced: .+; the process ends\n$", done.stderr
    )
    with contextlib.closing(opened(tmp_path / "log", "os")) as log:
        assert bytes(log.read(0).body) == b"safe"


@pytest.mark.parametrize("durability", ["os", "process"])
def test_a_failed_write_ends_the_process(tmp_path: Path, durability: str) -> None:
    done = python(
        f"""
        log.close()
        log = reopen({durability!r})
        def fail(fd, buffers, at):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        log_writer.write_at = fail
        log.append(5, [b"x"])
        log.flush()
        time.sleep(60)
        """,
        tmp_path,
    )
    assert done.returncode == 74, done.stderr
    assert "Input/output error; the process ends" in done.stderr
    assert "Traceback" not in done.stderr


WRITER = """
import random
log.close()
SEGMENT = 1 << 17
log = reopen(sys.argv[2])
rng = random.Random(int(sys.argv[3]))
while True:
    for _ in range(rng.randrange(1, 9)):
        number = log.next_lsn
        log.append(1 + number % 255, [number.to_bytes(8, "little") * rng.randrange(1, 700)])
    log.flush()
    print(log.safe_upto, flush=True)
    while log.next_lsn - log.safe_upto > 100:
        time.sleep(0.001)
"""


@pytest.mark.parametrize("durability", ["os", "process"])
def test_a_killed_writer_loses_nothing_that_it_called_safe(
    tmp_path: Path, durability: Literal["os", "process"]
) -> None:
    rng = random.Random(7)
    promised = 0
    for kill in range(6):
        command = [sys.executable, "-c", PRELUDE + WRITER, str(tmp_path), durability, str(kill)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            goal = promised + rng.randrange(20, 150)
            while promised < goal:
                promised = int(writer.stdout.readline())
            os.kill(writer.pid, signal.SIGKILL)
            said = writer.stdout.read().splitlines()  # a last line may be torn
            promised = max([promised, *map(int, said[:-1])])
        with contextlib.closing(opened(tmp_path / "log", durability)) as log:
            assert promised <= log.next_lsn
            for number, entry in enumerate(log.entries()):
                assert (entry.lsn, entry.kind) == (number, 1 + number % 255)
                assert bytes(entry.body[:8]) * (len(entry.body) // 8) == entry.body
                assert int.from_bytes(entry.body[:8], "little") == number
            promised = log.next_lsn


def opened(folder: Path, durability: Literal["os", "process"]) -> Log:
    return Log.open(folder, durability=durability, segment_bytes=1 << 17, on_safe=lambda: None)
