"""Memory that a broker cannot have: an error of the configuration, before anything listens, and nothing stays open."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from streampack_services.broker import memory_plan, service
from streampack_services.broker.machine_memory import Memory, machine_memory
from streampack_services.broker.memory_plan import with_enough_memory

import streampack
from streampack.config.config_validation import checked
from streampack.config.daemon_settings import BrokerConfig
from streampack.config.typed_yaml import convert, parse_size
from streampack.errors import ConfigError, UserError
from tests.integration.running import PATIENCE_S, in_process, the_error, write

V2 = "0::/kubepods/pod7\n"
V1 = "7:cpu,cpuacct:/\n4:memory:/docker/c7\n0::/\n"


def machine(root: Path, groups: str, limits: dict[str, str], total_kb: int | None = 1 << 20) -> Memory | None:
    files = {"proc/self/cgroup": groups} | {f"sys/fs/cgroup/{path}": text for path, text in limits.items()}
    if total_kb is not None:
        files["proc/meminfo"] = f"MemTotal:       {total_kb} kB\nMemFree: 1 kB\n"
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return machine_memory(root)


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        ("", {}, 1 << 30),
        (V2, {"kubepods/pod7/memory.max": "1000000\n"}, 1_000_000),
        (V2, {"kubepods/pod7/memory.max": "max\n", "kubepods/memory.max": "3000000\n"}, 3_000_000),
        ("0::/\n", {"memory.max": "2000000"}, 2_000_000),
        (V1, {"memory/memory.limit_in_bytes": "5000000\n", "memory.max": "max"}, 5_000_000),
        (V1, {"memory/docker/c7/memory.limit_in_bytes": "9223372036854771712\n"}, 1 << 30),
    ],
)
def test_the_least_of_the_machine_and_its_containers_counts(
    tmp_path: Path, groups: str, limits: dict[str, str], expected: int
) -> None:
    found = machine(tmp_path, groups, limits)
    assert found is not None
    assert found.num_bytes == expected
    assert ("container" in str(found)) == (expected != 1 << 30)


def test_a_kernel_that_does_not_say_bounds_nothing(tmp_path: Path) -> None:
    assert machine(tmp_path, "", {}, None) is None


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_plan, "machine_memory", lambda: Memory(2 << 30, "this machine"))


@pytest.mark.usefixtures("small")
def test_a_broker_says_what_the_machine_has(tmp_path: Path) -> None:
    path = write(tmp_path / "broker.yaml", {"streams": {"a": {}}, "memory": "256GiB"})
    said = the_error(in_process("broker", "-c", path), 2)
    assert "memory: got 256GiB, but this machine has 2048MiB. Lower memory" in said
    assert "a window of 1024 samples" in said
    assert "tokens" in said


@pytest.mark.usefixtures("small")
def test_a_local_loader_does_not_double_its_memory_beyond_the_machine() -> None:
    with pytest.raises(ConfigError) as error:
        streampack.local(["x"], budget=32 << 20)
    for word in ("memory", "a window of 1024 samples", f"{32 << 20} tokens", "this machine has 2048MiB"):
        assert word in str(error.value)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("budget", [1 << 10, 1 << 14, 1 << 18, 300_000])
def test_memory_that_is_raised_is_enough_and_no_more_than_the_machine_has(budget: int) -> None:
    tree = {"streams": {"a": {"partitions": 1}}, "memory": "1MiB", "rules": {"budget": budget, "step": {"packs": 1}}}
    config = with_enough_memory(checked(convert(tree, BrokerConfig)))
    memory_plan.plan(config)
    assert parse_size(config.memory, "memory") <= 2 << 30


def test_nothing_stays_open_where_the_memory_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(service, "Arena", refuse)
    for _ in range(2):  # the first time libraries may open files of their own
        before = len(os.listdir("/proc/self/fd")), threading.active_count()
        with pytest.raises(
            ConfigError, match="memory: got 1GiB, but the system cannot allocate 1024MiB for this process"
        ):
            streampack.local(["x"])
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before


def test_nothing_stays_open_where_a_local_loader_cannot_start() -> None:
    for _ in range(2):
        before = len(os.listdir("/proc/self/fd")), threading.active_count()
        with pytest.raises(UserError, match="cannot listen"):
            streampack.local(["x"], http="192.0.2.1:1")
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before


LACKS_MEMORY = """
import gc, resource, streampack
resource.setrlimit(resource.RLIMIT_AS, (24 << 30, 24 << 30))
try:
    streampack.local(["x"], memory="40GiB")
except Exception as error:
    print(type(error).__name__)
gc.collect()
print("collected")
"""


def test_garbage_can_be_collected_after_an_arena_that_there_was_no_memory_for() -> None:
    found = subprocess.run(
        [sys.executable, "-c", LACKS_MEMORY], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    assert found.stdout.splitlines() == ["ConfigError", "collected"]
