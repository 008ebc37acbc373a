"""A broker whose disk has no byte left: a commit makes space, and the commands of an audit answer."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.integration.faults.small_disks import mounts
from tests.integration.running import PATIENCE_S

PRELUDE = """
import json, os, sys, threading, time, traceback
from pathlib import Path

import numpy as np

import streampack
from tests.integration.running import RunningBroker, streampack as command, the_error, until

MIB = 1 << 20
folder = Path(sys.argv[1])
state = folder / "disk" / "state"
SETTINGS = {
    "run": "full", "tokens": "int32", "state_dir": str(state), "memory": "64MiB", "retain": {"checkpoints": 1},
    "limits": {"sample_tokens": 1 << 14, "chunk": "1MiB"},
    "rules": {"budget": 1 << 14, "window": {"samples": 16}, "step": {"packs": 4}}, "merge": "arrival",
    "streams": {"web": {"pushed": True, "partitions": 1}},
}
SAMPLE = np.arange(1 << 14, dtype=np.int32)

def segments():
    return sorted(path.name for path in state.glob("*.log"))

def fill():
    with open(folder / "disk" / "filler", "ab", buffering=0) as filler:
        for size in (MIB, 4096):
            try:
                while True:
                    filler.write(bytes(size))
            except OSError:
                pass
    left = os.statvfs(folder / "disk")
    assert left.f_bavail == 0, left

broker = RunningBroker(folder, SETTINGS)
try:
    pusher = streampack.Producer(broker.producers, stream="web", partition=0)
    loader = streampack.connect(broker.trainers, mesh={"dp": 1}, format="numpy")
    steps = loader.steps()
    for _ in range(32):
        pusher.send(SAMPLE)
    def train(count):
        for _ in range(count):
            for _ in range(4):
                pusher.send(SAMPLE)
            last = next(steps)
            list(last)
        return last.index
    train(50)
    until((state / "reserve.tmp").exists)
    while len(segments()) < 3:
        last = train(50)
    fill()
"""
AFTER = """
    code = 0
except BaseException:
    traceback.print_exc()
    code = 1
broker.kill()
sys.stderr.flush()
os._exit(code)  # the pusher waits for credit
"""


def on_a_full_disk(script: str, folder: Path) -> None:
    """Run ``script`` beside a broker whose log has three files, on a tmpfs of 300 MiB without a free byte."""
    if not mounts():
        pytest.skip("a tmpfs cannot be mounted here: neither as root nor by unshare -r")
    (folder / "disk").mkdir()
    code = PRELUDE + textwrap.indent(textwrap.dedent(script), "    ") + AFTER
    mount = ("sh", "-c", 'mount -t tmpfs -o size=300m none "$0/disk" && exec "$@"', str(folder))
    command = [*mounts(), *mount, sys.executable, "-c", code, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr + (folder / "broker.log").read_text()


def test_a_commit_makes_space_on_a_full_disk(tmp_path: Path) -> None:
    on_a_full_disk(
        """
        before = segments()
        loader.commit(last)
        until(lambda: segments()[0] > before[0], 60)
        train(300)  # in the space of the deleted segments
        answer = command("why", "--step", "0", "--json", "--state-dir", state)
        assert answer.returncode == 0, answer.stderr
        """,
        tmp_path,
    )
    assert "did not delete" not in (tmp_path / "broker.log").read_text()


def test_a_log_that_has_stopped_says_what_to_do_and_answers_and_goes_on_after_a_commit(tmp_path: Path) -> None:
    on_a_full_disk(
        """
        while broker.status()["log"]["records"] - int(segments()[-1][:20]) < 1100:
            last = train(2)
            time.sleep(0.05)
        def push():
            while True:
                pusher.send(SAMPLE)
        threading.Thread(target=push, daemon=True).start()
        until(lambda: broker.status()["log"]["stalled"] != "")
        text = (
            f"The disk of {state} has no space for the next log segment: no space left on device. Make space on it, or "
            "commit a checkpoint, so that the broker deletes old segments."
        )
        said = "".join(command("status", broker.http).stdout.split())  # the lines break words
        assert text.replace(" ", "") in said, said
        assert "\\nstreampack_log_warning 1.0\\n" in broker.get("/metrics")

        for arguments in (["why", "--step", str(last)], ["ledger", "verify"]):
            answer = command(*arguments, "--json", "--state-dir", state)
            assert answer.returncode == 0, answer.stderr
            assert "cannot be used: database or disk is full. Make space on its disk." in answer.stderr, answer.stderr
            found = json.loads(answer.stdout)
            assert found["run"] == "full"
        assert found["good"], found
        said = the_error(command("ledger", "rebuild", "--state-dir", state), 2)
        assert said.endswith("database or disk is full. Make space on its disk."), said
        assert not (state / "ledger.sqlite.new").exists()

        before = segments()
        loader.commit(last)
        until(lambda: segments()[0] > before[0])
        until(lambda: broker.status()["log"]["stalled"] == "")
        for _ in range(100):
            list(next(steps))
        answer = command("why", "--step", "0", "--json", "--state-dir", state)
        assert answer.returncode == 0, answer.stderr
        """,
        tmp_path,
    )
