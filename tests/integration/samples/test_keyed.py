"""Samples with keys and a real broker: a job's processes are killed and push again, and each key is delivered once."""

from __future__ import annotations

import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import streampack
from streampack.errors import DataStall, UserError
from tests.integration.running import PATIENCE_S, RunningBroker, folder, until
from tests.integration.running import streampack as command

ROWS, PARTITIONS = 300, 2
JOB = """
import sys, streampack
endpoint, partition, rows, write = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
with streampack.Producer(endpoint, stream="rows", partition=partition) as rows_out:
    for first in range(0, rows, 10):
        numbers = range(first, first + 10)
        rows_out.send_many([[n] * (1 + n % 9) for n in numbers], keys=numbers, write=write)
        rows_out.flush()
        print(first, flush=True)
"""


def settings(path: Path, **changes: Any) -> dict[str, Any]:
    sides = {side: f"ipc://{path}/{side}" for side in ("producers", "trainers")}
    return {
        "run": "keyed", "listen": {**sides, "http": "127.0.0.1:0"}, "merge": "arrival",
        "state_dir": str(path / "state"), "rules": {"budget": 64, "window": {"samples": 16}, "step": {"packs": 2}},
        "streams": {"rows": {"pushed": True, "partitions": PARTITIONS}},
    } | changes  # fmt: skip


def job(endpoint: str, partition: int, write: int) -> subprocess.Popen[str]:
    """A process that pushes every row of the job, over one partition."""
    words = [sys.executable, "-c", JOB, endpoint, str(partition), str(ROWS), str(write)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


def delivered(endpoint: str) -> list[int]:
    found: list[int] = []
    with streampack.connect(endpoint, format="numpy", verify=True, stall_timeout_s=PATIENCE_S) as loader:
        for step in loader.steps():
            for pack in step:
                found += [int(pack.input_ids[at]) for at in pack.cu_seqlens_padded[:-1][: pack.num_samples]]
    return found


def test_each_key_is_delivered_once_whatever_is_killed_and_again_only_after_a_commit() -> None:
    with folder() as path, ThreadPoolExecutor() as pool:
        broker = RunningBroker(path, settings(path))
        try:
            reader = pool.submit(delivered, broker.trainers)
            for write in range(2):
                with job(broker.producers, 0, write) as one, job(broker.producers, 1, write) as other:
                    for each in (one, other):
                        assert each.stdout is not None
                        each.stdout.readline()
                    one.send_signal(signal.SIGKILL)
                    broker.kill()
                    broker = RunningBroker(path, settings(path))
                    with job(broker.producers, 0, write) as again:  # once the killed one has lost the partition
                        assert (again.wait(PATIENCE_S), other.wait(PATIENCE_S)) == (0, 0)
                with streampack.Producer(broker.producers, stream="rows") as producer:
                    assert producer.write == write
                    producer.commit_write(write)
                    assert producer.write == write + 1
                    producer.commit_write(write)  # as a driver that does not know whether it has
                    producer.send_many([[9]], keys=[0], write=write)  # a process that was believed dead
                    if write:
                        producer.close(end=True)
            streampack.Producer(broker.producers, stream="rows", partition=1).close(end=True)
            assert sorted(reader.result(PATIENCE_S)) == sorted([*range(ROWS), *range(ROWS)])
            rejected = broker.status()["streams"][0]["rejected"]
            assert set(rejected) == {"repeated"}, rejected
            broker.kill()
            verified = command("ledger", "verify", "-c", path / "broker.yaml")
            assert verified.returncode == 0, verified.stdout + verified.stderr
        finally:
            broker.kill()


def test_a_full_index_of_keys_makes_a_producer_wait_and_say_why() -> None:
    with folder() as path:
        broker = RunningBroker(path, settings(path, limits={"keys": 20}))
        try:
            producer = streampack.Producer(broker.producers, stream="rows", timeout_s=3)
            for n in range(0, 40, 5):
                producer.send_many([[n + i] for i in range(5)], keys=range(n, n + 5))
            with pytest.raises(DataStall, match=r"index of keys is full.*Raise limits.keys"):
                producer.flush()
            producer.close(flush=False)
            until(lambda: broker.status()["streams"][0]["samples"] >= 16)
        finally:
            broker.kill()


def test_keys_are_text_numbers_or_bytes_one_for_each_sample() -> None:
    with folder() as path:
        broker = RunningBroker(path, settings(path))
        try:
            with streampack.Producer(broker.producers, stream="rows") as producer:
                with pytest.raises(UserError, match=r"got 1 keys for 2 samples"):
                    producer.send_many([[1], [2]], keys=["a"])
                with pytest.raises(UserError, match=r"got the key 1.5 of type float, expected text"):
                    producer.send_many([[1]], keys=[1.5])  # type: ignore[list-item]
                producer.send_many([[1], [2], [3]], keys=["1", 1, b"1"])
            until(lambda: broker.status()["streams"][0]["samples"] == 3)
            assert broker.status()["streams"][0]["rejected"] == {}
        finally:
            broker.kill()
