"""Trainers behind a relay have all that trainers of a broker have: checkpoints, iterations, status; and one copy."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from tests.integration.relay.relayed import SETTINGS, Ranks, job
from tests.integration.running import in_process, until

BUDGET, PACKS, STEPS = 4096, 16, 6


def shared_bytes(pid: int) -> int:
    """Shared memory that a process has touched."""
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(status.split("RssShmem:")[1].split()[0])


def test_tensor_ranks_share_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = SETTINGS["rules"] | {"budget": BUDGET, "step": {"packs": PACKS}, "window": {"samples": 1024}}
    streams = {"web": {"partitions": 2, "repeat": True}}
    settings = SETTINGS | {"rules": rules, "memory": "256MiB", "streams": streams}
    copies = {}
    for tp in (1, 4):
        with (
            job(monkeypatch, settings) as it,
            it.relaying() as relay,
            Ranks(it.broker.trainers, {"tp": tp}, most=1, prefetch=STEPS) as ranks,
        ):
            ranks.allow(20)
            assert ranks.all_by_relay()
            copies[tp] = shared_bytes(relay.process.pid)
    assert copies[1] >= PACKS * BUDGET * 2, "steps are held in shared memory"
    assert copies[4] < 1.5 * copies[1], "four ranks hold what one holds"


def test_a_checkpoint_is_taken_and_read_through_a_relay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sizes = {"dp": 2, "tp": 2}
    with job(monkeypatch, state_dir=tmp_path / "state") as it, it.relaying():
        with Ranks(it.broker.trainers, sizes, most=10) as ranks:
            ranks.allow(10)
            states = [rank.loader.state_dict(step=6) for rank in ranks.ranks]
            assert states == [states[0]] * 4
            ranks.ranks[1].loader.commit(6)
            until(lambda: it.broker.feed()["committed"] == 6)
            mixtures = [rank.loader.mixture() for rank in ranks.ranks]
            assert [list(mixture) for mixture in mixtures] == [
                [row["stream"] for row in it.broker.status()["streams"]]
            ] * 4
            before = [rank.read[7:10] for rank in ranks.ranks]
            assert ranks.all_by_relay()
        state = json.loads(json.dumps(states[0]))
        with Ranks(it.broker.trainers, sizes, most=3, state=state) as ranks:
            ranks.allow(3)
            assert ranks.all_by_relay()
            assert [rank.read[:3] for rank in ranks.ranks] == before


def test_a_finite_feed_is_read_twice_through_a_relay(monkeypatch: pytest.MonkeyPatch) -> None:
    with job(monkeypatch) as it, it.relaying(), Ranks(it.broker.trainers, {"dp": 2}, iterations=2) as ranks:
        ranks.allow(math.inf)
        assert ranks.all_by_relay()
    for rank in ranks.ranks:
        half = len(rank.read) // 2
        assert half > 80
        assert rank.read[:half] == rank.read[half:]


def test_status_and_why_know_the_ranks_of_a_relay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sizes = {"dp": 2, "cp": 2}
    with (
        job(monkeypatch, state_dir=tmp_path / "state") as it,
        it.relaying(),
        Ranks(it.broker.trainers, sizes, most=10) as ranks,
    ):
        ranks.allow(10)
        until(lambda: all(row["done_upto"] >= 9 for row in it.broker.feed()["readers"]))
        rows = it.broker.feed()["readers"]
        assert len(rows) == 4
        assert {row["where"].rpartition(":")[2] for row in rows} == {str(os.getpid())}
        said = in_process("status", it.broker.http)
        assert said.returncode == 0, said.stderr
        rows = [line.split() for line in said.stdout.splitlines() if line.startswith("dp=")]
        assert [row[:2] for row in rows] == [[f"dp={d}", f"cp={c}"] for d in range(2) for c in range(2)]
        assert all(row[2].endswith(f":{os.getpid()}") for row in rows)
        said = in_process("why", "--step", "8", "--dp", "1", "--dp-size", "2", "--state-dir", tmp_path / "state")
        assert said.returncode == 0, said.stderr
        assert ranks.ranks[0].read[8][0][:12] in said.stdout
